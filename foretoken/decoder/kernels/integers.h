// Products of weights and inputs in integers in vector registers, see `quantized.h`.
//
// Letters: M tokens, K inputs, D digits of an input; T tokens and P strips of rows, two, whose sums are in registers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>

#include "gemm.h"
#include "interface.h"
#include "quantized.h"
#include "vectors.h"

namespace {

constexpr int kStripsAtOnce = 2;

// This thread's memory, valid until the next call.
inline char* thread_memory(size_t bytes) {
  static thread_local std::unique_ptr<char, decltype(&std::free)> memory(nullptr, &std::free);
  static thread_local size_t size = 0;
  if (bytes > size) {
    size = 0;
    memory.reset(static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)));
    if (memory == nullptr) throw std::bad_alloc();
    size = bytes;
  }
  return memory.get();
}

// Numbers from sums of their digits, the highest one first.
template <int D, class Digit>
FORETOKEN_INLINE auto joined(Digit&& digit) {
  if constexpr (D == 1) return __builtin_convertvector(digit(0), Lanes);
  if constexpr (D == 2) return __builtin_convertvector((digit(0) << 8) + digit(1), Lanes);  // see `unit_of`
  Lanes value = __builtin_convertvector(digit(0), Lanes);
#pragma GCC unroll 3
  for (int d = 1; d < D; ++d) value = multiply_add(value, in_all_lanes(256.0f), __builtin_convertvector(digit(d), Lanes));
  return value;
}
// The same of numbers.
template <int D>
inline float joined_sum(const RoundedInputs& x, int64_t m, int64_t begin, int64_t count) {
  float value = 0;
  int64_t whole = 0;
  for (int d = 0; d < D; ++d) {
    whole = whole * 256 + x.sum(d, m, begin, count);
    value = std::fma(value, 256.0f, float(x.sum(d, m, begin, count)));
  }
  return D == 2 ? float(whole) : value;
}

// Calls work(integral constant) with a number from 1 to kMost.
template <int kMost, class Work>
FORETOKEN_INLINE void with_count(int64_t number, Work&& work) {
  if constexpr (kMost > 1) {
    if (number < kMost) return with_count<kMost - 1>(number, work);
  }
  work(std::integral_constant<int, kMost>());
}

// Scales and offsets of a strip's rows for the groups of a span.
class StripScales {
 public:
  static constexpr int kMost = kSpan / kSummed;
  alignas(kBytes) Lanes scales[kMost], offsets[kMost];

  void begin(const Matrix& matrix, int64_t panel, int strip) {
    matrix_ = &matrix;
    groups_ = panel * num_groups(matrix) * kPanelRows + strip * kLanes;
    supers_ = panel * num_supers(matrix) * kPanelRows + strip * kLanes;
    shift_ = matrix.group_scales == nullptr ? 0 : __builtin_ctzll(uint64_t(matrix.group));
    scales[0] = in_all_lanes(1.0f);
  }
  // The span begins at input k and has `inputs` ones.
  [[gnu::noinline]] void load(int64_t k, int64_t inputs) {
    if (matrix_->group_scales == nullptr) return;
    const int64_t count = std::max<int64_t>(inputs >> shift_, 1), at = groups_ + (k >> shift_) * kPanelRows, super = supers_ + k / kSuper * kPanelRows;
    load(matrix_->group_scales, matrix_->super_scales, at, super, count, scales);
    if (matrix_->group_offsets != nullptr) load(matrix_->group_offsets, matrix_->super_offsets, at, super, count, offsets);
  }

 private:
  FORETOKEN_INLINE void load(const void* values, const uint16_t* supers, int64_t at, int64_t super, int64_t count, Lanes* out) const {
    if (matrix_->scale_kind == kFloat) {
      for (int64_t i = 0; i < count; ++i) out[i] = load_lanes(static_cast<const float*>(values) + at + i * kPanelRows);
    } else if (matrix_->scale_kind == kHalf) {
      for (int64_t i = 0; i < count; ++i) out[i] = load_halves(static_cast<const uint16_t*>(values) + at + i * kPanelRows);
    } else {
      const Lanes factor = load_halves(supers + super);
      for (int64_t i = 0; i < count; ++i) out[i] = load_bytes(static_cast<const int8_t*>(values) + at + i * kPanelRows) * factor;  // exact
    }
  }

  const Matrix* matrix_;
  int64_t groups_, supers_;  // of the strip
  int shift_;
};

// Emits the dot products of a panel's rows with token m, those of the rows begin..end.
template <class Emit>
FORETOKEN_INLINE void emit_panel(const Matrix& matrix, int64_t panel, int64_t begin, int64_t end, int64_t m, float* totals, Emit&& emit) {
  const int64_t first = panel * kPanelRows, n = std::max(first, begin);
  emit_block<kPanelRows>(matrix, n, std::min(end, first + kPanelRows), m, 1, totals + (n - first), emit);
}

