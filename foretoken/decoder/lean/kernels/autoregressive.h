// Draft trees of heads that read pairs of a state and the next token with a decoder block (EAGLE). The state of a
// committed position comes from the target's features, that of a drafted node is the block's output for its parent.
// Nodes without children are not fed: the rows of drafted nodes are not kept.
//
// Letters: B sequences, P nodes of a level with children, M pairs of a pass: the committed ones, or B * P; E hidden
// size of the block, V vocabulary.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "barrier.h"
#include "checks.h"
#include "children.h"
#include "decoder.h"
#include "draft.h"
#include "elementwise.h"
#include "head_interface.h"
#include "head_layers.h"
#include "interface.h"
#include "workspace.h"

namespace {

// Buffers of `HeadLevels`, behind those of its passes.
template <class T, class W = T>
struct HeadDraftSpace {
  LevelSpace<T, W> levels;
  float* logits;               // (B * P, V)
  float *inputs, *sides;       // (M, E), inputs of the block
  float* outputs;              // (M, E), outputs of the block
  float* rows;                 // inputs of any matrix of the head, as wide as those of the widest dtype
  int64_t *tokens, *sources;   // (B, P), of a level: the token of each pair, and the row of `outputs` with its state
  int64_t size;

  HeadDraftSpace(const Model& model, const AutoregressiveHead& head, const Draft& draft, int64_t pairs, int64_t threads, void* base)
      : levels(model, draft, head.vocab, pairs, threads, base), size(levels.size) {
    int64_t inner = 0;
    if (__builtin_mul_overflow(draft.num_sequences, Widest(draft).inner, &inner)) size = -1;
    const int64_t M = size < 0 ? 0 : std::max(pairs, inner), E = model.hidden;
    take(base, size, logits, inner, head.vocab);
    for (float** each : {&inputs, &outputs}) take(base, size, *each, M, E);
    take(base, size, sides, has_side(model) ? M : 0, E);
    take(base, size, rows, most_inputs(M), Inputs<Int8>::padded(2 * E));
    for (int64_t** each : {&tokens, &sources}) take(base, size, *each, inner, 1);
  }
};

// Checks that drafts stay within the tables of a head, the cache and their own buffers. states: (M, E), of the pass
// over committed pairs; its tokens are those after the states.
inline Status check_head_trees(const Model& model, const AutoregressiveHead& head, const Pass& pass, const Draft& draft, const float* states, int64_t last_position) {
  if (states == nullptr || pass.tokens == nullptr || head.embedding == nullptr || head.lm_head.matrix.weight == nullptr) return Status::kMissing;
  if ((head.fuse.matrix.weight == nullptr) != has_side(model)) return Status::kMissing;  // exactly one way to read the token
  if (draft.vocab != head.vocab) return Status::kShape;
  if (head.num_tokens < head.vocab) return Status::kTokens;
  Pass fed = pass;
  fed.inputs = states;  // for the shape alone
  fed.sides = states;
  int64_t rows = 0;  // nodes below the root with children
  for (int64_t i = 2; draft.parents != nullptr && i < draft.num_nodes; ++i) rows += draft.parents[i] != draft.parents[i - 1];
  const Status status = check_trees(model, fed, draft, head.vocab, rows, last_position);
  if (status != Status::kDone) return status;
  return all_within(pass.tokens, pass.starts[pass.num_sequences], head.num_tokens) ? Status::kDone : Status::kTokens;
}

// out = the norm of a row, or the row itself; may be in place.
inline void put_normed(const Norm& norm, const float* x, int64_t size, float* out) {
  normalise_row(norm, x, size, [&](int64_t k, auto values) {
    if constexpr (std::is_same_v<decltype(values), float>) {
      out[k] = values;
    } else {
      store_lanes(out + k, values);
    }
  });
}

// See `fill_trees`.
template <class T, class W = T>
class HeadLevels {
 public:
  HeadLevels(const Model& model, const AutoregressiveHead& head, const Draft& draft, const Children& children, LevelPasses<T, W>& passes, const HeadDraftSpace<T, W>& space, const float* states)
      : model_(model), head_(head), draft_(draft), children_(children), passes_(passes), space_(space), layers_(space.rows),
        states_(states), tokens_(passes.pass().tokens), last_rows_(passes.pass().logit_rows), tap_(model.num_layers) {
    Pass& pass = passes.pass();
    pass.inputs = space.inputs;
    pass.sides = space.sides;
    pass.taps = &tap_;
    pass.num_taps = 1;
    pass.features = space.outputs;
    pass.features_are_bfloat16 = 0;
  }
  HeadLevels(const HeadLevels&) = delete;  // the pass has the address of `tap_`

