// The choice of children by itself, which drafts of heads and of draft models make for every level.

#include <algorithm>
#include <cstdint>

#include <omp.h>

#include "children.h"

extern "C" {

int64_t children_bytes(const Draft* draft, int64_t width) { return width < 1 ? 0 : ChildrenSpace(*draft, width, nullptr).size; }

// Chooses the children of all nodes of one depth that have some. logits: (B, P, width) of these nodes, or (B, 1, width)
// with `is_shared`. Returns a `Status`; a refused call writes nothing.
Status choose_children(const Draft* draft, int64_t depth, float* logits, int64_t width, int64_t is_shared, int64_t num_threads, void* workspace) {
  const int64_t seen = std::min(width, draft->vocab);
  const Status status = check_draft(*draft, seen, is_shared != 0);
  if (status != Status::kDone) return status;
  const Children children(*draft, seen, width, workspace);
  if (depth < 0 || depth >= children.depth()) return Status::kShape;
#pragma omp parallel num_threads(int(num_threads))
  children.choose(depth, logits, is_shared != 0);
  return Status::kDone;
}

}  // extern "C"
