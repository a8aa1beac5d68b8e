// Feed-forward layers: the input of the down projection, f(gate) * up or f(up), and mixtures of experts. A router gives
// each token some experts, feed-forward layers. Their outputs are added with its weights, behind those of the shared expert.
//
// The tokens of an expert are multiplied together, so that its weights are read once a pass. A token's result comes
// from its own row alone, and the outputs of its experts are added in the order of the experts. The result does not
// depend on other tokens with the same experts.
//
// Letters: P pairs of a token and one of its experts, sorted by expert; M tokens.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include <omp.h>

#include "gemm.h"
#include "integer_tiles.h"
#include "interface.h"
#include "quantized.h"
#include "rows.h"
#include "tiles.h"
#include "workspace.h"

namespace {

// inner (M, rows) = f(factor * gate projection) * up projection of x (M, K), or f(factor * up projection) without gate
// weights: this thread's share of the rows. gates, ups: (M, rows), scratch for both projections, unused where matrix units compute both together.
template <class X>
void multiply_activated(int64_t activation, const Matrix& gate, const Matrix& up, const X& x, int64_t M, const X& inner, float* gates, float* ups, float factor = 1.0f) {
  const bool has_gate = gate.weight != nullptr;
#if defined(FORETOKEN_TILES)
  if constexpr (std::is_same_v<X, TileInputs>) {
    if (has_gate && gate.bits == 0 && up.bits == 0) return with_activation(activation, factor, [&](auto f) { multiply_gated(gate, up, x, M, inner, f); });
#if defined(__AMX_INT8__)
    if (has_gate && is_gated_fast(gate, up, M)) return with_activation(activation, factor, [&](auto f) { multiply_rounded_gated(gate, up, x.rounded, M, inner, f); });
#endif
  }
#endif
  if (has_gate) multiply_into(gate, x, M, gates, X::kWholeShare);
  multiply_into(up, x, M, ups, X::kWholeShare);
  const auto [begin, end] = Share(up.rows, X::kWholeShare);  // computed by this thread
  with_activation(activation, factor, [&](auto f) {
    for (int64_t m = 0; m < M; ++m) activate_portion(inner, m, has_gate ? gates + m * up.rows : nullptr, ups + m * up.rows, begin, end, f);
  });
}

// Chooses the experts of one token by its router's logits (count,), which become scores: chosen (top_k,) ascending, and
// their weights. Among equal scores the lower expert wins.
inline void choose_experts(const Experts& experts, float* logits, int64_t* chosen, float* weights) {
  const int64_t count = experts.count, top_k = experts.top_k;
  float top = logits[0], sum = 0, total = experts.epsilon;
  if (experts.is_sigmoid) {
    for (int64_t e = 0; e < count; ++e) logits[e] = 1.0f / (1.0f + std::exp(-logits[e]));
  } else {
    for (int64_t e = 1; e < count; ++e) top = std::max(top, logits[e]);
    for (int64_t e = 0; e < count; ++e) sum += logits[e] = std::exp(logits[e] - top);
    for (int64_t e = 0; e < count; ++e) logits[e] /= sum;
  }
  const auto score = [&](int64_t e) { return experts.score_bias == nullptr ? logits[e] : logits[e] + experts.score_bias[e]; };
  for (int64_t j = 0; j < top_k; ++j) {
    int64_t best = -1;
    for (int64_t e = 0; e < count; ++e) {
      const bool is_free = std::find(chosen, chosen + j, e) == chosen + j;
      if (is_free && (best < 0 || score(e) > score(best))) best = e;
    }
    chosen[j] = best;
    total += logits[best];
  }
  std::sort(chosen, chosen + top_k);
  for (int64_t j = 0; j < top_k; ++j) weights[j] = (experts.is_normalised ? logits[chosen[j]] / total : logits[chosen[j]]) * experts.factor;
}

template <class T>
class ExpertLayer {
 public:
  ExpertLayer(const Layer& layer, int64_t hidden, int64_t M, const Workspace<T>& space, Barrier& barrier)
      : layer_(layer), experts_(layer.experts), hidden_(hidden), M_(M), num_pairs_(M * layer.experts.top_k), space_(space), barrier_(barrier) {}

