// Scores of queries and mixtures of values on matrix units.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cache_rows.h"
#include "gemm.h"
#include "tiles.h"
#include "vectors.h"

namespace {

#if defined(FORETOKEN_TILES)

// Queries for tiles: rows of whole steps.
struct TileQueries {
  using Token = Bfloat16;
  Bfloat16* data;
  int64_t width, size;  // elements of a row; rows side by side

  TileQueries(Bfloat16* data, int64_t count, int64_t D) : data(data), width(padded(D)), size(std::min<int64_t>(count, kTileTokens)) {}
  Bfloat16* at(int64_t q, int64_t k) const { return data + q * width + k; }
  void put(int64_t q, int64_t k, float value) const { assign(*at(q, k), value); }
  void put(int64_t q, int64_t k, Lanes values) const { store_lanes(at(q, k), values); }
  static int64_t padded(int64_t D) { return TileInputs::padded(D); }
};

// Flushes denormal numbers to zero in this thread, as the matrix units do.
class WithoutDenormals {
 public:
  WithoutDenormals() { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON | 0x40); }  // 0x40: of operands too
  ~WithoutDenormals() { _mm_setcsr(before_); }
  WithoutDenormals(const WithoutDenormals&) = delete;

 private:
  const unsigned before_ = _mm_getcsr();
};

// See `VectorAttention`. Weights are rounded to bfloat16. The values of a block are summed by place, kTileStep rows by
// each instruction: it adds products of even and of odd rows apart, then both sums to the one before (Intel, Software
// Developer's Manual, TDPBF16PS). Vector registers do the same for few queries, with the same bits.
class TileAttention : WithoutDenormals, TileRegisters {
 public:
  using Weight = Bfloat16;
  using Queries = TileQueries;
  static constexpr int kKeys = kTileRows, kQueries = kTileTokens, kMostQueries = 32 * kQueries, kFew = 4;
  static constexpr bool kHasWhole = true;

  // Registers: 0, 1, 3 and 5 sums of queries by keys, or by elements of values; 2 queries or weights; 4 keys or values. Of
  // keys that are not packed: 7 queries, 6 sums of keys by queries. space: of `packed(D)` elements.
  TileAttention(const TileQueries& queries, int64_t first, int count, int64_t D, Bfloat16* space)
      : queries_(queries), D_(D), packs_keys_(count > kQueries), packs_values_(count > kFew), keys_(space), values_(space + kBlock * queries.width), own_(values_ + kBlock * queries.width) {
    for (int i : {0, 1, 2, 3, 5}) shape(i, queries.size, kRow);
    shape(4, kTileStep / 2, kRow);
    for (int i : {6, 7}) shape(i, kTileRows, 4 * queries.size);
    use();
    if (packs_keys_) return;
    const Bfloat16* rows[kKeys];  // the places of packed keys are free for the queries
    for (int i = 0; i < kKeys; ++i) rows[i] = i < count ? queries.at(first + i, 0) : nullptr;
    pack_keys(rows, queries.width, keys_);
    fence();
    if (D <= kTileStep) _tile_loadd(7, keys_, kRow);  // stays there
  }

  static int64_t padded(int64_t queries) { return queries <= kQueries ? queries : (queries + kQueries - 1) / kQueries * kQueries; }
  static int64_t width(int64_t D) { return TileQueries::padded(D); }
  static int64_t packed(int64_t D) { return (2 * kBlock + kKeys) * width(D); }

  void choose(int64_t first) { chosen_ = queries_.at(first, 0); }

