// Recurrent layers: a causal convolution over a token and those before it, then a state of each head, a matrix (key_dim,
// value_dim) that every token decays, adds to and reads: the gated delta rule, or a state space (Mamba2). Or the
// convolution alone.
//
// Every token begins with its parent's state, and no state is stored but that behind the folded tokens: the accepted
// ones of the pass before and, of a prompt, all but the last. Of the others their inputs are stored, and a later pass
// computes them again by the same code, so with the same bits. Columns of a state do not depend on each other: a thread
// takes some columns of a head through all tokens of a sequence, depth first, while they stay in its first cache. A pass
// over a level of a tree takes only the way from the prefix to the new nodes.
//
// An item is a token to compute: first the replayed ones, then the sequence's nodes. Rows of earlier nodes are known too.
// Item -1 is the last row of the window, -2 the one before. Letters: I items of all sequences, C channels, K taps of the
// convolution.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include <omp.h>

#include "gemm.h"
#include "integer_tiles.h"
#include "interface.h"
#include "quantized.h"
#include "rows.h"
#include "vectors.h"
#include "workspace.h"

namespace {

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

template <class T>
class RecurrentLayers {
 public:
  RecurrentLayers(const Model& model, const Pass& pass, const Workspace<T>& space, Barrier& barrier)
      : model_(model), pass_(pass), space_(space), barrier_(barrier), rows_(pass.starts[pass.num_sequences]) {
    if (model.window == 0) return;
    space.items[0] = 0;
    for (int64_t s = 0; s < pass.num_sequences; ++s) {
      space.items[s + 1] = space.items[s] + num_replayed(s) + num_nodes(s);
      order(s);
    }
  }

  // Runs inside a parallel region, all threads together, once the inputs are there. Writes the input of the output
  // projection.
  void run(const Recurrent& layer, const MatrixInputs<T>& inputs, const MatrixInputs<T>& mixed) const {
    project(layer, inputs);
    if (layer.kind == kConvolution) return convolve_alone(layer, mixed);
    const int64_t items = space_.items[pass_.num_sequences];
    share(items * layer.key_heads, [&](int64_t unit) { prepare(layer, unit / layer.key_heads, unit % layer.key_heads); });
    for (int64_t s = 0; s < pass_.num_sequences; ++s) {
      share(num_kept(s), [&](int64_t row) { keep(layer, s, row, 0, layer.row_size); });
    }
    barrier_.wait();
    const int64_t tiles = tiles_of(layer), units = layer.heads * tiles;
    share(pass_.num_sequences * units, [&](int64_t unit) { advance(layer, unit / units, unit % units / tiles, unit % tiles); });
    barrier_.wait();
    const int64_t groups = layer.heads * layer.value_dim / layer.norm_size;
    if (groups < omp_get_num_threads()) {
      share(rows_, [&](int64_t m) {
        for (int64_t g = 0; g < groups; ++g) put_gated(layer, mixed, m, g);
      });
    } else {  // tokens stand side by side in `mixed`
      share(groups, [&](int64_t g) {
        for (int64_t m = 0; m < rows_; ++m) put_gated(layer, mixed, m, g);
      });
    }
  }

 private:
  void project(const Recurrent& layer, const MatrixInputs<T>& inputs) const {
    const Matrix* each = layer.inputs;
    round_inputs_of({each, each + 1, each + 2, each + 3, each + 4, each + 5}, inputs, rows_, barrier_);
    for (int64_t i = 0, at = 0; i < layer.num_inputs; at += layer.inputs[i++].rows) {
      multiply(layer.inputs[i], inputs, rows_, [&](int64_t m, int64_t n, auto count, const float* values) {
        float* row = space_.projected + m * layer.width;
        if (layer.places != nullptr) {
          for (int64_t k = 0; k < count; ++k) row[layer.places[at + n + k]] = values[k];
        } else if (layer.factors != nullptr) {
          for (int64_t k = at + n; k < at + n + count; ++k) row[k] = values[k - at - n] * layer.factors[k];
        } else {
          std::copy_n(values, count, row + at + n);
        }
      });
    }
    barrier_.wait();
  }

