// The pass: embedding, blocks, final norm and LM head; all threads run every step together.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <type_traits>

#include <omp.h>

#include "attention.h"
#include "feed_forward.h"
#include "gemm.h"
#include "integer_tiles.h"
#include "interface.h"
#include "quantized.h"
#include "recurrent.h"
#include "rows.h"
#include "tiles.h"
#include "vectors.h"
#include "workspace.h"

namespace {

// T: the dtype of KV cache and attention, and of embedding and matrices unless they are in integers.
template <class T>
class Decoder {
 public:
  Decoder(const Model& model, const Pass& pass)
      : model_(model),
        pass_(pass),
        rows_(pass.starts[pass.num_sequences]),
        num_nodes_(pass.node_starts[pass.num_sequences]),
        space_(model, num_nodes_, pass.num_threads, pass.workspace, pass.attention == nullptr ? 0 : pass.num_attention,
               num_replayed(model, pass)),
        normed_(space_.normed, rows_, model.hidden, space_.rounded),
        mixed_(space_.mixed, rows_, model.heads * model.head_dim, space_.rounded),
        group_(group_size(model)),
        recurrent_(model, pass, space_, barrier_) {
    std::iota(space_.every, space_.every + num_nodes_, 0);
    while (portion_ > SharedAttention<T>::kQueries && num_units() < kUnits * pass.num_threads) portion_ /= 2;
    space_.units[0] = 0;
    for (int64_t s = 0; s < pass.num_sequences; ++s) {
      std::fill(space_.sequence + pass.starts[s], space_.sequence + pass.starts[s + 1], s);
      space_.units[s + 1] = space_.units[s] + model.kv_heads * chunks_of(s);
      const int64_t first = pass.node_starts[s];
      for (int64_t g = first; g < pass.node_starts[s + 1]; ++g) {
        const bool follows = g > first && pass.parents[g] == g - first - 1;
        space_.runs[g] = follows ? space_.runs[g - 1] + 1 : 0;
      }
    }
  }

  // Runs inside a parallel region, all threads together. Not inlined: a large function with several callers.
  [[gnu::noinline]] void run() {
    embed();
    for (int64_t i = 0; i < model_.num_layers; ++i) {
      keep_features(i);
      if (pass_.is_append && i == model_.num_layers - 1) return append(model_.layers[i]);
      if (model_.layers[i].query.weight != nullptr) attend(model_.layers[i]);
      if (model_.layers[i].recurrent.kind != kNothing) recur(model_.layers[i]);
      feed_forward(model_.layers[i]);
    }
    keep_features(model_.num_layers);
    const bool has_all_logits = pass_.logits != nullptr && pass_.num_logits == rows_;
    if (pass_.logits != nullptr && model_.head_tokens != nullptr) fill_logits();
    if (has_all_logits || wants(model_.num_layers + 1)) normalise(model_.final_norm);
    if (wants(model_.num_layers + 1)) keep_final();
    if (has_all_logits) {
      round(normed_, rows_, {&model_.head});
      put_logits(normed_, rows_);
    } else if (pass_.logits != nullptr) {
      barrier_.wait();
      const MatrixInputs<T> chosen(space_.normed, pass_.num_logits, model_.hidden, space_.rounded);
      normalise(model_.final_norm, chosen, pass_.num_logits, [&](int64_t r) { return pass_.logit_rows[r]; });
      round(chosen, pass_.num_logits, {&model_.head});
      put_logits(chosen, pass_.num_logits);
    }
    if (pass_.logits != nullptr) finish_logits();
  }

 private:
  using Queries = typename SharedAttention<T>::Engine::Queries;
  static constexpr int64_t kUnits = 4;   // for each thread, if there are enough queries; a choice
  static constexpr int64_t kAhead = 32;  // tokens whose sums with the residual stream come next; a choice

  void embed() {
    share(rows_, [&](int64_t m) {
      float* out = space_.residual + m * model_.hidden;
      if (pass_.inputs != nullptr) {
        std::copy_n(pass_.inputs + m * model_.hidden, model_.hidden, out);
        return;
      }
      with_row(model_.embedding, model_.is_bfloat16, pass_.tokens[m], out, [&](const auto* row) {
        for (int64_t i = 0; i < model_.hidden; ++i) out[i] = to_float(row[i]) * model_.embedding_scale;
      });
    });
    barrier_.wait();
  }