  // Runs inside a parallel region, all threads together, once the inputs are there. Afterwards `pair_out` has the
  // output of every pair in its place, and `branch` that of the shared expert.
  void run(const MatrixInputs<T>& inputs) const {
    if (layer_.up.weight != nullptr) run_shared(inputs);
    multiply_into(experts_.router, inputs, M_, space_.router);
    barrier_.wait();
    const int64_t top_k = experts_.top_k;
    share(M_, [&](int64_t m) {
      choose_experts(experts_, space_.router + m * experts_.count, space_.chosen + m * top_k, space_.weights + m * top_k);
    });
    barrier_.wait();
    if (omp_get_thread_num() == 0) sort_pairs();
    barrier_.wait();
    share(num_pairs_, [&](int64_t pair) { gather(inputs, pair); });
    barrier_.wait();
    round(experts_.gate_up, space_.pair_inputs);
    const int64_t width = experts_.intermediate;
    for_each_expert([&](int64_t e, int64_t first, int64_t count) {
      const Matrix gate = experts_.is_gated ? part_of(experts_.gate_up, 2 * e, width) : Matrix{};
      const Matrix up = part_of(experts_.gate_up, experts_.is_gated ? 2 * e + 1 : e, width);
      multiply_activated(layer_.activation, gate, up, inputs_of(space_.pair_inputs, e, hidden_, count), count,
                         inputs_of(space_.pair_inner, e, width, count), space_.pair_gate + first * width, space_.pair_up + first * width);
    });
    barrier_.wait();
    round(experts_.down, space_.pair_inner);
    for_each_expert([&](int64_t e, int64_t first, int64_t count) {
      multiply_into(part_of(experts_.down, e, hidden_), inputs_of(space_.pair_inner, e, width, count), count, space_.pair_out + first * hidden_);
    });
    barrier_.wait();
  }

  // Adds the weighted outputs of a token's experts to a row (hidden,), which has those of the shared expert if there is one.
  void add(int64_t m, float* row) const {
    if (experts_.shared_gate.weight != nullptr) {
      const float gate = 1.0f / (1.0f + std::exp(-space_.shared_gates[m]));
      for (int64_t k = 0; k < hidden_; ++k) row[k] *= gate;
    }
    for (int64_t j = m * experts_.top_k; j < (m + 1) * experts_.top_k; ++j) {
      const float *out = space_.pair_out + space_.places[j] * hidden_, weight = space_.weights[j];
      int64_t k = 0;
      for (; k + kLanes <= hidden_; k += kLanes) {
        store_lanes(row + k, multiply_add(Lanes{} + weight, load_lanes(out + k), load_lanes(row + k)));
      }
      for (; k < hidden_; ++k) row[k] = std::fma(weight, out[k], row[k]);
    }
  }

 private:
  void run_shared(const MatrixInputs<T>& inputs) const {
    round_inputs_of({&layer_.gate, &layer_.up, &experts_.shared_gate}, inputs, M_, barrier_);
    const MatrixInputs<T> inner(space_.inner, M_, layer_.up.rows, space_.rounded);
    multiply_activated(layer_.activation, layer_.gate, layer_.up, inputs, M_, inner, space_.gate, space_.up, layer_.gate_factor);
    if (experts_.shared_gate.weight != nullptr) multiply_into(experts_.shared_gate, inputs, M_, space_.shared_gates);
    barrier_.wait();
    round_inputs_of({&layer_.down}, inner, M_, barrier_);
    multiply_into(layer_.down, inner, M_, space_.branch);
  }

