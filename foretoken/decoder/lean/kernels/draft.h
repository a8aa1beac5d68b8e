// Draft trees with nodes that are fed level by level behind a prefix in a KV cache. One pass fills the cache up to the
// roots, then each level with children is fed behind the levels above it.
//
// Letters: B sequences, N nodes of a draft, M tokens of a pass.
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

// Most nodes of one depth, and most of them with children; shapes list nodes level by level.
struct Widest {
  int64_t nodes = 1, inner = 1;

  explicit Widest(const Draft& draft) {
    for (int64_t begin = 1, end = 1; begin < draft.num_nodes; begin = end) {
      int64_t parents = 0;
      for (; end < draft.num_nodes && draft.parents[end] < begin; ++end) {
        parents += end == begin || draft.parents[end] != draft.parents[end - 1];
      }
      nodes = std::max(nodes, end - begin);
      inner = std::max(inner, parents);
      if (end == begin) break;  // a parent after its child is no valid shape; the checks refuse it
    }
  }
};

// Buffers of `LevelPasses`, first those of its passes, then those of `Children`; `size` is their bytes, -1 if 64 bits
// cannot count them.
template <class T, class W = T>
struct LevelSpace {
  int64_t *fed, *depths, *places;  // (N,)
  int64_t *positions, *parents;    // (B, N)
  int64_t *prefix, *starts, *node_starts;  // (B + 1,)
  void* children;
  int64_t size = 0;

  // width: logits of a row that count; M: nodes of the first pass.
  LevelSpace(const Model& model, const Draft& draft, int64_t width, int64_t M, int64_t threads, void* base) {
    const int64_t B = draft.num_sequences, N = draft.num_nodes;
    int64_t nodes = 0;
    size = __builtin_mul_overflow(B, N, &nodes) ? -1 : Workspace<T, W>(model, std::max(M, nodes), threads, nullptr).size;
    for (int64_t** each : {&fed, &depths, &places}) take(base, size, *each, N, 1);
    for (int64_t** each : {&positions, &parents}) take(base, size, *each, B, N);
    for (int64_t** each : {&prefix, &starts, &node_starts}) take(base, size, *each, B + 1, 1);
    char* rest;
    take(base, size, rest, size < 0 ? 0 : ChildrenSpace(draft, width, nullptr).size, 1);
    children = rest;
  }
};

// Checks that drafts stay within the model and the cache; other checks cover the inputs of `pass`, the first pass.
// width: see `check_draft`; rows: cache rows of nodes behind the pass.
inline Status check_trees(const Model& model, const Pass& pass, const Draft& draft, int64_t width, int64_t rows, int64_t last_position) {
  Pass wanted = pass;  // the pass gets its outputs here
  wanted.logits = static_cast<float*>(pass.workspace);
  wanted.num_taps = 0;
  if (const Status status = check(model, wanted); status != Status::kDone) return status;
  if (draft.num_sequences != pass.num_sequences || pass.num_logits != pass.num_sequences) return Status::kSequences;
  if (draft.num_nodes < 2) return Status::kShape;
  if (last_position < 0 || last_position >= model.num_positions) return Status::kPositions;
  if (const Status status = check_draft(draft, width); status != Status::kDone) return status;
  for (int64_t s = 0; s < pass.num_sequences; ++s) {
    const int64_t nodes = pass.node_starts[s + 1] - pass.node_starts[s];
    if (rows > model.capacity - nodes || !has_rows(model, pass, s, nodes + rows)) return Status::kCacheRows;
  }
  return Status::kDone;
}

// The first pass, then those over the levels, one after another.
template <class T, class W = T>
class LevelPasses {
 public:
  // feeds_leaves: whether nodes without children are fed too, so that the rows of accepted ones are kept.
  // last_position: the largest position of a node. Nodes beyond their sequence's room are cut off later.
  LevelPasses(const Model& model, const Pass& pass, const Draft& draft, const Children& children, const LevelSpace<T, W>& space, bool feeds_leaves, int64_t last_position)
      : model_(model), draft_(draft), children_(children), space_(space), feeds_leaves_(feeds_leaves), last_position_(last_position), pass_(pass) {
    for (int64_t s = 0; s < draft.num_sequences; ++s) {
      space_.prefix[s] = pass.prefix[s] + pass.node_starts[s + 1] - pass.node_starts[s];
    }
    int64_t count = 0;
    space_.places[0] = -1;  // the root lies in the prefix
    for (int64_t depth = 1; depth <= children.depth(); ++depth) {
      std::fill(space_.depths + children.level(depth), space_.depths + children.level(depth + 1), depth);
      for (int64_t i = 0; i < width(depth); ++i) {
        space_.fed[count] = node(depth, i);
        space_.places[node(depth, i)] = count++;
      }
    }
    pass_.logits = nullptr;
    pass_.chosen = nullptr;
    pass_.num_taps = 0;
    decoder_.emplace(model_, pass_);
  }

  // The next pass; the caller sets its inputs and outputs.
  Pass& pass() { return pass_; }
  int64_t num_tokens() const { return pass_.starts[pass_.num_sequences]; }

  // Nodes of one depth that are fed, and node i of them.
  int64_t width(int64_t depth) const {
    return feeds_leaves_ ? children_.level(depth + 1) - children_.level(depth) : children_.num_inner(depth);
  }
  int64_t node(int64_t depth, int64_t i) const { return feeds_leaves_ ? children_.level(depth) + i : children_.inner(depth, i); }

  // The index of a node among those of its depth that are fed.
  int64_t place(int64_t depth, int64_t node) const { return depth == 0 ? 0 : space_.places[node] - space_.places[this->node(depth, 0)]; }

  // Makes the pass over the nodes of one depth. One thread.
  void begin(int64_t depth) {
    const int64_t width = this->width(depth), nodes = space_.places[node(depth, 0)] + width;
    for (int64_t s = 0; s < draft_.num_sequences; ++s) {
      for (int64_t i = 0; i < nodes; ++i) {
        const int64_t fed = space_.fed[i];
        space_.positions[s * nodes + i] = std::min(space_.prefix[s] - 1 + space_.depths[fed], last_position_);
        space_.parents[s * nodes + i] = space_.places[children_.parent(s, fed)];
      }
    }
    for (int64_t s = 0; s <= draft_.num_sequences; ++s) {
      space_.starts[s] = s * width;
      space_.node_starts[s] = s * nodes;
    }
    pass_.positions = space_.positions;
    pass_.parents = space_.parents;
    pass_.prefix = space_.prefix;
    pass_.starts = space_.starts;
    pass_.node_starts = space_.node_starts;
    decoder_.emplace(model_, pass_);
  }

  // Inside a parallel region, all threads together. Ends with a barrier.
  void run() {
    decoder_->run();
    barrier_.wait();
  }

 private:
  const Model& model_;
  const Draft& draft_;
  const Children& children_;
  const LevelSpace<T, W>& space_;
  const bool feeds_leaves_;
  const int64_t last_position_;
  Pass pass_;
  std::optional<Decoder<T, W>> decoder_;
  Barrier barrier_;
};

// Fills trees, all threads together. levels.begin(depth) prepares a level below the root's, on one thread;
// levels.logits(depth) returns the logits after its nodes with children, on all threads, and ends with a barrier.
template <class Levels>
void fill_trees(const Children& children, Levels& levels, Barrier& barrier) {
  for (int64_t depth = 0; depth < children.depth(); ++depth) {
    if (depth > 0) {
      if (omp_get_thread_num() == 0) levels.begin(depth);
      barrier.wait();
    }
    children.choose(depth, levels.logits(depth), false);
  }
}

}  // namespace
