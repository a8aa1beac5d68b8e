// Inputs of a matrix, in the order of its kernel, and the rows of the matrix that each thread computes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <type_traits>

#include <omp.h>

#include "fragments.h"
#include "vectors.h"

namespace {

// The rows begin..end of a matrix that this thread computes, in multiples of `unit`.
struct Share {
  int64_t begin, end;

  Share(int64_t rows, int64_t unit) {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num(), units = (rows + unit - 1) / unit;
    begin = units * thread / threads * unit;
    end = std::min(units * (thread + 1) / threads * unit, rows);
  }
};

// For products in vector registers, see `gemm.h`: a step's elements of kTokens tokens stand side by side, then the next
// elements of these tokens. A single token has one step after another.
template <class T>
struct Inputs {
  using Token = typename Fragment<T>::Token;
  static constexpr int kShare = 24;                             // threads get rows in multiples of this,
  static constexpr int kWholeShare = std::lcm(kShare, kLanes);  // or of this, if each thread's rows have to fill registers
  Token* data;
  int64_t block, step;  // from one block of tokens, and from one step, to the next

  // data: room for `size(M, K)` elements.
  Inputs(Token* data, int64_t M, int64_t K)
      : data(data), block(kTokens * padded(K)), step(M == 1 ? kStep<T> : kTokens * kStep<T>) {}
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
  // Sets token m to the first K elements of token `source` of others.
  void copy(int64_t m, const Inputs& from, int64_t source, int64_t K) const {
    for (int64_t k = 0; k < K; k += kStep<T>) std::copy_n(from.at(source, k), kStep<T>, at(m, k));
  }
  static int64_t padded(int64_t K) { return (K + kStep<T> - 1) / kStep<T> * kStep<T>; }
  static int64_t padded_tokens(int64_t M) { return (M + kTokens - 1) / kTokens * kTokens; }
  static int64_t size(int64_t M, int64_t K) { return padded_tokens(M) * padded(K); }
};

constexpr int kTileTokens = 16;  // tokens of one instruction,
constexpr int kTileStep = 32;    // with as many elements of each

// For products in tiles, see `tiles.h`: two elements of each of up to kTileTokens tokens stand side by side, then the
// next two of all. Fewer tokens stand side by side if there are fewer.
struct TileInputs {
  using Token = Bfloat16;
  static constexpr int kShare = 32, kWholeShare = 32;  // see `Inputs`
  Token* data;
  int64_t width, block;  // tokens side by side; from this many tokens to the next

  // data: room for `size(M, K)` elements.
  TileInputs(Token* data, int64_t M, int64_t K)
      : data(data), width(std::min<int64_t>(M, kTileTokens)), block(width * padded(K)) {}
  Token* at(int64_t m, int64_t k) const {
    return data + m / kTileTokens * block + (k / 2 * width + m % kTileTokens) * 2 + k % 2;
  }
  void put(int64_t m, int64_t k, float value) const { assign(*at(m, k), value); }
  void put(int64_t m, int64_t k, Lanes values) const {  // k: a multiple of 2
    Token tokens[kLanes];
    store_lanes(tokens, values);
    Token* to = at(m, k);
    const int64_t stride = width;  // no store changes it
    for (int i = 0; i < kLanes; i += 2) std::memcpy(to + i * stride, tokens + i, 2 * sizeof(Token));
  }
  void copy(int64_t m, const TileInputs& from, int64_t source, int64_t K) const {
    for (int64_t k = 0; k < K; k += 2) std::memcpy(at(m, k), from.at(source, k), 2 * sizeof(Token));
  }
  static int64_t padded(int64_t K) { return (K + kTileStep - 1) / kTileStep * kTileStep; }
  static int64_t padded_tokens(int64_t M) { return M <= kTileTokens ? M : (M + kTileTokens - 1) / kTileTokens * kTileTokens; }
  static int64_t size(int64_t M, int64_t K) { return padded_tokens(M) * padded(K); }
};

#if defined(FORETOKEN_TILES)
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
#endif

// Of matrices in a dtype, or of keys.
template <class T>
constexpr bool kIsTiled = kHasTiles && !std::is_same_v<T, float>;
template <class T>
using MatrixInputs = std::conditional_t<kIsTiled<T>, TileInputs, Inputs<T>>;

// Tokens that inputs have room for in blocks of any kernel; -1 if 64 bits cannot count them.
constexpr int kMostTokens = kTileTokens;
inline int64_t most_inputs(int64_t M) {
  return M > INT64_MAX - kMostTokens ? -1 : (M + kMostTokens - 1) / kMostTokens * kMostTokens;
}

// Calls work(m, begin, end) for this thread's share of the inputs of M tokens, elements begin..end of token m: whole
// blocks of tokens, or, of few tokens, some of the elements of each. Tokens of a block share cache lines: two threads
// that write them would take the lines from each other at every store.
template <class Work>
void share_inputs(int64_t M, int64_t K, Work&& work) {
  const int64_t blocks = (M + kMostTokens - 1) / kMostTokens;
  const bool are_many = blocks >= 2 * omp_get_num_threads();
  const Share tokens(are_many ? M : 0, kMostTokens), elements(are_many ? 0 : K, kTileStep);
  for (int64_t m = tokens.begin; m < tokens.end; ++m) work(m, int64_t(0), K);
  for (int64_t m = 0; m < M && elements.begin < elements.end; ++m) work(m, elements.begin, elements.end);
}

// Writes elements from any index on.
template <class X>
inline void put_anywhere(const X& inputs, int64_t m, int64_t k, float value) {
  inputs.put(m, k, value);
}
template <class X>
inline void put_anywhere(const X& inputs, int64_t m, int64_t k, Lanes values) {
  if (k % kLanes == 0) return inputs.put(m, k, values);
  for (int i = 0; i < kLanes; ++i) inputs.put(m, k + i, values[i]);
}

}  // namespace