  static int64_t tiles_of(const Recurrent& layer) { return (layer.value_dim + kTile - 1) / kTile; }

  int64_t num_tokens(int64_t s) const { return pass_.starts[s + 1] - pass_.starts[s]; }
  int64_t num_nodes(int64_t s) const { return pass_.node_starts[s + 1] - pass_.node_starts[s]; }
  int64_t num_known(int64_t s) const { return pass_.known_starts[s + 1] - pass_.known_starts[s]; }
  int64_t num_replayed(int64_t s) const { return num_known(s) - (num_nodes(s) - num_tokens(s)); }
  int64_t num_folded(int64_t s) const { return num_replayed(s) + pass_.settled[s]; }
  int64_t items_of(int64_t s) const { return space_.items[s + 1] - space_.items[s]; }

  // The item before an item.
  int64_t before(int64_t s, int64_t item) const {
    const int64_t replayed = num_replayed(s);
    return item < replayed ? item - 1 : replayed + pass_.parents[pass_.node_starts[s] + item - replayed];
  }

  // The token of the pass that an item is; negative for known ones.
  int64_t token_of(int64_t s, int64_t item) const { return item < num_known(s) ? -1 : pass_.starts[s] + item - num_known(s); }

  // The convolution's input of an item, and its gates behind it; null before a text.
  const float* row_of(const Recurrent& layer, int64_t s, int64_t item) const {
    if (item >= num_known(s)) return space_.projected + token_of(s, item) * layer.width + layer.row_at;
    if (item >= 0) return pass_.known[pass_.known_starts[s] + item] + layer.rows_before;
    if (pass_.states_from[s] == nullptr) return nullptr;
    return pass_.states_from[s] + model_.state_size + (model_.window + item) * model_.row_size + layer.rows_before;
  }

  // Rows to store: of the window, if a block is made, and of the new nodes that are not folded.
  int64_t num_window(int64_t s) const { return pass_.states_to[s] == nullptr ? 0 : model_.window; }
  int64_t num_kept(int64_t s) const { return num_window(s) + num_tokens(s) - pass_.settled[s]; }

  // Stores elements begin..end of one of them.
  void keep(const Recurrent& layer, int64_t s, int64_t row, int64_t begin, int64_t end) const {
    const int64_t window = num_window(s);
    const bool is_window = row < window;
    const float* from = row_of(layer, s, is_window ? num_folded(s) - window + row : num_known(s) + pass_.settled[s] + row - window);
    float* to = is_window ? pass_.states_to[s] + model_.state_size + row * model_.row_size : pass_.rows_to[s] + (row - window) * model_.row_size;
    to += layer.rows_before;
    from == nullptr ? void(std::fill(to + begin, to + end, 0.0f)) : void(std::copy(from + begin, from + end, to + begin));
  }

  // Calls put(c, values) with the convolution of an item at channels begin..end, a register or an element at a time.
  template <class Put>
  void convolve(const Recurrent& layer, int64_t s, int64_t item, int64_t begin, int64_t end, Put&& put) const {
    const float* rows[kMostTaps];
    const int64_t C = layer.channels, K = model_.window + 1;
    for (int64_t j = K - 1, at = item; j >= 0; --j, at = before(s, at)) rows[j] = row_of(layer, s, at);
    int64_t c = begin;
    for (; c + kLanes <= end; c += kLanes) {
      Lanes sum = layer.tap_bias == nullptr ? Lanes{} : load_lanes(layer.tap_bias + c);
      for (int64_t j = 0; j < K; ++j) {
        if (rows[j] != nullptr) sum = multiply_add(load_lanes(layer.taps + j * C + c), load_lanes(rows[j] + c), sum);
      }
      put(c, sum);
    }
    for (; c < end; ++c) {
      float sum = layer.tap_bias == nullptr ? 0.0f : layer.tap_bias[c];
      for (int64_t j = 0; j < K; ++j) {
        if (rows[j] != nullptr) sum = std::fma(layer.taps[j * C + c], rows[j][c], sum);
      }
      put(c, sum);
    }
  }

