// Checks that a pass stays within the model's tables, the cache and its own buffers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "interface.h"
#include "workspace.h"

namespace {

bool all_within(const int64_t* values, int64_t count, int64_t end) {
  // One comparison a value: a negative value is a large unsigned one.
  return std::all_of(values, values + count, [&](int64_t value) { return uint64_t(value) < uint64_t(end); });
}

// Decides whether a sequence may have this many rows behind its prefix. Its slot and its prefix are within bounds.
inline bool has_rows(const Model& model, const Pass& pass, int64_t s, int64_t rows) {
  if (rows > model.capacity - pass.prefix[s]) return false;
  const int64_t first = pass.slots[s] * model.slot_rows + (model.kv_heads - 1) * model.head_rows;
  return first + pass.prefix[s] + rows <= model.layer_rows;
}

// Checks that a pass stays within the model's tables, the cache and its own buffers.
Status check(const Model& model, const Pass& pass) {
  if ((pass.tokens == nullptr && pass.inputs == nullptr) || pass.positions == nullptr || pass.parents == nullptr ||
      pass.slots == nullptr || pass.prefix == nullptr || pass.starts == nullptr || pass.node_starts == nullptr ||
      (has_side(model) && pass.sides == nullptr) || pass.workspace == nullptr ||
      (pass.num_taps > 0 && pass.features == nullptr) ||
      (pass.logits != nullptr && pass.logit_rows == nullptr) ||
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
  const int64_t M = starts[S];
  if (pass.num_threads < 1 || pass.num_threads > std::numeric_limits<int>::max()) return Status::kThreads;
  if (pass.inputs == nullptr && !all_within(pass.tokens, M, model.vocab)) return Status::kTokens;
  if (!all_within(pass.positions, node_starts[S], model.num_positions)) return Status::kPositions;
  if (pass.logits == nullptr) return Status::kDone;
  int64_t last = -1;  // ascending rows are at most M
  for (int64_t r = 0; r < pass.num_logits; ++r) {
    if (pass.logit_rows[r] <= last || pass.logit_rows[r] >= M) return Status::kLogitRows;
    last = pass.logit_rows[r];
  }
  if (!all_within(pass.impossible, pass.num_impossible, model.head.rows)) return Status::kTokens;
  return pass.num_logits < 1 ? Status::kLogitRows : Status::kDone;
}

}  // namespace
