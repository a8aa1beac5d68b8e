// GEMM on matrix units (AMX): one instruction multiplies sixteen rows of weights with up to sixteen tokens.
//
// A tile of weights has sixteen rows of 32 elements each, as in memory. A tile of inputs has these
// elements of the tokens, see `TileInputs`. The instruction fixes the order in which a token's products are summed,
// whatever the other tokens are: one token runs on the same instruction as sixteen, and gets the same bits.
//
// Gcc's intrinsics do not say that loading a tile reads memory. `fence` keeps the order of writes right before and
// right after such a load.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "gemm.h"
#include "interface.h"
#include "vectors.h"

namespace {

#if defined(FORETOKEN_TILES)

FORETOKEN_INLINE void fence() { __asm__ volatile("" : : : "memory"); }

constexpr int kTileRows = 16;
constexpr int64_t kStored = 8 * kTileStep;  // elements of K between two stores of a tile, see `tile_sums`; NOTES, "A store of a tile is slow"
// Bytes of inputs that all rows of a thread use before the next inputs. A choice: they stay in a second cache of 2 MiB.
constexpr int64_t kPanelBytes = 3 << 19;

// The shape of each tile register of this thread; the destructor releases the registers.
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
  // Gcc's intrinsic declares only the first bytes as read. A fence for all later loads.
  void use() const { __asm__ volatile("ldtilecfg %0" : : "m"(shapes_) : "memory"); }

 private:
  struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } shapes_;
};

// Registers of a product: 0 to 3 are sums of rows by tokens, 4 and 5 weights, 6 and 7 inputs.
class ProductRegisters : TileRegisters {
 public:
  ProductRegisters(int64_t rows, int64_t tokens) {
    for (int i = 0; i < 4; ++i) shape(i, rows, 4 * tokens);
    for (int i : {4, 5}) shape(i, rows, 2 * kTileStep);
    for (int i : {6, 7}) shape(i, kTileStep / 2, 4 * tokens);
    use();
  }
};

// Up to sixteen rows of a matrix, from row n on, in a tile of weights. A tile may not go past the last row: it then
// begins with rows before n, which are `skipped`.
class TileRows {
 public:
  const int64_t count, skipped, stride;  // stride: bytes of a row

  // distance: from these rows to the thread's next rows.
  TileRows(const Matrix& matrix, int64_t n, int64_t distance)
      : count(std::min<int64_t>(kTileRows, matrix.rows)),
        skipped(n - std::max<int64_t>(0, std::min(n, matrix.rows - kTileRows))),
        stride(matrix.cols * int64_t(sizeof(Bfloat16))),
        first_(static_cast<const Bfloat16*>(matrix.weight) + (n - skipped) * matrix.cols),
        K_(matrix.cols),
        distance_((skipped + distance) * matrix.cols) {}

  const Bfloat16* at(int64_t k) const { return first_ + k; }
  float weight(int64_t r, int64_t k) const { return to_float(first_[r * K_ + k]); }
  // Prefetches a step of `number` of the next rows into the second cache.
  void fetch(int64_t row, int number, int64_t k) const {
    const Bfloat16* from = first_ + distance_ + row * K_ + k;  // a prefetch past the end is harmless
    for (int i = 0; i < number; ++i) __builtin_prefetch(from + i * K_, 0, 2);
  }

 private:
  const Bfloat16* const first_;
  const int64_t K_, distance_;
};

// Dot products of R tiles of rows with up to two tiles of tokens, (R, 2, kTileRows, width) in float32. There is room
// for one more row, which `transpose` reads.
template <int R>
struct TileSums {
  alignas(kBytes) float data[R * 2 * kTileRows * kTileTokens + kTileRows];

  static int64_t size(int64_t width) { return kTileRows * width; }
  float* of(int rows, int tokens, int64_t width) { return data + (rows * 2 + tokens) * size(width); }
};