  // The whole layer where there is no state: gate * convolution(input * factor), see `Recurrent`.
  void convolve_alone(const Recurrent& layer, const MatrixInputs<T>& mixed) const {
    const int64_t C = layer.channels;
    share(portions_of(C), [&](int64_t portion) {
      const int64_t begin = portion * kPortion, end = std::min(begin + kPortion, C);
      for (int64_t m = 0; m < rows_; ++m) {
        float* input = space_.projected + m * layer.width + layer.row_at;
        const float* factor = space_.projected + m * layer.width + layer.factor_at;
        for (int64_t c = begin; c < end; ++c) input[c] *= factor[c];
      }
      for (int64_t s = 0; s < pass_.num_sequences; ++s) {
        for (int64_t item = num_known(s); item < items_of(s); ++item) {
          const int64_t m = token_of(s, item);
          const float* gate = space_.projected + m * layer.width + layer.gate_at;
          convolve(layer, s, item, begin, end, [&](int64_t c, auto values) {
            if constexpr (std::is_same_v<decltype(values), float>) {
              mixed.put(m, c, values * gate[c]);
            } else {
              mixed.put(m, c, values * load_lanes(gate + c));
            }
          });
        }
        for (int64_t row = 0; row < num_kept(s); ++row) keep(layer, s, row, begin, end);
      }
    });
  }

  // Of the item that is computed at place `i` among those of all sequences: what the heads that share a key head read, and
  // their gates.
  void prepare(const Recurrent& layer, int64_t i, int64_t key_head) const {
    const int64_t s = std::upper_bound(space_.items, space_.items + pass_.num_sequences + 1, i) - space_.items - 1;
    const int64_t item = i - space_.items[s] < num_folded(s) ? i - space_.items[s] : space_.visits[i].item;
    if (item < 0) return;
    i = space_.items[s] + item;
    const int64_t shared = layer.heads / layer.key_heads, values = shared * layer.value_dim;
    float* out = space_.convolved + i * layer.channels;
    const auto put = [&](int64_t c, auto value) {
      if constexpr (std::is_same_v<decltype(value), float>) {
        out[c] = silu(Lanes{} + value)[0];
      } else {
        store_lanes(out + c, silu(value));
      }
    };
    float *query = out + layer.query_at + key_head * layer.key_dim, *key = out + layer.key_at + key_head * layer.key_dim;
    for (float* part : {query, key}) convolve(layer, s, item, part - out, part - out + layer.key_dim, put);
    convolve(layer, s, item, layer.value_at + key_head * values, layer.value_at + (key_head + 1) * values, put);
    if (layer.kind == kDelta) {
      scale_to_length(query, layer.key_dim, 1.0f / std::sqrt(float(layer.key_dim)));
      scale_to_length(key, layer.key_dim, 1.0f);
    }
    const float* raw = row_of(layer, s, item) + layer.channels;
    for (int64_t h = key_head * shared; h < (key_head + 1) * shared; ++h) {
      float* gates = space_.gates + (i * layer.heads + h) * 2;
      const float step = softplus(raw[h] + layer.step_bias[h]);
      gates[0] = std::exp(layer.decay[h] * step);
      gates[1] = layer.kind == kDelta ? layer.beta_scale / (1.0f + std::exp(-raw[layer.heads + h])) : step;
    }
  }

  static void scale_to_length(float* x, int64_t size, float length) {
    float sum = 0;
    for (int64_t i = 0; i < size; ++i) sum = std::fma(x[i], x[i], sum);
    const float factor = length / std::sqrt(sum + 1e-6f);
    for (int64_t i = 0; i < size; ++i) x[i] *= factor;
  }

