// Buffers of a pass, and checks that the pass stays within them, the cache and the model's tables.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "attention.h"
#include "gemm.h"
#include "interface.h"
#include "quantized.h"

namespace {

inline int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Whether the first layer has a second input, and the width of attention's input there.
inline bool has_side(const Model& model) { return model.layers[0].side_norm.weight != nullptr; }
inline int64_t attention_width(const Model& model) { return has_side(model) ? 2 * model.hidden : model.hidden; }

inline bool gates_heads(const Model& model) {
  return std::any_of(model.layers, model.layers + model.num_layers, [](const Layer& layer) { return layer.gates_heads != 0; });
}

// Whether the outputs of a layer's experts are added up before the residual stream gets them.
inline bool adds_apart(const Layer& layer) {
  return layer.mlp_post_norm.weight != nullptr || layer.up.weight != nullptr || layer.mlp_factor != 1.0f;
}

// Whether a layer needs a row of a token beside the residual stream.
inline bool has_branch(const Layer& layer) {
  return layer.attention_post_norm.weight != nullptr || layer.mlp_post_norm.weight != nullptr || (layer.experts.count > 0 && adds_apart(layer));
}

inline int64_t group_size(const Model& model) { return model.heads / model.kv_heads; }

// Whether a matrix is in integers.
inline bool has_integers(const Model& model) {
  bool found = model.head.bits != 0;
  for (int64_t i = 0; i < model.num_layers; ++i) {
    const Layer& layer = model.layers[i];
    for (const Matrix& each : layer.recurrent.inputs) found = found || each.bits != 0;
    found = found || layer.recurrent.output.bits != 0;
    for (const Matrix* each : {&layer.query, &layer.key, &layer.value, &layer.output, &layer.gate, &layer.up, &layer.down, &layer.experts.gate_up, &layer.experts.down, &layer.experts.shared_gate}) found = found || each->bits != 0;
  }
  return found;
}

// Lays out a buffer of rows * cols elements behind `size` bytes from `base` on, which may be null. Adds its bytes to
// `size`; -1 if 64 bits cannot count them, or rows are -1.
template <class E>
void take(void* base, int64_t& size, E*& part, int64_t rows, int64_t cols) {
  part = base == nullptr ? nullptr : reinterpret_cast<E*>(static_cast<char*>(base) + size);
  int64_t bytes;
  if (size < 0 || rows < 0 || __builtin_mul_overflow(rows, cols, &bytes) || __builtin_mul_overflow(bytes, int64_t(sizeof(E)), &bytes) ||
      bytes > std::numeric_limits<int64_t>::max() - 63 || __builtin_add_overflow(size, aligned(bytes), &size)) {
    size = -1;
  }
}

constexpr int64_t kTile = 16;     // columns of a recurrent state that a thread takes through a sequence; a choice
constexpr int64_t kKeyStep = 4;   // heads of keys are multiples of it
constexpr int64_t kMostTaps = 8;  // of convolutions
constexpr int64_t kMostOpen = 33;  // states that wait for further branches: each is of a tree half as large, or smaller

// Tokens before the nodes of a pass that recurrent layers compute again.
inline int64_t num_replayed(const Model& model, const Pass& pass) {
  const int64_t S = pass.num_sequences;
  return model.window == 0 ? 0 : pass.known_starts[S] - (pass.node_starts[S] - pass.starts[S]);
}

// A token on the way through a tree: the places of its parent's state and of its own.
struct Visit {
  int64_t item;
  int32_t from, to;
};

// Buffers of a pass; `size` is their bytes. T as in the decoder.
template <class T>
struct Workspace {
  using Token = typename MatrixInputs<T>::Token;

  float *residual, *query, *key, *value, *gate, *up;
  float* branch;      // (M, hidden), on its way to the residual stream; empty if no layer has one, see `has_branch`
  Token *normed, *mixed, *inner;  // normed: twice as wide if the first layer has a second input
  char* rounded;                  // `RoundedInputs` of the widest of these, if a matrix is in integers
  typename SharedAttention<T>::Engine::Queries::Token* rotated;
  AttentionSpace<T> attention;  // of the first thread
  int32_t* scratch;             // (threads, kMostQueries, M), see `View`
  float* parts;                 // (KV heads, blocks), of `Softmax`
  float* kept;                  // (threads, up to kMostQueries), see `SharedAttention::keep`
  int32_t *runs, *every;  // (W,), see `view_of`
  int64_t *sequence;  // (M,), of each token
  int64_t *units;     // (S + 1,), the first portion of attention of each sequence

