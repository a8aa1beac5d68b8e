// The steps of draft heads (Medusa, Hydra, MLP speculator): logits after the nodes of one level of a draft.
//
// Every matrix has its own dtype; values between matrices are float32.
//
// Letters: B sequences, P nodes of a level with children, M rows of a level: B * P, or B if tokens are not read; N
// nodes of a draft, E hidden size of the target, W width of the LM heads' inputs, V vocabulary.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <omp.h>

#include "children.h"
#include "gemm.h"
#include "integer_tiles.h"
#include "interface.h"
#include "quantized.h"
#include "rows.h"
#include "tiles.h"
#include "vectors.h"
#include "workspace.h"

extern "C" {

// A matrix with its dtype and bias; a null weight means no matrix.
struct HeadMatrix {
  Matrix matrix;
  int64_t is_bfloat16;
};

enum HeadKind : int64_t {
  kFromFeature = 0,  // Medusa: every step reads the feature alone
  kFromPath = 1,     // Hydra: [feature; embeddings of the tokens drafted before]
  kFromState = 2,    // MLP speculator: the state of the parent node, and the embedding of the node's token
};

// One step, for the children of the nodes of one depth. With y, the input of the LM head:
//   kFromFeature: y = feature
//   kFromPath:    a, b = halves of first(u), u the concatenation; y = a + silu(b)
//   kFromState:   y = gelu(norm(first(state) + embedding_scale * embedding)), which is also the state
// Then y <- y + silu(block(y)) for every block, and logits = lm_head(y), scaled and capped.
struct HeadStep {
  HeadMatrix first, lm_head;
  Norm norm;                      // RMS norm with a bias
  const HeadMatrix* blocks;
  int64_t num_blocks;
  HeadMatrix embedding;           // (tokens, E or W), without a bias
  float embedding_scale;
  float logit_scale, logit_softcap;  // scale 1: none, cap 0: none
};

struct Head {
  int64_t kind, num_steps, hidden, width, vocab;  // E, W and V, the width of logits
  const int64_t* token_map;                       // the token of each row of the LM heads; null: row i is token i
  float feature_rms, feature_epsilon;             // kFromState: root mean square that features are scaled to; 0: no scaling
  const HeadStep* steps;
};

}  // extern "C"

namespace {

// Writes a row of `size` elements times a factor to an input, from element `first` on.
template <class X, class E>
void put_row(const X& inputs, int64_t m, int64_t first, const E* row, int64_t size, float factor) {
  int64_t k = 0;
  if (first % kLanes == 0) {
    for (; k + kLanes <= size; k += kLanes) inputs.put(m, first + k, load_lanes(row + k) * factor);
  }
  for (; k < size; ++k) inputs.put(m, first + k, to_float(row[k]) * factor);
}

// Writes rows of `size` contiguous elements.
struct PutRows {
  const float* rows;
  int64_t size;
  template <class X>
  void operator()(int64_t m, const X& inputs) const {
    put_row(inputs, m, 0, rows + m * size, size, 1.0f);
  }
};

// An LM head with its model's scale and cap of logits.
struct LmHead {
  const HeadMatrix& matrix;
  const int64_t* token_map;  // the token of each row; null: row i is token i
  int64_t vocab;             // V
  float scale, softcap;      // scale 1: none, cap 0: none
};

class HeadLayers {
 public:
  // inputs, rounded: room for the inputs of any layer in the widest dtype, and for `RoundedInputs`.
  HeadLayers(float* inputs, char* rounded) : inputs_(inputs), rounded_(rounded) {}

  // out (M, rows) = M inputs times the transposed matrix; put(m, inputs) sets input m. Ends with a barrier.
  template <class Put>
  void project(const HeadMatrix& matrix, int64_t M, Put&& put, float* out) const {
    set_inputs(matrix, M, put);
    multiply_all(matrix, M, out);
  }

