// The cache rows that a token sees, in the order of their positions.
#pragma once

#include <algorithm>
#include <cstdint>

#include "interface.h"

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

}  // namespace
