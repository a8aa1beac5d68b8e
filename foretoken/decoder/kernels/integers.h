// Products of weights and inputs in integers in vector registers, see `rounded_inputs.h`.
//
// Letters: M tokens, K inputs, D digits of an input; T tokens and P strips of rows whose sums are in registers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "gemm.h"
#include "interface.h"
#include "rounded_inputs.h"
#include "vectors.h"

namespace {

// The scales of the weights and inputs of a unit.
struct UnitScales {
  const Matrix& matrix;
  const int64_t groups;       // of weights
  int64_t group = 0;          // of this unit's weights
  const float* inputs = nullptr;  // of this unit's inputs of the first token

  explicit UnitScales(const Matrix& matrix) : matrix(matrix), groups(num_groups(matrix)) {}
  void begin(const RoundedInputs& x, int64_t m, int64_t k) {
    if (groups > 0) group = k / matrix.group;
    inputs = x.scales + k / x.group * x.num_tokens + m;
  }
  // own: a matrix of this kind.
  Lanes scales(const Matrix& own, int64_t panel, int strip) const { return groups == 0 ? in_all_lanes(1.0f) : load(own.group_scales, panel, strip); }
  Lanes offsets(const Matrix& own, int64_t panel, int strip) const { return load(own.group_offsets, panel, strip); }

 private:
  Lanes load(const void* numbers, int64_t panel, int strip) const {
    const int64_t at = (panel * groups + group) * kPanelRows + strip * kLanes;
    return matrix.groups_are_half ? load_halves(static_cast<const uint16_t*>(numbers) + at) : load_lanes(static_cast<const float*>(numbers) + at);
  }
};

// Numbers from sums of their digits, the highest one first.
template <int D, class Digit>
FORETOKEN_INLINE Lanes joined(Digit&& digit) {
  Lanes value = __builtin_convertvector(digit(0), Lanes);
#pragma GCC unroll 3
  for (int d = 1; d < D; ++d) value = multiply_add(value, in_all_lanes(256.0f), __builtin_convertvector(digit(d), Lanes));
  return value;
}

// Emits the dot products of a panel's rows with token m, those of the rows begin..end.
template <class Emit>
FORETOKEN_INLINE void emit_panel(const Matrix& matrix, int64_t panel, int64_t begin, int64_t end, int64_t m, float* totals, Emit&& emit) {
  const int64_t first = panel * kPanelRows, n = std::max(first, begin);
  emit_block<kPanelRows>(matrix, n, std::min(end, first + kPanelRows), m, 1, totals + (n - first), emit);
}

#if defined(__AVX512F__)
typedef uint8_t ByteLanes __attribute__((vector_size(64), aligned(1), may_alias));
#else
typedef uint8_t ByteLanes __attribute__((vector_size(32), aligned(1), may_alias));
#endif

// sum + the products of four unsigned bytes with four signed ones in every lane. kIsSmall: no unsigned byte is above 15.
template <bool kIsSmall>
FORETOKEN_INLINE IntLanes add_dots(IntLanes sum, ByteLanes weights, IntLanes inputs) {
#if defined(__AVX512VNNI__)
  return (IntLanes)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)inputs);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
  return (IntLanes)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, (__m256i)inputs);
#elif defined(__AVX512BW__)
  const auto dots = [&](__m512i own, short factor) { return _mm512_madd_epi16(_mm512_maddubs_epi16(own, (__m512i)inputs), _mm512_set1_epi16(factor)); };
  if constexpr (kIsSmall) return (IntLanes)_mm512_add_epi32((__m512i)sum, dots((__m512i)weights, 1));
  const __m512i low = _mm512_set1_epi8(15);  // halves, as pairs of products of whole bytes exceed 16 bits
  const __m512i both = _mm512_add_epi32(dots(_mm512_and_si512((__m512i)weights, low), 1), dots(_mm512_and_si512(_mm512_srli_epi16((__m512i)weights, 4), low), 16));
  return (IntLanes)_mm512_add_epi32((__m512i)sum, both);
