// GEMM on matrix units (AMX): sixteen rows of weights meet up to sixteen tokens in one instruction.
//
// A tile of weights is sixteen rows of them, 32 elements each, as they stand in memory or widened from int8; a tile of inputs
// has these elements of the tokens, see `TileInputs`. The instruction fixes the order in which a token's products are summed,
// whatever other tokens there are: one token runs on the same instruction as sixteen, and has the same bits.
//
// Gcc's intrinsics do not say that loading a tile reads memory. What is written right before it, or is written again right
// after it, is kept in order by `fence`.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "gemm.h"
#include "inputs.h"
#include "interface.h"
#include "vectors.h"

namespace {

#if defined(FORETOKEN_TILES)

FORETOKEN_INLINE void fence() { __asm__ volatile("" : : : "memory"); }

constexpr int kTileRows = 16;
constexpr int64_t kPanelBytes = 1 << 20;  // of inputs that meet all rows of a thread before the next ones do: they stay in the second cache

// The shape of each tile register of this thread, which gives them back in the end.
class TileRegisters {
 public:
  TileRegisters() = default;
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;

 protected:
  void shape(int tile, int64_t rows, int64_t bytes) {
    shapes_.rows[tile] = uint8_t(rows);
    shapes_.bytes[tile] = uint16_t(bytes);
  }
  // Gcc's intrinsic says of the first bytes alone that they are read. A fence for all that is loaded afterwards.
  void use() const { __asm__ volatile("ldtilecfg %0" : : "m"(shapes_) : "memory"); }

 private:
  struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } shapes_;
};

// Of a product: 0 to 3 are sums of rows by tokens, 4 and 5 weights, 6 and 7 inputs.
class ProductRegisters : TileRegisters {
 public:
  ProductRegisters(int64_t rows, int64_t tokens) {
    for (int i = 0; i < 4; ++i) shape(i, rows, 4 * tokens);
    for (int i : {4, 5}) shape(i, rows, 2 * kTileStep);
    for (int i : {6, 7}) shape(i, kTileStep / 2, 4 * tokens);
    use();
  }
};

// Sixteen rows of weights as tiles read them: where they are, or some steps of them in bfloat16.
template <class T>
class TileRows;
template <>
class TileRows<Bfloat16> {
 public:
  const int64_t stride;  // bytes

  TileRows(const Bfloat16* rows, int64_t, int64_t K) : stride(K * int64_t(sizeof(Bfloat16))), rows_(rows) {}
  const Bfloat16* at(int64_t k) { return rows_ + k; }

 private:
  const Bfloat16* rows_;
};
template <>
class TileRows<Int8> {
 public:
  const int64_t stride = kTileStep * int64_t(sizeof(Bfloat16));

  TileRows(const Int8* rows, int64_t count, int64_t K) : rows_(rows), count_(count), K_(K) {}
  const Bfloat16* at(int64_t k) {
    const int64_t step = k / kTileStep % kSteps;
    if (step == 0) widen(k, std::min<int64_t>(kSteps, (K_ - k) / kTileStep));
    return widened_[step];
  }

 private:
  // Meanwhile the next steps are fetched, or the first ones of the rows that come after these.
  void widen(int64_t k, int64_t steps) {
    fence();
    const int64_t next = k + kSteps * kTileStep < K_ ? kSteps * kTileStep : 2 * kTileRows * K_ - k;
    for (int64_t r = 0; r < count_; ++r) {
      const Int8* row = rows_ + r * K_ + k;
      for (int64_t i = 0; i < kSteps * kTileStep; i += 64) __builtin_prefetch(row + next + i);
#pragma GCC unroll 4
      for (int64_t i = 0; i < steps; ++i, row += kTileStep) {
        const auto both = _mm512_cvtne2ps_pbh((__m512)load_lanes(row + kLanes), (__m512)load_lanes(row));
        _mm512_store_si512(widened_[i] + r * kTileStep, (__m512i)both);
      }
    }
    fence();
  }

