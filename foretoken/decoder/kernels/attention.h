// Attention of few queries over a sequence's cache rows, block by block.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "attention_tiles.h"
#include "cache_rows.h"
#include "gemm.h"
#include "vectors.h"

namespace {

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

#if defined(FORETOKEN_TILES)
template <class T>
using BlockAttention = std::conditional_t<kIsTiled<T>, TileAttention, VectorAttention<T>>;
#else
template <class T>
using BlockAttention = VectorAttention<T>;
#endif

constexpr int64_t kMostPerQuery = 4;  // `BlockAttention<T>::padded(n)` is at most this many times n

// The softmax of up to kQueries queries over some rows: greatest score as a power of 2, sum of the numerators, and the mixture of values
// (kQueries, width), not yet divided by the sum. A sum of 0: the query sees none of the rows.
template <class T>
struct Softmax {
  static constexpr int kQueries = BlockAttention<T>::kQueries, kPadded = std::max(kQueries, kLanes);
  float *greatest, *sums, *mixtures;  // (kPadded,) twice

  Softmax(float* memory) : greatest(memory), sums(memory + kPadded), mixtures(memory + 2 * kPadded) {}
  static int64_t size(int64_t D) { return 2 * kPadded + kQueries * BlockAttention<T>::width(D); }

  void clear() {
    std::fill_n(greatest, kPadded, -INFINITY);
    std::fill_n(sums, kPadded, 0.0f);
  }

  // Adds the softmax of later rows.
  void add(const Softmax& other, int64_t width) {
    float kept[kPadded], added[kPadded];
    for (int i = 0; i < kPadded; i += kLanes) {
      const Lanes ours = load_lanes(greatest + i), theirs = load_lanes(other.greatest + i), top = theirs > ours ? theirs : ours;
      const Lanes old = power_of_two(ours - top), late = power_of_two(theirs - top);
      store_lanes(kept + i, old);
      store_lanes(added + i, late);
      store_lanes(greatest + i, top);
    }
    for (int c = 0; c < kQueries; ++c) {
      if (other.sums[c] == 0.0f) continue;
      float *to = mixtures + c * width, *from = other.mixtures + c * width;
      if (sums[c] == 0.0f) {
        sums[c] = other.sums[c];
        std::copy_n(from, width, to);
        continue;
      }
      sums[c] = std::fma(other.sums[c], added[c], sums[c] * kept[c]);
      const Lanes old = in_all_lanes(kept[c]), late = in_all_lanes(added[c]);
      for (int64_t d = 0; d < width; d += kLanes) store_lanes(to + d, multiply_add(load_lanes(from + d), late, load_lanes(to + d) * old));
    }
  }
};

// A thread's buffers for attention.
template <class T>
struct AttentionSpace {
  using Weight = typename BlockAttention<T>::Weight;
  float* scores;    // (kQueries, kBlock)
  Weight* weights;  // (kQueries, kBlock), or the scores
  T* packed;
  float* block;     // of `Softmax`
  float* totals;    // of `Softmax`, for every kQueries queries
  T* loaded;        // of `HeadRows`
};

// Attention of up to kMostQueries queries that share keys and values, of one head of one sequence.
//
// Every kBlock places have a softmax of their own, which are added in order (Rabe and Staats 2021, arXiv 2112.05682). A
// query's result therefore depends neither on other queries nor on who computes a block.
template <class T>
class SharedAttention {
 public:
  using Engine = BlockAttention<T>;
  static constexpr int kKeys = Engine::kKeys, kQueries = Engine::kQueries, kMostQueries = Engine::kMostQueries;

  // views: of the queries from `first` on. A softcap above 0 bounds the scores.
  SharedAttention(const typename Engine::Queries& queries, int64_t first, const View* views, int count, const HeadRows<T>& rows, int64_t D, float scale, float softcap, const AttentionSpace<T>& space)
      : engine_(queries, first, count, D, space.packed), first_(first), views_(views), count_(count), rows_(rows), D_(D), scale_(scale), softcap_(softcap), space_(space) {
    for (int c = 0; c < count; ++c) {
      begin_ = std::min(begin_, views[c].begin());
      end_ = std::max(end_, views[c].end());
      plain_ = std::max(plain_, views[c].plain());
    }
  }

  // The blocks first..last that some query sees.
  int64_t first_block() const { return begin_ / kBlock; }
  int64_t last_block() const { return blocks_of(end_); }

  // Elements for the weights of a query over `rows` places: for each block its greatest score, then its numerators.
  static int64_t kept(int64_t rows) { return blocks_of(rows) * (kBlock + 1); }