  void begin(int64_t depth) {
    const int64_t P = children_.num_inner(depth), before = children_.num_inner(depth - 1);
    for (int64_t s = 0; s < draft_.num_sequences; ++s) {
      for (int64_t i = 0; i < P; ++i) {
        const int64_t node = children_.inner(depth, i), parent = children_.parent(s, node);
        space_.tokens[s * P + i] = draft_.tokens[s * draft_.num_nodes + node];
        space_.sources[s * P + i] = depth == 1 ? last_rows_[s] : s * before + passes_.place(depth - 1, parent);
      }
    }
    tokens_ = space_.tokens;
    passes_.begin(depth);
  }

  float* logits(int64_t depth) {
    set_inputs(depth);
    passes_.run();
    const int64_t R = draft_.num_sequences * children_.num_inner(depth), E = model_.hidden;
    if constexpr (!std::is_same_v<T, float>) round(passes_.num_tokens() * E);
    const LmHead head{head_.lm_head, head_.token_map, head_.vocab, head_.logit_scale, head_.logit_softcap};
    layers_.logits(head, R, [&](int64_t r, const auto& inputs) {
      const float* row = space_.outputs + (depth == 0 ? last_rows_[r] : r) * E;
      normalise_row(head_.norm, row, E, [&](int64_t k, auto values) { inputs.put(r, k, values); });
    }, space_.logits);
    return space_.logits;
  }

 private:
  // Computes the block's inputs for each pair. Ends with a barrier.
  void set_inputs(int64_t depth) {
    const int64_t M = passes_.num_tokens(), E = model_.hidden;
    const auto state = [&](int64_t m) { return depth == 0 ? states_ + m * E : space_.outputs + space_.sources[m] * E; };
    if (head_.fuse.matrix.weight != nullptr) {
      layers_.project(head_.fuse, M, [&](int64_t m, const auto& inputs) {
        with_embedding(m, [&](const auto* row) { put_row(inputs, m, 0, row, E, head_.embedding_scale); });
        put_row(inputs, m, E, state(m), E, 1.0f);
      }, space_.inputs);
      return;
    }
    share(M, [&](int64_t m) {
      float *input = space_.inputs + m * E, *side = space_.sides + m * E;
      put_normed(depth > 0 && head_.feeds_normed ? head_.norm : Norm{}, state(m), E, input);
      put_normed(head_.state_norm, input, E, input);
      with_embedding(m, [&](const auto* row) {
        for (int64_t k = 0; k < E; ++k) side[k] = to_float(row[k]) * head_.embedding_scale;
      });
    });
    barrier_.wait();
  }

  // Rounds outputs like a separate pass, in T: trees are the same, whether or not levels are separate passes. Ends with
  // a barrier.
  void round(int64_t count) {
    const int64_t portions = portions_of(count);
    share(portions, [&](int64_t i) {
      for (int64_t k = i * kPortion; k < std::min((i + 1) * kPortion, count); ++k) {
        T kept;
        assign(kept, space_.outputs[k]);
        space_.outputs[k] = to_float(kept);
      }
    });
    barrier_.wait();
  }

  // work(row), row: the embedding of the token of a pair.
  template <class Work>
  void with_embedding(int64_t m, Work&& work) const {
    with_row(head_.embedding, head_.embedding_is_bfloat16, tokens_[m] * model_.hidden, work);
  }

  const Model& model_;
  const AutoregressiveHead& head_;
  const Draft& draft_;
  const Children& children_;
  LevelPasses<T, W>& passes_;
  const HeadDraftSpace<T, W>& space_;
  const HeadLayers layers_;
  const float* states_;
  const int64_t *tokens_, *last_rows_;  // tokens of the next pass; rows of the roots in the first pass
  const int64_t tap_;
  mutable Barrier barrier_;
};

}  // namespace