  // Packs rows for many queries; of values, whole steps alone.
  void prepare(const HeadRows<Bfloat16>& cache, int64_t begin, int64_t last) {
    const Bfloat16 *const keys = cache.keys(), *const values = cache.values();
    const int64_t W = width(D_), end = std::min(begin + kBlock, last);
    later_keys_ = cache.later_keys(last);
    later_values_ = cache.later_values(last);
    const Bfloat16* rows[kTileStep];
    for (int64_t row = begin; row < end; row += kTileStep) {
      if (packs_keys_) {
        for (int64_t i = 0; i < kTileStep; ++i) rows[i] = row + i < end ? keys + (row + i) * D_ : nullptr;
        for (int64_t i = 0; i < kTileStep; i += kKeys) pack_keys(rows + i, D_, keys_ + (row - begin + i) * W);
      }
      if (packs_keys_) later_keys_.fetch(keys + row * D_, kTileStep * D_);
      if (packs_values_) later_values_.fetch(values + row * D_, kTileStep * D_);
      if (packs_values_ && row + kTileStep <= end) pack_values(values + row * D_, values_ + (row - begin) * W);
    }
    fence();
  }

  void score_rows(const Bfloat16* keys, int64_t begin, int64_t first, int64_t end, float* out) const {
    if (packs_keys_) {
      load_queries();
      for (int64_t row = first; row < end; row += kKeys) multiply(keys_ + (row - begin) * width(D_), out + row - begin, kBlock);
    } else {
      constexpr int64_t kMost = kKeys * kWaiting;
      for (int64_t row = first; row < end; row += kMost) score_in_place(keys + row * D_, std::min(kMost, end - row), out + row - begin, kBlock);
    }
  }

  void score(const Bfloat16* keys, int64_t count, float* out, int64_t stride) const {
    if (!packs_keys_) return score_in_place(keys, count, out, stride);
    load_queries();
    const Bfloat16* rows[kKeys];
    for (int64_t i = 0; i < kKeys; ++i) rows[i] = i < count ? keys + i * D_ : nullptr;
    pack_keys(rows, D_, own_);
    fence();
    multiply(own_, out, stride);
  }

  bool packs_keys() const { return packs_keys_; }

  // The softmax of kQueries queries over a block that all of them see, see `Softmax`: scores and their maxima, then step
  // by step numerators and mixtures, so that matrix units and vector registers work at the same time. It has the bits of
  // `score_rows`, `SharedAttention::soften` and `mix`.
  void attend_whole(float* scores, Bfloat16* weights, float scale, float* greatest, float* sums, float* mixtures) const {
    load_queries();
    Lanes top[kQueries], sum[kQueries] = {};
    for (Lanes& each : top) each = Lanes{} - INFINITY;
    for (int64_t first = 0; first < kTiles; first += kWaiting) {
      for (int64_t i = first; i < first + kWaiting; i += 4) multiply_four(keys_ + i * kKeys * width(D_), scores + i * kScores);
      for (int c = 0; c < kQueries; ++c) {
        const float* from = scores + first * kScores + c * kKeys;
        Lanes most[2] = {top[c], top[c]};
#pragma GCC unroll 8
        for (int i = 0; i < kWaiting; ++i) most[i % 2] = greater(load_lanes(from + i * kScores), most[i % 2]);
        top[c] = greater(most[0], most[1]);
      }
    }
    for (int c = 0; c < kQueries; ++c) greatest[c] = greatest_lane(top[c]) * scale;
    const bool is_wide = D_ > kTileStep;
    const auto add_one = [&](int64_t step) {
      const Bfloat16 *from = weights + step * kTile, *to = values_ + step * kTileStep * width(D_);
      is_wide ? add_step<2>(from, kRow, to) : add_step<1>(from, kRow, to);
    };
    clear_sums();
    for (int64_t step = 0; step < kBlock / kTileStep; ++step) {
      for (int c = 0; c < kQueries; ++c) {
        const float* from = scores + 2 * step * kScores + c * kKeys;
        const Numerators pair(load_lanes(from), load_lanes(from + kScores), scale, greatest[c]);
        store_pair(weights + step * kTile + c * kTileStep, pair.first, pair.second);
        sum[c] += pair.first + pair.second;
      }
      fence();
      if (step > 0) add_one(step - 1);  // a tile is loaded some time after its stores
    }
    add_one(kBlock / kTileStep - 1);
    store_sums(is_wide, mixtures);
    store_lanes(sums, sums_over_lanes<kQueries>(sum));
    add(weights, kTile, kRow, values_, kBlock / kTileStep, 2 * kTileStep, mixtures);
  }