// Dot products, over the whole steps of K, of R tiles of rows with C tiles of tokens from token m on. Prefetches
// `number` of the next rows for each tile of rows, from their row `row` on.
template <int R, int C>
void tile_sums(const TileRows (&rows)[2], int64_t K, const TileInputs& x, int64_t m, int64_t row, int number, TileSums<R>& out) {
  const int64_t width = x.width, pair = width * 2 * int64_t(sizeof(Bfloat16));
  const Bfloat16 *first = x.at(m, 0), *second = first + x.block;
  _tile_zero(0);
  if constexpr (R > 1) _tile_zero(1);
  if constexpr (C > 1) _tile_zero(2);
  if constexpr (R > 1 && C > 1) _tile_zero(3);
  for (int64_t k = 0; k + kTileStep <= K; k += kTileStep) {
    for (int i = 0; i < R; ++i) rows[i].fetch(row, number, k);
    // An unfinished sum, which the last store replaces: a Xeon takes 800 cycles more for a store that comes more than
    // 2400 cycles after the last one (`benchmarks/NOTES.md`).
    if (k % kStored == 0 && k > 0) _tile_stored(0, out.data, pair);
    const Bfloat16* weights = rows[0].at(k);
    _tile_loadd(6, first + k * width, pair);
    _tile_loadd(4, weights, rows[0].stride);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (R > 1) {
      weights = rows[1].at(k);
      _tile_loadd(5, weights, rows[1].stride);
      _tile_dpbf16ps(1, 5, 6);
    }
    if constexpr (C > 1) {
      _tile_loadd(7, second + k * width, pair);
      _tile_dpbf16ps(2, 4, 7);
      if constexpr (R > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out.of(0, 0, width), pair);
  if constexpr (R > 1) _tile_stored(1, out.of(1, 0, width), pair);
  if constexpr (C > 1) _tile_stored(2, out.of(0, 1, width), pair);
  if constexpr (R > 1 && C > 1) _tile_stored(3, out.of(1, 1, width), pair);
}

// Dot products of R tiles of rows with tokens first..last: calls take(m, count, sums) for up to kTileTokens tokens,
// `count` of them from m on. sums: (kTileRows, width) of the first tile of rows; those of the second one come 2 *
// TileSums<R>::size(width) later.
template <int R, class Take>
void sum_tiles(const TileRows (&rows)[2], int64_t K, const TileInputs& x, int64_t first, int64_t last, Take&& take) {
  TileSums<R> sums;
  // If all tokens are multiplied at once, memory is read all the time, and the processor's prefetcher works. Otherwise
  // each turn prefetches some of the next rows.
  const int64_t width = x.width, turns = (last - first + 2 * width - 1) / (2 * width), whole = K / kTileStep * kTileStep;
  const int fetched = turns > 1 ? int((kTileRows + turns - 1) / turns) : 0;
  for (int64_t m = first, row = 0; m < last; m += 2 * width, row += fetched) {
    const int tiles = last - m > width ? 2 : 1;
    const auto add_up = tiles == 2 ? tile_sums<R, 2> : tile_sums<R, 1>;
    add_up(rows, K, x, m, row, fetched, sums);
    for (int j = 0; j < tiles; ++j) {
      const int64_t at = m + j * width, count = std::min(width, last - at);
      for (int64_t k = whole; k < K; ++k) {  // past the last whole step
        for (int i = 0; i < R; ++i) {
          float* sum = sums.of(i, j, width);
          for (int64_t r = 0; r < rows[i].count; ++r) {
            for (int64_t c = 0; c < count; ++c) sum[r * width + c] = std::fma(rows[i].weight(r, k), to_float(*x.at(at + c, k)), sum[r * width + c]);
          }
        }
      }
      take(at, count, sums.of(0, j, width));
    }
  }
}

// Transposes sixteen rows of sixteen elements.
FORETOKEN_INLINE void transpose(__m512 (&rows)[16]) {
  __m512 pairs[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // a quarter q of rows[i + j] has column 4 q + j of rows i to i + 3
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
    rows[j] = _mm512_shuffle_f32x4(even[0], even[1], 0x88);
    rows[4 + j] = _mm512_shuffle_f32x4(odd[0], odd[1], 0x88);
    rows[8 + j] = _mm512_shuffle_f32x4(even[0], even[1], 0xdd);
    rows[12 + j] = _mm512_shuffle_f32x4(odd[0], odd[1], 0xdd);
  }
}

// Transposes sums (kTileRows, width) into dot products (width, kTileRows). There are sixteen of these, with room for
// another row past the sums.
inline void transpose(const float* sums, int64_t width, float* out) {
  __m512 rows[16];
  if (width == 1) return _mm512_storeu_ps(out, _mm512_loadu_ps(sums));
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) rows[i] = _mm512_loadu_ps(sums + i * width);
  transpose(rows);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_storeu_ps(out + i * kTileRows, rows[i]);
}

// Calls work(first, last) for each panel of tokens, with tile registers for the rows of a matrix.
template <class Work>
void for_each_panel(const Matrix& matrix, const TileInputs& x, int64_t M, Work&& work) {
  const ProductRegisters registers(std::min<int64_t>(matrix.rows, kTileRows), x.width);
  const int64_t fit = kPanelBytes / (matrix.cols * int64_t(sizeof(Bfloat16))) / (2 * x.width) * (2 * x.width);
  const int64_t panel = std::max(fit, 2 * x.width);
  for (int64_t first = 0; first < M; first += panel) work(first, std::min(first + panel, M));
}

// See `multiply`: R tiles of rows from row n on, for rows before `end`, with tokens first..last.
template <int R, class Emit>
void multiply_tiles(const Matrix& matrix, const TileInputs& x, int64_t first, int64_t last, int64_t n, int64_t end, Emit&& emit) {
  constexpr int kAll = R * kTileRows;
  const TileRows rows[2] = {{matrix, n, kAll}, {matrix, n + kAll - kTileRows, kAll}};
  alignas(kBytes) float out[kTileRows * kTileTokens + kTileRows];
  sum_tiles<R>(rows, matrix.cols, x, first, last, [&](int64_t m, int64_t count, float* sums) {
    for (int i = 0; i < R; ++i, sums += 2 * TileSums<R>::size(x.width)) {
      transpose(sums, x.width, out);
      emit_block<kTileRows>(matrix, n + i * kTileRows, end, m, count, out + rows[i].skipped, emit);
    }
  });
}

// See `multiply`; for rows begin..end.
template <class Emit>
void multiply_between(const Matrix& matrix, const TileInputs& x, int64_t M, int64_t begin, int64_t end, Emit&& emit) {
  for_each_panel(matrix, x, M, [&](int64_t first, int64_t last) {
    int64_t n = begin;
    for (; n + kTileRows < end; n += 2 * kTileRows) multiply_tiles<2>(matrix, x, first, last, n, end, emit);
    for (; n < end; n += kTileRows) multiply_tiles<1>(matrix, x, first, last, n, end, emit);
  });
}

// Adds biases to sums (kTileRows, width), like `emit_block`. Their row `skipped` is row n of the matrix.
inline void finish_sums(const Matrix& matrix, int64_t n, int64_t skipped, int64_t count, int64_t width, float* sums) {
  if (matrix.bias == nullptr) return;
  for (int64_t r = skipped; r < count; ++r) {
    for (int64_t c = 0; c < width; ++c) sums[r * width + c] += matrix.bias[n + r - skipped];
  }
}

// Writes sixteen rows of values, `stride` from one row to the next, to `inner`: elements n.. of the tokens from m on.
inline void put_pairs(const float* values, int64_t stride, const TileInputs& inner, int64_t m, int64_t n) {
  Bfloat16* out = inner.at(m, n);
  for (int64_t r = 0; r < kTileRows; r += 2, out += 2 * inner.width) {  // two elements of each token side by side
    const BitLanes pairs = rounded(load_lanes(values + r * stride)) | rounded(load_lanes(values + (r + 1) * stride)) << 16;
    _mm512_mask_storeu_epi16(out, uint32_t((uint64_t(1) << 2 * inner.width) - 1), (__m512i)pairs);
  }
}

// Writes f(gate) * up of two tiles of sums (kTileRows, width) to `inner`: elements n.. of `count` tokens from m on. The
// first `skipped` of `rows` rows are left out.
template <class Function>
void put_gated(const float* gate, const float* up, const TileInputs& inner, int64_t m, int64_t count, int64_t n, int64_t skipped, int64_t rows, Function f) {
  const int64_t width = inner.width;
  float values[kTileRows * kTileTokens + kTileRows];
  for (int64_t i = 0; i < kTileRows * width; i += kLanes) store_lanes(values + i, f(load_lanes(gate + i)) * load_lanes(up + i));
  if (skipped > 0 || rows < kTileRows) {
    for (int64_t r = skipped; r < rows; ++r) {
      for (int64_t c = 0; c < count; ++c) inner.put(m + c, n + r - skipped, values[r * width + c]);
    }
    return;
  }
  put_pairs(values, width, inner, m, n);
}

// inner (M, rows) = f(x times the transposed `gate`) * (x times the transposed `up`), this thread's share of the rows.
// Sixteen rows of both are computed together. Their dot products are still in the first cache, in the order of
// `inner`'s tiles: nothing is transposed.
template <class Function>
void multiply_gated(const Matrix& gate, const Matrix& up, const TileInputs& x, int64_t M, const TileInputs& inner, Function f) {
  const int64_t size = 2 * TileSums<2>::size(x.width);
  const Share share(gate.rows, TileInputs::kWholeShare);
  if (share.begin >= share.end) return;
  for_each_panel(gate, x, M, [&](int64_t first, int64_t last) {
    for (int64_t n = share.begin; n < share.end; n += kTileRows) {
      const TileRows rows[2] = {{gate, n, kTileRows}, {up, n, kTileRows}};
      sum_tiles<2>(rows, gate.cols, x, first, last, [&](int64_t m, int64_t count, float* sums) {
        finish_sums(gate, n, rows[0].skipped, rows[0].count, x.width, sums);
        finish_sums(up, n, rows[1].skipped, rows[1].count, x.width, sums + size);
        put_gated(sums, sums + size, inner, m, count, n, rows[0].skipped, rows[0].count, f);
      });
    }
  });
}

#endif

}  // namespace