#elif defined(__AVX2__)
  const auto dots = [&](__m256i own, short factor) { return _mm256_madd_epi16(_mm256_maddubs_epi16(own, (__m256i)inputs), _mm256_set1_epi16(factor)); };
  if constexpr (kIsSmall) return (IntLanes)_mm256_add_epi32((__m256i)sum, dots((__m256i)weights, 1));
  const __m256i low = _mm256_set1_epi8(15);
  const __m256i both = _mm256_add_epi32(dots(_mm256_and_si256((__m256i)weights, low), 1), dots(_mm256_and_si256(_mm256_srli_epi16((__m256i)weights, 4), low), 16));
  return (IntLanes)_mm256_add_epi32((__m256i)sum, both);
#else
  const int8_t* own = reinterpret_cast<const int8_t*>(&inputs);
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < kQuad; ++j) sum[i] += int32_t(weights[i * kQuad + j]) * own[i * kQuad + j];
  }
  return sum;
#endif
}

FORETOKEN_INLINE IntLanes in_all_lanes(const int8_t* quad) {
  int32_t word;
  std::memcpy(&word, quad, sizeof word);
#if defined(__AVX512F__)
  return (IntLanes)_mm512_set1_epi32(word);
#else
  return IntLanes{} + word;
#endif
}

// Dot products of P strips of rows, from panel `panel` on, with T tokens from m on: totals (T, P). Prefetches the same
// number of strips that come next.
template <int D, int T, int P, bool kIsNibbles>
[[gnu::noinline]] void dot_strips(const Matrix& matrix, const RoundedInputs& x, int64_t m, int64_t panel, int64_t last_panel, bool fetches, Lanes* totals) {
  constexpr int kZero = kIsNibbles ? 8 : 128;  // weights are unsigned here: numbers plus this
  const int64_t unit = unit_of(matrix), bytes = panel_bytes(matrix), ahead = P / kStrips * bytes;
  const char* rows[P];
  int64_t panels[P];
  for (int p = 0; p < P; ++p) {
    panels[p] = std::min(panel + p / kStrips, last_panel);
    rows[p] = static_cast<const char*>(matrix.weight) + panels[p] * bytes + p % kStrips * kBytes;
  }
  for (int i = 0; i < T * P; ++i) totals[i] = Lanes{};
  const int8_t* inputs_of[D * T];
  for (int i = 0; i < D * T; ++i) inputs_of[i] = x.at(i / T, m + i % T, 0);
  const int64_t step_size = x.step_size();
  UnitScales unit_scales(matrix);
  for (int64_t begin = 0; begin < x.stride; begin += unit) {
    const int64_t end = std::min(begin + unit, x.stride);
    IntLanes sums[D * T * P];
    int32_t input_sums[T][D];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 3
      for (int d = 0; d < D; ++d) {
        input_sums[t][d] = x.sum(d, m + t, begin, end);
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) sums[(d * T + t) * P + p] = IntLanes{} - kZero * input_sums[t][d];
      }
    }
    const auto add = [&](int64_t at, const ByteLanes* weights) {  // at: of the inputs' digits
#pragma GCC unroll 3
      for (int d = 0; d < D; ++d) {
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
          const IntLanes inputs = in_all_lanes(inputs_of[d * T + t] + at);
#pragma GCC unroll 4
          for (int p = 0; p < P; ++p) {
            IntLanes& sum = sums[(d * T + t) * P + p];
            sum = add_dots<kIsNibbles>(sum, weights[p], inputs);
          }
        }
      }
    };
    constexpr int kNumbers = kIsNibbles ? 2 * kQuad : kQuad;  // of a row, in a register
    for (int64_t k = begin; k < end; k += kNumbers) {
      const int64_t at = k / kWholeStep * step_size + k % kWholeStep;
      ByteLanes weights[P], others[P];
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        const char* own = rows[p] + k / kNumbers * kPanelRows * kQuad;
        if (fetches && p % kStrips == 0) __builtin_prefetch(own + ahead, 0, 2);
        const IntLanes both = *reinterpret_cast<const IntLanes*>(own);
        weights[p] = kIsNibbles ? (ByteLanes)(both & 0x0f0f0f0f) : (ByteLanes)both ^ 0x80;
        if (kIsNibbles) others[p] = (ByteLanes)((both >> 4) & 0x0f0f0f0f);
      }
      add(at, weights);
      if (kIsNibbles) add(at + kQuad, others);
    }
    unit_scales.begin(x, m, begin);
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      const Lanes scale = unit_scales.scales(matrix, panels[p], p % kStrips);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const float input_scale = unit_scales.inputs[t];
        Lanes& total = totals[t * P + p];
        const Lanes value = joined<D>([&](int d) { return sums[(d * T + t) * P + p]; });
        total = multiply_add(value, scale * input_scale, total);
        if (matrix.group_offsets == nullptr) continue;
        const Lanes inputs = joined<D>([&](int d) { return IntLanes{} + input_sums[t][d]; });
        total = multiply_add(inputs, unit_scales.offsets(matrix, panels[p], p % kStrips) * input_scale, total);
      }
    }
  }
}