  void attend(const Layer& layer) {
    const MatrixInputs<T> inputs = attention_inputs(layer);
    round(inputs, rows_, {&layer.query, &layer.key, &layer.value});
    const bool is_divided = model_.kv_heads % omp_get_num_threads() == 0 && !layer.norms_all_heads;
    is_divided ? attend_own_heads(layer, inputs) : attend_all(layer, inputs);
    barrier_.wait();
    add(layer.output, mixed_, layer.attention_post_norm, layer.attention_factor);
  }

  void recur(const Layer& layer) {
    if (layer.query.weight == nullptr) normalise(layer.attention_norm);  // otherwise attention has
    const Recurrent& own = layer.recurrent;
    const MatrixInputs<T> mixed(space_.mixed, rows_, own.output.cols, space_.rounded);
    recurrent_.run(own, normed_, mixed);
    barrier_.wait();
    add(own.output, mixed, Norm{}, own.output_factor);
  }

  // Each thread computes queries, keys and values of some KV heads and their attention. It waits for no other thread,
  // and its data stays in its caches.
  void attend_own_heads(const Layer& layer, const MatrixInputs<T>& inputs) {
    const int64_t count = model_.kv_heads / omp_get_num_threads(), first = count * omp_get_thread_num();
    const int64_t rows = count * model_.head_dim;
    multiply_into(layer.query, inputs, rows_, space_.query, rows * group_ * (layer.gates_heads ? 2 : 1));
    multiply_into(layer.key, inputs, rows_, space_.key, rows);
    multiply_into(layer.value, inputs, rows_, space_.value, rows);
    for (int64_t m = 0; m < rows_; ++m) {
      place_queries(layer, m, first, first + count);
      place_keys(layer, m, first, first + count);
    }
    for (int64_t s = 0; s < pass_.num_sequences; ++s) {
      for (int64_t unit = first * chunks_of(s); unit < (first + count) * chunks_of(s); ++unit) attend(layer, s, unit);
    }
  }

  void attend_all(const Layer& layer, const MatrixInputs<T>& inputs) {
    multiply_into(layer.query, inputs, rows_, space_.query);
    multiply_into(layer.key, inputs, rows_, space_.key);
    multiply_into(layer.value, inputs, rows_, space_.value);
    barrier_.wait();
    share(rows_, [&](int64_t m) {
      place_queries(layer, m, 0, model_.kv_heads);
      place_keys(layer, m, 0, model_.kv_heads);
    });
    barrier_.wait();
    // Of few queries, threads share the blocks of every KV head, if there are several for each of them.
    const int64_t blocks = blocks_of(pass_.prefix[0] + pass_.node_starts[1]);
    if (pass_.num_sequences == 1 && group_ * rows_ <= SharedAttention<T>::kQueries && blocks >= 2 * omp_get_num_threads() && pass_.attention == nullptr) return attend_by_block(layer);
    // A thread adds the attention weights of all tokens of a sequence and a KV head, one token after another.
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    for (int64_t s = 0; s < pass_.num_sequences; ++s) {
      for (int64_t unit = 0; unit < space_.units[s + 1] - space_.units[s]; ++unit) {
        const int64_t owner = has_weighed(s, unit) ? s * model_.kv_heads + unit / chunks_of(s) : space_.units[s] + unit;
        if (owner % threads == thread) attend(layer, s, unit);
      }
    }
  }

  // The input of attention: the norm of the stream, after the norm of the second input if the layer has one. Written to
  // `normed_`.
  MatrixInputs<T> attention_inputs(const Layer& layer) {
    if (layer.side_norm.weight == nullptr) {
      normalise(layer.attention_norm);
      return normed_;
    }
    const int64_t E = model_.hidden;
    const MatrixInputs<T> both(space_.normed, rows_, 2 * E, space_.rounded);
    share_inputs(rows_, E, [&](int64_t m, int64_t begin, int64_t end) {
      normalise_elements(layer.side_norm, pass_.sides + m * E, E, begin, end, [&](int64_t k, auto values) { both.put(m, k, values); });
      normalise_elements(layer.attention_norm, space_.residual + m * E, E, begin, end,
                         [&](int64_t k, auto values) { put_anywhere(both, m, E + k, values); });
    });
    barrier_.wait();
    return both;
  }

