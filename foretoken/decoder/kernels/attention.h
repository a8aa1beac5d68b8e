// Attention of few queries over a sequence's cache rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "gemm.h"
#include "interface.h"
#include "tiles.h"
#include "vectors.h"

namespace {

// The rows that one token sees: the cache rows low..prefix of its sequence, then `count` scratch rows, numbered from
// the prefix. The first `run` scratch rows are 0 to `run` - 1.
struct View {
  int64_t low, prefix, count, run;
  const int32_t* scratch;

  int64_t size() const { return prefix - low + count; }
};

// Returns the rows that node t of sequence s sees. `runs`: for each node, how many nodes before it are its nearest
// ancestors. `every`: the numbers of all scratch rows, for nodes that see all rows before them.
View view_of(const Pass& pass, const int32_t* runs, const int32_t* every, int64_t window, int64_t s, int64_t t, int32_t* scratch) {
  const int64_t first = pass.node_starts[s], prefix = pass.prefix[s], position = pass.positions[first + t];
  const int64_t low = window > 0 ? std::min(std::max<int64_t>(0, position - window + 1), prefix) : 0;
  const int64_t *parents = pass.parents + first, *positions = pass.positions + first;
  int64_t count = 0;
  if (window > 0) {
    for (int64_t node = t; node >= 0 && position - positions[node] < window; node = parents[node]) scratch[count++] = int32_t(node);
  } else if (runs[first + t] == t) {
    return {low, prefix, t + 1, t + 1, every};
  } else {
    for (int64_t node = t; node >= 0;) {
      const int64_t last = node - runs[first + node];
      for (int64_t i = node; i >= last; --i) scratch[count + node - i] = int32_t(i);
      count += node - last + 1;
      node = parents[last];
    }
  }
  std::reverse(scratch, scratch + count);
  int64_t run = 0;
  while (run < count && scratch[run] == run) ++run;
  return {low, prefix, count, run, scratch};
}

// Dot products of up to kQueries queries, from one on, with up to kKeys keys, in vector registers.
template <class T>
class VectorDots {
 public:
  static constexpr int kKeys = 4, kQueries = kTokens;

  VectorDots(const Inputs<T>& queries, int64_t first, int64_t D) : queries_(queries.at(first, 0)), D_(D) {}

  // The number of queries that the buffers hold for this many queries.
  static int64_t padded(int64_t queries) { return (queries + kQueries - 1) / kQueries * kQueries; }

  // With the first `count` of some keys. Writes kKeys values a query; the rest of them is undefined; `stride` elements
  // from one query to the next.
  void run(const T* keys, int64_t count, float* out, int64_t stride) const {
    const T* rows[kKeys];
    float dots[kQueries * kKeys];
    for (int r = 0; r < kKeys; ++r) rows[r] = keys + std::min<int64_t>(r, count - 1) * D_;
    dot_block<T, kKeys, kQueries>(rows, queries_, D_, NoFetch{}, dots);
    for (int c = 0; c < kQueries; ++c) std::copy_n(dots + c * kKeys, kKeys, out + c * stride);
  }

 private:
  const typename Inputs<T>::Token* queries_;
  const int64_t D_;
};

#if defined(FORETOKEN_TILES)
template <class T>
using Dots = std::conditional_t<kIsTiled<T>, TileDots, VectorDots<T>>;
#else
template <class T>
using Dots = VectorDots<T>;
#endif

constexpr int64_t kMostPerQuery = 4;  // `Dots<T>::padded(n)` is at most this many times n

// Attention of up to kQueries queries that share keys and values: (rows, D) of one head of one sequence. A query's
// result does not depend on other queries: its keys come in the order of its view.
template <class T>
class SharedAttention {
 public:
  static constexpr int kKeys = Dots<T>::kKeys, kQueries = Dots<T>::kQueries;

  // views: of the queries from `first` on.
  SharedAttention(const MatrixInputs<T>& queries, int64_t first, const View* views, int count, const T* keys, const T* values, int64_t D, float* scores, int64_t stride)
      : dots_(queries, first, D), views_(views), count_(count), keys_(keys), values_(values), D_(D), scores_(scores), stride_(stride) {}

  // Computes scores of the queries, then the numerators of their softmax and 1 / its sum. A softcap above 0 bounds the
  // scores.
  void score(float scale, float softcap) {
    const Seen seen(views_, count_);
    score_prefix(seen);
    score_scratch(seen);
    for (int c = 0; softcap > 0 && c < count_; ++c) cap(of(c), views_[c].size(), scale, softcap);
    if (softcap > 0) scale = 1.0f;
    Lanes sums[std::max(kQueries, 4)] = {};
    for (int c = 0; c < count_; ++c) sums[c] = soften(of(c), views_[c].size(), scale);
    store_lanes(factors_, 1.0f / sums_over_lanes<std::max(kQueries, 4)>(sums));
  }

