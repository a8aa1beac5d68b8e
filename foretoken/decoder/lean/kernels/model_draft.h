// Draft trees of a draft model: if a level has children, all of its nodes are fed, so that accepted nodes have rows.
//
// Letters: B sequences.
#pragma once

#include <algorithm>
#include <cstdint>

#include "children.h"
#include "decoder.h"
#include "draft.h"
#include "interface.h"
#include "workspace.h"

namespace {

// Logits of a row that count: the draft model's vocabulary may have other padding than the target's.
inline int64_t seen_logits(const Model& model, const Draft& draft) { return std::min(model.head.rows, draft.vocab); }

// Buffers of `ModelLevels`, behind those of its passes.
template <class T, class W = T>
struct ModelDraftSpace {
  LevelSpace<T, W> levels;
  float* logits;                 // (B, nodes of a level that have children, rows of the LM head)
  int64_t *tokens, *logit_rows;  // (B, nodes of a level)
  int64_t size;

  // M: nodes of the first pass.
  ModelDraftSpace(const Model& model, const Draft& draft, int64_t M, int64_t threads, void* base)
      : levels(model, draft, seen_logits(model, draft), M, threads, base), size(levels.size) {
    const Widest widest(draft);
    int64_t rows = 0;
    if (__builtin_mul_overflow(draft.num_sequences, widest.inner, &rows)) size = -1;
    take(base, size, logits, rows, model.head.rows);
    for (int64_t** each : {&tokens, &logit_rows}) take(base, size, *each, draft.num_sequences, widest.nodes);
  }
};

// See `fill_trees`.
template <class T, class W = T>
class ModelLevels {
 public:
  ModelLevels(const Model& model, const Draft& draft, const Children& children, LevelPasses<T, W>& passes, const ModelDraftSpace<T, W>& space)
      : model_(model), draft_(draft), children_(children), passes_(passes), space_(space) {
    passes.pass().logits = space.logits;
  }

  void begin(int64_t depth) {
    const int64_t width = passes_.width(depth), inner = children_.num_inner(depth);
    for (int64_t s = 0; s < draft_.num_sequences; ++s) {
      for (int64_t i = 0; i < width; ++i) {
        space_.tokens[s * width + i] = std::min(draft_.tokens[s * draft_.num_nodes + passes_.node(depth, i)], model_.vocab - 1);
      }
      for (int64_t i = 0; i < inner; ++i) {
        space_.logit_rows[s * inner + i] = s * width + passes_.place(depth, children_.inner(depth, i));
      }
    }
    Pass& pass = passes_.pass();
    pass.tokens = space_.tokens;
    pass.inputs = nullptr;
    pass.logit_rows = space_.logit_rows;
    pass.num_logits = draft_.num_sequences * inner;
    passes_.begin(depth);
  }

  float* logits(int64_t) {
    passes_.run();
    return space_.logits;
  }

 private:
  const Model& model_;
  const Draft& draft_;
  const Children& children_;
  LevelPasses<T, W>& passes_;
  const ModelDraftSpace<T, W>& space_;
};

}  // namespace