  static constexpr int kSteps = 4;  // at a time: nothing is loaded right after it was stored
  const Int8* rows_;
  const int64_t count_, K_;
  alignas(kBytes) Bfloat16 widened_[kSteps][kTileRows * kTileStep];
};

// Sums of R tiles of rows with C tiles of tokens: out (R, C, kTileRows, width). Meanwhile `count` rows from `ahead` on are
// fetched into the second cache.
template <int R, int C, class T>
void tile_sums(TileRows<T> (&rows)[2], int64_t K, const TileInputs& x, int64_t m, const T* ahead, int count, float* out) {
  const int64_t pair = x.width * 2 * int64_t(sizeof(Bfloat16)), size = kTileRows * x.width;
  const Bfloat16 *first = x.at(m, 0), *second = first + x.block;
  _tile_zero(0);
  if constexpr (R > 1) _tile_zero(1);
  if constexpr (C > 1) _tile_zero(2);
  if constexpr (R > 1 && C > 1) _tile_zero(3);
  for (int64_t k = 0; k + kTileStep <= K; k += kTileStep) {
    for (int i = 0; i < count; ++i) __builtin_prefetch(ahead + i * K + k, 0, 2);
    const Bfloat16* weights = rows[0].at(k);
    _tile_loadd(6, first + k * x.width, pair);
    _tile_loadd(4, weights, rows[0].stride);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (R > 1) {
      weights = rows[1].at(k);
      _tile_loadd(5, weights, rows[1].stride);
      _tile_dpbf16ps(1, 5, 6);
    }
    if constexpr (C > 1) {
      _tile_loadd(7, second + k * x.width, pair);
      _tile_dpbf16ps(2, 4, 7);
      if constexpr (R > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out, pair);
  if constexpr (R > 1) _tile_stored(1, out + C * size, pair);
  if constexpr (C > 1) _tile_stored(2, out + size, pair);
  if constexpr (R > 1 && C > 1) _tile_stored(3, out + (C + 1) * size, pair);
}

// Turns sums (kTileRows, width) into dot products (width, kTileRows). Past both there is room for another row.
inline void transpose(const float* sums, int64_t width, float* out) {
  __m512 rows[16], pairs[16], turned[16];
  if (width == 1) return _mm512_storeu_ps(out, _mm512_loadu_ps(sums));
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) rows[i] = _mm512_loadu_ps(sums + i * width);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // a quarter q of rows[i + j] has token 4 q + j of rows i to i + 3
    for (int j = 0; j < 2; ++j) {
      const __m512d lower = _mm512_castps_pd(pairs[i + j]), upper = _mm512_castps_pd(pairs[i + j + 2]);
      rows[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(lower, upper));
      rows[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(lower, upper));
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512 even[2] = {_mm512_shuffle_f32x4(rows[j], rows[4 + j], 0x88), _mm512_shuffle_f32x4(rows[8 + j], rows[12 + j], 0x88)};
    const __m512 odd[2] = {_mm512_shuffle_f32x4(rows[j], rows[4 + j], 0xdd), _mm512_shuffle_f32x4(rows[8 + j], rows[12 + j], 0xdd)};
    turned[j] = _mm512_shuffle_f32x4(even[0], even[1], 0x88);
    turned[4 + j] = _mm512_shuffle_f32x4(odd[0], odd[1], 0x88);
    turned[8 + j] = _mm512_shuffle_f32x4(even[0], even[1], 0xdd);
    turned[12 + j] = _mm512_shuffle_f32x4(odd[0], odd[1], 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_storeu_ps(out + i * kTileRows, turned[i]);
}

// See `multiply`, of R tiles of rows from row n on, for rows before `end`, with tokens first..last.
template <int R, class T, class Emit>
void multiply_tiles(const Matrix& matrix, const TileInputs& x, int64_t first, int64_t last, int64_t n, int64_t end, Emit&& emit) {
  const int64_t K = matrix.cols, whole = K / kTileStep * kTileStep, count = std::min<int64_t>(kTileRows, matrix.rows);
  const T* const weights = static_cast<const T*>(matrix.weight);
  // A tile may not go past the last row: it begins with some of the rows before it then.
  const auto begin = [&](int i) { return std::max<int64_t>(0, std::min(n + i * kTileRows, matrix.rows - kTileRows)); };
  TileRows<T> rows[2] = {{weights + begin(0) * K, count, K}, {weights + begin(R - 1) * K, count, K}};
  alignas(kBytes) float sums[4 * kTileRows * kTileTokens + kTileRows], out[kTileRows * kTileTokens + kTileRows];
  // Where all tokens meet the rows at once, memory is read all the time, and the processor foresees what comes. Else each
  // turn fetches some of the rows that come next.
  const int64_t turns = (last - first + 2 * x.width - 1) / (2 * x.width);
  const int fetched = turns > 1 ? int((R * kTileRows + turns - 1) / turns) : 0;
  const T* ahead = weights + (n + R * kTileRows) * K;
  for (int64_t m = first; m < last; m += 2 * x.width, ahead += fetched * K) {
    const int tiles = last - m > x.width ? 2 : 1;
    const auto add_up = tiles == 2 ? tile_sums<R, 2, T> : tile_sums<R, 1, T>;
    add_up(rows, K, x, m, ahead, fetched, sums);
    for (int i = 0; i < R; ++i) {
      for (int j = 0; j < tiles; ++j) {
        const int64_t at = m + j * x.width, tokens = std::min(x.width, last - at), skipped = n + i * kTileRows - begin(i);
        transpose(sums + (i * tiles + j) * kTileRows * x.width, x.width, out);
        for (int64_t k = whole; k < K; ++k) {
          for (int64_t c = 0; c < tokens; ++c) {
            for (int64_t r = skipped; r < count; ++r) {
              float& value = out[c * kTileRows + r];
              value = std::fma(to_float(weights[(begin(i) + r) * K + k]), to_float(*x.at(at + c, k)), value);
            }
          }
        }
        emit_block<kTileRows>(matrix, n + i * kTileRows, end, at, tokens, out + skipped, emit);
      }
    }
  }
}

// See `multiply`; of weights in a dtype.
template <class T, class Emit>
void multiply_in_tiles(const Matrix& matrix, const TileInputs& x, int64_t M, Emit&& emit, int64_t unit) {
  const auto [begin, end] = Share(matrix.rows, unit);
  if (begin >= end) return;
  const ProductRegisters registers(std::min<int64_t>(matrix.rows, kTileRows), x.width);
  const int64_t fit = kPanelBytes / (matrix.cols * int64_t(sizeof(Bfloat16))) / (2 * x.width) * (2 * x.width);
  const int64_t panel = std::max(fit, 2 * x.width);
  const bool is_alone = std::is_same_v<T, Bfloat16> && M <= kTileTokens;  // one tile of tokens is loaded faster than rows are
  for (int64_t first = 0; first < M; first += panel) {
    const int64_t last = std::min(first + panel, M);
    int64_t n = begin;
    for (; !is_alone && n + kTileRows < end; n += 2 * kTileRows) multiply_tiles<2, T>(matrix, x, first, last, n, end, emit);
    for (; n < end; n += kTileRows) multiply_tiles<1, T>(matrix, x, first, last, n, end, emit);
  }
}

// See `multiply` for vector registers.
template <class Emit>
void multiply(const Matrix& matrix, const TileInputs& x, int64_t M, Emit&& emit, int64_t unit = TileInputs::kShare) {
  matrix.scales == nullptr ? multiply_in_tiles<Bfloat16>(matrix, x, M, emit, unit) : multiply_in_tiles<Int8>(matrix, x, M, emit, unit);
}

// See `VectorDots`. Up to kFew queries stand side by side as if they were so many, more as if they were kQueries.
struct TileDots {
  static constexpr int kKeys = kTileRows, kQueries = kTileTokens, kFew = 4;

  static int64_t padded(int64_t queries) { return queries <= kFew ? kFew : (queries + kQueries - 1) / kQueries * kQueries; }

  // 0: sums of keys by queries; 4 and 6: keys and queries, 5 and 7 those of the elements past the last whole step.
  class Registers : TileRegisters {
   public:
    Registers(const TileInputs& queries, int64_t D) {
      const int64_t rest = D % kTileStep / 2 * 2, pairs = 4 * queries.width;
      shape(0, kKeys, pairs);
      if (D >= kTileStep) shape(4, kKeys, 2 * kTileStep);
      if (D >= kTileStep) shape(6, kTileStep / 2, pairs);
      if (rest > 0) shape(5, kKeys, 2 * rest);
      if (rest > 0) shape(7, rest / 2, pairs);
      use();
    }
  };

  static void run(const TileInputs& queries, int64_t first, const Bfloat16* keys, int64_t count, int64_t D, float* out) {
    const int64_t width = queries.width, pairs = width * 2 * int64_t(sizeof(Bfloat16));
    const Bfloat16* const x = queries.at(first, 0);
    alignas(kBytes) float sums[kKeys * (kQueries + 1)];
    KeyRows rows(keys, count, D);
    int64_t k = 0;
    _tile_zero(0);
    for (; k + kTileStep <= D; k += kTileStep) {
      const Bfloat16* from = rows.at(k, kTileStep);
      _tile_loadd(4, from, rows.stride);
      _tile_loadd(6, x + k * width, pairs);
      _tile_dpbf16ps(0, 4, 6);
    }
    if (k + 2 <= D) {
      const Bfloat16* from = rows.at(k, D - k);
      _tile_loadd(5, from, rows.stride);
      _tile_loadd(7, x + k * width, pairs);
      _tile_dpbf16ps(0, 5, 7);
    }
    _tile_stored(0, sums, pairs);
    for (int64_t i = 0; D % 2 > 0 && i < count * width; ++i) {
      const float key = to_float(keys[i / width * D + D - 1]), query = to_float(x[(D - 1) * width + i % width * 2]);
      sums[i] = std::fma(key, query, sums[i]);
    }
    width == kFew ? transpose_few(sums, out) : transpose(sums, width, out);
  }

 private:
  // Keys as a tile reads them: where they are, or copied where there are fewer than it reads.
  struct KeyRows {
    const Bfloat16* keys;
    const int64_t count, D, stride;  // stride: bytes
    Bfloat16 copied[kKeys * kTileStep];

    KeyRows(const Bfloat16* keys, int64_t count, int64_t D)
        : keys(keys), count(count), D(D), stride((count < kKeys ? kTileStep : D) * int64_t(sizeof(Bfloat16))) {}
    const Bfloat16* at(int64_t k, int64_t size) {
      if (count >= kKeys) return keys + k;
      fence();
      for (int64_t r = 0; r < count; ++r) std::copy_n(keys + r * D + k, size, copied + r * kTileStep);
      fence();
      return copied;
    }
  };

  // Turns (kKeys, kFew) into (kFew, kKeys).
  static void transpose_few(const float* sums, float* out) {
    static_assert(kFew == 4 && kKeys == 16);
    const __m512 a = _mm512_loadu_ps(sums), b = _mm512_loadu_ps(sums + 16), c = _mm512_loadu_ps(sums + 32), d = _mm512_loadu_ps(sums + 48);
    for (int i = 0; i < kFew; ++i) {
      const __m512i every = _mm512_add_epi32(_mm512_set1_epi32(i), _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 0, 0, 0, 0, 0, 0, 0));
      const __m256 first = _mm512_castps512_ps256(_mm512_permutex2var_ps(a, every, b));
      const __m256 second = _mm512_castps512_ps256(_mm512_permutex2var_ps(c, every, d));
      _mm512_storeu_ps(out + i * kKeys, _mm512_insertf32x8(_mm512_castps256_ps512(first), second, 1));
    }
  }
};

#endif

}  // namespace