  // The keys and values of the last layer alone; its output is unused.
  void append(const Layer& layer) {
    const MatrixInputs<T> inputs = attention_inputs(layer);
    round(inputs, rows_, {&layer.key, &layer.value});
    multiply_into(layer.key, inputs, rows_, space_.key);
    multiply_into(layer.value, inputs, rows_, space_.value);
    barrier_.wait();
    share(rows_, [&](int64_t m) { place_keys(layer, m, 0, model_.kv_heads); });
  }

  void feed_forward(const Layer& layer) {
    if (layer.up.weight == nullptr && layer.experts.count == 0) return;
    normalise(layer.mlp_norm);
    if (layer.experts.count > 0) return add_experts(layer);
    round(normed_, rows_, {&layer.gate, &layer.up});
    const MatrixInputs<T> inner(space_.inner, rows_, layer.up.rows, space_.rounded);
    multiply_activated(layer.activation, layer.gate, layer.up, normed_, rows_, inner, space_.gate, space_.up, layer.gate_factor);
    barrier_.wait();
    add(layer.down, inner, layer.mlp_post_norm, layer.mlp_factor);
  }

  void add_experts(const Layer& layer) {
    const ExpertLayer<T> experts(layer, model_.hidden, rows_, space_, barrier_);
    experts.run(normed_);
    const bool is_apart = adds_apart(layer), has_shared = layer.up.weight != nullptr;
    share(rows_, [&](int64_t m) {
      float* row = (is_apart ? space_.branch : space_.residual) + m * model_.hidden;
      if (is_apart && !has_shared) std::fill_n(row, model_.hidden, 0.0f);
      experts.add(m, row);
      if (is_apart) add_normed(layer.mlp_post_norm, m, layer.mlp_factor);
    });
    barrier_.wait();
  }

  void normalise(const Norm& norm) {
    normalise(norm, normed_, rows_, [](int64_t m) { return m; });
  }

  // Norms `count` tokens; token(i) is the i-th of them.
  template <class Token>
  void normalise(const Norm& norm, const MatrixInputs<T>& out, int64_t count, Token&& token) {
    share_inputs(count, model_.hidden, [&](int64_t i, int64_t begin, int64_t end) {
      const float* x = space_.residual + token(i) * model_.hidden;
      normalise_elements(norm, x, model_.hidden, begin, end, [&](int64_t k, auto values) { out.put(i, k, values); });
    });
    barrier_.wait();
  }

  void round(const MatrixInputs<T>& x, int64_t M, std::initializer_list<const Matrix*> matrices) { round_inputs_of(matrices, x, M, barrier_); }

  // Adds x times the transposed matrix, times a factor, to the residual stream, after the post norm if there is one.
  void add(const Matrix& matrix, const MatrixInputs<T>& x, const Norm& post, float factor) {
    round(x, rows_, {&matrix});
    if (post.weight != nullptr) {
      multiply_into(matrix, x, rows_, space_.branch);
      barrier_.wait();
      share(rows_, [&](int64_t m) { add_normed(post, m, factor); });
    } else {
      multiply(matrix, x, rows_, [&](int64_t m, int64_t n, auto count, const float* values) {
        float* row = space_.residual + m * model_.hidden + n;
        if (m + kAhead < rows_) __builtin_prefetch(row + kAhead * model_.hidden, 1);
        int i = 0;
        for (; i + kLanes <= count; i += kLanes) store_lanes(row + i, multiply_add(Lanes{} + factor, load_lanes(values + i), load_lanes(row + i)));
        for (; i < count; ++i) row[i] = std::fma(factor, values[i], row[i]);
      });
    }
    barrier_.wait();
  }

  // Adds a token's row of `branch`, its norm if there is one, times a factor, to its residual stream.
  void add_normed(const Norm& norm, int64_t m, float factor) {
    float* row = space_.residual + m * model_.hidden;
    normalise_row(norm, space_.branch + m * model_.hidden, model_.hidden, [&](int64_t k, auto values) {
      if constexpr (std::is_same_v<decltype(values), float>) {
        row[k] = std::fma(factor, values, row[k]);
      } else {
        store_lanes(row + k, multiply_add(Lanes{} + factor, values, load_lanes(row + k)));
      }
    });
  }

  // Sets all logits to -inf.
  void fill_logits() {
    const int64_t count = pass_.num_logits * model_.num_logits;
    share(portions_of(count), [&](int64_t i) { std::fill(pass_.logits + i * kPortion, pass_.logits + std::min((i + 1) * kPortion, count), -INFINITY); });
  }