  // Of experts, see `ExpertLayer`: a token and one of its experts are a pair; there are P = M * top_k pairs.
  float *router, *shared_gates;                 // (M, num_experts), (M,)
  float *weights;                               // (P,)
  int64_t *chosen, *places, *tokens, *experts;  // (P,)
  int64_t *starts, *blocks;                     // (num_experts + 1,)
  float *pair_gate, *pair_up, *pair_out;        // (P, expert_intermediate) twice, (P, hidden)
  Token *pair_inputs, *pair_inner;              // of P tokens and the padding of each expert's tokens
  char* pair_rounded;                           // `RoundedInputs` of the wider of these, if a matrix is in integers

  // Of recurrent layers, see `recurrent.h`; I items: nodes and tokens before them.
  float *projected, *read;   // (M, recurrent_width), (M, recurrent_outputs)
  float *convolved, *gates;  // (I, recurrent_channels), (I, recurrent_heads, 2)
  float* tiles;              // (threads, kMostOpen, recurrent_keys, kTile)
  int64_t* items;            // (S + 1,), the first item of each sequence
  Visit *visits, *waiting;   // (I,), (M,)
  int32_t* branches;         // (4, M + 1)

  int64_t size = 0;  // -1 if 64 bits cannot count it
  int64_t num_kept;  // queries in `kept` of a thread

  // M: tokens or nodes, the larger number; weighed: tokens whose attention weights are needed; replayed: tokens before the
  // nodes that recurrent layers compute again.
  Workspace(const Model& model, int64_t M, int64_t threads, void* base, int64_t weighed = 0, int64_t replayed = 0) {
    const int64_t q = model.heads * model.head_dim, kv = model.kv_heads * model.head_dim;
    int64_t pairs = 0;
    if (M > std::numeric_limits<int64_t>::max() - kMostTokens || __builtin_mul_overflow(M, model.top_k, &pairs) ||
        pairs > std::numeric_limits<int64_t>::max() / kMostTokens) {
      size = -1;
    }
    const int64_t padded_M = size < 0 ? 0 : most_inputs(M);
    const int64_t padded_pairs = size < 0 ? 0 : pairs + std::min(pairs, model.num_experts) * (kMostTokens - 1);
    take(base, size, residual, M, model.hidden);
    take(base, size, query, M, gates_heads(model) ? 2 * q : q);
    take(base, size, key, M, kv);
    take(base, size, value, M, kv);
    take(base, size, gate, M, model.intermediate);
    take(base, size, up, M, model.intermediate);
    take(base, size, branch, std::any_of(model.layers, model.layers + model.num_layers, has_branch) ? M : 0, model.hidden);
    take(base, size, rotated, M, kMostPerQuery * model.heads * SharedAttention<T>::Engine::Queries::padded(model.head_dim));
    take(base, size, normed, padded_M, MatrixInputs<T>::padded(attention_width(model)));
    take(base, size, mixed, padded_M, MatrixInputs<T>::padded(std::max(q, model.recurrent_outputs)));
    take(base, size, inner, padded_M, MatrixInputs<T>::padded(model.intermediate));
    take(base, size, rounded, has_integers(model) ? padded_M : 0, rounded_bytes(std::max({attention_width(model), q, model.intermediate, model.recurrent_outputs})));
    using Attention = SharedAttention<T>;
    const int64_t softmax = Softmax<T>::size(model.head_dim), block = Attention::kQueries * kBlock;
    take(base, size, attention.scores, threads, block);
    take(base, size, attention.weights, threads, block);
    take(base, size, attention.packed, threads, Attention::Engine::packed(model.head_dim));
    take(base, size, attention.block, threads, softmax);
    take(base, size, attention.totals, threads, Attention::kMostQueries / Attention::kQueries * softmax);
    take(base, size, attention.loaded, size < 0 ? -1 : threads, HeadRows<T>::size(model, size < 0 ? 0 : M));
    take(base, size, scratch, size < 0 ? -1 : threads * Attention::kMostQueries, M);
    take(base, size, parts, model.kv_heads, blocks_of(model.capacity) * softmax);
    num_kept = std::min<int64_t>(Attention::kMostQueries, std::min(weighed, M) * group_size(model));
    take(base, size, kept, threads * num_kept, Attention::kept(model.capacity));
    for (int32_t** each : {&runs, &every}) take(base, size, *each, M, 1);
    take(base, size, sequence, M, 1);
    take(base, size, units, padded_M + 1, 1);
    take(base, size, router, M, model.num_experts);
    take(base, size, shared_gates, model.num_experts > 0 ? M : 0, 1);
    take(base, size, weights, pairs, 1);
    for (int64_t** each : {&chosen, &places, &tokens, &experts}) take(base, size, *each, pairs, 1);
    for (int64_t** each : {&starts, &blocks}) take(base, size, *each, model.num_experts + 1, 1);
    for (float** each : {&pair_gate, &pair_up}) take(base, size, *each, pairs, model.expert_intermediate);
    take(base, size, pair_out, pairs, model.hidden);
    take(base, size, pair_inputs, padded_pairs, MatrixInputs<T>::padded(model.hidden));
    take(base, size, pair_inner, padded_pairs, MatrixInputs<T>::padded(model.expert_intermediate));
    take(base, size, pair_rounded, has_integers(model) ? padded_pairs : 0, rounded_bytes(std::max(model.hidden, model.expert_intermediate)));
    if (model.window == 0 || size < 0) return;
    const int64_t I = M > std::numeric_limits<int64_t>::max() - replayed ? -1 : M + replayed;
    take(base, size, projected, M, model.recurrent_width);
    take(base, size, read, M, model.recurrent_outputs);
    take(base, size, convolved, I, model.recurrent_channels);
    take(base, size, gates, I, 2 * model.recurrent_heads);
    take(base, size, tiles, threads * kMostOpen, model.recurrent_keys * kTile);
    take(base, size, items, padded_M + 1, 1);
    take(base, size, visits, I, 1);
    take(base, size, waiting, M, 1);
    take(base, size, branches, 4, padded_M + 1);
  }