  // Keeps the weights of a query for `add_weights`. memory: of `kept(rows)` elements.
  void keep(int c, float* memory) { kept_[c] = memory; }

  void run() {
    for (int c = 0; c < count_; c += kQueries) total(c).clear();
    Softmax<T> block(space_.block);
    for (int64_t b = first_block(); b < last_block(); ++b) {
      prepare(b);
      for (int c = 0; c < count_; c += kQueries) {
        if (compute(b * kBlock, c, block)) total(c).add(block, Engine::width(D_));
      }
    }
  }

  // `run` in two steps, for up to kQueries queries: the softmax of a block, then the sum of all; part(b) is that of block b.
  void run_block(int64_t b, Softmax<T> out) {
    prepare(b);
    if (!compute(b * kBlock, 0, out)) out.clear();
  }
  template <class Part>
  void add_up(Part&& part) {
    total(0).clear();
    for (int64_t b = first_block(); b < last_block(); ++b) total(0).add(part(b), Engine::width(D_));
  }

  // Calls emit(query, d, values...) with the results: kLanes at a time, the last ones of an odd D one by one.
  template <class Emit>
  void emit(Emit&& emit) const {
    for (int c = 0; c < count_; ++c) {
      const Softmax<T> softmax = total(c);
      const auto emit_one = [&](int64_t d, auto values) { emit(c, d, values); };
      engine_.emit(softmax.mixtures + c % kQueries * Engine::width(D_), 1.0f / softmax.sums[c % kQueries], emit_one);
    }
  }

  // Adds the kept weights of a query to those of the rows it sees.
  void add_weights(int c, float* rows) const {
    const View& view = views_[c];
    const Softmax<T> softmax = total(c);
    for (int64_t place = view.begin(), b = place / kBlock; place < view.end(); ++b) {
      const float* kept = kept_[c] + b * (kBlock + 1);
      const float* weights = kept + 1 - b * kBlock;
      const float factor = power_of_two(Lanes{} + (kept[0] - softmax.greatest[c % kQueries]))[0] / softmax.sums[c % kQueries];
      const int64_t end = std::min(view.end(), (b + 1) * kBlock), plain = std::min(view.plain(), end);
      for (; place < plain; ++place) rows[place] = std::fma(weights[place], factor, rows[place]);
      for (; place < end; ++place) rows[view.row(place)] = std::fma(weights[place], factor, rows[view.row(place)]);
    }
  }

 private:
  void prepare(int64_t b) {
    rows_.load(b * kBlock);
    engine_.prepare(rows_, b * kBlock, plain_);
  }

  Softmax<T> total(int c) const { return space_.totals + c / kQueries * Softmax<T>::size(D_); }

  // Computes the softmax of the places begin..begin + kBlock, of kQueries queries from query `first` on. Returns whether
  // some query sees such a place.
  bool compute(int64_t begin, int first, Softmax<T>& out) {
    const View* views = views_ + first;
    const int count = std::min(kQueries, count_ - first);
    int64_t low = begin + kBlock, high = begin;
    for (int c = 0; c < count; ++c) {
      low = std::min(low, views[c].begin());
      high = std::max(high, std::min(begin + kBlock, views[c].end()));
    }
    if (low >= high) return false;
    engine_.choose(first_ + first);
    if constexpr (Engine::kHasWhole) {
      if (engine_.packs_keys() && are_whole(views, count, begin)) {
        engine_.attend_whole(space_.scores, space_.weights, power_scale(), out.greatest, out.sums, out.mixtures);
        return true;
      }
    }
    score_plain(views, count, std::max(low, begin), begin);
    score_scratch(views, count, begin);
    out.clear();
    const int64_t size = std::min((high - begin + kStep - 1) / kStep * kStep, kBlock);
    Lanes sums[std::max(kQueries, 4)] = {};
    for (int c = 0; c < count; ++c) {
      float* scores = space_.scores + c * kBlock;
      const int64_t from = std::max<int64_t>(views[c].begin() - begin, 0), to = std::min(views[c].end() - begin, size);
      if (from >= to) {
        std::fill_n(space_.weights + c * kBlock, size, typename Engine::Weight{});
        continue;
      }
      if (softcap_ > 0) cap(scores, size);
      std::fill(scores, scores + from, -INFINITY);
      std::fill(scores + to, scores + size, -INFINITY);
      float* kept = kept_[first + c] == nullptr ? nullptr : kept_[first + c] + begin / kBlock * (kBlock + 1);
      sums[c] = soften(scores, size, space_.weights + c * kBlock, out.greatest[c], kept);
    }
    store_lanes(out.sums, sums_over_lanes<std::max(kQueries, 4)>(sums));
    engine_.mix(views, count, rows_.values(), begin, space_.weights, out.mixtures);
    return true;
  }

