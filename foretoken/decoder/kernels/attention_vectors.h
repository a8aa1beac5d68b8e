// Scores of queries and mixtures of values in vector registers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cache_rows.h"
#include "gemm.h"
#include "vectors.h"
#include "views.h"

namespace {

// The numerators of a softmax of two registers of scores: 2^(score * scale - top).
struct Numerators {
  Lanes first, second;

  Numerators(Lanes first, Lanes second, float scale, float top) : first(of(first, scale, top)), second(of(second, scale, top)) {}

 private:
  static Lanes of(Lanes scores, float scale, float top) {
    return power_of_two(multiply_add(scores, in_all_lanes(scale), -in_all_lanes(top)));
  }
};

// Blocks of rows with up to kQueries queries. The values of a block are summed by place, one row after another.
template <class T>
class VectorAttention {
 public:
  using Weight = float;
  using Queries = Inputs<T>;
  static constexpr int kKeys = 4, kQueries = kTokens, kMostQueries = 8 * kQueries;
  static constexpr bool kHasWhole = false;

  VectorAttention(const Inputs<T>& queries, int64_t, int, int64_t D, T*) : queries_(queries), D_(D) {}

  // The number of queries that the buffers hold for this many queries; elements of a mixture; of packed values.
  static int64_t padded(int64_t queries) { return (queries + kQueries - 1) / kQueries * kQueries; }
  static int64_t width(int64_t D) { return (D + kLanes - 1) / kLanes * kLanes; }
  static int64_t packed(int64_t) { return 0; }

  // Scores are of the queries from `first` on.
  void choose(int64_t first) { chosen_ = queries_.at(first, 0); }

  // Prepares the rows of the block that begins at `begin` for several calls of `mix` and `score_rows`; there are no rows
  // from `end` on.
  void prepare(const HeadRows<T>& rows, int64_t, int64_t end) {
    if (rows.are_loaded()) return;  // they were fetched while they were loaded
    later_keys_ = rows.later_keys(end);
    later_values_ = rows.later_values(end);
  }

  // Scores of the rows first..end at their places in the block that begins at `begin`; first: a multiple of kKeys.
  void score_rows(const T* keys, int64_t begin, int64_t first, int64_t end, float* out) const {
    for (int64_t row = first; row < end; row += kKeys) {
      later_keys_.fetch(keys + row * D_, kKeys * D_);
      score(keys + row * D_, std::min<int64_t>(kKeys, end - row), out + row - begin, kBlock);
    }
  }

  // Scores of the first `count` of some keys. Writes kKeys values a query; the rest of them is undefined; `stride`
  // elements from one query to the next.
  void score(const T* keys, int64_t count, float* out, int64_t stride) const {
    const T* rows[kKeys];
    float dots[kQueries * kKeys];
    for (int r = 0; r < kKeys; ++r) rows[r] = keys + std::min<int64_t>(r, count - 1) * D_;
    dot_block<T, kKeys, kQueries>(rows, chosen_, D_, NoFetch{}, dots);
    for (int c = 0; c < kQueries; ++c) std::copy_n(dots + c * kKeys, kKeys, out + c * stride);
  }

  // Writes the mixtures of up to kQueries queries, (count, width), of the rows with places begin..begin + kBlock.
  void mix(const View* views, int count, const T* values, int64_t begin, const float* weights, float* out) const {
    int64_t d = 0;
    for (; d + 4 * kLanes <= D_; d += 4 * kLanes) mix_lanes<4>(views, count, values, begin, d, weights, out);
    for (; d + 2 * kLanes <= D_; d += 2 * kLanes) mix_lanes<2>(views, count, values, begin, d, weights, out);
    for (; d + kLanes <= D_; d += kLanes) mix_lanes<1>(views, count, values, begin, d, weights, out);
    for (; d < D_; ++d) {
      for (int c = 0; c < count; ++c) {
        float sum = 0;
        for (int64_t place = std::max(begin, views[c].begin()); place < std::min(begin + kBlock, views[c].end()); ++place) {
          sum = std::fma(weights[c * kBlock + place - begin], to_float(values[views[c].row(place) * D_ + d]), sum);
        }
        out[c * width(D_) + d] = sum;
      }
    }
  }

  // Calls emit(d, values...) with a mixture times `factor`: kLanes at a time, the last ones of an odd D one by one.
  template <class Emit>
  void emit(const float* sums, float factor, Emit&& emit) const {
    int64_t d = 0;
    for (; d + kLanes <= D_; d += kLanes) emit(d, load_lanes(sums + d) * factor);
    for (; d < D_; ++d) emit(d, sums[d] * factor);
  }

 private:
  // First the rows that all queries see at their places: each value is loaded once for all queries. Rows before the
  // window of a query have a weight of 0.
  template <int kRegisters>
  void mix_lanes(const View* views, int count, const T* values, int64_t begin, int64_t d, const float* weights, float* out) const {
    int64_t shared = begin + kBlock, low = shared;
    for (int c = 0; c < count; ++c) {
      shared = std::min(shared, views[c].plain());
      low = std::min(low, views[c].begin());
    }
    shared = std::max(shared, begin);
    low = std::clamp(low, begin, shared);
    Lanes sums[kQueries][kRegisters] = {};
    if (count == 1) add_shared<1>(values, low, shared, d, weights + low - begin, sums);
    if (count == 2) add_shared<2>(values, low, shared, d, weights + low - begin, sums);
    if constexpr (kQueries > 2) {
      if (count == 3) add_shared<3>(values, low, shared, d, weights + low - begin, sums);
      if (count == 4) add_shared<4>(values, low, shared, d, weights + low - begin, sums);
    }
    for (int c = 0; c < count; ++c) {
      Lanes own[kRegisters];
      for (int i = 0; i < kRegisters; ++i) own[i] = sums[c][i];
      for (int64_t place = std::max(shared, views[c].begin()); place < std::min(begin + kBlock, views[c].end()); ++place) {
        const Lanes weight = in_all_lanes(weights[c * kBlock + place - begin]);
        const T* value = values + views[c].row(place) * D_ + d;
        for (int i = 0; i < kRegisters; ++i) own[i] = multiply_add(weight, load_lanes(value + i * kLanes), own[i]);
      }
      for (int i = 0; i < kRegisters; ++i) store_lanes(out + c * width(D_) + d + i * kLanes, own[i]);
    }
  }

  // The compiler knows the number of queries, or their sums would not stay in registers.
  template <int kCount, int kRegisters>
  void add_shared(const T* values, int64_t first, int64_t last, int64_t d, const float* weights, Lanes (&totals)[kQueries][kRegisters]) const {
    static_assert(kCount <= kQueries);
    Lanes sums[kCount][kRegisters] = {};
    for (int64_t row = first; row < last; ++row, ++weights) {
      const T* value = values + row * D_ + d;
      later_values_.fetch(value, kRegisters * kLanes);
#pragma GCC unroll 4
      for (int i = 0; i < kRegisters; ++i) {
        const Lanes v = load_lanes(value + i * kLanes);
#pragma GCC unroll 4
        for (int c = 0; c < kCount; ++c) sums[c][i] = multiply_add(in_all_lanes(weights[c * kBlock]), v, sums[c][i]);
      }
    }
    for (int c = 0; c < kCount; ++c) {
      for (int i = 0; i < kRegisters; ++i) totals[c][i] = sums[c][i];
    }
  }

  const Inputs<T> queries_;
  const typename Inputs<T>::Token* chosen_ = nullptr;
  LaterRows<T> later_keys_, later_values_;
  const int64_t D_;
};

}  // namespace
