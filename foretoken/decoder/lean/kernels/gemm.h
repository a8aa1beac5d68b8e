// Small-batch GEMM: each weight is read once, and meets every token of a pass while it is in a register.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <type_traits>

#include <omp.h>
#include <unistd.h>

#include "fragments.h"
#include "interface.h"
#include "vectors.h"

namespace {

constexpr int kRows = 6;            // rows of weights that meet a token likewise: 24 sums of 32 registers, or 12 of 16
constexpr int kNear = 24 * 1024;    // bytes of them that stay in the nearest cache beside what passes by
constexpr int kDepth = 32;          // steps of longer rows that meet tokens one after another,
constexpr int kPanel = 64;          // and tokens that meet them
constexpr int kRowsOfOne = 8;       // rows side by side when there is one token
constexpr int kShare = 24;          // rows are dealt out to threads in multiples of this,
constexpr int kWholeShare = std::lcm(kShare, kLanes);  // or of this, where each thread's rows have to fill registers

// Bytes of rows that fit the nearest cache together with the next ones and with tokens.
inline int64_t nearest_bytes() {
  static const int64_t bytes = [] {
    int64_t cache = 32 * 1024;
#if defined(_SC_LEVEL1_DCACHE_SIZE)
    if (const long found = sysconf(_SC_LEVEL1_DCACHE_SIZE); found > 0) cache = found;
#endif
    return cache / 4;
  }();
  return bytes;
}

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
    constexpr int kSide = Fragment<T>::kSide;
    if constexpr (kSide == kLanes) return store_lanes(at(m, k), values);
    Token tokens[kLanes];
    store_lanes(tokens, values);
    for (int i = 0; i < kLanes; i += kSide) std::memcpy(at(m, k + i), tokens + i, kSide * sizeof(Token));
  }
  void put_anywhere(int64_t m, int64_t k, float value) const { put(m, k, value); }
  void put_anywhere(int64_t m, int64_t k, Lanes values) const {
    if (k % kLanes == 0) return put(m, k, values);
    for (int i = 0; i < kLanes; ++i) put(m, k + i, values[i]);
  }
  static int64_t padded(int64_t K) { return (K + kStep<T> - 1) / kStep<T> * kStep<T>; }
  static int64_t size(int64_t M, int64_t K) { return (M + kTokens - 1) / kTokens * kTokens * padded(K); }
};

// Fetches a cache line ahead of its use: into the nearest cache, or only as near as the second one.
template <bool kIsFar>
inline void fetch(const char* p) {
  if constexpr (kIsFar) {
    __builtin_prefetch(p, 0, 2);
  } else {
    __builtin_prefetch(p);
  }
}