  void put_logits(const MatrixInputs<T>& x, int64_t count) {
    if (model_.head_tokens == nullptr) return multiply_into(model_.head, x, count, pass_.logits);
    multiply(model_.head, x, count, PutLogits{pass_.logits, model_.num_logits, model_.head_tokens, model_.logit_scale, model_.logit_softcap});
  }

  // Scales and caps logits if the model does and they are not yet, and chooses the token after each row.
  void finish_logits() {
    barrier_.wait();
    if ((model_.logit_softcap > 0 || model_.logit_scale != 1.0f) && model_.head_tokens == nullptr) {
      shape_logits();
      barrier_.wait();
    }
    if (pass_.chosen == nullptr) return;
    share(pass_.num_logits, [&](int64_t r) {
      float* row = pass_.logits + r * model_.num_logits;
      for (int64_t i = 0; i < pass_.num_impossible; ++i) row[pass_.impossible[i]] = -INFINITY;
      const float scale = pass_.inverse_temperature == nullptr ? 0.0f : pass_.inverse_temperature[r];
      pass_.chosen[r] = scale == 0.0f ? greatest(row, model_.num_logits)
                                      : drawn(row, model_.num_logits, scale, target_key(pass_.seeds[r], position_of(pass_.logit_rows[r]) + 1));
    });
  }

  void shape_logits() {
    const int64_t V = model_.num_logits, portions = portions_of(V);
    const auto shaped = [&](Lanes x) {
      x = x * model_.logit_scale;
      return model_.logit_softcap > 0 ? hyperbolic_tangent(x / model_.logit_softcap) * model_.logit_softcap : x;
    };
    share(pass_.num_logits * portions, [&](int64_t unit) {
      float* row = pass_.logits + unit / portions * V;
      int64_t k = unit % portions * kPortion;
      const int64_t end = std::min(k + kPortion, V);
      for (; k + kLanes <= end; k += kLanes) store_lanes(row + k, shaped(load_lanes(row + k)));
      for (; k < end; ++k) row[k] = shaped(Lanes{} + row[k])[0];
    });
  }

  // Norms and rotates a token's queries of the KV heads first..last.
  void place_queries(const Layer& layer, int64_t m, int64_t first, int64_t last) {
    const int64_t D = model_.head_dim, s = space_.sequence[m], t = m - pass_.starts[s];
    if (layer.norms_all_heads) normalise_head(layer.query_norm, space_.query + m * model_.heads * D, model_.heads * D);
    for (int64_t h = first * group_; h < last * group_; ++h) {
      float* query = query_of(layer, m, h);
      rotate_head(layer, layer.query_norm, query, m);
      const Queries queries = queries_of(s, h / group_);
      const int64_t q = t * group_ + h % group_;
      int64_t i = 0;
      for (; i + kLanes <= D; i += kLanes) queries.put(q, i, load_lanes(query + i));
      for (; i < D; ++i) queries.put(q, i, query[i]);
      for (; i < Queries::padded(D); ++i) queries.put(q, i, 0.0f);
    }
  }

  // Norms and rotates a token's keys of the KV heads first..last, and writes keys and values to the cache rows.
  void place_keys(const Layer& layer, int64_t m, int64_t first, int64_t last) {
    const int64_t D = model_.head_dim, s = space_.sequence[m], row = pass_.prefix[s] + node_of(m);
    if (layer.norms_all_heads) normalise_head(layer.key_norm, space_.key + m * model_.kv_heads * D, model_.kv_heads * D);
    for (int64_t h = first; h < last; ++h) {
      float *key = space_.key + (m * model_.kv_heads + h) * D, *value = space_.value + (m * model_.kv_heads + h) * D;
      rotate_head(layer, layer.key_norm, key, m);
      const int64_t at = cache_row(s, h, row);
      put_row(key, static_cast<char*>(layer.keys) + at);
      put_row(value, static_cast<char*>(layer.values) + at);
    }
  }

  void put_row(const float* x, char* out) {
    model_.rows_are_rounded ? round_row(x, model_.head_dim, out) : copy_row(reinterpret_cast<T*>(out), x, model_.head_dim);
  }

