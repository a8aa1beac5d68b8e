// The library of the kernels: the functions of `decoder.cpp`, and those that draft whole trees. One unit of compilation, as
// both use the same templates, which take long to compile.

#include <cstdint>
#include <limits>

#include "children.h"
#include "decoder.cpp"
#include "heads.h"
#include "trees.h"

extern "C" {

// Bytes of the workspace of `foretoken_draft`, for a pass of this many nodes, and tokens before them that recurrent layers
// compute again; -1 if 64 bits cannot count them.
int64_t foretoken_draft_bytes(const Model* model, const Draft* draft, int64_t num_nodes, int64_t num_threads, int64_t num_replayed) {
  return with_dtype(*model, [&](auto type) {
    return ModelDraftSpace<decltype(type)>(*model, *draft, num_nodes, num_threads, nullptr, num_replayed).size;
  });
}

// Runs a pass that ends with the roots of draft trees and computes their logits, and drafts the trees. Every level with
// children is fed to the cache rows behind the root's. drafted_rows: `rows` of `LevelPasses`. Returns a `Status`; a refused
// call writes nothing.
Status foretoken_draft(const Model* model, const Pass* pass, const Draft* draft, int64_t last_position, float* const* drafted_rows) {
  if (has_side(*model)) return Status::kMissing;  // a level would have no second input
  const int64_t width = seen_logits(*model, *draft);
  const int64_t rows = draft->candidates == nullptr ? draft->num_nodes : draft->num_nodes - draft->num_candidates;
  Status status = check_trees(*model, *pass, *draft, width, rows, last_position);
  if (status == Status::kDone) status = check_drafted_rows(*model, *pass, drafted_rows);
  if (status != Status::kDone) return status;
  with_dtype(*model, [&](auto type) {
    using T = decltype(type);
    const ModelDraftSpace<T> space(*model, *draft, pass->node_starts[pass->num_sequences], pass->num_threads, pass->workspace, num_replayed(*model, *pass));
    const Children children(*draft, width, model->num_logits, space.levels.children);
    LevelPasses<T> passes(*model, *pass, *draft, children, space.levels, true, last_position, drafted_rows);
    ModelLevels<T> levels(*model, *draft, children, passes, space);
    Barrier barrier;
#pragma omp parallel num_threads(int(pass->num_threads))
    fill_trees(children, levels, barrier);
  });
  return Status::kDone;
}

// Bytes for `foretoken_autoregressive_draft`, like `foretoken_draft_bytes`.
int64_t foretoken_autoregressive_draft_bytes(const Model* model, const AutoregressiveHead* head, const Draft* draft, int64_t num_nodes, int64_t num_threads) {
  return with_dtype(*model, [&](auto type) {
    return HeadDraftSpace<decltype(type)>(*model, *head, *draft, num_nodes, num_threads, nullptr).size;
  });
}

// Runs a pass over pairs of states (M, hidden) and the next tokens, the root's pair last in each sequence, and drafts
// the trees. Nodes with children are fed to the cache rows behind the pairs. Returns a `Status`; a refused call writes
// nothing.
Status foretoken_autoregressive_draft(const Model* model, const AutoregressiveHead* head, const Pass* pass, const Draft* draft, const float* states, int64_t last_position) {
  const Status status = check_head_trees(*model, *head, *pass, *draft, states, last_position);
  if (status != Status::kDone) return status;
  with_dtype(*model, [&](auto type) {
    using T = decltype(type);
    const HeadDraftSpace<T> space(*model, *head, *draft, pass->node_starts[pass->num_sequences], pass->num_threads, pass->workspace);
    const Children children(*draft, head->vocab, head->vocab, space.levels.children);
    LevelPasses<T> passes(*model, *pass, *draft, children, space.levels, false, last_position);
    HeadLevels<T> levels(*model, *head, *draft, children, passes, space, states);
    Barrier barrier;
#pragma omp parallel num_threads(int(pass->num_threads))
    fill_trees(children, levels, barrier);
  });
  return Status::kDone;
}

// Bytes of the workspace of `foretoken_head_draft`; -1 if 64 bits cannot count them.
int64_t foretoken_head_draft_bytes(const Head* head, const Draft* draft, int64_t num_rows) {
  return HeadSpace(*head, *draft, num_rows, nullptr).size;
}

// Drafts whole trees with a head of up to `num_rows` rows of logits a step. features: (B, E). Returns a `Status`; a
// refused call writes nothing.
Status foretoken_head_draft(const Head* head, const Draft* draft, const float* features, int64_t num_rows, int64_t num_threads, void* workspace) {
  if (draft->num_sequences < 1) return Status::kDone;
  if (workspace == nullptr) return Status::kMissing;
  if (num_threads < 1 || num_threads > std::numeric_limits<int>::max()) return Status::kThreads;
  Status status = check_draft(*draft, head->vocab, head->kind == kFromFeature);
  if (status == Status::kDone) status = check_head(*head, *draft, features);
  if (status != Status::kDone) return status;
  const HeadSpace space(*head, *draft, num_rows, workspace);
  const Children children(*draft, head->vocab, head->vocab, space.children);
  const HeadSteps steps(*head, *draft, children, features, space);
  if (children.depth() > head->num_steps || steps.most_rows() > num_rows) return Status::kShape;
#pragma omp parallel num_threads(int(num_threads))
  steps.run();
  return Status::kDone;
}

}  // extern "C"