// sum + the products of four unsigned bytes with four signed ones in every lane. kIsSmall: no unsigned byte is above 127,
// so that 16 bits hold a sum of two products.
template <bool kIsSmall>
FORETOKEN_INLINE IntLanes add_dots(IntLanes sum, ByteLanes weights, IntLanes inputs) {
#if defined(__AVX512VNNI__)
  return (IntLanes)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)inputs);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
  return (IntLanes)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, (__m256i)inputs);
#elif defined(__AVX512BW__)
  const auto dots = [&](__m512i own, short factor) { return _mm512_madd_epi16(_mm512_maddubs_epi16(own, (__m512i)inputs), _mm512_set1_epi16(factor)); };
  if constexpr (kIsSmall) return (IntLanes)_mm512_add_epi32((__m512i)sum, dots((__m512i)weights, 1));
  const __m512i low = _mm512_set1_epi8(15);  // half bytes: the sum of two products of whole bytes can exceed 16 bits
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

// What a matrix takes from the sums of its inputs, for the units of some tokens that are multiplied together: what the sums
// of products begin with, (units, D, T), as codes are numbers plus kZero; and for offsets the sums of inputs, (units, T).
struct UnitInputs {
  const int32_t* starts;
  const float* inputs;
};

// The same of all tokens, in this thread's memory.
template <int D>
class UnitInputsOfAll {
 public:
  UnitInputsOfAll(const Matrix& matrix, const RoundedInputs& x, int64_t M)
      : matrix_(matrix), x_(x), unit_(unit_of(matrix)), units_((x.stride + unit_ - 1) / unit_),
        starts_(reinterpret_cast<int32_t*>(thread_memory(size_t(M * units_ * (D + 1)) * sizeof(int32_t)))), inputs_(reinterpret_cast<float*>(starts_ + M * units_ * D)) {}

  UnitInputs of(int64_t m) const { return {starts_ + m * units_ * D, inputs_ + m * units_}; }
  void fill(int64_t m, int64_t T) const {
    const int zero = matrix_.offsets_are_lowest ? 0 : zero_of(matrix_.bits);
    int32_t* starts = starts_ + m * units_ * D;
    float* inputs = inputs_ + m * units_;
    for (int64_t begin = 0; begin < x_.stride; begin += unit_, starts += D * T, inputs += T) {
      const int64_t count = (std::min(begin + unit_, x_.stride) - begin) / kSummed;
      for (int64_t t = 0; t < T; ++t) {
        for (int d = 0; d < D; ++d) starts[d * T + t] = -zero * x_.sum(d, m + t, begin, count);
        if (matrix_.group_offsets != nullptr) inputs[t] = joined_sum<D>(x_, m + t, begin, count);
      }
    }
  }

 private:
  const Matrix& matrix_;
  const RoundedInputs& x_;
  const int64_t unit_, units_;
  int32_t* const starts_;
  float* const inputs_;
};

// Dot products of two strips of rows, from panel `panel` on, with T tokens from m on, side by side in `x`: totals (T, P).
// Prefetches the two that come next.
template <int D, int T, int kBits>
[[gnu::noinline]] void dot_strips(const Matrix& matrix, const RoundedInputs& x, UnitInputs of_units, int64_t m, int64_t panel, int64_t last_panel, bool fetches, Lanes* totals) {
  using Own = Packing<kBits>;
  constexpr int P = kStripsAtOnce;
  const int64_t unit = unit_of(matrix), span = span_of(matrix), bytes = panel_bytes(matrix), ahead = P / kStrips * bytes;
  const int64_t step_size = x.step_size(), digit_size = x.width * kWholeStep;
  const bool has_offsets = matrix.group_offsets != nullptr;
  const char* rows[P];
  int64_t panels[P];
  for (int p = 0; p < P; ++p) {
    panels[p] = std::min(panel + p / kStrips, last_panel);
    rows[p] = static_cast<const char*>(matrix.weight) + panels[p] * bytes + p % kStrips * kBytes;
  }
  const int8_t* const all_digits = x.at(0, m, 0);
  StripScales scales[P];
  for (int p = 0; p < P; ++p) scales[p].begin(matrix, panels[p], p % kStrips);
  alignas(kBytes) Lanes parts[T * P];  // of a span
  for (int i = 0; i < T * P; ++i) totals[i] = Lanes{};
  for (int64_t first = 0; first < x.stride; first += span) {
    const int64_t last = std::min(first + span, x.stride);
    for (int p = 0; p < P; ++p) scales[p].load(first, last - first);
    for (int i = 0; i < T * P; ++i) parts[i] = Lanes{};
    int64_t group = 0;  // of the span
    for (int64_t begin = first; begin < last; begin += unit, ++group, of_units.starts += D * T, of_units.inputs += T) {
      const int64_t end = std::min(begin + unit, last);
      alignas(kBytes) IntLanes sums[D * T * P];
#pragma GCC unroll 12
      for (int i = 0; i < D * T; ++i) {
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) sums[i * P + p] = IntLanes{} + of_units.starts[i];
      }
      for (int64_t k = begin; k < end; k += Own::kNumbers) {
        const int8_t* const digits = all_digits + uint64_t(k) / kWholeStep * step_size + uint64_t(k) % kWholeStep;
        const uint64_t place = uint64_t(k) / Own::kNumbers * Own::kBytes;
        if (fetches) {
#pragma GCC unroll 4
          for (int p = 0; p < P; p += kStrips) {
#pragma GCC unroll 5
            for (int i = 0; i < Own::kBytes; i += kBlockBytes) __builtin_prefetch(rows[p] + place + i + ahead, 0, 2);
          }
        }
#pragma GCC unroll 8
        for (int q = 0; q < Own::kQuads; ++q) {
          ByteLanes weights[P];
#pragma GCC unroll 4
          for (int p = 0; p < P; ++p) weights[p] = Own::codes(rows[p] + place, q);
#pragma GCC unroll 3
          for (int d = 0; d < D; ++d) {
#pragma GCC unroll 6
            for (int t = 0; t < T; ++t) {
              const IntLanes own = in_all_lanes(digits + d * digit_size + t * kWholeStep + q * kQuad);
#pragma GCC unroll 4
              for (int p = 0; p < P; ++p) {
                IntLanes& sum = sums[(d * T + t) * P + p];
                sum = add_dots<Own::kIsSmall>(sum, weights[p], own);
              }
            }
          }
        }
      }
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        const Lanes scale = scales[p].scales[group], offset = scales[p].offsets[group];
#pragma GCC unroll 6
        for (int t = 0; t < T; ++t) {
          Lanes& part = parts[t * P + p];
          part = multiply_add(joined<D>([&](int d) { return sums[(d * T + t) * P + p]; }), scale, part);
          if (has_offsets) part = multiply_add(in_all_lanes(of_units.inputs[t]), offset, part);
        }
      }
    }
    const float* const input_scales = x.scales_at(m, first);
    for (int t = 0; t < T; ++t) {
      for (int p = 0; p < P; ++p) totals[t * P + p] = multiply_add(parts[t * P + p], in_all_lanes(input_scales[t]), totals[t * P + p]);
    }
  }
}