  // Columns of a head's state, (key_dim, kTile), through all items of a sequence.
  void advance(const Recurrent& layer, int64_t s, int64_t head, int64_t tile) const {
    const int64_t size = layer.key_dim * kTile, at = layer.state_at + (head * tiles_of(layer) + tile) * size, folded = num_folded(s);
    float* open = space_.tiles + omp_get_thread_num() * kMostOpen * model_.recurrent_keys * kTile;
    if (pass_.states_from[s] == nullptr) {
      std::fill_n(open, size, 0.0f);
    } else {
      std::copy_n(pass_.states_from[s] + at, size, open);
    }
    for (int64_t item = 0; item < folded; ++item) step(layer, s, head, tile, item, open, open);
    if (pass_.states_to[s] != nullptr) std::copy_n(open, size, pass_.states_to[s] + at);
    for (int64_t i = space_.items[s] + folded; i < space_.items[s + 1]; ++i) {
      const Visit& visit = space_.visits[i];
      if (visit.item < 0) break;
      step(layer, s, head, tile, visit.item, open + visit.from * size, open + visit.to * size);
    }
  }

  void step(const Recurrent& layer, int64_t s, int64_t head, int64_t tile, int64_t item, const float* from, float* to) const {
    const auto run = [&](auto is_delta) {
      constexpr bool kIsDelta = decltype(is_delta)::value;
      token_of(s, item) < 0 ? step_of<kIsDelta, false>(layer, s, head, tile, item, from, to) : step_of<kIsDelta, true>(layer, s, head, tile, item, from, to);
    };
    layer.kind == kDelta ? run(std::true_type()) : run(std::false_type());
  }

  // to = the state behind an item, from that before it, which may be the same; writes what the item reads of its state
  // if it is a node of the pass. Four sums over keys do not wait for each other's additions. A state is decayed twice and
  // stored once, since stores take longer.
  template <bool kIsDelta, bool kReads>
  void step_of(const Recurrent& layer, int64_t s, int64_t head, int64_t tile, int64_t item, const float* from, float* to) const {
    constexpr int kRegisters = kTile / kLanes;
    const int64_t K = layer.key_dim, i = space_.items[s] + item, first = tile * kTile, count = std::min(kTile, layer.value_dim - first);
    const int64_t key_head = head / (layer.heads / layer.key_heads);
    const float* row = space_.convolved + i * layer.channels;
    const float *query = row + layer.query_at + key_head * K, *key = row + layer.key_at + key_head * K;
    const float* gates = space_.gates + (i * layer.heads + head) * 2;
    const Lanes decay = in_all_lanes(gates[0]), rate = in_all_lanes(gates[1]);
    alignas(kBytes) float buffer[kTile] = {};
    std::copy_n(row + layer.value_at + head * layer.value_dim + first, count, buffer);
    for (int r = 0; r < kRegisters; ++r) {
      const float* old = from + r * kLanes;
      float* place = to + r * kLanes;
      const Lanes value = load_lanes(buffer + r * kLanes);
      Lanes sums[kKeyStep] = {}, added = rate * value;
      if constexpr (kIsDelta) {
        for (int64_t d = 0; d < K; d += kKeyStep) {
#pragma GCC unroll 4
          for (int u = 0; u < kKeyStep; ++u) {
            const Lanes decayed = load_lanes(old + (d + u) * kTile) * decay;
            sums[u] = multiply_add(in_all_lanes(key[d + u]), decayed, sums[u]);
          }
        }
        added = rate * (value - ((sums[0] + sums[1]) + (sums[2] + sums[3])));
        for (Lanes& each : sums) each = Lanes{};
      }
      for (int64_t d = 0; d < K; d += kKeyStep) {
#pragma GCC unroll 4
        for (int u = 0; u < kKeyStep; ++u) {
          const Lanes decayed = load_lanes(old + (d + u) * kTile) * decay;
          const Lanes state = multiply_add(in_all_lanes(key[d + u]), added, decayed);
          store_lanes(place + (d + u) * kTile, state);
          if constexpr (kReads) sums[u] = multiply_add(in_all_lanes(query[d + u]), state, sums[u]);
        }
      }
      if constexpr (!kReads) continue;
      const Lanes read = (sums[0] + sums[1]) + (sums[2] + sums[3]);
      store_lanes(buffer + r * kLanes, layer.skip == nullptr ? read : multiply_add(in_all_lanes(layer.skip[head]), value, read));
    }
    if constexpr (kReads) std::copy_n(buffer, count, space_.read + (token_of(s, item) * layer.heads + head) * layer.value_dim + first);
  }

