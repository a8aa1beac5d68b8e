// Vector registers, the dtypes, element-wise functions over registers, and weights in a register beside the elements of a
// token.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// For the innermost loops: if they were called, their registers would go through memory. A compiler's own choice
// changes with every file that uses them.
#define FORETOKEN_INLINE inline __attribute__((always_inline))

// Whether matrix units multiply bfloat16, and queries with keys. Using their registers without the system's permission
// ends the process.
#if defined(FORETOKEN_MAY_USE_TILES) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512DQ__) && defined(__AVX512BF16__)
#define FORETOKEN_TILES
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64;        // of a vector register
constexpr int kTokens = 4;        // tokens that are multiplied with a weight in a register
#else
constexpr int kBytes = 32;
constexpr int kTokens = 2;
#endif
constexpr int kLanes = kBytes / int(sizeof(float));
typedef float Lanes __attribute__((vector_size(kBytes), aligned(4), may_alias));
typedef int32_t IntLanes __attribute__((vector_size(kBytes), aligned(4), may_alias));
typedef uint32_t BitLanes __attribute__((vector_size(kBytes), aligned(4), may_alias));

struct Bfloat16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(Bfloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline void assign(float& to, float x) { to = x; }
inline void assign(Bfloat16& to, float x) {  // round to nearest even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  to.bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline Lanes load_lanes(const float* p) { return *reinterpret_cast<const Lanes*>(p); }
inline Lanes load_lanes(const Bfloat16* p) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16);
#elif defined(__AVX2__)
  return (Lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16);
#else
  typedef uint16_t Halves __attribute__((vector_size(kBytes / 2), aligned(2), may_alias));
  const BitLanes words = __builtin_convertvector(*reinterpret_cast<const Halves*>(p), BitLanes) << 16;
  return reinterpret_cast<const Lanes&>(words);
#endif
}
inline Lanes in_all_lanes(float x) {  // x + zeros would take an addition, and changes x = -0
#if defined(__AVX512F__)
  return (Lanes)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (Lanes)_mm256_set1_ps(x);
#else
  Lanes result;
  for (int i = 0; i < kLanes; ++i) result[i] = x;
  return result;
#endif
}
inline float half_to_float(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, size = bits & 0x7fff;
  if (size >= 0x7c00) {  // infinite, or NaN
    const uint32_t word = sign | 0x7f800000 | (size & 0x3ff) << 13;
    float result;
    std::memcpy(&result, &word, sizeof result);
    return result;
  }
  const float value = size >= 0x400 ? std::ldexp(float(0x400 | (size & 0x3ff)), int(size >> 10) - 25) : std::ldexp(float(size), -24);
  return sign ? -value : value;
}
inline Lanes load_halves(const uint16_t* p) {  // numbers in half precision
#if defined(__AVX512F__)
  return (Lanes)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return (Lanes)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Lanes result;
  for (int i = 0; i < kLanes; ++i) result[i] = half_to_float(p[i]);
  return result;
#endif
}
inline Lanes load_bytes(const int8_t* p) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return (Lanes)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  Lanes result;
  for (int i = 0; i < kLanes; ++i) result[i] = float(p[i]);
  return result;
#endif
}
inline void store_lanes(float* p, Lanes x) { *reinterpret_cast<Lanes*>(p) = x; }
inline BitLanes rounded(Lanes x) {  // to bfloat16 in each lower half, as `assign`
  const BitLanes bits = reinterpret_cast<const BitLanes&>(x);
  return x != x ? BitLanes{} + 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
inline void store_lanes(Bfloat16* p, Lanes x) {
  typedef uint16_t Halves __attribute__((vector_size(kBytes / 2), aligned(2), may_alias));
  *reinterpret_cast<Halves*>(p) = __builtin_convertvector(rounded(x), Halves);
}
inline Lanes greater(Lanes a, Lanes b) { return a > b ? a : b; }
// The nearest integers, ties to even; any number for NaN.
inline IntLanes nearest(Lanes x) {
#if defined(__AVX512F__)
  return (IntLanes)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
  return (IntLanes)_mm256_cvtps_epi32((__m256)x);
#else
  IntLanes result;
  for (int i = 0; i < kLanes; ++i) result[i] = x[i] == x[i] ? int32_t(std::nearbyint(x[i])) : 0;
  return result;
#endif
}

constexpr int64_t kPair = 2 * kLanes;

// Two registers side by side; where the processor rounds to bfloat16, numbers below the normal ones become 0.
inline void store_pair(float* p, Lanes first, Lanes second) {
  store_lanes(p, first);
  store_lanes(p + kLanes, second);
}
inline void store_pair(Bfloat16* p, Lanes first, Lanes second) {
#if defined(__AVX512BF16__)
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#else
  store_lanes(p, first);
  store_lanes(p + kLanes, second);
#endif
}

// A row of float32 in another dtype, rounded as `assign` does.
template <class To>
inline void copy_row(To* to, const float* from, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store_lanes(to + i, load_lanes(from + i));
  for (; i < count; ++i) assign(to[i], from[i]);
}

// a * b + sum, rounded once if the processor can. A compiler left to itself rounds twice in some loops and not in
// others.
inline Lanes multiply_add(Lanes a, Lanes b, Lanes sum) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
  return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
  return a * b + sum;
#endif
}

