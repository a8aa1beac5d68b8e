// Draft trees with nodes that are fed level by level behind a prefix in a KV cache. One pass fills the cache up to the
// roots, then each level with children is fed behind the levels above it. A draft model feeds all nodes of such a level,
// so that accepted nodes have rows.
//
// A head with a decoder block (EAGLE) reads pairs of a state and the next token. The state of a committed position comes
// from the target's features, that of a drafted node is the block's output for its parent. Nodes without children are
// not fed: the rows of drafted nodes are not kept.
//
// Letters: B sequences, N nodes of a draft, P nodes of a level with children, M tokens of a pass, or pairs: the committed
// ones, or B * P; E hidden size of the block, V vocabulary.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

#include <omp.h>

#include "children.h"
#include "decoder.h"
#include "heads.h"
#include "interface.h"
#include "rows.h"
#include "workspace.h"

extern "C" {

// A head of one decoder block; the block's output x becomes the state of the next step. For a state s and the embedding
// e of the next token, the block reads fuse([embedding_norm(e); state_norm(s)]); without `fuse` it reads state_norm(s),
// and embedding_norm(e) as second input. logits = lm_head(norm(x)), scaled and capped; the next state is x, or norm(x).
struct AutoregressiveHead {
  HeadMatrix fuse, lm_head;       // (E, 2 E), (Vd, E); E is the hidden size of the block
  const int64_t* token_map;       // (Vd,), the token of each row of the LM head; null: row i is token i
  int64_t vocab;                  // V, the width of logits
  HeadMatrix embedding;           // (tokens, E), without a bias
  int64_t feeds_normed;           // whether the next state is norm(x)
  Norm norm, state_norm, embedding_norm;  // (E,)
  float embedding_scale;
  float logit_scale, logit_softcap;  // scale 1: none, cap 0: none
};

}  // extern "C"

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
template <class T>
struct LevelSpace {
  int64_t *fed, *depths, *places;  // (N,)
  int64_t *positions, *parents;    // (B, N)
  int64_t *prefix, *root_positions, *starts, *node_starts;  // (B + 1,)
  // Of recurrent layers, see `Pass`:
  float **states_from, **states_to, **rows_to;  // (B,)
  int64_t *settled, *known_starts;              // (B + 1,)
  const float** known;                          // (M + B N,)
  char* children;
  int64_t size = 0;