// Adds products of steps from..to of R rows of weights with C tokens to their sums over lanes, (C, R); x begins at step
// `from`. Fetches `lines` cache lines from `ahead` on a step meanwhile.
template <class T, int R, int C, bool kIsFar>
FORETOKEN_INLINE void add_steps(const T* const* w, const typename Fragment<T>::Token* x, int64_t from, int64_t to, const char* ahead, int lines, Lanes (&sums)[R * C]) {
  for (int64_t k = from; k < to; k += kStep<T>, x += C * kStep<T>) {
    for (int i = 0; i < lines; ++i, ahead += kBytes) fetch<kIsFar>(ahead);
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
}

// Dot products (C, R) from their sums over lanes, and from the elements past the last whole step, at `whole`; x begins there.
template <class T, int R, int C>
FORETOKEN_INLINE void finish_dots(const Lanes* sums, const T* const* w, const typename Fragment<T>::Token* x, int64_t whole, int64_t K, float* out) {
  static_assert(R * C % 4 == 0 && R * C <= 2 * kLanes);
  store_lanes(out, sums_over_lanes<std::min(R * C, kLanes)>(sums));
  if constexpr (R * C > kLanes) store_lanes(out + kLanes, sums_over_lanes<R * C - kLanes>(sums + kLanes));
  for (int i = 0; whole + i < K; ++i) {
    for (int c = 0; c < C; ++c) {
      for (int r = 0; r < R; ++r) {
        out[c * R + r] = std::fma(to_float(w[r][whole + i]), to_float(x[c * kStep<T> + Fragment<T>::place(i)]), out[c * R + r]);
      }
    }
  }
}

// Dot products of R rows of weights with C tokens, (C, R).
template <class T, int R, int C, bool kIsFar = false>
inline void dot_block(const T* const* w, const typename Fragment<T>::Token* x, int64_t K, const char* ahead, int lines, float* out) {
  const int64_t whole = K / kStep<T> * kStep<T>;
  Lanes sums[R * C] = {};
  add_steps<T, R, C, kIsFar>(w, x, 0, whole, ahead, lines, sums);
  finish_dots<T, R, C>(sums, w, x + whole * C, whole, K, out);
}

// R rows of a matrix from row n on; rows past the end repeat the last one.
template <class T, int R>
struct Rows {
  const T* at[R];

  Rows(const Matrix& matrix, int64_t n) {
    for (int r = 0; r < R; ++r) at[r] = static_cast<const T*>(matrix.weight) + std::min(n + r, matrix.rows - 1) * matrix.cols;
  }
  // Where the block of tokens m.. of `blocks` begins to fetch its share of the rows after these, `lines` cache lines a step;
  // a prefetch past the end is harmless.
  const char* after(const Matrix& matrix, int64_t block, int64_t step, int lines) const {
    return reinterpret_cast<const char*>(at[0] + R * matrix.cols) + (block * (matrix.cols / kStep<T>) + step) * lines * kBytes;
  }
};

// Scales the dot products (C, R) at row n and token m, adds biases and hands them on, see `multiply`; for rows before `end`.
template <int R, int C, class Emit>
FORETOKEN_INLINE void emit_block(const Matrix& matrix, int64_t n, int64_t end, int64_t m, int64_t M, float* out, Emit&& emit) {
  if (matrix.scales != nullptr) {  // by fma, or a compiler joins some of these products with what `emit` adds
    for (int c = 0; c < C; ++c) {
      for (int r = 0; r < R; ++r) out[c * R + r] = std::fma(out[c * R + r], matrix.scales[std::min(n + r, matrix.rows - 1)], 0.0f);
    }
  }
  if (matrix.bias != nullptr) {
    for (int c = 0; c < C; ++c) {
      for (int r = 0; r < R; ++r) out[c * R + r] += matrix.bias[std::min(n + r, matrix.rows - 1)];
    }
  }
  for (int c = 0; c < std::min<int64_t>(C, M - m); ++c) {
    if (n + R <= end) {
      emit(m + c, n, std::integral_constant<int, R>(), out + c * R);
    } else {
      emit(m + c, n, int(end - n), out + c * R);
    }
  }
}

// Cache lines that each of some blocks of tokens fetches a step, so that all of them fetch R rows.
template <int R>
int lines_each(int64_t blocks) {
  return int((R + blocks - 1) / blocks);
}

// See `multiply`; for rows begin..end.
template <class T, int R, int C, bool kIsFar, class Emit>
void multiply_rows(const Matrix& matrix, const Inputs<T>& x, int64_t M, int64_t begin, int64_t end, Emit&& emit) {
  const int lines = lines_each<R>((M + C - 1) / C);
  float out[2 * kLanes];
  for (int64_t n = begin; n < end; n += R) {
    const Rows<T, R> rows(matrix, n);
    for (int64_t m = 0; m < M; m += C) {
      const char* next = rows.after(matrix, m / C, 0, lines);
      dot_block<T, R, C, kIsFar>(rows.at, x.at(m, 0), matrix.cols, next, m / C < R ? lines : 0, out);
      emit_block<R, C>(matrix, n, end, m, M, out, emit);
    }
  }
}

// Likewise for rows that are longer than the nearest cache: some steps of them meet all tokens of a panel, then the next.
// The sums over lanes wait in memory meanwhile, so that every sum is taken in the same order.
template <class T, int R, int C, class Emit>
void multiply_long_rows(const Matrix& matrix, const Inputs<T>& x, int64_t M, int64_t begin, int64_t end, Emit&& emit) {
  const int lines = lines_each<R>((M + C - 1) / C);
  const int64_t K = matrix.cols, whole = K / kStep<T> * kStep<T>, depth = kDepth * kStep<T>;
  float out[2 * kLanes];
  Lanes waiting[kPanel / C][R * C];
  for (int64_t n = begin; n < end; n += R) {
    const Rows<T, R> rows(matrix, n);
    for (int64_t first = 0; first < M; first += kPanel) {
      const int64_t last = std::min<int64_t>(first + kPanel, M);
      for (int64_t from = 0; from < whole; from += depth) {
        for (int64_t m = first; m < last; m += C) {
          const char* next = rows.after(matrix, m / C, from / kStep<T>, lines);
          Lanes* kept = waiting[(m - first) / C];
          Lanes sums[R * C];
#pragma GCC unroll 32
          for (int i = 0; i < R * C; ++i) sums[i] = from == 0 ? Lanes{} : kept[i];
          add_steps<T, R, C, true>(rows.at, x.at(m, from), from, std::min(from + depth, whole), next, m / C < R ? lines : 0, sums);
#pragma GCC unroll 32
          for (int i = 0; i < R * C; ++i) kept[i] = sums[i];
        }
      }
      for (int64_t m = first; m < last; m += C) {
        finish_dots<T, R, C>(waiting[(m - first) / C], rows.at, x.at(m, whole), whole, K, out);
        emit_block<R, C>(matrix, n, end, m, M, out, emit);
      }
    }
  }
}

// The rows begin..end of a matrix that this thread computes, dealt out in multiples of `unit`.
struct Share {
  int64_t begin, end;

  Share(int64_t rows, int64_t unit) {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num(), units = (rows + unit - 1) / unit;
    begin = units * thread / threads * unit;
    end = std::min(units * (thread + 1) / threads * unit, rows);
  }
};

// x (M, K) times the transposed matrix, this thread's share of the rows. emit(m, n, count, values) takes the outputs of
// token m at `count` rows from n on.
template <class T, int kUnit = kShare, class Emit>
void multiply(const Matrix& matrix, const Inputs<T>& x, int64_t M, Emit&& emit) {
  const auto [begin, end] = Share(matrix.rows, kUnit);
  const int64_t bytes = matrix.cols * kRows * int64_t(sizeof(T));
  if (M == 1) {
    multiply_rows<T, kRowsOfOne, 1, false>(matrix, x, M, begin, end, emit);
  } else if (bytes <= nearest_bytes()) {
    multiply_rows<T, kRows, kTokens, false>(matrix, x, M, begin, end, emit);
  } else if (bytes <= kNear) {
    multiply_rows<T, kRows, kTokens, true>(matrix, x, M, begin, end, emit);
  } else {
    multiply_long_rows<T, kRows, kTokens>(matrix, x, M, begin, end, emit);
  }
}

}  // namespace