  // Steps of rows that all queries see at their places are mixed together. A query's other rows come after them; tokens
  // take turns.
  void mix(const View* views, int count, const Bfloat16* values, int64_t begin, const Bfloat16* weights, float* out) const {
    int64_t shared = begin + kBlock;
    for (int c = 0; c < count; ++c) shared = std::min(shared, views[c].plain());
    const int64_t steps = std::max<int64_t>(shared - begin, 0) / kTileStep, done = begin + steps * kTileStep;
    fence();
    if (packs_values_) {
      add(weights, kTileStep, kBlock * int64_t(sizeof(Bfloat16)), values_, steps, 0, out);
    } else {
      std::fill_n(out, count * width(D_), 0.0f);
      add_few(views[0], count, values, begin, begin, done, weights, out);
    }
    for (int first = 0, last; first < count; first = last) {
      const View& view = views[first];
      for (last = first + 1; last < count && last < first + kFew && views[last].scratch == view.scratch && views[last].count == view.count;) ++last;
      add_few(view, last - first, values, begin, std::max(done, view.begin()), std::min(view.end(), begin + kBlock), weights + first * kBlock, out + first * width(D_));
    }
  }

  template <class Emit>
  void emit(const float* sums, float factor, Emit&& emit) const {
    for (int64_t d = 0; d < D_; d += 2 * kLanes) {
      const Lanes low = load_lanes(sums + d), high = load_lanes(sums + d + kLanes);
      const Lanes both[2] = {__builtin_shufflevector(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23) * factor,
                             __builtin_shufflevector(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31) * factor};
      for (int64_t i = 0; i < 2; ++i) {
        const int64_t at = d + i * kLanes;
        if (at + kLanes <= D_) {
          emit(at, both[i]);
        } else {
          for (int64_t j = at; j < D_; ++j) emit(j, both[i][j - at]);
        }
      }
    }
  }

 private:
  static constexpr int kWaiting = 8;                          // tiles that are stored before one is read; a choice
  static constexpr int64_t kRow = 64;                         // bytes of a row of a tile
  static constexpr int64_t kTile = kTileStep / 2 * kRow / 2;  // elements of a tile of keys, values or weights
  static constexpr int64_t kScores = kKeys * kQueries;        // of a tile of scores
  static constexpr int64_t kTiles = kBlock / kKeys;           // of keys in a block

  static __m512i row_at(const Bfloat16* row, int64_t k, __mmask32 mask) {
    return row == nullptr ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16(mask, row + k);
  }
  static __mmask32 mask_of(int64_t rest) { return rest >= kTileStep ? ~__mmask32(0) : (__mmask32(1) << rest) - 1; }

  // Packs kKeys rows for tiles: two elements of each row side by side, then the next two of all. A null row is zero.
  static void pack_keys(const Bfloat16* const* rows, int64_t D, Bfloat16* out) {
    for (int64_t k = 0; k < D; k += kTileStep, out += kTile) {
      const __mmask32 mask = mask_of(D - k);
      __m512 pairs[kKeys];
#pragma GCC unroll 16
      for (int i = 0; i < kKeys; ++i) pairs[i] = _mm512_castsi512_ps(row_at(rows[i], k, mask));
      transpose(pairs);
#pragma GCC unroll 16
      for (int i = 0; i < kKeys; ++i) _mm512_storeu_ps(out + i * kTileStep, pairs[i]);
    }
  }

