// The KV cache of a sequence: the rows that a token sees, and their keys and values, in the model's dtype or rounded to int8
// with a scale for each row of a head.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "gemm.h"
#include "interface.h"
#include "vectors.h"

namespace {

// The cache rows low..prefix of a sequence, then `count` scratch rows, numbered from the prefix. The first `run` scratch
// rows are 0 to `run` - 1.
//
// A row's place is the cache row that it would have if all rows of the view were committed. It is the same in a tree and
// after a commit. Scratch row i of the view has place `at` + i, every other row has its own number.
struct View {
  int64_t low, prefix, count, run, at;
  const int32_t* scratch;

  int64_t begin() const { return low < prefix ? low : at; }
  int64_t end() const { return at + count; }
  int64_t plain() const { return prefix + run; }  // rows before this one are at their places
  int64_t row(int64_t place) const { return place < plain() ? place : prefix + scratch[place - at]; }
};

// Returns the rows that node t of sequence s sees. `runs`: for each node, how many nodes before it are its nearest
// ancestors. `every`: the numbers of all scratch rows, for nodes that see all rows before them.
View view_of(const Pass& pass, const int32_t* runs, const int32_t* every, int64_t window, int64_t s, int64_t t, int32_t* scratch) {
  const int64_t first = pass.node_starts[s], prefix = pass.prefix[s], position = pass.positions[first + t];
  const int64_t low = window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
  const int64_t *parents = pass.parents + first, *positions = pass.positions + first;
  int64_t count = 0;
  if (window > 0) {
    for (int64_t node = t; node >= 0 && position - positions[node] < window; node = parents[node]) scratch[count++] = int32_t(node);
  } else if (runs[first + t] == t) {
    return {low, prefix, t + 1, t + 1, prefix, every};
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
  while (low <= prefix && run < count && scratch[run] == run) ++run;
  return {std::min(low, prefix), prefix, count, run, std::max(low, prefix), scratch};
}

constexpr int64_t kBlock = 512;  // rows of a KV cache whose mixture is computed by itself; NOTES, "Long prefixes"

inline int64_t blocks_of(int64_t rows) { return (rows + kBlock - 1) / kBlock; }

// Bytes of a row of a head. A rounded row is D numbers of int8, and the scale in float32 right behind them.
inline int64_t rounded_bytes_of(int64_t D) { return D + int64_t(sizeof(float)); }
template <class T>
int64_t row_bytes(const Model& model) {
  return model.rows_are_rounded ? rounded_bytes_of(model.head_dim) : model.head_dim * int64_t(sizeof(T));
}

// Rounds a row to multiples of 1 / 127 of its largest size, ties to even. If an element is infinite or NaN, the scale is NaN.
inline void round_row(const float* x, int64_t D, char* out) {
  constexpr float kMost = 127.0f;
  const auto load = [&](int64_t i) {
    if (i + kLanes <= D) return load_lanes(x + i);
    Lanes values{};
    for (int64_t j = 0; i + j < D; ++j) values[j] = x[i + j];
    return values;
  };
  Lanes sizes{}, rest{};  // rest: 0, or NaN if an element is infinite or NaN
  for (int64_t i = 0; i < D; i += kLanes) {
    const Lanes values = load(i);
    sizes = greater(sizes, greater(values, -values));
    rest += values - values;
  }
  const float size = greatest_lane(sizes), odd = sum_of_lanes(rest);
  const bool is_zero = !(size >= 1e-30f);  // the factor that rounds smaller elements may overflow
  const float scale = odd != odd ? NAN : is_zero ? 0.0f : size / kMost, factor = odd != odd || is_zero ? 0.0f : kMost / size;
  typedef int8_t RowBytes __attribute__((vector_size(kLanes)));
  for (int64_t i = 0; i < D; i += kLanes) {
    const RowBytes numbers = __builtin_convertvector(nearest(load(i) * factor), RowBytes);
    std::memcpy(out + i, &numbers, size_t(std::min<int64_t>(kLanes, D - i)));
  }
  std::memcpy(out + D, &scale, sizeof scale);
}

// Writes the rows first..last, which `round_row` rounded, in the model's dtype. kD: their D, or 0.
template <int kD, class T>
void load_rows_of(const char* first, const char* last, int64_t D, T* out) {
  constexpr int64_t kAhead = 4 << 10;  // bytes; a choice: arithmetic leaves no room in the processor's queues to read far ahead
  if (kD > 0) D = kD;
  const int64_t bytes = rounded_bytes_of(D);
  for (const char* row = first; row < last; row += bytes, out += D) {
    for (int64_t i = 0; i < bytes; i += 64) fetch<Into::kSecond>(row + i + kAhead);  // past the end it is harmless
    float scale;
    std::memcpy(&scale, row + D, sizeof scale);
    const auto values = [&](int64_t i) { return load_bytes(reinterpret_cast<const int8_t*>(row + i)) * scale; };
    int64_t i = 0;
    for (; i + kPair <= D; i += kPair) store_pair(out + i, values(i), values(i + kLanes));
    for (; i < D; ++i) assign(out[i], float(int8_t(row[i])) * scale);
  }
}

// Not inlined: every caller would have these loops.
template <class T>
[[gnu::noinline]] void load_rows(const char* first, const char* last, int64_t D, T* out) {
  if (D == 32) return load_rows_of<32>(first, last, D, out);
  if (D == 64) return load_rows_of<64>(first, last, D, out);
  if (D == 128) return load_rows_of<128>(first, last, D, out);
  load_rows_of<0>(first, last, D, out);
}

// Fetches rows that are read some time after those at hand: arithmetic leaves no room in the processor's queues to read far
// ahead. NOTES, "Long prefixes"; not measured on processors other than Intel's.
template <class T>
struct LaterRows {
  const T* rows = nullptr;                      // the first row that can be at hand
  const char *later = nullptr, *end = nullptr;  // what is fetched beside it; past the last row
  int64_t D = 0;                                // of rounded rows; 0: rows are not rounded

  // row, count: elements at hand.
  FORETOKEN_INLINE void fetch(const T* row, int64_t count) const {
    if (end == nullptr || fetches_nearest_fast()) return;
    const char* from = later + bytes_of(row - rows);
    if (from >= end) return;
    for (const char* past = from + bytes_of(count); from < past; from += 64) ::fetch<Into::kSecond>(from);
  }

 private:
  int64_t bytes_of(int64_t count) const { return D == 0 ? count * int64_t(sizeof(T)) : count / D * rounded_bytes_of(D); }
};

// The cache rows of one head of one sequence. Attention reads them block by block, see `SharedAttention`.
template <class T>
class HeadRows {
 public:
  // keys, values: the first row; prefix and nodes: rows that hold something. memory: of `size` elements if rows are rounded.
  HeadRows(const Model& model, const void* keys, const void* values, int64_t prefix, int64_t nodes, T* memory)
      : keys_(static_cast<const char*>(keys)), values_(static_cast<const char*>(values)), D_(model.head_dim), prefix_(prefix), end_(prefix + nodes),
        memory_(model.rows_are_rounded ? memory : nullptr), half_(size(model, nodes) / 2) {}

  // Elements for the rows of a block. Nodes of a tree may stand behind the block that their places are in.
  static int64_t size(const Model& model, int64_t nodes) { return model.rows_are_rounded ? 2 * (kBlock + nodes) * model.head_dim : 0; }

  // Makes the rows of the block that begins at `begin` readable until the next call.
  void load(int64_t begin) {
    if (memory_ == nullptr) return;
    const int64_t bytes = rounded_bytes_of(D_), past = begin + kBlock <= prefix_ ? begin + kBlock : end_;
    load_rows(keys_ + begin * bytes, keys_ + past * bytes, D_, memory_);
    load_rows(values_ + begin * bytes, values_ + past * bytes, D_, memory_ + half_);
    begin_ = begin;
  }

  // What is read after rows before `last`: some KiB later, or rounded rows of the next block.
  LaterRows<T> later_keys(int64_t last) const { return later(keys_, keys(), last); }
  LaterRows<T> later_values(int64_t last) const { return later(values_, values(), last); }

  bool are_loaded() const { return memory_ != nullptr; }
  // Row r is r * D elements further.
  const T* keys() const { return memory_ == nullptr ? reinterpret_cast<const T*>(keys_) : memory_ - begin_ * D_; }
  const T* values() const { return memory_ == nullptr ? reinterpret_cast<const T*>(values_) : memory_ + half_ - begin_ * D_; }

 private:
  LaterRows<T> later(const char* stored, const T* rows, int64_t last) const {
    constexpr int64_t kAhead = 8 << 10;
    if (memory_ == nullptr) return {rows, stored + kAhead, stored + last * D_ * int64_t(sizeof(T)), 0};
    return {rows + begin_ * D_, stored + (begin_ + kBlock) * rounded_bytes_of(D_), stored + last * rounded_bytes_of(D_), D_};
  }

  const char *keys_, *values_;
  int64_t D_, prefix_, end_;
  T* memory_;
  int64_t half_, begin_ = 0;
};

}  // namespace
