// Draft trees of a draft model, whole: a pass brings its KV cache up to the roots, then each level that has children is
// fed behind the levels above it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include <omp.h>

#include "barrier.h"
#include "checks.h"
#include "children.h"
#include "decoder.h"
#include "interface.h"
#include "workspace.h"

namespace {

// Logits of a row that count: a draft model's vocabulary may be padded otherwise than the target's.
inline int64_t seen_logits(const Model& model, const Draft& draft) { return std::min(model.head.rows, draft.vocab); }

// Buffers of `TreeDrafter`: those of its passes, then what is laid out here, then those of `Children`.
template <class T, class W = T>
struct DraftSpace {
  float* logits;           // (B, nodes of a level, rows of the LM head)
  int64_t* depths;         // (N,)
  int64_t* tokens;         // of a level's pass, see `Pass`: (B, nodes of a level)
  int64_t *positions, *parents;  // (B, N)
  int64_t* logit_rows;     // (B, nodes of a level)
  int64_t *prefix, *starts, *node_starts;  // (B + 1,)
  void* children;
  int64_t size = 0;

  // M: nodes of the pass that catches up.
  DraftSpace(const Model& model, const Draft& draft, int64_t M, int64_t threads, void* base) {
    const int64_t B = draft.num_sequences, N = draft.num_nodes, widest = widest_level(draft);
    int64_t nodes = 0;
    size = __builtin_mul_overflow(B, N, &nodes) ? -1 : Workspace<T, W>(model, std::max(M, nodes), threads, nullptr).size;
    take(base, logits, size < 0 ? 0 : B * widest, model.head.rows);
    take(base, depths, N, 1);
    for (int64_t** each : {&tokens, &logit_rows}) take(base, *each, B, widest);
    for (int64_t** each : {&positions, &parents}) take(base, *each, B, N);
    for (int64_t** each : {&prefix, &starts, &node_starts}) take(base, *each, B + 1, 1);
    char* rest;
    take(base, rest, size < 0 ? 0 : ChildrenSpace(draft, seen_logits(model, draft), nullptr).size, 1);
    children = rest;
  }

 private:
  // Most nodes of one depth; shapes list them level by level.
  static int64_t widest_level(const Draft& draft) {
    int64_t widest = 1;
    for (int64_t begin = 1, end = 1; begin < draft.num_nodes; begin = end) {
      while (end < draft.num_nodes && draft.parents[end] < begin) ++end;
      widest = std::max(widest, end - begin);
      if (end == begin) break;  // a parent that comes after: no shape, and refused as such
    }
    return widest;
  }

  template <class E>
  void take(void* base, E*& part, int64_t rows, int64_t cols) {
    ::take(base, size, part, rows, cols);
  }
};

// Whether a draft stays within the model, the cache and its own buffers; `pass` catches up.
inline Status check_trees(const Model& model, const Pass& pass, const Draft& draft, int64_t last_position) {
  Pass wanted = pass;  // with what it is given here
  wanted.logits = static_cast<float*>(pass.workspace);
  wanted.num_taps = 0;
  if (const Status status = check(model, wanted); status != Status::kDone) return status;
  if (draft.num_sequences != pass.num_sequences || pass.num_logits != pass.num_sequences) return Status::kSequences;
  if (draft.num_nodes < 2) return Status::kShape;
  if (has_side(model)) return Status::kMissing;  // nothing says what a level reads there
  if (last_position < 0 || last_position >= model.num_positions) return Status::kPositions;
  if (const Status status = check_draft(draft, seen_logits(model, draft)); status != Status::kDone) return status;
  for (int64_t s = 0; s < pass.num_sequences; ++s) {
    const int64_t rows = pass.prefix[s] + pass.node_starts[s + 1] - pass.node_starts[s];
    if (draft.num_nodes > model.capacity - rows) return Status::kCacheRows;
  }
  return Status::kDone;
}

template <class T, class W = T>
class TreeDrafter {
 public:
  // last_position: the greatest that a node gets. A node deeper than its sequence has room for is cut off later.
  TreeDrafter(const Model& model, const Pass& pass, const Draft& draft, int64_t last_position)
      : model_(model),
        draft_(draft),
        space_(model, draft, pass.node_starts[pass.num_sequences], pass.num_threads, pass.workspace),
        children_(draft, seen_logits(model, draft), model.head.rows, space_.children),
        last_position_(last_position),
        pass_(pass) {
    for (int64_t s = 0; s < draft.num_sequences; ++s) {
      space_.prefix[s] = pass.prefix[s] + pass.node_starts[s + 1] - pass.node_starts[s];
    }
    for (int64_t depth = 0; depth <= children_.depth(); ++depth) {
      std::fill(space_.depths + children_.level(depth), space_.depths + children_.level(depth + 1), depth);
    }
    pass_.logits = space_.logits;
    pass_.chosen = nullptr;
    pass_.num_taps = 0;
    decoder_.emplace(model_, pass_);
  }

  // Runs inside a parallel region, all threads together.
  void run() {
    for (int64_t depth = 0; depth < children_.depth(); ++depth) {
      if (depth > 0) {
        if (omp_get_thread_num() == 0) begin_level(depth);
        barrier_.wait();
      }
      decoder_->run();
      barrier_.wait();
      children_.choose(depth, space_.logits, false);
    }
  }

 private:
  // The pass over the nodes of one depth; node i of a tree is the i-th behind the root, which lies in the prefix.
  void begin_level(int64_t depth) {
    const int64_t begin = children_.level(depth), end = children_.level(depth + 1), width = end - begin, nodes = end - 1;
    const int64_t inner = children_.num_inner(depth), B = draft_.num_sequences;
    for (int64_t s = 0; s < B; ++s) {
      for (int64_t i = 0; i < width; ++i) {
        space_.tokens[s * width + i] = std::min(draft_.tokens[s * draft_.num_nodes + begin + i], model_.vocab - 1);
      }
      for (int64_t i = 1; i <= nodes; ++i) {
        space_.positions[s * nodes + i - 1] = std::min(space_.prefix[s] - 1 + space_.depths[i], last_position_);
        space_.parents[s * nodes + i - 1] = draft_.parents[i] - 1;
      }
      for (int64_t i = 0; i < inner; ++i) space_.logit_rows[s * inner + i] = s * width + children_.inner(depth, i) - begin;
    }
    for (int64_t s = 0; s <= B; ++s) {
      space_.starts[s] = s * width;
      space_.node_starts[s] = s * nodes;
    }
    pass_.tokens = space_.tokens;
    pass_.inputs = nullptr;
    pass_.positions = space_.positions;
    pass_.parents = space_.parents;
    pass_.prefix = space_.prefix;
    pass_.starts = space_.starts;
    pass_.node_starts = space_.node_starts;
    pass_.logit_rows = space_.logit_rows;
    pass_.num_logits = B * inner;
    decoder_.emplace(model_, pass_);
  }

  const Model& model_;
  const Draft& draft_;
  const DraftSpace<T, W> space_;
  const Children children_;
  const int64_t last_position_;
  Pass pass_;  // the one that runs
  std::optional<Decoder<T, W>> decoder_;
  Barrier barrier_;
};

}  // namespace