  // Packs kTileStep rows for tiles: two rows side by side. Elements of a row stand in the order of the instructions that
  // interleave them, see `emit`.
  void pack_values(const Bfloat16* rows, Bfloat16* out) const {
    for (int64_t d = 0; d < D_; d += kTileStep, out += 2 * kTile) {
      const __mmask32 mask = mask_of(D_ - d);
#pragma GCC unroll 4
      for (int64_t i = 0; i < kTileStep; i += 2) {
        const __m512i even = row_at(rows + i * D_, d, mask), odd = row_at(rows + (i + 1) * D_, d, mask);
        _mm512_storeu_si512(out + i * kTileStep / 2, _mm512_unpacklo_epi16(even, odd));
        _mm512_storeu_si512(out + kTile + i * kTileStep / 2, _mm512_unpackhi_epi16(even, odd));
      }
    }
  }

  // Loads short queries for `multiply`.
  void load_queries() const {
    if (D_ <= kTileStep) _tile_loadd(2, chosen_, kRow);
  }

  // Writes the scores of kKeys packed keys.
  void multiply(const Bfloat16* packed, float* out, int64_t stride) const {
    _tile_zero(0);
    for (int64_t k = 0; k < width(D_); k += kTileStep, packed += kTile) {
      if (D_ > kTileStep) _tile_loadd(2, chosen_ + k, width(D_) * int64_t(sizeof(Bfloat16)));
      _tile_loadd(4, packed, kRow);
      _tile_dpbf16ps(0, 2, 4);
    }
    _tile_stored(0, out, stride * int64_t(sizeof(float)));
    fence();
  }

  // Writes the scores of four times kKeys packed keys, a tile after another: `multiply` waits for each result.
  void multiply_four(const Bfloat16* packed, float* out) const {
    const int64_t size = kKeys * width(D_);
    clear_sums();
    for (int64_t k = 0; k < width(D_); k += kTileStep, packed += kTile) {
      if (D_ > kTileStep) _tile_loadd(2, chosen_ + k, width(D_) * int64_t(sizeof(Bfloat16)));
      _tile_loadd(4, packed, kRow);
      _tile_dpbf16ps(0, 2, 4);
      _tile_loadd(6, packed + size, kRow);
      _tile_dpbf16ps(1, 2, 6);
      _tile_loadd(7, packed + 2 * size, kRow);
      _tile_dpbf16ps(3, 2, 7);
      _tile_loadd(4, packed + 3 * size, kRow);
      _tile_dpbf16ps(5, 2, 4);
    }
    _tile_stored(0, out, kRow);
    _tile_stored(1, out + kScores, kRow);
    _tile_stored(3, out + 2 * kScores, kRow);
    _tile_stored(5, out + 3 * kScores, kRow);
    fence();
  }

  // Writes the scores of `count` keys, up to kKeys * kWaiting, with up to kQueries queries. They have the bits of
  // `multiply`: an instruction adds the same products in the same order. A register cannot be loaded right after the short
  // stores of its parts, so several tiles are stored before the first one is transposed.
  void score_in_place(const Bfloat16* keys, int64_t count, float* out, int64_t stride) const {
    alignas(kBytes) float sums[kWaiting][kKeys * kQueries];
    const bool are_few = queries_.size <= kFew;
    for (int64_t row = 0; row < count; row += kKeys) {
      sum_in_place(keys + row * D_, std::min<int64_t>(kKeys, count - row), sums[row / kKeys], are_few ? kFew * int64_t(sizeof(float)) : kRow);
    }
    fence();
    for (int64_t row = 0; row < count; row += kKeys) {
      const float* from = sums[row / kKeys];
      if (are_few) {
        transpose_few(from, out + row, stride);
        continue;
      }
      __m512 rows[kKeys];
#pragma GCC unroll 16
      for (int i = 0; i < kKeys; ++i) rows[i] = _mm512_load_ps(from + i * kQueries);
      transpose(rows);
#pragma GCC unroll 16
      for (int i = 0; i < kQueries; ++i) _mm512_storeu_ps(out + row + i * stride, rows[i]);
    }
  }