  // Scores of rows at their places. Queries that do not see some of these rows get too many scores.
  void score_plain(const View* views, int count, int64_t low, int64_t begin) const {
    int64_t end = begin;
    for (int c = 0; c < count; ++c) end = std::max(end, std::min(begin + kBlock, views[c].plain()));
    engine_.score_rows(rows_.keys(), begin, low / kKeys * kKeys, end, space_.scores);
  }

  // Scores of rows at other places.
  void score_scratch(const View* views, int count, int64_t begin) const {
    const int64_t prefix = views[0].prefix;
    int64_t next[kQueries], last[kQueries], low = INT64_MAX, high = 0;
    for (int c = 0; c < count; ++c) {
      next[c] = std::max(views[c].run, begin - views[c].at);
      last[c] = std::min(views[c].count, begin + kBlock - views[c].at);
      if (next[c] >= last[c]) continue;
      low = std::min<int64_t>(low, views[c].scratch[next[c]]);
      high = std::max<int64_t>(high, views[c].scratch[last[c] - 1] + 1);
    }
    float out[kQueries * kKeys];
    for (int64_t row = low; row < high; row += kKeys) {
      engine_.score(rows_.keys() + (prefix + row) * D_, std::min<int64_t>(kKeys, high - row), out, kKeys);
      for (int c = 0; c < count; ++c) {
        float* scores = space_.scores + c * kBlock + views[c].at - begin;
        for (; next[c] < last[c] && views[c].scratch[next[c]] < row + kKeys; ++next[c]) {
          scores[next[c]] = out[c * kKeys + views[c].scratch[next[c]] - row];
        }
      }
    }
  }

  // Scales and caps scores.
  void cap(float* scores, int64_t size) const {
    for (int64_t j = 0; j < size; j += kLanes) {
      store_lanes(scores + j, hyperbolic_tangent(load_lanes(scores + j) * scale_ / softcap_) * softcap_);
    }
  }

  // Turns scores into the numerators of a softmax. Sets the greatest score, and returns the sum lane by lane. kept: see
  // `keep`, or null.
  Lanes soften(const float* scores, int64_t size, typename Engine::Weight* weights, float& top, float* kept) const {
    const float scale = power_scale();
    Lanes greatest[2] = {Lanes{} - INFINITY, Lanes{} - INFINITY}, sum{};  // two chains, each waits for itself alone
    for (int64_t j = 0; j < size; j += kPair) {
      for (int i = 0; i < 2; ++i) greatest[i] = greater(load_lanes(scores + j + i * kLanes), greatest[i]);
    }
    top = greatest_lane(greater(greatest[0], greatest[1])) * scale;
    if (kept != nullptr) *kept++ = top;
    for (int64_t j = 0; j < size; j += kPair) {
      const Numerators pair(load_lanes(scores + j), load_lanes(scores + j + kLanes), scale, top);
      if (kept != nullptr) store_pair(kept + j, pair.first, pair.second);
      store_pair(weights + j, pair.first, pair.second);
      sum += pair.first + pair.second;
    }
    return sum;
  }

  // Of scores, as the exponents of powers of 2.
  float power_scale() const { return (softcap_ > 0 ? 1.0f : scale_) * 1.44269504088896341f; }

  // Whether kQueries queries see all rows of a block at their places, and nothing is needed but their softmax.
  bool are_whole(const View* views, int count, int64_t begin) const {
    bool result = count == kQueries && softcap_ == 0;
    for (int c = 0; c < count; ++c) {
      result = result && views[c].begin() <= begin && begin + kBlock <= views[c].plain() && kept_[&views[c] - views_] == nullptr;
    }
    return result;
  }

  static constexpr int64_t kStep = 32;  // places are filled up to a multiple of this
  static_assert(kStep % kPair == 0);

  Engine engine_;
  const int64_t first_;
  const View* const views_;
  const int count_;
  HeadRows<T> rows_;
  const int64_t D_;
  const float scale_, softcap_;
  const AttentionSpace<T> space_;
  int64_t begin_ = INT64_MAX, end_ = 0, plain_ = 0;
  float* kept_[kMostQueries] = {};
};

}  // namespace
