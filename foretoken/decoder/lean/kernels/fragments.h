// Weights in a register, as stored or widened, and the elements of a token that are multiplied with them.
#pragma once

#include <cstdint>

#include "vectors.h"

namespace {

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

// Integers in -127..127, to be multiplied by the scale of their row; bfloat16 holds them exactly.
#if defined(__AVX512BF16__)
template <>
struct Fragment<Int8> {
  using Token = Bfloat16;
  __m512bh low, high;
  static constexpr int64_t place(int64_t k) { return k; }
  static constexpr int kSide = kLanes;
  static Fragment load(const Int8* p) {
    const auto widened = [p](int i) { return (__m512)load_lanes(p + i * kLanes); };
    return {_mm512_cvtne2ps_pbh(widened(1), widened(0)), _mm512_cvtne2ps_pbh(widened(3), widened(2))};
  }
  static Fragment load(const Bfloat16* p) {
    return {(__m512bh)_mm512_loadu_si512(p), (__m512bh)_mm512_loadu_si512(p + 2 * kLanes)};
  }
  Lanes add_product(const Fragment& other, Lanes sum) const {
    return (Lanes)_mm512_dpbf16_ps(_mm512_dpbf16_ps((__m512)sum, low, other.low), high, other.high);
  }
};
#else
template <>
struct Fragment<Int8> {
  using Token = float;
  Lanes lanes[4];
  static constexpr int64_t place(int64_t k) { return k; }
  static constexpr int kSide = kLanes;
  template <class E>
  static Fragment load(const E* p) {
    return {{load_lanes(p), load_lanes(p + kLanes), load_lanes(p + 2 * kLanes), load_lanes(p + 3 * kLanes)}};
  }
  Lanes add_product(const Fragment& other, Lanes sum) const {
    for (int i = 0; i < 4; ++i) sum = multiply_add(lanes[i], other.lanes[i], sum);
    return sum;
  }
};
#endif

}  // namespace