  // Writes the scores of up to kKeys keys, a row for each key.
  FORETOKEN_INLINE void sum_in_place(const Bfloat16* keys, int64_t count, float* sums, int64_t stride) const {
    alignas(kBytes) Bfloat16 copied[kKeys * kTileStep];
    later_keys_.fetch(keys, kKeys * D_);
    _tile_zero(6);
    for (int64_t k = 0; k < D_; k += kTileStep) {
      if (D_ > kTileStep) _tile_loadd(7, keys_ + k * kTileStep / 2, kRow);
      if (count == kKeys && k + kTileStep <= D_) {
        _tile_loadd(4, keys + k, D_ * int64_t(sizeof(Bfloat16)));
      } else {
        for (int64_t i = 0; i < kKeys; ++i) _mm512_store_si512(copied + i * kTileStep, row_at(i < count ? keys + i * D_ : nullptr, k, mask_of(D_ - k)));
        fence();
        _tile_loadd(4, copied, kRow);
      }
      _tile_dpbf16ps(6, 4, 7);
    }
    _tile_stored(6, sums, stride);
  }

  // Transposes (kKeys, kFew) into (kFew, kKeys), `stride` elements from one row to the next.
  static void transpose_few(const float* sums, float* out, int64_t stride) {
    static_assert(kFew == 4 && kKeys == 16);
    const __m512 a = _mm512_load_ps(sums), b = _mm512_load_ps(sums + 16), c = _mm512_load_ps(sums + 32), d = _mm512_load_ps(sums + 48);
    for (int i = 0; i < kFew; ++i) {
      const __m512i every = _mm512_add_epi32(_mm512_set1_epi32(i), _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 0, 0, 0, 0, 0, 0, 0));
      const __m256 first = _mm512_castps512_ps256(_mm512_permutex2var_ps(a, every, b));
      const __m256 second = _mm512_castps512_ps256(_mm512_permutex2var_ps(c, every, d));
      _mm512_storeu_ps(out + i * stride, _mm512_insertf32x8(_mm512_castps256_ps512(first), second, 1));
    }
  }

  // Writes the mixtures of packed values, their elements from `first` on. step: elements of weights from one step to the
  // next; stride: bytes from one query to the next.
  void add(const Bfloat16* weights, int64_t step, int64_t stride, const Bfloat16* packed, int64_t steps, int64_t first, float* sums) const {
    const int64_t W = width(D_);
    for (int64_t d = first, pairs; d < W; d += pairs * kTileStep) {
      pairs = std::min<int64_t>((W - d) / kTileStep, 2);
      clear_sums();
      for (int64_t i = 0; i < steps; ++i) {
        const Bfloat16* from = packed + i * kTileStep * W + d * kTileStep;
        pairs == 2 ? add_step<2>(weights + i * step, stride, from) : add_step<1>(weights + i * step, stride, from);
      }
      store_sums(pairs == 2, sums + d);
    }
    fence();
  }

  static void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(3);
    _tile_zero(5);
  }

  // Adds a step of rows to the sums of kPairs * kTileStep elements.
  template <int kPairs>
  FORETOKEN_INLINE static void add_step(const Bfloat16* weights, int64_t stride, const Bfloat16* packed) {
    _tile_loadd(2, weights, stride);
    _tile_loadd(4, packed, kRow);
    _tile_dpbf16ps(0, 2, 4);
    _tile_loadd(4, packed + kTile, kRow);
    _tile_dpbf16ps(1, 2, 4);
    if constexpr (kPairs == 2) {
      _tile_loadd(4, packed + 2 * kTile, kRow);
      _tile_dpbf16ps(3, 2, 4);
      _tile_loadd(4, packed + 3 * kTile, kRow);
      _tile_dpbf16ps(5, 2, 4);
    }
  }

  void store_sums(bool are_wide, float* out) const {
    const int64_t stride = width(D_) * int64_t(sizeof(float));
    _tile_stored(0, out, stride);
    _tile_stored(1, out + kLanes, stride);
    if (!are_wide) return;
    _tile_stored(3, out + 2 * kLanes, stride);
    _tile_stored(5, out + 3 * kLanes, stride);
  }

  // Adds the rows with places from..to of a block to the mixtures of up to kFew queries that see them.
  void add_few(const View& view, int count, const Bfloat16* values, int64_t begin, int64_t from, int64_t to, const Bfloat16* weights, float* out) const {
    if (from >= to) return;
    if (count == 1) add_few<1>(view, values, begin, from, to, weights, out);
    if (count == 2) add_few<2>(view, values, begin, from, to, weights, out);
    if (count == 3) add_few<3>(view, values, begin, from, to, weights, out);
    if (count == 4) add_few<4>(view, values, begin, from, to, weights, out);
  }

  template <int kCount>
  void add_few(const View& view, const Bfloat16* values, int64_t begin, int64_t from, int64_t to, const Bfloat16* weights, float* out) const {
    alignas(kBytes) float widened[kCount][kBlock];
    for (int64_t i = (from - begin) / kLanes * kLanes; i < to - begin; i += kLanes) {
      for (int c = 0; c < kCount; ++c) store_lanes(widened[c] + i, load_lanes(weights + c * kBlock + i));
    }
    for (int64_t d = 0; d < D_; d += kTileStep) {
      Lanes sums[kCount][2];
      for (int c = 0; c < kCount; ++c) {
        for (int i = 0; i < 2; ++i) sums[c][i] = load_lanes(out + c * width(D_) + d + i * kLanes);
      }
      const __mmask32 mask = mask_of(D_ - d);
      for (int64_t place = from, end; place < to; place = end) {
        end = std::min(to, (place / kTileStep + 1) * kTileStep);
        Lanes even[kCount][2] = {}, odd[kCount][2] = {};
        if (d == 0) later_values_.fetch(values + place * D_, kTileStep * D_);
        if (end - place == kTileStep && end <= view.plain() && d + kTileStep <= D_) {
          const Bfloat16* row = values + place * D_ + d;
#pragma GCC unroll 2
          for (int64_t i = place - begin; i < end - begin; i += 2, row += 2 * D_) {
            add_row<kCount>(_mm512_loadu_si512(row), widened, i, even);
            add_row<kCount>(_mm512_loadu_si512(row + D_), widened, i + 1, odd);
          }
        } else {
          for (int64_t at = place; at < end; ++at) add_row<kCount>(row_at(values + view.row(at) * D_, d, mask), widened, at - begin, at % 2 > 0 ? odd : even);
        }
#pragma GCC unroll 4
        for (int c = 0; c < kCount; ++c) {
          for (int i = 0; i < 2; ++i) sums[c][i] += even[c][i] + odd[c][i];
        }
      }
      for (int c = 0; c < kCount; ++c) {
        for (int i = 0; i < 2; ++i) store_lanes(out + c * width(D_) + d + i * kLanes, sums[c][i]);
      }
    }
  }

  // Adds kTileStep elements of a row, times the weights of each query.
  template <int kCount>
  FORETOKEN_INLINE static void add_row(__m512i row, const float (&weights)[kCount][kBlock], int64_t place, Lanes (&sums)[kCount][2]) {
    const __m512i zero = _mm512_setzero_si512();
    const Lanes low = (Lanes)_mm512_unpacklo_epi16(zero, row), high = (Lanes)_mm512_unpackhi_epi16(zero, row);
#pragma GCC unroll 4
    for (int c = 0; c < kCount; ++c) {
      const Lanes weight = in_all_lanes(weights[c][place]);
      sums[c][0] = multiply_add(weight, low, sums[c][0]);
      sums[c][1] = multiply_add(weight, high, sums[c][1]);
    }
  }

  const TileQueries queries_;
  const Bfloat16* chosen_ = nullptr;
  LaterRows<Bfloat16> later_keys_, later_values_;
  const int64_t D_;
  const bool packs_keys_, packs_values_;
  Bfloat16 *const keys_, *const values_, *const own_;  // packed: blocks, and keys of a view's own rows
};

#endif

}  // namespace
