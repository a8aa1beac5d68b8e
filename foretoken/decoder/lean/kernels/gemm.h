// Small-batch GEMM: each weight is read once, and meets every token of a pass while it is in a register.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include <omp.h>

#include "interface.h"
#include "vectors.h"

namespace {

constexpr int kRows = 6;          // rows of weights that meet a token likewise: 24 sums of 32 registers, or 12 of 16
constexpr int kLongRows = 4;      // likewise where kRows of them are more than kNear bytes
constexpr int kNear = 24 * 1024;  // bytes that stay in the nearest cache beside what passes by
constexpr int kRowsOfOne = 8;     // rows side by side when there is one token
constexpr int kShare = 24;        // rows are dealt out to threads in multiples of this

// As many weights as a register holds, the same elements of a token, and sums of their products. Tokens are kept in the
// model's dtype where the processor multiplies that, else in float32, and in the order in which weights are widened.
template <class T>
constexpr int kStep = kBytes / int(sizeof(T));
template <class T>
struct Fragment;
template <>
struct Fragment<float> {
  using Token = float;
  Lanes lanes;
  static constexpr int64_t place(int64_t k) { return k; }  // of an element of a token among those of a step
  static Fragment load(const float* p) {
    Lanes lanes = load_lanes(p);
#if defined(__AVX2__)
    __asm__("" : "+v"(lanes));  // or the compiler loads it anew for every use, and loads are what the loop waits for
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
  static Fragment load(const Bfloat16* p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
  Lanes add_product(const Fragment& other, Lanes sum) const {
    return (Lanes)_mm512_dpbf16_ps((__m512)sum, pairs, other.pairs);
  }
};
#else
template <>
struct Fragment<Bfloat16> {
  using Token = float;
  Lanes low, high;  // the first and the last four of every eight elements: what processors widen in one instruction each
  static constexpr int64_t place(int64_t k) { return k % 8 / 4 * kLanes + k / 8 * 4 + k % 4; }
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

// Inputs of a matrix in the order in which they are read. A step's elements of kTokens tokens stand side by side, then come
// the next elements of these tokens; a single token is one step after another.
template <class T>
struct Inputs {
  using Token = typename Fragment<T>::Token;
  Token* data;
  int64_t block, step;  // from one block of tokens, one step, to the next

  Inputs(Token* data, int64_t K, bool is_single)
      : data(data), block(kTokens * padded(K)), step(is_single ? kStep<T> : kTokens * kStep<T>) {}
  Token* at(int64_t m, int64_t k) const {
    return data + m / kTokens * block + k / kStep<T> * step + m % kTokens * kStep<T> + Fragment<T>::place(k % kStep<T>);
  }
  void put(int64_t m, int64_t k, float value) const { assign(*at(m, k), value); }
  void put(int64_t m, int64_t k, Lanes values) const {  // k: a multiple of kLanes
    if constexpr (std::is_same_v<Token, T>) {
      store_lanes(at(m, k), values);
    } else {
      for (int i = 0; i < kLanes; i += 4) std::memcpy(at(m, k + i), reinterpret_cast<const float*>(&values) + i, 16);
    }
  }
  static int64_t padded(int64_t K) { return (K + kStep<T> - 1) / kStep<T> * kStep<T>; }
  static int64_t size(int64_t M, int64_t K) { return (M + kTokens - 1) / kTokens * kTokens * padded(K); }
};

// Dot products of R rows of weights with C tokens, (C, R). Fetches `lines` cache lines from `ahead` on a step meanwhile.
template <class T, int R, int C>
inline void dot_block(const T* const* w, const typename Fragment<T>::Token* x, int64_t K, const char* ahead, int lines, float* out) {
  static_assert(R * C % 4 == 0 && R * C <= 2 * kLanes);
  Lanes sums[R * C] = {};
  int64_t k = 0;
  for (; k + kStep<T> <= K; k += kStep<T>, x += C * kStep<T>) {
    for (int i = 0; i < lines; ++i, ahead += kBytes) __builtin_prefetch(ahead);
    Fragment<T> tokens[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) tokens[c] = Fragment<T>::load(x + c * kStep<T>);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Fragment<T> row = Fragment<T>::load(w[r] + k);
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) sums[c * R + r] = row.add_product(tokens[c], sums[c * R + r]);
    }
  }
  store_lanes(out, sums_over_lanes<std::min(R * C, kLanes)>(sums));
  if constexpr (R * C > kLanes) store_lanes(out + kLanes, sums_over_lanes<R * C - kLanes>(sums + kLanes));
  for (int i = 0; k + i < K; ++i) {
    for (int c = 0; c < C; ++c) {
      for (int r = 0; r < R; ++r) {
        out[c * R + r] = std::fma(to_float(w[r][k + i]), to_float(x[c * kStep<T> + Fragment<T>::place(i)]), out[c * R + r]);
      }
    }
  }
}

// The block at row n and token m; rows past the end repeat the last one.
template <class T, int R, int C>
inline void block(const Matrix& matrix, const Inputs<T>& x, int64_t n, int64_t m, int lines, float* out) {
  const T* w[R];
  for (int r = 0; r < R; ++r) w[r] = static_cast<const T*>(matrix.weight) + std::min(n + r, matrix.rows - 1) * matrix.cols;
  // Each block of tokens fetches its share of the rows after these; a prefetch past the end is harmless.
  const char* next = reinterpret_cast<const char*>(w[0] + R * matrix.cols) + m / C * (matrix.cols / kStep<T>) * lines * kBytes;
  dot_block<T, R, C>(w, x.at(m, 0), matrix.cols, next, lines, out);
  if (matrix.bias != nullptr) {
    for (int c = 0; c < C; ++c) {
      for (int r = 0; r < R; ++r) out[c * R + r] += matrix.bias[std::min(n + r, matrix.rows - 1)];
    }
  }
}

// See `multiply`; for rows begin..end.
template <class T, int R, int C, class Emit>
void multiply_rows(const Matrix& matrix, const Inputs<T>& x, int64_t M, int64_t begin, int64_t end, Emit&& emit) {
  const int64_t blocks = (M + C - 1) / C;
  const int lines = int((R + blocks - 1) / blocks);
  float out[2 * kLanes];
  for (int64_t n = begin; n < end; n += R) {
    for (int64_t m = 0; m < M; m += C) {
      block<T, R, C>(matrix, x, n, m, m / C < R ? lines : 0, out);
      for (int c = 0; c < std::min<int64_t>(C, M - m); ++c) {
        if (n + R <= end) {
          emit(m + c, n, std::integral_constant<int, R>(), out + c * R);
        } else {
          emit(m + c, n, int(end - n), out + c * R);
        }
      }
    }
  }
}

// x (M, K) times the transposed matrix, this thread's share of the rows. emit(m, n, count, values) takes the outputs of
// token m at `count` rows from n on.
template <class T, class Emit>
void multiply(const Matrix& matrix, const Inputs<T>& x, int64_t M, Emit&& emit) {
  const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
  const int64_t units = (matrix.rows + kShare - 1) / kShare;
  const int64_t begin = units * thread / threads * kShare;
  const int64_t end = std::min(units * (thread + 1) / threads * kShare, matrix.rows);
  if (M == 1) {
    multiply_rows<T, kRowsOfOne, 1>(matrix, x, M, begin, end, emit);
  } else if (matrix.cols * kRows * int64_t(sizeof(T)) <= kNear) {
    multiply_rows<T, kRows, kTokens>(matrix, x, M, begin, end, emit);
  } else {
    multiply_rows<T, kLongRows, kTokens>(matrix, x, M, begin, end, emit);
  }
}

}  // namespace