  // Calls emit(query, d, values...) with the mixture of values: kLanes at a time, the last ones of an odd D one by one.
  template <class Emit>
  void mix(Emit&& emit) const {
    for (int first = 0; first < count_; first += kTokens) {
      const Group group(views_ + first, first, std::min(kTokens, count_ - first));
      int64_t d = 0;
      for (; d + 4 * kLanes <= D_; d += 4 * kLanes) mix_lanes<4>(group, d, emit);
      for (; d + 2 * kLanes <= D_; d += 2 * kLanes) mix_lanes<2>(group, d, emit);
      for (; d + kLanes <= D_; d += kLanes) mix_lanes<1>(group, d, emit);
      for (; d < D_; ++d) {
        for (int c = first; c < first + group.count; ++c) {
          float sum = 0;
          walk(c, [&](float weight, const T* value) { sum = std::fma(weight, to_float(value[d]), sum); });
          emit(c, d, sum * factors_[c]);
        }
      }
    }
  }

 private:
  // The rows that some queries see: cache rows from `low` on, and all queries those from `common` on; scratch rows
  // before `scratch`, and all queries those before `shared`.
  struct Seen {
    int64_t low = INT64_MAX, common = 0, scratch = 0, shared = INT64_MAX;

    Seen(const View* views, int count) {
      for (int c = 0; c < count; ++c) {
        low = std::min(low, views[c].low);
        common = std::max(common, views[c].low);
        shared = std::min(shared, views[c].run);
        if (views[c].count > 0) scratch = std::max<int64_t>(scratch, views[c].scratch[views[c].count - 1] + 1);
      }
    }
  };

  // Queries whose values are mixed together.
  struct Group : Seen {
    int first, count;

    Group(const View* views, int first, int count) : Seen(views, count), first(first), count(count) {}
  };

  float* of(int c) const { return scores_ + c * stride_; }

  // Scores of cache rows. If all queries see the same rows, scores go straight to their places. Scores of scratch rows
  // overwrite the values past the last row.
  void score_prefix(const Seen& seen) {
    const int64_t prefix = views_[0].prefix;
    float out[kQueries * kKeys];
    for (int64_t row = seen.low; row < prefix; row += kKeys) {
      const int64_t count = std::min<int64_t>(kKeys, prefix - row);
      if (seen.low == seen.common) {
        dots_.run(keys_ + row * D_, count, scores_ + row - seen.low, stride_);
        continue;
      }
      dots_.run(keys_ + row * D_, count, out, kKeys);
      for (int c = 0; c < count_; ++c) {
        for (int r = 0; r < count; ++r) {
          if (row + r >= views_[c].low) of(c)[row + r - views_[c].low] = out[c * kKeys + r];
        }
      }
    }
  }

  // Scores of scratch rows. A query that sees all rows so far, but not all of these, gets too many scores; later ones
  // overwrite them.
  void score_scratch(const Seen& seen) {
    const int64_t prefix = views_[0].prefix;
    float out[kQueries * kKeys];
    int64_t next[kQueries];
    for (int c = 0; c < count_; ++c) next[c] = views_[c].run;
    for (int64_t row = 0; row < seen.scratch; row += kKeys) {
      const T* keys = keys_ + (prefix + row) * D_;
      if (seen.low == seen.common && row + kKeys <= seen.shared) {
        dots_.run(keys, kKeys, scores_ + prefix - seen.low + row, stride_);
        continue;
      }
      dots_.run(keys, std::min<int64_t>(kKeys, seen.scratch - row), out, kKeys);
      for (int c = 0; c < count_; ++c) {
        const View& view = views_[c];
        float* scores = of(c) + prefix - view.low;
        if (row < view.run) std::copy_n(out + c * kKeys, kKeys, scores + row);
        for (; next[c] < view.count && view.scratch[next[c]] < row + kKeys; ++next[c]) {
          scores[next[c]] = out[c * kKeys + view.scratch[next[c]] - row];
        }
      }
    }
  }

  // Scales and caps scores; the buffer has room for a register past the last score.
  static void cap(float* scores, int64_t size, float scale, float softcap) {
    for (int64_t j = 0; j < size; j += kLanes) {
      store_lanes(scores + j, hyperbolic_tangent(load_lanes(scores + j) * scale / softcap) * softcap);
    }
  }