  // out (M, V), -inf for tokens without a row. Ends with a barrier.
  template <class Put>
  void logits(const LmHead& head, int64_t M, Put&& put, float* out) const {
    const int64_t V = head.vocab;
    share(head.token_map == nullptr ? 0 : M, [&](int64_t m) { std::fill_n(out + m * V, V, -INFINITY); });
    set_inputs(head.matrix, M, put);
    const bool is_plain = head.token_map == nullptr && head.scale == 1.0f && head.softcap == 0.0f;
    is_plain ? multiply_all(head.matrix, M, out) : multiply_logits(head, M, out);
  }

 private:
  template <class T>
  MatrixInputs<T> inputs(const Matrix& matrix, int64_t M) const {
    return {reinterpret_cast<typename MatrixInputs<T>::Token*>(inputs_), M, matrix.cols, rounded_};
  }

  // Calls run(inputs) with inputs in the dtype of a matrix.
  template <class Run>
  void with_inputs(const HeadMatrix& matrix, int64_t M, Run&& run) const {
    matrix.is_bfloat16 ? run(inputs<Bfloat16>(matrix.matrix, M)) : run(inputs<float>(matrix.matrix, M));
    barrier_.wait();
  }

  template <class Put>
  void set_inputs(const HeadMatrix& matrix, int64_t M, Put&& put) const {
    with_inputs(matrix, M, [&](const auto& inputs) { share(M, [&](int64_t m) { put(m, inputs); }); });
    if (matrix.matrix.bits != 0) with_inputs(matrix, M, [&](const auto& inputs) { round_inputs(inputs, M, matrix.matrix, matrix.matrix.group_offsets != nullptr); });
  }

  // These two do not depend on the caller's `put`, so they are compiled once.
  void multiply_all(const HeadMatrix& matrix, int64_t M, float* out) const {
    with_inputs(matrix, M, [&](const auto& inputs) { multiply_into(matrix.matrix, inputs, M, out); });
  }

  void multiply_logits(const LmHead& head, int64_t M, float* out) const {
    with_inputs(head.matrix, M, [&](const auto& inputs) {
      multiply(head.matrix.matrix, inputs, M, PutLogits{out, head.vocab, head.token_map, head.scale, head.softcap});
    });
  }

  float* inputs_;
  char* rounded_;
  mutable Barrier barrier_;
};

// Buffers of the steps of up to M rows, then those of `Children`; `size` is their bytes, -1 if 64 bits cannot count them.
struct HeadSpace {
  float* logits;     // (M, V)
  float* wide;       // (M, 2 W)
  float* states[2];  // (M, W), inputs of the LM head, of a level and of the level before
  float* embedded;   // (M, E or W), rows of an embedding in integers
  float* inputs;     // of any matrix, in the widest dtype
  char* rounded;     // the same as integers
  int64_t* places;   // (N,), the index of a node in its level
  char* children;
  int64_t size = 0;

  HeadSpace(const Head& head, const Draft& draft, int64_t rows, void* base) {
    int64_t longest = head.width;
    for (int64_t i = 0; i < head.num_steps; ++i) longest = std::max(longest, head.steps[i].first.matrix.cols);
    take(base, size, logits, rows, head.vocab);
    take(base, size, wide, rows, 2 * head.width);
    for (float*& state : states) take(base, size, state, rows, head.width);
    take(base, size, embedded, rows, std::max(head.hidden, head.width));
    take(base, size, inputs, most_inputs(rows), Inputs<Bfloat16>::padded(longest));
    take(base, size, rounded, most_inputs(rows), rounded_bytes(longest));
    take(base, size, places, draft.num_nodes, 1);
    take(base, size, children, ChildrenSpace(draft, head.vocab, nullptr).size, 1);
  }
};

// Checks that a draft stays within the tables of a head.
inline Status check_head(const Head& head, const Draft& draft, const float* features) {
  if (features == nullptr || head.steps == nullptr) return Status::kMissing;
  if (draft.vocab != head.vocab) return Status::kShape;
  for (int64_t i = 0; head.kind != kFromFeature && i < head.num_steps; ++i) {
    const int64_t tokens = head.steps[i].embedding.matrix.rows;
    if (tokens < head.vocab) return Status::kTokens;
    for (int64_t s = 0; s < draft.num_sequences; ++s) {
      if (!all_within(draft.tokens + s * draft.num_nodes, 1, tokens)) return Status::kTokens;
    }
  }
  return Status::kDone;
}

inline bool have_one_head(const HeadStep& a, const HeadStep& b) {
  const Matrix &own = a.lm_head.matrix, &other = b.lm_head.matrix;
  return own.weight == other.weight && own.bias == other.bias && own.scales == other.scales && own.group_scales == other.group_scales && a.logit_scale == b.logit_scale && a.logit_softcap == b.logit_softcap;
}

class HeadSteps {
 public:
  // features: (B, E), the input of the first step. The tokens of a level are chosen before its step.
  HeadSteps(const Head& head, const Draft& draft, const Children& children, const float* features, const HeadSpace& space)
      : head_(head), draft_(draft), children_(children), features_(features), space_(space), layers_(space.inputs, space.rounded) {
    for (int64_t d = 0; d < children.depth(); ++d) {
      for (int64_t p = 0; p < children.num_inner(d); ++p) space.places[children.inner(d, p)] = p;
    }
  }

