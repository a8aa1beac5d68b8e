// The input of a feed-forward network's down projection: f(gate) * up, or f(up).
#pragma once

#include <cstdint>
#include <type_traits>

#include "elementwise.h"
#include "gemm.h"
#include "inputs.h"
#include "interface.h"
#include "tiles.h"

namespace {

// inner (M, rows) = f(gate projection) * up projection of x (M, K), or f(up projection) without gate weights: this
// thread's share of the rows. gates, ups: (M, rows), scratch for both projections, unused on matrix units.
template <class X>
void multiply_activated(int64_t activation, const Matrix& gate, const Matrix& up, const X& x, int64_t M, const X& inner, float* gates, float* ups) {
  const bool has_gate = gate.weight != nullptr;
#if defined(FORETOKEN_TILES)
  if constexpr (std::is_same_v<X, TileInputs>) {
    if (has_gate) return with_activation(activation, [&](auto f) { multiply_gated(gate, up, x, M, inner, f); });
  }
#endif
  if (has_gate) multiply_into(gate, x, M, gates, X::kWholeShare);
  multiply_into(up, x, M, ups, X::kWholeShare);
  const auto [begin, end] = Share(up.rows, X::kWholeShare);  // computed by this thread
  with_activation(activation, [&](auto f) {
    for (int64_t m = 0; m < M; ++m) activate_portion(inner, m, has_gate ? gates + m * up.rows : nullptr, ups + m * up.rows, begin, end, f);
  });
}

}  // namespace
