// Small-batch GEMM: each weight is read once and multiplied with every token of a pass while it is in a register. Inputs
// stand in the order of the kernel that reads them, and threads share the rows of the matrix.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <type_traits>

#include <omp.h>
#include <unistd.h>

#include "interface.h"
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
  void* rounded;        // memory for `RoundedInputs`; null if no matrix is in integers
  int64_t block, step;  // from one block of tokens, and from one step, to the next

  // data: room for `size(M, K)` elements.
  Inputs(Token* data, int64_t M, int64_t K, void* rounded = nullptr)
      : data(data), rounded(rounded), block(kTokens * padded(K)), step(M == 1 ? kStep<T> : kTokens * kStep<T>) {}
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
  Lanes load(int64_t m, int64_t k) const {  // k: a multiple of kLanes
    constexpr int kSide = Fragment<T>::kSide;
    if constexpr (kSide == kLanes) return load_lanes(at(m, k));
    Token tokens[kLanes];
    for (int i = 0; i < kLanes; i += kSide) std::memcpy(tokens + i, at(m, k + i), kSide * sizeof(Token));
    return load_lanes(tokens);
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
  void* rounded;
  int64_t width, block;  // tokens side by side; from this many tokens to the next

  // data: room for `size(M, K)` elements.
  TileInputs(Token* data, int64_t M, int64_t K, void* rounded = nullptr)
      : data(data), rounded(rounded), width(std::min<int64_t>(M, kTileTokens)), block(width * padded(K)) {}
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
  Lanes load(int64_t m, int64_t k) const {  // k: a multiple of 2
    Token tokens[kLanes];
    const Token* from = at(m, k);
    for (int i = 0; i < kLanes; i += 2) std::memcpy(tokens + i, from + i * width, 2 * sizeof(Token));
    return load_lanes(tokens);
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

// Measured: benchmarks/NOTES.md, "Other block sizes" and "Other parts and panels for rows of 3072".
constexpr int kRows = 6;            // rows of weights in registers together: 24 sums of 32 registers, or 12 of 16
constexpr int kNear = 24 * 1024;    // bytes of weights that stay in the first cache beside data that passes by
constexpr int kPart = 32;           // steps of longer rows that are multiplied with all tokens before the next steps
constexpr int kPanel = 64;          // tokens that are multiplied with such a part of kRows rows, one block of them after another
constexpr int kFewTokens = 16;      // tokens whose part stays in the first cache
constexpr int kGroups = 8;          // multiples of kRows rows for so few tokens
constexpr int kRowsOfOne = 8;       // rows in registers for a single token
constexpr int kPanelRows = 16;      // rows of a matrix in integers that are stored together, see `interface.h`

// Bytes of rows that fit the first cache together with the next rows and with tokens.
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

// Bytes of the last cache.
inline int64_t last_cache_bytes() {
  static const int64_t bytes = [] {
#if defined(_SC_LEVEL3_CACHE_SIZE)
    if (const long found = sysconf(_SC_LEVEL3_CACHE_SIZE); found > 0) return int64_t(found);
#endif
    return int64_t(32) << 20;
  }();
  return bytes;
}

// Decides whether prefetches into the first cache alone are as fast as others. On Intel they bypass the second cache
// and its prefetcher: a Xeon then reads memory at a third of its rate.
inline bool fetches_nearest_fast() {
#if defined(__x86_64__)
  static const bool is_fast = !__builtin_cpu_is("intel");
  return is_fast;
#else
  return true;
#endif
}

// The target of a prefetch: all caches, the second cache, or the first cache alone, which keeps the contents of the
// others. A line that leaves the first cache unused is then read from memory again.
enum class Into { kAll, kSecond, kNearest };
template <Into kInto>
FORETOKEN_INLINE void fetch(const char* p) {
  if constexpr (kInto == Into::kAll) __builtin_prefetch(p);
  if constexpr (kInto == Into::kSecond) __builtin_prefetch(p, 0, 2);
  if constexpr (kInto == Into::kNearest) __builtin_prefetch(p, 0, 0);
}

// A step prefetches nothing,
struct NoFetch {
  void step() {}
};

// or some cache lines of whole rows, one after another,
template <Into kInto>
struct LineFetch {
  const char* at;
  int lines;  // a step

  void step() {
    for (int i = 0; i < lines; ++i, at += kBytes) fetch<kInto>(at);
  }
};

// or one cache line of each of kCount rows, which opens more than one stream of memory.
template <Into kInto, int kCount>
struct RowFetch {
  const char* at;
  int64_t stride;  // bytes of a row

  void step() {
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) fetch<kInto>(at + i * stride);
    at += kBytes;
  }
};

// Adds products of steps from..to of R rows of weights with C tokens to their sums over lanes, (C, R); x begins at step
// `from`.
template <class T, int R, int C, class Fetch>
FORETOKEN_INLINE void add_steps(const T* const* w, const typename Fragment<T>::Token* x, int64_t from, int64_t to, Fetch fetch, Lanes (&sums)[R * C]) {
  for (int64_t k = from; k < to; k += kStep<T>, x += C * kStep<T>) {
    fetch.step();
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

// Dot products (C, R) from their sums over lanes, and from the elements past the last whole step, `whole`, where x
// begins.
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
template <class T, int R, int C, class Fetch>
inline void dot_block(const T* const* w, const typename Fragment<T>::Token* x, int64_t K, Fetch fetch, float* out) {
  const int64_t whole = K / kStep<T> * kStep<T>;
  Lanes sums[R * C] = {};
  add_steps<T, R, C>(w, x, 0, whole, fetch, sums);
  finish_dots<T, R, C>(sums, w, x + whole * C, whole, K, out);
}

// R rows of a matrix from row n on; rows past the end repeat the last one.
template <class T, int R>
struct Rows {
  const T* at[R];

  Rows(const Matrix& matrix, int64_t n) {
    for (int r = 0; r < R; ++r) at[r] = static_cast<const T*>(matrix.weight) + std::min(n + r, matrix.rows - 1) * matrix.cols;
  }
};

// Scales the dot products of R rows from row n on with `count` tokens from m on, (count, R), adds biases and emits
// them, see `multiply`; for rows before `end`.
template <int R, class Emit>
FORETOKEN_INLINE void emit_block(const Matrix& matrix, int64_t n, int64_t end, int64_t m, int64_t count, float* out, Emit&& emit) {
  // Products by fma, or a compiler joins some of them with the additions of `emit`.
  const auto finish = [&](auto rows) {
    for (int64_t c = 0; c < count; ++c, out += R) {
      int r = 0;
      for (; r + kLanes <= rows; r += kLanes) {
        Lanes values = load_lanes(out + r);
        if (matrix.scales != nullptr) values = multiply_add(values, load_lanes(matrix.scales + n + r), Lanes{});
        if (matrix.bias != nullptr) values += load_lanes(matrix.bias + n + r);
        store_lanes(out + r, values);
      }
      for (; r < rows; ++r) {
        if (matrix.scales != nullptr) out[r] = std::fma(out[r], matrix.scales[n + r], 0.0f);
        if (matrix.bias != nullptr) out[r] += matrix.bias[n + r];
      }
      emit(m + c, n, rows, out);
    }
  };
  n + R <= end ? finish(std::integral_constant<int, R>()) : finish(int(end - n));
}

// `dot_block` that prefetches some lines a step. Not inlined: every caller emits differently, but this part is the
// same.
template <class T, int R, int C>
[[gnu::noinline]] void fetching_dot_block(const T* const* w, const typename Fragment<T>::Token* x, int64_t K, Into into, const char* ahead, int lines, float* out) {
  if (into == Into::kAll) return dot_block<T, R, C>(w, x, K, LineFetch<Into::kAll>{ahead, lines}, out);
  if (into == Into::kSecond) return dot_block<T, R, C>(w, x, K, LineFetch<Into::kSecond>{ahead, lines}, out);
  dot_block<T, R, C>(w, x, K, LineFetch<Into::kNearest>{ahead, lines}, out);
}

// See `multiply`; for rows begin..end. Each group of rows is multiplied with all tokens and prefetches the next group.
template <class T, int R, int C, class Emit>
void multiply_rows(const Matrix& matrix, const Inputs<T>& x, int64_t M, int64_t begin, int64_t end, Into into, Emit&& emit) {
  const int64_t blocks = (M + C - 1) / C, steps = matrix.cols / kStep<T>;
  const int lines = int((R + blocks - 1) / blocks);
  float out[2 * kLanes];
  for (int64_t n = begin; n < end; n += R) {
    const Rows<T, R> rows(matrix, n);
    const char* next = reinterpret_cast<const char*>(rows.at[0] + R * matrix.cols);  // a prefetch past the end is harmless
    for (int64_t block = 0; block < blocks; ++block) {
      const char* ahead = next + block * steps * lines * kBytes;
      fetching_dot_block<T, R, C>(rows.at, x.at(block * C, 0), matrix.cols, into, ahead, block < R ? lines : 0, out);
      emit_block<R>(matrix, n, end, block * C, std::min<int64_t>(C, M - block * C), out, emit);
    }
  }
}

// See `multiply`; for rows begin..end and a single token. The processor itself fetches ahead in rows that follow each
// other, and wide registers keep up with memory, though not with a cache: each product waits for the sum before it.
// Measured: benchmarks/NOTES.md, "One row after another".
template <class T, class Emit>
void multiply_single(const Matrix& matrix, const Inputs<T>& x, int64_t begin, int64_t end, Emit&& emit) {
  constexpr int R = kRowsOfOne;
  const int64_t K = matrix.cols, whole = K / kStep<T> * kStep<T>;
  float out[2 * kLanes];
  for (int64_t n = begin; n < end; n += R) {
    const Rows<T, R> rows(matrix, n);
    Lanes sums[R] = {};
    for (int r = 0; r < R; ++r) {
      Lanes sum[1] = {};
      add_steps<T, 1, 1>(rows.at + r, x.at(0, 0), 0, whole, NoFetch{}, sum);
      sums[r] = sum[0];
    }
    finish_dots<T, R, 1>(sums, rows.at, x.at(0, whole), whole, K, out);
    emit_block<R>(matrix, n, end, 0, 1, out, emit);
  }
}

// `add_steps` for a block of tokens; prefetches the block's share of R rows beginning at `next`, the same steps of each
// row: `count` rows from row `first` on.
template <class T, int R, int C, Into kInto>
FORETOKEN_INLINE void add_fetching_steps(const T* const* w, const typename Fragment<T>::Token* x, int64_t from, int64_t to, const T* next, int64_t K, int64_t first, int count, Lanes (&sums)[R * C]) {
  const char* at = reinterpret_cast<const char*>(next + first * K);
  const int64_t stride = K * int64_t(sizeof(T));
  if (first >= R) {
    add_steps<T, R, C>(w, x, from, to, NoFetch{}, sums);
  } else if (count == 1) {
    add_steps<T, R, C>(w, x, from, to, RowFetch<kInto, 1>{at, stride}, sums);
  } else if (count == 2) {
    add_steps<T, R, C>(w, x, from, to, RowFetch<kInto, 2>{at, stride}, sums);
  } else if (count == 3) {
    add_steps<T, R, C>(w, x, from, to, RowFetch<kInto, 3>{at, stride}, sums);
  } else {
    add_steps<T, R, C>(w, x, from, to, RowFetch<kInto, R>{at, stride}, sums);
  }
}

// Adds to the stored sums, or to zero. Not inlined, see `fetching_dot_block`.
template <class T, int R, int C>
[[gnu::noinline]] void add_part(const T* const* w, const typename Fragment<T>::Token* x, int64_t from, int64_t to, Into into, const T* next, int64_t K, int64_t first, int count, Lanes* waiting) {
  Lanes sums[R * C];
#pragma GCC unroll 32
  for (int i = 0; i < R * C; ++i) sums[i] = from == 0 ? Lanes{} : waiting[i];
  if (into == Into::kNearest) {
    add_fetching_steps<T, R, C, Into::kNearest>(w, x, from, to, next, K, first, count, sums);
  } else if (into == Into::kSecond) {
    add_fetching_steps<T, R, C, Into::kSecond>(w, x, from, to, next, K, first, count, sums);
  } else {
    add_fetching_steps<T, R, C, Into::kAll>(w, x, from, to, next, K, first, count, sums);
  }
#pragma GCC unroll 32
  for (int i = 0; i < R * C; ++i) waiting[i] = sums[i];
}

// Works part by part: some steps of `groups` times R rows are multiplied with all tokens of a panel, block by block,
// then the next steps. Sums over lanes are stored between parts, so that every sum has the same order.
template <class T, int R, int C, int kMostGroups, int kMostTokens, class Emit>
void multiply_parts(const Matrix& matrix, const Inputs<T>& x, int64_t M, int64_t begin, int64_t end, Into into, Emit&& emit) {
  const int64_t K = matrix.cols, whole = K / kStep<T> * kStep<T>, depth = kPart * kStep<T>;
  float out[2 * kLanes];
  alignas(kBytes) Lanes waiting[kMostGroups][kMostTokens / C][R * C];
  for (int64_t batch = begin; batch < end; batch += kMostGroups * R) {
    const int groups = int(std::min<int64_t>(kMostGroups, (end - batch + R - 1) / R));
    for (int64_t first = 0; first < M; first += kMostTokens) {
      const int64_t last = std::min<int64_t>(first + kMostTokens, M), blocks = (last - first + C - 1) / C;
      const int share = int((R + blocks - 1) / blocks);  // of the next rows, prefetched by each block
      int64_t from = 0;
      do {
        const int64_t to = std::min(from + depth, whole);
        for (int group = 0; group < groups; ++group) {
          const int64_t n = batch + group * R;
          const Rows<T, R> rows(matrix, n);
          const T* next = rows.at[0] + R * K + from;  // the next group, or the next part of the first one
          if (group == groups - 1) {
            const T* start = rows.at[0] - group * R * K;
            next = to < whole ? start + to : last < M ? start : start + groups * R * K;
          }
          for (int64_t block = 0; block < blocks; ++block) {
            const int64_t m = first + block * C;
            Lanes* sums = waiting[group][block];
            add_part<T, R, C>(rows.at, x.at(m, from), from, to, into, next, K, block * share, share, sums);
            if (to < whole) continue;
            finish_dots<T, R, C>(sums, rows.at, x.at(m, whole), whole, K, out);
            emit_block<R>(matrix, n, end, m, std::min<int64_t>(C, M - m), out, emit);
          }
        }
        from = to;
      } while (from < whole);
    }
  }
}

// See `multiply`; for rows begin..end.
template <class T, class Emit>
void multiply_between(const Matrix& matrix, const Inputs<T>& x, int64_t M, int64_t begin, int64_t end, Emit&& emit) {
  const int64_t row = matrix.cols * int64_t(sizeof(T)), bytes = kRows * row;
  // Rows that the caches could not keep until the next pass go to the first cache alone if that keeps them until their
  // use, otherwise to the second one.
  const bool come_from_memory = matrix.pass_bytes > last_cache_bytes(), are_lost = come_from_memory && fetches_nearest_fast();
  const bool stay_near = M == 1 ? kRowsOfOne * row <= 2 * nearest_bytes() : kRows * kPart * kBytes <= nearest_bytes();
  const Into into = M > kFewTokens || !are_lost ? Into::kAll : stay_near ? Into::kNearest : Into::kSecond;
  constexpr bool kIsWide = kBytes == 64;
  if (M == 1 && kIsWide && come_from_memory) {
    multiply_single(matrix, x, begin, end, emit);
  } else if (M == 1) {
    multiply_rows<T, kRowsOfOne, 1>(matrix, x, M, begin, end, kIsWide ? Into::kSecond : into, emit);
  } else if (M <= kFewTokens && (M > kTokens || bytes > kNear)) {
    multiply_parts<T, kRows, kTokens, kGroups, kFewTokens>(matrix, x, M, begin, end, into, emit);
  } else if (bytes <= kNear) {
    multiply_rows<T, kRows, kTokens>(matrix, x, M, begin, end, bytes <= nearest_bytes() ? into : Into::kSecond, emit);
  } else {
    multiply_parts<T, kRows, kTokens, 1, kPanel>(matrix, x, M, begin, end, into, emit);
  }
}

template <class Emit>
void multiply_rounded(const Matrix& matrix, void* rounded, int64_t M, int64_t begin, int64_t end, Emit&& emit);

// x (M, K) times the transposed matrix, this thread's share of the rows, in multiples of `unit`; 0: of the kernel's own.
// emit(m, n, count, values) takes the outputs of token m at `count` rows from n on. A matrix in integers reads
// `x.rounded`, see `round_inputs`.
template <class X, class Emit>
void multiply(const Matrix& matrix, const X& x, int64_t M, Emit&& emit, int64_t unit = 0) {
  const Share share(matrix.rows, unit > 0 ? unit : matrix.bits == 0 ? X::kShare : 4 * kPanelRows);
  if (share.begin >= share.end) return;
  if (matrix.bits != 0) return multiply_rounded(matrix, x.rounded, M, share.begin, share.end, emit);
  multiply_between(matrix, x, M, share.begin, share.end, emit);
}

// out (M, rows) = x (M, K) times the transposed matrix, see `multiply`.
template <class X>
void multiply_into(const Matrix& matrix, const X& x, int64_t M, float* out, int64_t unit = 0) {
  const auto emit = [&](int64_t m, int64_t n, auto count, const float* values) {
    float* row = out + m * matrix.rows + n;
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) store_lanes(row + i, load_lanes(values + i));
    for (; i < count; ++i) row[i] = values[i];
  };
  multiply(matrix, x, M, emit, unit);
}

// Takes the products of an LM head, see `multiply`: to the logits of the tokens of its rows, scaled and capped.
struct PutLogits {
  float* out;             // (M, vocab)
  int64_t vocab;
  const int64_t* tokens;  // the token of each row; null: row i is token i
  float scale, softcap;   // scale 1: none, cap 0: none

  template <class Count>
  void operator()(int64_t m, int64_t n, Count count, const float* values) const {
    for (int i = 0; i < count; ++i) {
      const float value = values[i] * scale;
      out[m * vocab + (tokens == nullptr ? n + i : tokens[n + i])] = softcap > 0 ? std::tanh(value / softcap) * softcap : value;
    }
  }
};

}  // namespace