  // The norm of a group of a token's outputs if there is one, and their gate before or after it.
  void put_gated(const Recurrent& layer, const MatrixInputs<T>& mixed, int64_t m, int64_t group) const {
    const int64_t size = layer.norm_size, first = group * size;
    float* x = space_.read + m * layer.heads * layer.value_dim + first;
    const float *gate = space_.projected + m * layer.width + layer.gate_at + first, *weight = layer.norm.weight + first;
    if (layer.gates_first) {
      for (int64_t k = 0; k < size; ++k) x[k] *= silu(Lanes{} + gate[k])[0];
    }
    if (layer.norm.weight == nullptr) {
      for (int64_t k = 0; k < size; ++k) mixed.put(m, first + k, x[k]);
      return;
    }
    const float factor = norm_factor(x, size, layer.norm.epsilon);
    int64_t k = 0;
    for (; k + kLanes <= size; k += kLanes) {
      const Lanes normed = load_lanes(x + k) * factor * load_lanes(weight + k);
      put_anywhere(mixed, m, first + k, layer.gates_first ? normed : normed * silu(load_lanes(gate + k)));
    }
    for (; k < size; ++k) {
      const float normed = x[k] * factor * weight[k];
      mixed.put(m, first + k, layer.gates_first ? normed : normed * silu(Lanes{} + gate[k])[0]);
    }
  }

  // Sorts the nodes of a sequence depth first, those behind the folded ones, and gives each a place for its state: that
  // of its parent if no child of the parent comes later, otherwise the next one. The largest branch comes last, so the
  // places are few. Branches of earlier nodes alone are left out; an item of -1 ends the rest.
  void order(int64_t s) const {
    const int64_t nodes = num_nodes(s), earlier = nodes - num_tokens(s), settled = pass_.settled[s], replayed = num_replayed(s);
    const int64_t* parents = pass_.parents + pass_.node_starts[s];
    int32_t *sizes = space_.branches, *largest = space_.branches + nodes + 1, *next = largest + nodes + 1, *child = next + nodes + 1;
    // Index n + 1 is node n; 0 is the last folded token, whose children are nodes with any folded parent. A size counts
    // new nodes.
    const auto parent_of = [&](int64_t n) { return parents[n] < settled ? int64_t(0) : parents[n] + 1; };
    std::fill_n(sizes, earlier + 1, 0);
    std::fill_n(sizes + earlier + 1, nodes - earlier, 1);
    std::fill_n(largest, nodes + 1, 0);
    std::fill_n(child, nodes + 1, 0);
    for (int64_t n = nodes - 1; n >= settled; --n) {
      if (sizes[n + 1] == 0) continue;
      const int64_t parent = parent_of(n);
      sizes[parent] += sizes[n + 1];
      next[n + 1] = child[parent];
      child[parent] = int32_t(n + 1);
      if (largest[parent] == 0 || sizes[n + 1] >= sizes[largest[parent]]) largest[parent] = int32_t(n + 1);
    }
    Visit *visit = space_.visits + space_.items[s] + replayed + settled, *end = space_.visits + space_.items[s + 1];
    Visit* waiting = space_.waiting;
    int64_t count = 0;
    const auto push = [&](int64_t parent, int32_t place) {
      if (largest[parent] == 0) return;
      waiting[count++] = {largest[parent], place, place};
      for (int32_t each = child[parent]; each != 0; each = next[each]) {
        if (each != largest[parent]) waiting[count++] = {each, place, place + 1};
      }
    };
    push(0, 0);
    while (count > 0) {
      const Visit taken = waiting[--count];
      *visit++ = {replayed + taken.item - 1, taken.from, taken.to};
      push(taken.item, taken.to);
    }
    std::fill(visit, end, Visit{-1, 0, 0});
  }

  const Model& model_;
  const Pass& pass_;
  const Workspace<T>& space_;
  Barrier& barrier_;
  const int64_t rows_;
};

}  // namespace