  // Rows of logits in memory at once: those of the widest level, or of all levels if tokens are not read.
  int64_t most_rows() const {
    int64_t most = head_.kind == kFromFeature ? children_.depth() : 0;
    for (int64_t d = 0; d < children_.depth() && head_.kind != kFromFeature; ++d) most = std::max(most, children_.num_inner(d));
    return draft_.num_sequences * most;
  }

  // Fills the trees level by level, all threads together.
  void run() const {
    const int64_t B = draft_.num_sequences, depth = children_.depth();
    const bool is_shared = head_.kind == kFromFeature;
    if (is_shared) run_all();
    for (int64_t d = 0; d < depth; ++d) {
      if (!is_shared) {
        set_hidden(d, space_.states[d % 2]);
        finish(head_.steps[d], rows(d), space_.states[d % 2], space_.logits);
      }
      children_.choose(d, space_.logits + (is_shared ? d * B * head_.vocab : 0), is_shared);
    }
  }

 private:
  // Rows of logits of a level: one for each node, or one for each sequence if tokens are not read.
  int64_t rows(int64_t depth) const {
    return draft_.num_sequences * (head_.kind == kFromFeature ? 1 : children_.num_inner(depth));
  }

  // Logits of all levels at once, for heads that read no tokens: a shared LM head is read once.
  void run_all() const {
    const int64_t B = draft_.num_sequences, W = head_.width, depth = children_.depth();
    float* hidden = space_.states[0];
    for (int64_t d = 0; d < depth; ++d) set_hidden(d, hidden + d * B * W);
    for (int64_t d = 0, last; d < depth; d = last) {
      for (last = d + 1; last < depth && have_one_head(head_.steps[d], head_.steps[last]);) ++last;
      finish(head_.steps[d], (last - d) * B, hidden + d * B * W, space_.logits + d * B * head_.vocab);
    }
  }

  // Inputs of the LM head for the rows of a level, sequence by sequence. Ends with a barrier.
  void set_hidden(int64_t depth, float* hidden) const {
    const HeadStep& step = head_.steps[depth];
    const int64_t M = rows(depth), W = head_.width;
    switch (head_.kind) {
      case kFromPath:
        layers_.project(step.first, M, [&](int64_t m, const auto& inputs) { put_path(depth, m, inputs); }, space_.wide);
        add_activated(M, space_.wide, space_.wide + W, 2 * W, hidden);
        break;
      case kFromState:
        layers_.project(step.first, M, [&](int64_t m, const auto& inputs) { put_state(depth, m, inputs); }, space_.wide);
        share(M, [&](int64_t m) { take_token(depth, m, space_.wide + m * W, hidden + m * W); });
        break;
      default: share(M, [&](int64_t m) { std::copy_n(features_ + m * W, W, hidden + m * W); });
    }
    barrier_.wait();
    for (int64_t i = 0; i < step.num_blocks; ++i) {
      layers_.project(step.blocks[i], M, PutRows{hidden, W}, space_.wide);
      add_activated(M, hidden, space_.wide, W, hidden);
      barrier_.wait();
    }
  }