  // Norms one head if each head has a norm, and rotates it if the layer has positions.
  void rotate_head(const Layer& layer, const Norm& norm, float* x, int64_t m) {
    if (!layer.norms_all_heads) normalise_head(norm, x, model_.head_dim);
    const int64_t first = position_of(m) * layer.pairs;
    if (layer.pairs > 0) rotate(x, layer.cos + first, layer.sin + first, layer.pairs);
  }

  // Attention of a portion of a sequence's queries, of a group of heads with one KV head; query t * group + h is head h
  // of token t. `unit` counts the portions of all KV heads. Calls work(attention, first query, number of queries).
  template <class Work>
  void with_unit(const Layer& layer, int64_t s, int64_t unit, Work&& work) {
    const int64_t kv_head = unit / chunks_of(s), first = unit % chunks_of(s) * portion_;
    const int64_t D = model_.head_dim, thread = omp_get_thread_num();
    const int count = int(std::min<int64_t>(portion_, group_ * num_tokens(s) - first));
    View views[SharedAttention<T>::kMostQueries];
    for (int c = 0; c < count; ++c) {
      const int64_t token = (first + c) / group_;
      int32_t* scratch = space_.scratch + (thread * SharedAttention<T>::kMostQueries + c) * num_nodes_;
      const bool is_same = c > 0 && (first + c - 1) / group_ == token;
      views[c] = is_same ? views[c - 1] : view_of(pass_, space_.runs, space_.every, layer.window, s, num_earlier(s) + token, scratch);
    }
    const int64_t start = cache_row(s, kv_head, 0);
    const AttentionSpace<T> space = space_.attention_of(model_, num_nodes_, thread);
    const HeadRows<T> rows(model_, static_cast<const char*>(layer.keys) + start, static_cast<const char*>(layer.values) + start, pass_.prefix[s],
                           pass_.node_starts[s + 1] - pass_.node_starts[s], space.loaded);
    SharedAttention<T> attention(queries_of(s, kv_head), first, views, count, rows, D, layer.scale, layer.softcap, space);
    work(attention, first, count);
  }

  void attend(const Layer& layer, int64_t s, int64_t unit) {
    with_unit(layer, s, unit, [&](SharedAttention<T>& attention, int64_t first, int count) {
      int64_t weighed = omp_get_thread_num() * space_.num_kept;
      for (int c = 0; c < count; ++c) {
        if (is_weighed(s, first + c)) attention.keep(c, space_.kept + weighed++ * SharedAttention<T>::kept(model_.capacity));
      }
      attention.run();
      put(layer, attention, s, unit, first);
      if (pass_.attention == nullptr) return;
      float* weights = pass_.attention + ((s * model_.num_layers + (&layer - model_.layers)) * model_.kv_heads + unit / chunks_of(s)) * pass_.attention_cols;
      for (int c = 0; c < count; ++c) {
        if (is_weighed(s, first + c)) attention.add_weights(c, weights);
      }
    });
  }

  // Attention of few queries of one sequence: all threads share the blocks of every KV head.
  void attend_by_block(const Layer& layer) {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const auto part = [&](int64_t head, int64_t b) { return Softmax<T>(space_.parts + (head * blocks_of(model_.capacity) + b) * Softmax<T>::size(model_.head_dim)); };
    for (int64_t head = 0; head < model_.kv_heads; ++head) {
      with_unit(layer, 0, head, [&](SharedAttention<T>& attention, int64_t, int) {
        const int64_t first = attention.first_block(), count = attention.last_block() - first;
        for (int64_t b = count * thread / threads; b < count * (thread + 1) / threads; ++b) attention.run_block(first + b, part(head, first + b));
      });
    }
    barrier_.wait();
    share(model_.kv_heads, [&](int64_t head) {
      with_unit(layer, 0, head, [&](SharedAttention<T>& attention, int64_t first, int) {
        attention.add_up([&](int64_t b) { return part(head, b); });
        put(layer, attention, 0, head, first);
      });
    });
  }

  // Writes the results of queries from `first` on.
  void put(const Layer& layer, const SharedAttention<T>& attention, int64_t s, int64_t unit, int64_t first) {
    attention.emit([&](int c, int64_t d, auto values) {
      const int64_t m = pass_.starts[s] + (first + c) / group_, head = unit / chunks_of(s) * group_ + (first + c) % group_;
      if (layer.gates_heads) values = values * gate_at(query_of(layer, m, head) + model_.head_dim + d, values);
      put_anywhere(mixed_, m, head * model_.head_dim + d, values);
    });
  }