  // width: logits of a row that count; M: nodes of the first pass; replayed: tokens before these that recurrent layers
  // compute again.
  LevelSpace(const Model& model, const Draft& draft, int64_t width, int64_t M, int64_t threads, void* base, int64_t replayed = 0) {
    const int64_t B = draft.num_sequences, N = draft.num_nodes;
    int64_t nodes = 0, most = 0;
    const bool fits = !__builtin_mul_overflow(B, N, &nodes) && !__builtin_add_overflow(M, nodes, &most);
    size = fits ? Workspace<T>(model, std::max(M, nodes), threads, nullptr, 0, std::max(M, replayed)).size : -1;
    for (int64_t** each : {&fed, &depths, &places}) take(base, size, *each, N, 1);
    for (int64_t** each : {&positions, &parents}) take(base, size, *each, B, N);
    for (int64_t** each : {&prefix, &root_positions, &starts, &node_starts, &settled, &known_starts}) take(base, size, *each, B + 1, 1);
    const int64_t recurrent = model.window == 0 ? 0 : 1;
    for (float*** each : {&states_from, &states_to, &rows_to}) take(base, size, *each, recurrent, B);
    take(base, size, known, recurrent, most);
    take(base, size, children, ChildrenSpace(draft, width, nullptr).size, 1);
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

// Checks what recurrent layers need behind the first pass, which `check_trees` has checked. rows: see `LevelPasses`.
inline Status check_drafted_rows(const Model& model, const Pass& pass, float* const* rows) {
  if (model.window == 0) return Status::kDone;
  if (rows == nullptr) return Status::kMissing;
  for (int64_t s = 0; s < pass.num_sequences; ++s) {
    if (rows[s] == nullptr || pass.states_to[s] == nullptr) return Status::kMissing;
    for (int64_t n = 0; n < pass.node_starts[s + 1] - pass.node_starts[s]; ++n) {
      if (pass.parents[pass.node_starts[s] + n] != n - 1) return Status::kParents;  // the roots end chains
    }
  }
  return Status::kDone;
}

// The first pass, then those over the levels, one after another.
template <class T>
class LevelPasses {
 public:
  // feeds_leaves: whether nodes without children are fed too, so that the rows of accepted ones are kept.
  // last_position: the largest position of a node. Nodes beyond their sequence's room are cut off later.
  // rows: (B,), where recurrent layers store the inputs of each sequence's fed nodes, one row after another; or null.
  LevelPasses(const Model& model, const Pass& pass, const Draft& draft, const Children& children, const LevelSpace<T>& space, bool feeds_leaves, int64_t last_position, float* const* rows = nullptr)
      : model_(model), first_(pass), draft_(draft), children_(children), space_(space), rows_(rows), feeds_leaves_(feeds_leaves), last_position_(last_position), pass_(pass) {
    for (int64_t s = 0; s < draft.num_sequences; ++s) {
      space_.prefix[s] = pass.prefix[s] + pass.node_starts[s + 1] - pass.node_starts[s];
      space_.root_positions[s] = pass.positions[pass.node_starts[s + 1] - 1];
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
    pass_.attention = nullptr;
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
        space_.positions[s * nodes + i] = std::min(space_.root_positions[s] + space_.depths[fed], last_position_);
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
    if (model_.window > 0) begin_states(space_.places[node(depth, 0)]);
    decoder_.emplace(model_, pass_);
  }

  // Inside a parallel region, all threads together. Ends with a barrier.
  void run() {
    decoder_->run();
    barrier_.wait();
  }

 private:
  // Recurrent layers begin with the block that the first pass has made, and compute again the tokens behind it: down to
  // the root, then the `earlier` nodes of the levels above. They make no block, so the committed states stay.
  void begin_states(int64_t earlier) {
    const int64_t size = model_.row_size;
    int64_t count = space_.known_starts[0] = 0;
    for (int64_t s = 0; s < draft_.num_sequences; ++s) {
      const int64_t behind = first_.node_starts[s + 1] - first_.node_starts[s] - first_.settled[s];
      for (int64_t i = 0; i < behind; ++i) space_.known[count++] = first_.rows_to[s] + i * size;
      for (int64_t i = 0; i < earlier; ++i) space_.known[count++] = rows_[s] + i * size;
      space_.known_starts[s + 1] = count;
      space_.states_from[s] = first_.states_to[s];
      space_.states_to[s] = nullptr;
      space_.rows_to[s] = rows_[s] + earlier * size;
      space_.settled[s] = 0;
    }
    pass_.states_from = space_.states_from;
    pass_.states_to = space_.states_to;
    pass_.rows_to = space_.rows_to;
    pass_.known = space_.known;
    pass_.known_starts = space_.known_starts;
    pass_.settled = space_.settled;
  }

  const Model& model_;
  const Pass& first_;
  const Draft& draft_;
  const Children& children_;
  const LevelSpace<T>& space_;
  float* const* rows_;
  const bool feeds_leaves_;
  const int64_t last_position_;
  Pass pass_;
  std::optional<Decoder<T>> decoder_;
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
    if (children.have_all_ended(depth + 1)) return;
  }
}

// Logits of a row that count: the draft model's vocabulary may have other padding than the target's.
inline int64_t seen_logits(const Model& model, const Draft& draft) { return std::min(model.num_logits, draft.vocab); }

// Buffers of `ModelLevels`, behind those of its passes.
template <class T>
struct ModelDraftSpace {
  LevelSpace<T> levels;
  float* logits;                 // (B, nodes of a level that have children, V)
  int64_t *tokens, *logit_rows;  // (B, nodes of a level)
  int64_t size;

  // M, replayed: as in `LevelSpace`.
  ModelDraftSpace(const Model& model, const Draft& draft, int64_t M, int64_t threads, void* base, int64_t replayed)
      : levels(model, draft, seen_logits(model, draft), M, threads, base, replayed), size(levels.size) {
    const Widest widest(draft);
    int64_t rows = 0;
    if (__builtin_mul_overflow(draft.num_sequences, widest.inner, &rows)) size = -1;
    take(base, size, logits, rows, model.num_logits);
    for (int64_t** each : {&tokens, &logit_rows}) take(base, size, *each, draft.num_sequences, widest.nodes);
  }
};

// See `fill_trees`.
template <class T>
class ModelLevels {
 public:
  ModelLevels(const Model& model, const Draft& draft, const Children& children, LevelPasses<T>& passes, const ModelDraftSpace<T>& space)
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
  LevelPasses<T>& passes_;
  const ModelDraftSpace<T>& space_;
};

// Buffers of `HeadLevels`, behind those of its passes.
template <class T>
struct HeadDraftSpace {
  LevelSpace<T> levels;
  float* logits;               // (B * P, V)
  float *inputs, *sides;       // (M, E), inputs of the block
  float* outputs;              // (M, E), outputs of the block
  float* embedded;             // (M, E), rows of an embedding in integers
  float* rows;                 // inputs of any matrix of the head, as wide as those of the widest dtype
  char* rounded;               // the same as integers
  int64_t *tokens, *sources;   // (B, P), of a level: the token of each pair, and the row of `outputs` with its state
  int64_t size;

  HeadDraftSpace(const Model& model, const AutoregressiveHead& head, const Draft& draft, int64_t pairs, int64_t threads, void* base)
      : levels(model, draft, head.vocab, pairs, threads, base), size(levels.size) {
    int64_t inner = 0;
    if (__builtin_mul_overflow(draft.num_sequences, Widest(draft).inner, &inner)) size = -1;
    const int64_t M = size < 0 ? 0 : std::max(pairs, inner), E = model.hidden;
    take(base, size, logits, inner, head.vocab);
    for (float** each : {&inputs, &outputs, &embedded}) take(base, size, *each, M, E);
    take(base, size, sides, has_side(model) ? M : 0, E);
    take(base, size, rows, most_inputs(M), Inputs<Bfloat16>::padded(2 * E));
    take(base, size, rounded, most_inputs(M), rounded_bytes(2 * E));
    for (int64_t** each : {&tokens, &sources}) take(base, size, *each, inner, 1);
  }
};

// Checks that drafts stay within the tables of a head, the cache and their own buffers. states: (M, E), of the pass
// over committed pairs; its tokens are those after the states.
inline Status check_head_trees(const Model& model, const AutoregressiveHead& head, const Pass& pass, const Draft& draft, const float* states, int64_t last_position) {
  if (states == nullptr || pass.tokens == nullptr || head.embedding.matrix.weight == nullptr || head.lm_head.matrix.weight == nullptr) return Status::kMissing;
  if ((head.fuse.matrix.weight == nullptr) != has_side(model)) return Status::kMissing;  // exactly one way to read the token
  if (draft.vocab != head.vocab) return Status::kShape;
  if (head.embedding.matrix.rows < head.vocab) return Status::kTokens;
  Pass fed = pass;
  fed.inputs = states;  // for the shape alone
  fed.sides = states;
  int64_t rows = 0;  // nodes below the root with children
  for (int64_t i = 2; draft.parents != nullptr && i < draft.num_nodes; ++i) rows += draft.parents[i] != draft.parents[i - 1];
  const Status status = check_trees(model, fed, draft, head.vocab, rows, last_position);
  if (status != Status::kDone) return status;
  return all_within(pass.tokens, pass.starts[pass.num_sequences], head.embedding.matrix.rows) ? Status::kDone : Status::kTokens;
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
template <class T>
class HeadLevels {
 public:
  HeadLevels(const Model& model, const AutoregressiveHead& head, const Draft& draft, const Children& children, LevelPasses<T>& passes, const HeadDraftSpace<T>& space, const float* states)
      : model_(model), head_(head), draft_(draft), children_(children), passes_(passes), space_(space), layers_(space.rows, space.rounded),
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
    if (head_.fuse.matrix.weight != nullptr) {
      layers_.project(head_.fuse, M, [&](int64_t m, const auto& inputs) {
        float* row = space_.inputs + m * E;  // free until the product
        put_embedded(m, row);
        put_row(inputs, m, 0, row, E, 1.0f);
        put_state(depth, m, row);
        put_row(inputs, m, E, row, E, 1.0f);
      }, space_.inputs);
      return;
    }
    share(M, [&](int64_t m) {
      put_state(depth, m, space_.inputs + m * E);
      put_embedded(m, space_.sides + m * E);
    });
    barrier_.wait();
  }

  // The state of a pair, and the embedding of its token.
  void put_state(int64_t depth, int64_t m, float* out) const {
    const int64_t E = model_.hidden;
    const float* state = depth == 0 ? states_ + m * E : space_.outputs + space_.sources[m] * E;
    put_normed(depth > 0 && head_.feeds_normed ? head_.norm : Norm{}, state, E, out);
    put_normed(head_.state_norm, out, E, out);
  }

  void put_embedded(int64_t m, float* out) const {
    const HeadMatrix& table = head_.embedding;
    with_row(table.matrix, table.is_bfloat16, tokens_[m], space_.embedded + m * model_.hidden, [&](const auto* row) {
      for (int64_t k = 0; k < model_.hidden; ++k) out[k] = to_float(row[k]) * head_.embedding_scale;
    });
    put_normed(head_.embedding_norm, out, model_.hidden, out);
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

  const Model& model_;
  const AutoregressiveHead& head_;
  const Draft& draft_;
  const Children& children_;
  LevelPasses<T>& passes_;
  const HeadDraftSpace<T>& space_;
  const HeadLayers layers_;
  const float* states_;
  const int64_t *tokens_, *last_rows_;  // tokens of the next pass; rows of the roots in the first pass
  const int64_t tap_;
  mutable Barrier barrier_;
};

}  // namespace