  // The LM head of a step.
  void finish(const HeadStep& step, int64_t M, const float* hidden, float* logits) const {
    const LmHead head{step.lm_head, head_.token_map, head_.vocab, step.logit_scale, step.logit_softcap};
    layers_.logits(head, M, PutRows{hidden, head_.width}, logits);
  }

  // [feature; embeddings of the tokens from the root to the node].
  template <class X>
  void put_path(int64_t depth, int64_t m, const X& inputs) const {
    const int64_t E = head_.hidden, sequence = m / children_.num_inner(depth);
    put_row(inputs, m, 0, features_ + sequence * E, E, 1.0f);
    int64_t node = node_of(depth, m);
    for (int64_t d = depth; d >= 0; --d, node = children_.parent(sequence, node)) {
      with_embedding(depth, m, node, [&](const auto* row) {
        put_row(inputs, m, (d + 1) * E, row, E, head_.steps[depth].embedding_scale);
      });
    }
  }

  // The state of the parent from the step before, or the feature.
  template <class X>
  void put_state(int64_t depth, int64_t m, const X& inputs) const {
    const int64_t sequence = m / children_.num_inner(depth), K = depth == 0 ? head_.hidden : head_.width;
    const float* row = features_ + sequence * K;
    if (depth == 0) {
      const float scale = head_.feature_rms;
      return put_row(inputs, m, 0, row, K, scale > 0 ? scale * norm_factor(row, K, head_.feature_epsilon) : 1.0f);
    }
    const int64_t parent = space_.places[children_.parent(sequence, node_of(depth, m))];
    row = space_.states[(depth - 1) % 2] + (sequence * children_.num_inner(depth - 1) + parent) * K;
    put_row(inputs, m, 0, row, K, 1.0f);
  }

  // out = base + silu(gated), rows of W elements; `stride` elements from one row of `gated` to the next, and of `base`
  // unless it is another buffer.
  void add_activated(int64_t M, const float* base, const float* gated, int64_t stride, float* out) const {
    const int64_t W = head_.width, portions = portions_of(W);
    share(M * portions, [&](int64_t unit) {
      const int64_t m = unit / portions, end = std::min(unit % portions * kPortion + kPortion, W);
      const float *x = base + m * (base == out ? W : stride), *y = gated + m * stride;
      int64_t k = unit % portions * kPortion;
      for (; k + kLanes <= end; k += kLanes) store_lanes(out + m * W + k, load_lanes(x + k) + silu(load_lanes(y + k)));
      for (; k < end; ++k) out[m * W + k] = x[k] + silu(Lanes{} + y[k])[0];
    });
  }

  // gelu(norm(projected + scale * embedding)); changes `projected`.
  void take_token(int64_t depth, int64_t m, float* projected, float* out) const {
    const HeadStep& step = head_.steps[depth];
    const int64_t W = head_.width;
    with_embedding(depth, m, node_of(depth, m), [&](const auto* row) {
      for (int64_t k = 0; k < W; ++k) projected[k] += to_float(row[k]) * step.embedding_scale;
    });
    const float factor = norm_factor(projected, W, step.norm.epsilon);
    for (int64_t k = 0; k < W; ++k) {
      const float x = std::fma(projected[k] * factor, step.norm.weight[k], step.norm.bias[k]);
      out[k] = 0.5f * x * (1.0f + std::erf(x * 0.7071067811865476f));
    }
  }

  // work(row), row: the embedding of the token of a node, an ancestor of row m of a level or the node of the row itself.
  template <class Work>
  void with_embedding(int64_t depth, int64_t m, int64_t node, Work&& work) const {
    const HeadMatrix& table = head_.steps[depth].embedding;
    const int64_t sequence = m / children_.num_inner(depth), token = draft_.tokens[sequence * draft_.num_nodes + node];
    with_row(table.matrix, table.is_bfloat16, token, space_.embedded + m * table.matrix.cols, work);
  }

  int64_t node_of(int64_t depth, int64_t m) const { return children_.inner(depth, m % children_.num_inner(depth)); }

  const Head& head_;
  const Draft& draft_;
  const Children& children_;
  const float* features_;
  const HeadSpace& space_;
  const HeadLayers layers_;
  mutable Barrier barrier_;
};

}  // namespace