// See `multiply_rounded`; in vector registers.
template <int D, class Emit>
void multiply_strips(const Matrix& matrix, const RoundedInputs& x, int64_t M, int64_t begin, int64_t end, Emit&& emit) {
  // Strips of rows for one token, and for several: their sums stay in registers.
  constexpr int kSums = kBytes == 64 ? 16 : 8, kOfOne = kBytes == 64 || D < 3 ? 4 : 2, kOfMany = 2;
  constexpr int kMost = std::clamp(kSums / (D * kOfMany), 1, 4);  // tokens at once
  const int64_t last = (matrix.rows - 1) / kPanelRows;
  Lanes totals[std::max(kMost * kOfMany, kOfOne)];
  const auto run = [&](auto tokens, auto strips, int64_t m, int64_t panel) {
    constexpr int T = decltype(tokens)::value, P = decltype(strips)::value;
    const auto dots = matrix.bits == 4 ? dot_strips<D, T, P, true> : dot_strips<D, T, P, false>;
    dots(matrix, x, m, panel, last, m == 0, totals);
    for (int t = 0; t < T; ++t) {
      for (int p = 0; p < P / kStrips && (panel + p) * kPanelRows < end; ++p) {
        float own[kPanelRows];
        for (int i = 0; i < kStrips; ++i) store_lanes(own + i * kLanes, totals[t * P + p * kStrips + i]);
        emit_panel(matrix, panel + p, begin, end, m + t, own, emit);
      }
    }
  };
  using std::integral_constant;
  const int64_t first = begin / kPanelRows, panels = (M == 1 ? kOfOne : kOfMany) / kStrips;
  for (int64_t panel = first; panel * kPanelRows < end; panel += panels) {
    int64_t m = 0;
    if (M > 1) {
      for (; m + kMost <= M; m += kMost) run(integral_constant<int, kMost>(), integral_constant<int, kOfMany>(), m, panel);
      const int64_t rest = M - m;  // all at once: each call reads the weights
      if (rest == 1) run(integral_constant<int, 1>(), integral_constant<int, kOfMany>(), m, panel);
      if constexpr (kMost > 2) {
        if (rest == 2) run(integral_constant<int, 2>(), integral_constant<int, kOfMany>(), m, panel);
        if (rest == 3) run(integral_constant<int, 3>(), integral_constant<int, kOfMany>(), m, panel);
      }
    } else {
      run(integral_constant<int, 1>(), integral_constant<int, kOfOne>(), 0, panel);
    }
  }
}

}  // namespace