  // A head of a token's queries, followed by its gate if it has one.
  float* query_of(const Layer& layer, int64_t m, int64_t head) const {
    return space_.query + (m * model_.heads + head) * model_.head_dim * (layer.gates_heads ? 2 : 1);
  }

  static float gate_at(const float* x, float) { return gate_of(Lanes{} + *x)[0]; }
  static Lanes gate_at(const float* x, Lanes) { return gate_of(load_lanes(x)); }
  static Lanes gate_of(Lanes x) { return 1.0f / (1.0f + exponential(-x)); }

  // Whether the attention weights of a query are needed.
  bool is_weighed(int64_t s, int64_t query) const {
    const int64_t m = pass_.starts[s] + query / group_;
    return pass_.attention != nullptr && std::binary_search(pass_.attention_rows, pass_.attention_rows + pass_.num_attention, m);
  }

  bool has_weighed(int64_t s, int64_t unit) const {
    const int64_t first = unit % chunks_of(s) * portion_, end = std::min(first + portion_, group_ * num_tokens(s));
    for (int64_t query = first; pass_.attention != nullptr && query < end; ++query) {
      if (is_weighed(s, query)) return true;
    }
    return false;
  }

  // Rotated queries of all tokens of a sequence, of the heads that share a KV head.
  Queries queries_of(int64_t s, int64_t kv_head) const {
    const int64_t D = model_.head_dim, count = BlockAttention<T>::padded(group_ * num_tokens(s));
    const int64_t first = pass_.starts[s] * model_.heads * kMostPerQuery + kv_head * count;
    return {space_.rotated + first * Queries::padded(D), count, D};
  }

  int64_t cache_row(int64_t s, int64_t head, int64_t row) const {  // in bytes
    return (pass_.slots[s] * model_.slot_rows + head * model_.head_rows + row) * row_bytes<T>(model_);
  }

  int64_t position_of(int64_t m) const { return pass_.positions[pass_.node_starts[space_.sequence[m]] + node_of(m)]; }

  // Index of a token among the nodes of its sequence.
  int64_t node_of(int64_t m) const {
    const int64_t s = space_.sequence[m];
    return num_earlier(s) + m - pass_.starts[s];
  }

  int64_t num_tokens(int64_t s) const { return pass_.starts[s + 1] - pass_.starts[s]; }
  int64_t num_earlier(int64_t s) const { return pass_.node_starts[s + 1] - pass_.node_starts[s] - num_tokens(s); }
  int64_t chunks_of(int64_t s) const { return (group_ * num_tokens(s) + portion_ - 1) / portion_; }  // portions of queries

  int64_t num_units() const {
    int64_t count = 0;
    for (int64_t s = 0; s < pass_.num_sequences; ++s) count += model_.kv_heads * chunks_of(s);
    return count;
  }

  bool wants(int64_t tap) const { return std::find(pass_.taps, pass_.taps + pass_.num_taps, tap) != pass_.taps + pass_.num_taps; }

  void keep_features(int64_t tap) {
    keep(tap, [&](auto* out, int64_t m) { copy_row(out, space_.residual + m * model_.hidden, model_.hidden); });
  }

  void keep_final() {
    keep(model_.num_layers + 1, [&](auto* out, int64_t m) {
      for (int64_t k = 0; k < model_.hidden; ++k) assign(out[k], to_float(*normed_.at(m, k)));
    });
  }

  // write(out, m) writes a token's row to every place of this tap.
  template <class Write>
  void keep(int64_t tap, Write&& write) {
    for (int64_t f = 0; f < pass_.num_taps; ++f) {
      if (pass_.taps[f] != tap) continue;
      share(rows_, [&](int64_t m) {
        const int64_t at = (m * pass_.num_taps + f) * model_.hidden;
        pass_.features_are_bfloat16 ? write(static_cast<Bfloat16*>(pass_.features) + at, m) : write(static_cast<float*>(pass_.features) + at, m);
      });
    }
  }

  const Model& model_;
  const Pass& pass_;
  const int64_t rows_, num_nodes_;
  const Workspace<T> space_;
  const MatrixInputs<T> normed_, mixed_;
  const int64_t group_;                                 // query heads for each KV head
  int64_t portion_ = SharedAttention<T>::kMostQueries;  // queries that a thread computes together
  Barrier barrier_;
  const RecurrentLayers<T> recurrent_;
};

}  // namespace