// Tokens that `dot_strips` multiplies at once, at most. Their sums stay in registers, AVX-512 has 32 and AVX2 16;
// without VNNI a product needs some more itself. Measured: `benchmarks/RESULTS.md`, "Passes of GGUF files".
template <int D>
constexpr int most_tokens() {
#if defined(__AVX512VNNI__)
  constexpr int kSums = 24;
#else
  constexpr int kSums = kBytes == 64 ? 16 : 8;
#endif
  return std::clamp(kSums / (D * kStripsAtOnce), 1, D < 3 ? 6 : 2);  // each number of tokens is a function to compile
}

// See `dot_strips`; T: tokens.
template <int D>
[[gnu::noinline]] void dot_some(const Matrix& matrix, const RoundedInputs& x, UnitInputs of_units, int64_t m, int64_t T, int64_t panel, int64_t last_panel, Lanes* totals) {
  with_bits(matrix.bits, [&](auto bits) {
    with_count<most_tokens<D>()>(T, [&](auto tokens) { dot_strips<D, decltype(tokens)::value, decltype(bits)::value>(matrix, x, of_units, m, panel, last_panel, m == 0, totals); });
  });
}

// See `multiply_rounded`; in vector registers.
template <int D, class Emit>
void multiply_strips(const Matrix& matrix, const RoundedInputs& x, int64_t M, int64_t begin, int64_t end, Emit&& emit) {
  constexpr int kMost = most_tokens<D>(), P = kStripsAtOnce;
  // Calls work(m, T) for tokens that stand side by side, in equal shares: each call reads the weights.
  const auto for_all_tokens = [&](auto&& work) {
    for (int64_t m = 0, T; m < M; m += T) {
      const int64_t rest = std::min<int64_t>(M - m, kTileTokens - m % kTileTokens), calls = (rest + kMost - 1) / kMost;
      T = (rest + calls - 1) / calls;
      work(m, T);
    }
  };
  const UnitInputsOfAll<D> of_units(matrix, x, M);
  for_all_tokens([&](int64_t m, int64_t T) { of_units.fill(m, T); });
  const int64_t last = (matrix.rows - 1) / kPanelRows;
  for (int64_t panel = begin / kPanelRows; panel * kPanelRows < end; panel += P / kStrips) {
    for_all_tokens([&](int64_t m, int64_t T) {
      Lanes totals[most_tokens<D>() * kStripsAtOnce];
      dot_some<D>(matrix, x, of_units.of(m), m, T, panel, last, totals);
      for (int64_t t = 0; t < T; ++t) {
        for (int p = 0; p < P / kStrips && (panel + p) * kPanelRows < end; ++p) {
          float own[kPanelRows];
          for (int i = 0; i < kStrips; ++i) store_lanes(own + i * kLanes, totals[t * P + p * kStrips + i]);
          emit_panel(matrix, panel + p, begin, end, m + t, own, emit);
        }
      }
    });
  }
}

}  // namespace