  // The first pair of each expert (`starts`), and the place of every pair among all pairs. `blocks` are the starts with
  // the padding of each expert's inputs.
  void sort_pairs() const {
    const int64_t count = experts_.count, top_k = experts_.top_k;
    std::fill(space_.starts, space_.starts + count + 1, 0);
    for (int64_t j = 0; j < num_pairs_; ++j) ++space_.starts[space_.chosen[j] + 1];
    space_.blocks[0] = 0;
    for (int64_t e = 0; e < count; ++e) {
      space_.blocks[e + 1] = space_.blocks[e] + most_inputs(space_.starts[e + 1]);
      space_.starts[e + 1] += space_.starts[e];
    }
    for (int64_t j = 0; j < num_pairs_; ++j) {  // `starts` counts up here and is moved back afterwards
      const int64_t e = space_.chosen[j], place = space_.starts[e]++;
      space_.places[j] = place;
      space_.tokens[place] = j / top_k;
      space_.experts[place] = e;
    }
    for (int64_t e = count; e > 0; --e) space_.starts[e] = space_.starts[e - 1];
    space_.starts[0] = 0;
  }

  // Copies the inputs of a pair's token to those of its expert.
  void gather(const MatrixInputs<T>& inputs, int64_t pair) const {
    const int64_t e = space_.experts[pair], first = space_.starts[e];
    inputs_of(space_.pair_inputs, e, hidden_, space_.starts[e + 1] - first).copy(pair - first, inputs, space_.tokens[pair], hidden_);
  }

  MatrixInputs<T> inputs_of(typename MatrixInputs<T>::Token* base, int64_t e, int64_t width, int64_t count) const {
    char* rounded = space_.pair_rounded + space_.blocks[e] * rounded_bytes(std::max(hidden_, experts_.intermediate));
    return {base + space_.blocks[e] * MatrixInputs<T>::padded(width), count, width, rounded};
  }

  // Rounds the inputs of each expert if the matrices are in integers.
  void round(const Matrix& matrix, typename MatrixInputs<T>::Token* base) const {
    if (matrix.bits == 0) return;
    for_each_expert([&](int64_t e, int64_t, int64_t count) {
      round_inputs(inputs_of(base, e, matrix.cols, count), count, matrix, matrix.group_offsets != nullptr);
    });
    barrier_.wait();
  }

  // Matrix `index` of those of `rows` rows that stand one below another.
  static Matrix part_of(const Matrix& matrix, int64_t index, int64_t rows) {
    Matrix part = matrix;
    part.rows = rows;
    if (matrix.bits == 0) {
      part.weight = static_cast<const T*>(matrix.weight) + index * rows * matrix.cols;
      return part;
    }
    const int64_t panel = index * ((rows + kPanelRows - 1) / kPanelRows);
    const int64_t width = matrix.scale_kind == kFloat ? 4 : matrix.scale_kind == kHalf ? 2 : 1;  // bytes of a scale
    const int64_t at = panel * num_groups(matrix) * kPanelRows * width, super = panel * num_supers(matrix) * kPanelRows;
    part.weight = static_cast<const char*>(matrix.weight) + panel * panel_bytes(matrix);
    if (matrix.scales != nullptr) part.scales = matrix.scales + panel * kPanelRows;
    if (matrix.group_scales != nullptr) part.group_scales = static_cast<const char*>(matrix.group_scales) + at;
    if (matrix.group_offsets != nullptr) part.group_offsets = static_cast<const char*>(matrix.group_offsets) + at;
    if (matrix.super_scales != nullptr) part.super_scales = matrix.super_scales + super;
    if (matrix.super_offsets != nullptr) part.super_offsets = matrix.super_offsets + super;
    return part;
  }

  template <class Work>
  void for_each_expert(Work&& work) const {
    for (int64_t e = 0; e < experts_.count; ++e) {
      const int64_t first = space_.starts[e], count = space_.starts[e + 1] - first;
      if (count > 0) work(e, first, count);
    }
  }

  const Layer& layer_;
  const Experts& experts_;
  const int64_t hidden_, M_, num_pairs_;
  const Workspace<T>& space_;
  Barrier& barrier_;
};

}  // namespace