// Sums over the lanes of up to kLanes vectors: lane i of the result belongs to vector i; all use the same tree of
// additions.
#if defined(__AVX512F__)
template <int kCount>
FORETOKEN_INLINE Lanes sums_over_lanes(const Lanes* v) {
  const auto pairs = [](Lanes a, Lanes b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
           __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  };
  const auto quads = [](Lanes a, Lanes b) {
    return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  };
  const auto quarters = [](Lanes a, Lanes b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  };
  Lanes four[4] = {};
#pragma GCC unroll 4
  for (int i = 0; i < kCount / 4; ++i) four[i] = quads(pairs(v[4 * i], v[4 * i + 1]), pairs(v[4 * i + 2], v[4 * i + 3]));
  const Lanes upper = kCount > 8 ? quarters(four[2], four[3]) : Lanes{};
  return quarters(quarters(four[0], four[1]), upper);
}
#else
template <int kCount>
FORETOKEN_INLINE Lanes sums_over_lanes(const Lanes* v) {
  const auto pairs = [](Lanes a, Lanes b) {
    return __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) +
           __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
  };
  const auto halves = [](Lanes a, Lanes b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
  };
  const Lanes lower = pairs(pairs(v[0], v[1]), pairs(v[2], v[3]));
  if constexpr (kCount <= 4) {
    return halves(lower, lower);
  } else {
    return halves(lower, pairs(pairs(v[4], v[5]), pairs(v[6], v[7])));
  }
}
#endif

inline Lanes exponential(Lanes x) {  // relative error below 2e-7; 0 below -87
  const Lanes low = Lanes{} - 87.0f, high = Lanes{} + 88.0f;
#if defined(__AVX512F__)
  const __mmask16 is_large = _mm512_cmp_ps_mask((__m512)x, (__m512)low, _CMP_NLT_UQ);  // or NaN
  x = (Lanes)_mm512_min_ps((__m512)high, (__m512)x);
#else
  const IntLanes underflows = x < low;
  x = underflows ? low : x;
  x = x > high ? high : x;
#endif
  const Lanes magic = Lanes{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Lanes shifted = x * 1.44269504088896341f + magic, n = shifted - magic;
  const Lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Lanes p = Lanes{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
#if defined(__AVX512F__)
  return (Lanes)_mm512_maskz_scalef_ps(is_large, (__m512)p, (__m512)n);  // p * 2^n
#else
  const IntLanes power = (__builtin_convertvector(n, IntLanes) + 127) << 23;
  const Lanes result = p * reinterpret_cast<const Lanes&>(power);
  return underflows ? Lanes{} : result;
#endif
}

inline Lanes power_of_two(Lanes x) {  // 2^x, relative error below 3e-7; below -125 it is 0, or nearly 0
#if defined(__AVX512DQ__)
  const Lanes r = (Lanes)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);  // 0 for -inf
#else
  const IntLanes underflows = x < -125.0f;
  x = underflows ? Lanes{} - 125.0f : x;
  const Lanes magic = Lanes{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Lanes n = (x - 0.5f + magic) - magic, r = x - n;
#endif
  Lanes p = Lanes{} + 1.8671307479962707e-3f;  // with p(0) = 1, the least relative error on 0..1
  p = multiply_add(p, r, Lanes{} + 9.017028845846653e-3f);
  p = multiply_add(p, r, Lanes{} + 5.579991266131401e-2f);
  p = multiply_add(p, r, Lanes{} + 2.4016444385051727e-1f);
  p = multiply_add(p, r, Lanes{} + 6.931512951850891e-1f);
  p = multiply_add(p, r, Lanes{} + 1.0f);
#if defined(__AVX512DQ__)
  return (Lanes)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
  const IntLanes power = (__builtin_convertvector(n, IntLanes) + 127) << 23;
  const Lanes result = p * reinterpret_cast<const Lanes&>(power);
  return underflows ? Lanes{} : result;
#endif
}

// The numerators of a softmax of two registers of scores: 2^(score * scale - top).
struct Numerators {
  Lanes first, second;

  Numerators(Lanes first, Lanes second, float scale, float top) : first(of(first, scale, top)), second(of(second, scale, top)) {}

 private:
  static Lanes of(Lanes scores, float scale, float top) {
    return power_of_two(multiply_add(scores, in_all_lanes(scale), -in_all_lanes(top)));
  }
};

inline bool any_of(IntLanes flags) {  // whether a comparison holds in some lane
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)flags, (__m512i)flags) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_epi8((__m256i)flags) != 0;
#else
  bool result = false;
  for (int i = 0; i < kLanes; ++i) result |= flags[i] != 0;
  return result;
#endif
}

