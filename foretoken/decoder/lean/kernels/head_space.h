// Buffers of the steps of draft heads, how rows become inputs of their matrices, and whether a draft fits a head.
//
// Letters: see `heads.h`.
#pragma once

#include <algorithm>
#include <cstdint>

#include "checks.h"
#include "gemm.h"
#include "head_interface.h"
#include "interface.h"
#include "vectors.h"
#include "workspace.h"

namespace {

// Buffers of the steps of up to M rows; `size` is what they take, -1 where that is beyond what 64 bits count.
struct HeadSpace {
  float* logits;     // (M, V)
  float* wide;       // (M, 2 W)
  float* states[2];  // (M, W), what the LM head reads, of a level and of the one before
  float* inputs;     // of any matrix, as wide as those of any dtype
  int64_t* places;   // (N,), where a node stands among those of its level
  int64_t size = 0;

  HeadSpace(const Head& head, int64_t rows, int64_t num_nodes, void* base) {
    int64_t longest = head.width;
    for (int64_t i = 0; i < head.num_steps; ++i) longest = std::max(longest, head.steps[i].first.matrix.cols);
    take(base, size, logits, rows, head.vocab);
    take(base, size, wide, rows, 2 * head.width);
    for (float*& state : states) take(base, size, state, rows, head.width);
    take(base, size, inputs, (rows + kTokens - 1) / kTokens * kTokens, Inputs<Int8>::padded(longest));
    take(base, size, places, num_nodes, 1);
  }
};

// Whether a draft stays within the tables of a head.
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

// Puts a row of `size` elements times a factor into an input, from element `first` on.
template <class T, class E>
void put_row(const Inputs<T>& inputs, int64_t m, int64_t first, const E* row, int64_t size, float factor) {
  int64_t k = 0;
  if (first % kLanes == 0) {
    for (; k + kLanes <= size; k += kLanes) inputs.put(m, first + k, load_lanes(row + k) * factor);
  }
  for (; k < size; ++k) inputs.put(m, first + k, to_float(row[k]) * factor);
}

// Puts rows of `size` elements that stand one after another.
struct PutRows {
  const float* rows;
  int64_t size;
  template <class T>
  void operator()(int64_t m, const Inputs<T>& inputs) const {
    put_row(inputs, m, 0, rows + m * size, size, 1.0f);
  }
};

}  // namespace
