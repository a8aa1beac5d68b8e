// Buffers of the steps of draft heads, and the check that a draft fits a head.
//
// Letters: see `heads.h`.
#pragma once

#include <algorithm>
#include <cstdint>

#include "checks.h"
#include "head_interface.h"
#include "interface.h"
#include "vectors.h"
#include "workspace.h"

namespace {

// Buffers of the steps of up to M rows; `size` is their bytes, -1 if 64 bits cannot count them.
struct HeadSpace {
  float* logits;     // (M, V)
  float* wide;       // (M, 2 W)
  float* states[2];  // (M, W), inputs of the LM head, of a level and of the level before
  float* inputs;     // of any matrix, in the widest dtype
  int64_t* places;   // (N,), the index of a node in its level
  int64_t size = 0;

  HeadSpace(const Head& head, int64_t rows, int64_t num_nodes, void* base) {
    int64_t longest = head.width;
    for (int64_t i = 0; i < head.num_steps; ++i) longest = std::max(longest, head.steps[i].first.matrix.cols);
    take(base, size, logits, rows, head.vocab);
    take(base, size, wide, rows, 2 * head.width);
    for (float*& state : states) take(base, size, state, rows, head.width);
    take(base, size, inputs, most_inputs(rows), Inputs<Int8>::padded(longest));
    take(base, size, places, num_nodes, 1);
  }
};

// Checks that a draft stays within the tables of a head.
inline Status check_head(const Head& head, const Draft& draft, const float* features) {
  if (features == nullptr || head.steps == nullptr) return Status::kMissing;
  if (draft.vocab != head.vocab) return Status::kShape;
  for (int64_t i = 0; head.kind != kFromFeature && i < head.num_steps; ++i) {
    if (head.steps[i].num_tokens < head.vocab) return Status::kTokens;
    for (int64_t s = 0; s < draft.num_sequences; ++s) {
      if (!all_within(draft.tokens + s * draft.num_nodes, 1, head.steps[i].num_tokens)) return Status::kTokens;
    }
  }
  return Status::kDone;
}

}  // namespace