inline Lanes silu(Lanes x) { return x / (1.0f + exponential(-x)); }

inline Lanes gelu_tanh(Lanes x) {  // x (1 + tanh(u)) / 2 is x times the logistic function of 2 u
  const Lanes u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return x / (1.0f + exponential(-2.0f * u));
}

inline Lanes gelu(Lanes x) {
  for (int i = 0; i < kLanes; ++i) x[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.7071067811865476f));
  return x;
}

inline Lanes hyperbolic_tangent(Lanes x) {  // relative error below 1e-6
  const Lanes square = x * x, size = x < 0.0f ? -x : x, large = 1.0f - 2.0f / (exponential(2.0f * size) + 1.0f);
  Lanes p = square * 0.021869488536155203f - 0.05396825396825397f;
  p = p * square + 0.13333333333333333f;
  p = p * square - 0.3333333333333333f;
  const Lanes small = x + x * square * p, far = x < 0.0f ? -large : large;
  return size < 0.3f ? small : far;
}

inline float sum_of_lanes(Lanes x) {
  const Lanes v[4] = {x};
  return sums_over_lanes<4>(v)[0];
}

inline float greatest_lane(Lanes x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  const Lanes half = __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3);
  x = x < half ? half : x;
  const Lanes quarter = __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5);
  x = x < quarter ? quarter : x;
  return std::max(x[0], x[1]);
#endif
}

// As many weights as a register holds, the same elements of a token, and sums of their products. Tokens have the
// model's dtype if the processor multiplies it, otherwise float32, in the order of the widened weights.
template <class T>
constexpr int kStep = kBytes / int(sizeof(T));
template <class T>
struct Fragment;
template <>
struct Fragment<float> {
  using Token = float;
  Lanes lanes;
  static constexpr int64_t place(int64_t k) { return k; }  // of an element of a token among those of a step
  static constexpr int kSide = kLanes;                     // elements that stay side by side
  static Fragment load(const float* p) {
    Lanes lanes = load_lanes(p);
#if defined(__AVX2__)
    __asm__("" : "+v"(lanes));  // or the compiler reloads it for every use, and the loop waits for loads
#endif
    return {lanes};
  }
  Lanes add_product(const Fragment& other, Lanes sum) const { return multiply_add(lanes, other.lanes, sum); }
};
#if defined(__AVX512BF16__)
template <>
struct Fragment<Bfloat16> {
  using Token = Bfloat16;
  __m512bh pairs;
  static constexpr int64_t place(int64_t k) { return k; }
  static constexpr int kSide = kLanes;
  static Fragment load(const Bfloat16* p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
  Lanes add_product(const Fragment& other, Lanes sum) const {
    return (Lanes)_mm512_dpbf16_ps((__m512)sum, pairs, other.pairs);
  }
};
#else
template <>
struct Fragment<Bfloat16> {
  using Token = float;
  Lanes low, high;  // the first and the last four of every eight elements: one instruction widens each
  static constexpr int64_t place(int64_t k) { return k % 8 / 4 * kLanes + k / 8 * 4 + k % 4; }
  static constexpr int kSide = 4;
  static Fragment load(const Bfloat16* p) {
    typedef uint16_t Halves __attribute__((vector_size(kBytes), aligned(2), may_alias));
    const Halves halves = *reinterpret_cast<const Halves*>(p), zeros{};
#if defined(__AVX512BW__)
    return {(Lanes)_mm512_unpacklo_epi16((__m512i)zeros, (__m512i)halves),
            (Lanes)_mm512_unpackhi_epi16((__m512i)zeros, (__m512i)halves)};
#elif defined(__AVX2__)
    return {(Lanes)_mm256_unpacklo_epi16((__m256i)zeros, (__m256i)halves),
            (Lanes)_mm256_unpackhi_epi16((__m256i)zeros, (__m256i)halves)};
#else
    Fragment result;
    for (int i = 0; i < kLanes; ++i) {
      result.low[i] = to_float(p[i / 4 * 8 + i % 4]);
      result.high[i] = to_float(p[i / 4 * 8 + 4 + i % 4]);
    }
    return result;
#endif
  }
  static Fragment load(const float* p) { return {load_lanes(p), load_lanes(p + kLanes)}; }
  Lanes add_product(const Fragment& other, Lanes sum) const {
    return multiply_add(high, other.high, multiply_add(low, other.low, sum));
  }
};
#endif

}  // namespace