  // Turns scores into the numerators of a softmax and returns the denominator, lane by lane.
  static Lanes soften(float* scores, int64_t size, float scale) {
    const int64_t padded = (size + kLanes - 1) / kLanes * kLanes;
    for (int64_t j = size; j < padded; ++j) scores[j] = -INFINITY;
    Lanes greatest = Lanes{} - INFINITY;
    for (int64_t j = 0; j < padded; j += kLanes) {
      const Lanes s = load_lanes(scores + j) * scale;
      greatest = s > greatest ? s : greatest;
    }
    const Lanes all = in_all_lanes(scale), top = in_all_lanes(greatest_lane(greatest));
    Lanes sum{};
    for (int64_t j = 0; j < padded; j += kLanes) {
      const Lanes e = exponential(multiply_add(load_lanes(scores + j), all, -top));
      store_lanes(scores + j, e);
      sum += e;
    }
    return sum;
  }

  // Calls step(weight, value) for every row that query c sees.
  template <class Step>
  void walk(int c, Step&& step) const {
    const View& view = views_[c];
    const float* weights = of(c) - view.low;
    for (int64_t row = view.low; row < view.prefix; ++row) step(weights[row], values_ + row * D_);
    for (int64_t j = 0; j < view.count; ++j) step(weights[view.prefix + j], values_ + (view.prefix + view.scratch[j]) * D_);
  }

  template <int kRegisters, class Emit>
  void mix_lanes(const Group& group, int64_t d, Emit&& emit) const {
    const int64_t prefix = views_[0].prefix;
    Lanes sums[kTokens][kRegisters] = {};
    for (int i = 0; i < group.count; ++i) {
      const int c = group.first + i;
      Lanes own[kRegisters] = {};
      for (int64_t row = views_[c].low; row < group.common; ++row) add<kRegisters>(c, row, row, d, own);
      for (int j = 0; j < kRegisters; ++j) sums[i][j] = own[j];
    }
    if (group.count == 1) add_common<1>(group, d, sums);
    if (group.count == 2) add_common<2>(group, d, sums);
    if constexpr (kTokens > 2) {
      if (group.count == 3) add_common<3>(group, d, sums);
      if (group.count == 4) add_common<4>(group, d, sums);
    }
    for (int i = 0; i < group.count; ++i) {
      const int c = group.first + i;
      Lanes own[kRegisters];
      for (int j = 0; j < kRegisters; ++j) own[j] = sums[i][j];
      for (int64_t j = group.shared; j < views_[c].count; ++j) add<kRegisters>(c, prefix + j, prefix + views_[c].scratch[j], d, own);
      for (int j = 0; j < kRegisters; ++j) emit(c, d + j * kLanes, own[j] * factors_[c]);
    }
  }

  // Adds a row's values times the weight of query c at `place`.
  template <int kRegisters>
  FORETOKEN_INLINE void add(int c, int64_t place, int64_t row, int64_t d, Lanes (&sums)[kRegisters]) const {
    const Lanes weight = in_all_lanes(of(c)[place - views_[c].low]);
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; ++i) sums[i] = multiply_add(weight, load_lanes(values_ + row * D_ + d + i * kLanes), sums[i]);
  }

  // Adds the rows that all queries see: each value is loaded once for all queries. The compiler knows their number, or
  // their sums would not stay in registers.
  template <int kCount, int kRegisters>
  void add_common(const Group& group, int64_t d, Lanes (&totals)[kTokens][kRegisters]) const {
    static_assert(kCount <= kTokens);
    Lanes sums[kCount][kRegisters];
    const float* weights[kCount];
    for (int c = 0; c < kCount; ++c) {
      weights[c] = of(group.first + c) - views_[group.first + c].low;
      for (int i = 0; i < kRegisters; ++i) sums[c][i] = totals[c][i];
    }
    const int64_t end = views_[0].prefix + group.shared;
    for (int64_t row = group.common; row < end; ++row) {
      const T* value = values_ + row * D_ + d;
#pragma GCC unroll 4
      for (int i = 0; i < kRegisters; ++i) {
        const Lanes v = load_lanes(value + i * kLanes);
#pragma GCC unroll 4
        for (int c = 0; c < kCount; ++c) sums[c][i] = multiply_add(in_all_lanes(weights[c][row]), v, sums[c][i]);
      }
    }
    for (int c = 0; c < kCount; ++c) {
      for (int i = 0; i < kRegisters; ++i) totals[c][i] = sums[c][i];
    }
  }

  const Dots<T> dots_;
  const View* const views_;
  const int count_;
  const T *keys_, *values_;
  const int64_t D_;
  float* const scores_;
  const int64_t stride_;
  float factors_[std::max(kQueries, kLanes)];
};

}  // namespace