  AttentionSpace<T> attention_of(const Model& model, int64_t M, int64_t thread) const {
    using Attention = SharedAttention<T>;
    const int64_t head_dim = model.head_dim, softmax = Softmax<T>::size(head_dim), block = Attention::kQueries * kBlock;
    return {attention.scores + thread * block, attention.weights + thread * block, attention.packed + thread * Attention::Engine::packed(head_dim),
            attention.block + thread * softmax, attention.totals + thread * Attention::kMostQueries / Attention::kQueries * softmax,
            attention.loaded + thread * HeadRows<T>::size(model, M)};
  }
};

bool all_within(const int64_t* values, int64_t count, int64_t end) {
  // One comparison a value: a negative value is a large unsigned one.
  return std::all_of(values, values + count, [&](int64_t value) { return uint64_t(value) < uint64_t(end); });
}

// Whether values ascend from 0 on, and stay below `end`.
bool ascend_within(const int64_t* values, int64_t count, int64_t end) {
  for (int64_t i = 0, last = -1; i < count; last = values[i++]) {
    if (values[i] <= last || values[i] >= end) return false;
  }
  return true;
}

// Decides whether a sequence may have this many rows behind its prefix. Its slot and its prefix are within bounds.
inline bool has_rows(const Model& model, const Pass& pass, int64_t s, int64_t rows) {
  if (rows > model.capacity - pass.prefix[s]) return false;
  const int64_t first = pass.slots[s] * model.slot_rows + (model.kv_heads - 1) * model.head_rows;
  return first + pass.prefix[s] + rows <= model.layer_rows;
}

// Checks the blocks of states of a pass; its sequences and parents are within bounds.
inline Status check_states(const Model& model, const Pass& pass) {
  if (model.window == 0) return Status::kDone;
  if (pass.states_from == nullptr || pass.states_to == nullptr || pass.rows_to == nullptr || pass.known_starts == nullptr || pass.settled == nullptr) return Status::kMissing;
  if (pass.known_starts[0] != 0) return Status::kSequences;
  for (int64_t s = 0; s < pass.num_sequences; ++s) {
    const int64_t first = pass.known_starts[s], known = pass.known_starts[s + 1] - first, tokens = pass.starts[s + 1] - pass.starts[s];
    const int64_t earlier = pass.node_starts[s + 1] - pass.node_starts[s] - tokens, settled = pass.settled[s];
    if (known < earlier || uint64_t(settled) > uint64_t(earlier > 0 ? 0 : tokens)) return Status::kSequences;
    if ((settled > 0 && pass.states_to[s] == nullptr) || (settled < tokens && pass.rows_to[s] == nullptr) || (known > 0 && pass.known == nullptr)) return Status::kMissing;
    if (known > 0 && std::any_of(pass.known + first, pass.known + first + known, [](const float* row) { return row == nullptr; })) return Status::kMissing;
    if (settled == 0) continue;
    for (int64_t n = 0; n < tokens; ++n) {
      const int64_t parent = pass.parents[pass.node_starts[s] + n];
      if (n < settled ? parent != n - 1 : parent < settled - 1) return Status::kParents;
    }
  }
  return Status::kDone;
}

// Checks that a pass stays within the model's tables, the cache and its own buffers.
Status check(const Model& model, const Pass& pass) {
  if ((pass.tokens == nullptr && pass.inputs == nullptr) || pass.positions == nullptr || pass.parents == nullptr ||
      pass.slots == nullptr || pass.prefix == nullptr || pass.starts == nullptr || pass.node_starts == nullptr ||
      (has_side(model) && pass.sides == nullptr) || pass.workspace == nullptr ||
      (pass.is_append && model.layers[model.num_layers - 1].key.weight == nullptr) ||
      (pass.num_taps > 0 && pass.features == nullptr) ||
      (pass.logits != nullptr && pass.logit_rows == nullptr) ||
      (pass.attention != nullptr && pass.num_attention > 0 && pass.attention_rows == nullptr) ||
      (pass.inverse_temperature != nullptr && pass.seeds == nullptr)) {
    return Status::kMissing;
  }
  const int64_t S = pass.num_sequences, *starts = pass.starts, *node_starts = pass.node_starts;
  if (starts[0] != 0 || node_starts[0] != 0) return Status::kSequences;
  if (!all_within(pass.slots, S, model.num_slots)) return Status::kSlots;
  for (int64_t s = 0; s < S; ++s) {
    const int64_t count = starts[s + 1] - starts[s], nodes = node_starts[s + 1] - node_starts[s];
    if (count < 1 || nodes < count) return Status::kSequences;
    if (uint64_t(pass.prefix[s]) > uint64_t(model.capacity) || !has_rows(model, pass, s, nodes)) return Status::kCacheRows;
    for (int64_t t = 0; t < nodes; ++t) {
      const int64_t parent = pass.parents[node_starts[s] + t];
      if (parent < -1 || parent >= t) return Status::kParents;  // ancestors come before
    }
  }
  const Status states = check_states(model, pass);
  if (states != Status::kDone) return states;
  const int64_t M = starts[S];
  if (pass.num_threads < 1 || pass.num_threads > std::numeric_limits<int>::max()) return Status::kThreads;
  if (pass.inputs == nullptr && !all_within(pass.tokens, M, model.vocab)) return Status::kTokens;
  if (!all_within(pass.positions, node_starts[S], model.num_positions)) return Status::kPositions;
  if (pass.attention != nullptr) {
    for (int64_t s = 0; s < S; ++s) {
      if (pass.prefix[s] + node_starts[s + 1] - node_starts[s] > pass.attention_cols) return Status::kCacheRows;
    }
    if (!ascend_within(pass.attention_rows, pass.num_attention, M)) return Status::kAttentionRows;
  }
  if (pass.logits == nullptr) return Status::kDone;
  if (!ascend_within(pass.logit_rows, pass.num_logits, M)) return Status::kLogitRows;
  if (!all_within(pass.impossible, pass.num_impossible, model.num_logits)) return Status::kTokens;
  return pass.num_logits < 1 ? Status::kLogitRows : Status::kDone;
}

}  // namespace
