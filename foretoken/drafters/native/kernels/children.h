// Chooses the children of the nodes of draft trees, a level at a time, from logits like `TreeExpansion.grow`; for
// dynamic trees the candidates and the best of them, like `DynamicExpansion.grow`.
//
// A row of logits is divided into parts, so that all threads share even a single row. The result of a row depends on
// its parts, not on the threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>

#include <omp.h>

#include "interface.h"
#include "rows.h"
#include "vectors.h"
#include "workspace.h"

extern "C" {

// How the tokens of a sequence's draft are chosen, see `DraftDraws`; and how a token was chosen, see `DrawKind`.
enum Draw : int64_t { kGreedily = 0, kCoupled = 1, kSampled = 2 };
enum DrawKind : int64_t { kOneHot = 0, kIndependent = 1, kWithoutReplacement = 2 };

// Draft trees of B sequences, all of one shape of N nodes: level by level, the children of a node side by side.
//
// Dynamic trees of D levels have nodes for the root and for the K best candidates of each level, which are expanded. K
// is `num_candidates`, N = 1 + D K, and in the shape node i of a level is the child of node i of the level above. The
// chosen candidates and their parents differ between sequences. All K candidates of all expanded nodes are kept, C = 1
// + K + (D - 1) K K with the root. The last level is not expanded, and its nodes are not written.
struct Draft {
  int64_t num_sequences, num_nodes;
  int64_t num_candidates;            // largest rank plus one
  int64_t num_rows, vocab;           // R, V: sizes of `rows`
  const int64_t *parents, *ranks;    // (N,), of the shape
  const int64_t* draws;              // (B,) `Draw`
  const float* inverse_temperature;  // (B,), not read for greedy drafts
  const int64_t *seeds, *root_positions;  // (B,)
  int64_t* tokens;                   // (B, N); the caller sets the roots
  float* scores;                     // (B, N), log-probability of the path to a node; the caller sets the roots
  int64_t *kinds, *row_of;           // (B, N); the caller sets the roots; both may be null if `rows` is
  float* rows;                       // (B, R, V) draft distributions; null without sampled sequences, and for dynamic trees
  // For dynamic trees, otherwise null:
  int64_t *node_parents, *node_numbers;  // (B, N), of expanded nodes: parents, and numbers among the candidates; the caller sets the root
  int64_t* candidates;               // (B, C) tokens, level by level, the best of each parent first; the caller sets the root
  float* path_scores;                // (B, C), their `scores`; the caller sets the root
  int64_t* candidate_parents;        // (B, C), the candidate that is the parent; the caller sets the root
  // For paths that end early, otherwise null: only the first node of a level has children, and no level follows once
  // every sequence has a path of such nodes whose estimate is below
  // the floor of its depth. A token of draft probability q is estimated to be right with log-odds slope * log-odds(q) +
  // intercept of its depth.
  const float *floors, *intercepts;  // (levels,), by depth from 1; floors of log-probabilities
  int64_t* lengths;                  // (B,), the depth at which each sequence's path falls below, or of its last node
  float slope;
};

}  // extern "C"

namespace {

// Parts of a row of logits, and elements of one. A choice: enough parts for many threads, few partial results to join.
constexpr int64_t kMostParts = 16, kLeastPart = 512;
// The greatest log-odds that count, and -log of their probability; as `log_odds` in host_trees.py.
constexpr double kFarthest = 9, kNearest = 1.2340e-4;

inline int64_t part_size(int64_t width) {  // whole registers
  return (std::max((width + kMostParts - 1) / kMostParts, kLeastPart) + kLanes - 1) / kLanes * kLanes;
}

// The largest keys in order; among equals the first.
class Best {
 public:
  Best(float* keys, int64_t* tokens, int64_t size) : keys_(keys), tokens_(tokens), size_(size) {}
  bool may_take(Lanes keys) const { return count_ < size_ || any_of(keys > keys_[size_ - 1]); }
  void take(float key, int64_t token) {
    if (count_ == size_ && !(key > keys_[size_ - 1])) return;
    int64_t i = count_ < size_ ? count_++ : size_ - 1;
    for (; i > 0 && key > keys_[i - 1]; --i) {
      keys_[i] = keys_[i - 1];
      tokens_[i] = tokens_[i - 1];
    }
    keys_[i] = key;
    tokens_[i] = token;
  }
  int64_t count() const { return count_; }

 private:
  float* const keys_;
  int64_t* const tokens_;
  const int64_t size_;
  int64_t count_ = 0;
};

// Buffers of `Children`; `size` is their bytes, -1 if 64 bits cannot count them.
struct ChildrenSpace {
  int64_t *levels;        // (N + 1,), the first node of each level
  int64_t *first;         // (N + 1,), the first child of each node; children stand side by side
  int64_t *inner;         // (N,), the nodes with children
  int64_t *inner_levels;  // (N + 1,), in `inner`, the first node of each level
  // For each sequence, node with children, and part of a row:
  float *tops, *sums;     // the largest scaled logit, and the sum of exp(logit - largest)
  float *keys;            // of the candidates, in descending order
  int64_t *candidates, *counts;
  float *row_tops, *factors;  // of a whole row, NaN if it has no distribution; 1 / its sum
  int64_t* order;  // (B, K K), for dynamic trees: candidates of a level, the best first
  int64_t size = 0;

  ChildrenSpace(const Draft& draft, int64_t width, void* base) {
    const int64_t N = draft.num_nodes, parts = (width + part_size(width) - 1) / part_size(width);
    int64_t rows = 1;  // nodes with children, of all sequences
    for (int64_t i = 2; i < N; ++i) rows += draft.parents[i] != draft.parents[i - 1];
    if (__builtin_mul_overflow(draft.num_sequences, rows, &rows)) size = -1;
    for (int64_t** each : {&levels, &first, &inner, &inner_levels}) take(base, size, *each, N + 1, 1);
    for (float** each : {&tops, &sums}) take(base, size, *each, rows, parts);
    take(base, size, counts, rows, parts);
    take(base, size, keys, rows, parts * draft.num_candidates);
    take(base, size, candidates, rows, parts * draft.num_candidates);
    for (float** each : {&row_tops, &factors}) take(base, size, *each, rows, 1);
    const int64_t K = draft.candidates == nullptr ? 0 : draft.num_candidates;
    take(base, size, order, draft.num_sequences, K * K);
  }
};

// Decides whether the shape is that of dynamic trees, with all output buffers.
inline Status check_dynamic(const Draft& draft) {
  if (draft.node_parents == nullptr || draft.node_numbers == nullptr || draft.path_scores == nullptr || draft.candidate_parents == nullptr) return Status::kMissing;
  const int64_t K = draft.num_candidates;
  if (draft.rows != nullptr || draft.num_nodes < 1 + K || (draft.num_nodes - 1) % K != 0) return Status::kShape;
  for (int64_t i = 1; i < draft.num_nodes; ++i) {
    if (draft.parents[i] != std::max<int64_t>(i - K, 0)) return Status::kShape;
  }
  return Status::kDone;
}

// Decides whether the shape is valid and the sequences' draws are known. is_shared: see `Children::choose`.
inline Status check_draft(const Draft& draft, int64_t width, bool is_shared = false) {
  if (draft.parents == nullptr || draft.ranks == nullptr || draft.draws == nullptr || draft.inverse_temperature == nullptr ||
      draft.seeds == nullptr || draft.root_positions == nullptr || draft.tokens == nullptr || draft.scores == nullptr ||
      (draft.rows != nullptr && (draft.kinds == nullptr || draft.row_of == nullptr))) {
    return Status::kMissing;
  }
  if (draft.num_nodes < 1 || draft.parents[0] != -1 || draft.num_candidates < 1 || draft.num_candidates > width ||
      width > draft.vocab) {
    return Status::kShape;
  }
  int64_t num_inner = 0, depth = 0, level = 0;  // level: the first node of the deepest level so far
  bool is_comb = true;  // whether children are those of the first nodes of levels
  for (int64_t i = 1; i < draft.num_nodes; ++i) {
    const int64_t parent = draft.parents[i];
    const bool is_first = parent != draft.parents[i - 1];
    if (parent < std::max<int64_t>(draft.parents[i - 1], 0) || parent >= i) return Status::kShape;
    if (draft.ranks[i] < (is_first ? 0 : draft.ranks[i - 1] + 1) || draft.ranks[i] >= draft.num_candidates) return Status::kShape;
    num_inner += is_first;
    is_comb &= parent == (parent >= level ? level : draft.parents[level]);
    if (parent >= level) {
      level = i;
      ++depth;
    }
  }
  if (draft.rows != nullptr && draft.num_rows < (is_shared ? depth : num_inner)) return Status::kShape;
  for (int64_t s = 0; s < draft.num_sequences; ++s) {
    if (draft.draws[s] < kGreedily || draft.draws[s] > kSampled) return Status::kDraws;
    if (draft.draws[s] == kSampled && draft.rows == nullptr && draft.candidates == nullptr) return Status::kMissing;
  }
  if (draft.floors != nullptr) {
    if (draft.intercepts == nullptr || draft.lengths == nullptr) return Status::kMissing;
    if (!is_comb || is_shared || draft.candidates != nullptr) return Status::kShape;
  }
  if (draft.candidates == nullptr) return Status::kDone;
  return is_shared ? Status::kShape : check_dynamic(draft);
}

class Children {
 public:
  // width: logits of a row that count, at most the vocabulary; stride: from one row to the next.
  Children(const Draft& draft, int64_t width, int64_t stride, void* workspace)
      : draft_(draft),
        width_(width),
        stride_(stride),
        part_(part_size(width)),
        parts_((width + part_ - 1) / part_),
        space_(draft, width, workspace) {
    const int64_t N = draft.num_nodes;
    int64_t num_inner = 0, next = 1;
    space_.levels[0] = 0;
    space_.inner_levels[0] = 0;
    for (int64_t begin = 0, end = 1; begin < N; begin = end, end = next) {
      for (int64_t node = begin; node < end; ++node) {
        space_.first[node] = next;
        while (next < N && draft.parents[next] == node) ++next;
        if (next > space_.first[node]) space_.inner[num_inner++] = node;
      }
      space_.levels[++depth_] = end;
      space_.inner_levels[depth_] = num_inner;
    }
    --depth_;
    space_.first[N] = N;
  }

  int64_t depth() const { return depth_; }  // of the deepest node
  int64_t level(int64_t depth) const { return space_.levels[depth]; }  // the first node of a depth
  int64_t num_inner(int64_t depth) const { return space_.inner_levels[depth + 1] - space_.inner_levels[depth]; }
  int64_t inner(int64_t depth, int64_t i) const { return space_.inner[space_.inner_levels[depth] + i]; }  // node i of them
  bool is_dynamic() const { return draft_.candidates != nullptr; }
  // The parent of a node below the root, valid once the levels above it are chosen.
  int64_t parent(int64_t sequence, int64_t node) const {
    return is_dynamic() ? draft_.node_parents[sequence * draft_.num_nodes + node] : draft_.parents[node];
  }

  // Chooses the children of all nodes of one depth that have some, all threads together. The tokens are valid on
  // return, the draft distributions after the next barrier.
  //
  // logits: a row for each sequence and node with children, or, with `is_shared`, one row for each sequence; changed
  // for dynamic trees.
  void choose(int64_t depth, float* logits, bool is_shared) const {
    const int64_t P = num_inner(depth), looks = draft_.num_sequences * P;
    share(looks * parts_, [&](int64_t unit) { scan(depth, logits, is_shared, unit / parts_, unit % parts_); });
    barrier_.wait();
    if (is_dynamic()) {
      share(looks, [&](int64_t look) { keep_candidates(depth, look); });
      barrier_.wait();
      share(depth + 1 < depth_ ? draft_.num_sequences : 0, [&](int64_t sequence) { expand_best(depth, sequence); });
      barrier_.wait();
      return;
    }
    share(looks, [&](int64_t look) { settle(depth, logits, is_shared, look); });
    barrier_.wait();
    if (draft_.rows == nullptr) return;
    share(looks * parts_, [&](int64_t unit) {
      if (!is_shared || unit / parts_ % P == 0) state(depth, logits, is_shared, unit / parts_, unit % parts_);
    });
  }

  // Decides whether no sequence's chain goes on after a depth. Any number of threads, after `choose`.
  bool have_all_ended(int64_t depth) const {
    if (draft_.floors == nullptr) return false;
    bool have_ended = true;
    for (int64_t s = 0; s < draft_.num_sequences; ++s) {
      const int64_t length = length_of(draft_.scores + s * draft_.num_nodes, depth);
      have_ended &= length > 0;
      if (omp_get_thread_num() == 0) draft_.lengths[s] = length > 0 ? length : depth;
    }
    return have_ended;
  }

 private:
  // The depth at which a path falls below its floor, 0 if it does not down to `depth`. scores: of its nodes.
  int64_t length_of(const float* scores, int64_t depth) const {
    double path = 0;
    for (int64_t d = 1; d <= depth; ++d) {
      const double q = std::min(double(scores[level(d)]) - scores[level(d - 1)], -kNearest);
      const double odds = std::clamp(q - std::log1p(-std::exp(q)), -kFarthest, kFarthest);
      path -= std::log1p(std::exp(-(draft_.slope * odds + draft_.intercepts[d - 1])));
      if (!(path >= draft_.floors[d - 1])) return d;
    }
    return 0;
  }

  // One row of logits for one node of one sequence.
  struct Look {
    int64_t sequence, node, place, source;  // source: the look that has its candidates
    float* logits;
    float scale;
    bool is_noisy;
    uint64_t key;
    int64_t num_candidates;
  };

  Look look_at(int64_t depth, float* logits, bool is_shared, int64_t index) const {
    const int64_t P = num_inner(depth), s = index / P, place = index % P, node = inner(depth, place);
    const int64_t draw = draft_.draws[s], last = space_.first[node + 1] - 1;
    const bool is_everybodys = is_shared && draw != kSampled;
    const uint64_t key = draw == kSampled ? noise_key(draft_.seeds[s], draft_.root_positions[s], kDraft, node)
                                          : target_key(draft_.seeds[s], draft_.root_positions[s] + depth + 1);
    return {
        s,
        node,
        place,
        is_everybodys ? s * P : index,
        logits + (is_shared ? s : index) * stride_,
        draw == kGreedily ? 1.0f : draft_.inverse_temperature[s],
        is_dynamic() ? draw == kCoupled : draw != kGreedily,
        key,
        is_dynamic() ? draft_.num_candidates : draw == kSampled ? last - space_.first[node] + 1 : is_everybodys ? draft_.num_candidates : draft_.ranks[last] + 1,
    };
  }

  // The candidates of one part of a row, its largest logit and the sum of exp. Dynamic trees rank tokens by their
  // probability given the noise, if there is noise: noisy logits replace the others.
  void scan(int64_t depth, float* logits, bool is_shared, int64_t index, int64_t part) const {
    const Look look = look_at(depth, logits, is_shared, index);
    if (look.source != index) return;
    const int64_t at = index * parts_ + part, begin = part * part_, end = std::min(begin + part_, width_);
    Best best(space_.keys + at * draft_.num_candidates, space_.candidates + at * draft_.num_candidates, look.num_candidates);
    Tops tops;
    const bool is_replaced = is_dynamic() && look.is_noisy;
    for (int64_t k = begin; k < end; k += kLanes) {
      const Lanes values = load_filled(look.logits, k, end) * look.scale;
      const Lanes keys = look.is_noisy ? values + gumbel(look.key, uint64_t(k)) : values;
      tops.take(is_replaced ? keys : values);
      if (is_replaced) store_below(look.logits, k, end, keys);
      if (!best.may_take(keys)) continue;
      for (int64_t i = 0; i < std::min<int64_t>(kLanes, end - k); ++i) best.take(keys[i], k + i);
    }
    const float top = tops.greatest();
    Lanes sum{};
    if (std::isfinite(top)) {
      const float scale = is_replaced ? 1.0f : look.scale;
      for (int64_t k = begin; k < end; k += kLanes) sum += exponential(load_filled(look.logits, k, end) * scale - top);
    }
    space_.tops[at] = top;
    space_.sums[at] = sum_of_lanes(sum);
    space_.counts[at] = best.count();
  }

  // The largest element of a row, NaN without a distribution, and the sum of exp(element - largest).
  struct Total {
    float top, sum;
  };

  // Over all parts of a row, from `at` on.
  Total total_of(int64_t at) const {
    float top = -INFINITY, sum = 0;
    bool is_odd = false;
    for (int64_t part = at; part < at + parts_; ++part) {
      is_odd |= std::isnan(space_.tops[part]);
      top = std::max(top, space_.tops[part]);
    }
    if (is_odd || !std::isfinite(top)) top = NAN;
    for (int64_t part = at; part < at + parts_; ++part) sum += space_.sums[part] * std::exp(space_.tops[part] - top);
    return {top, sum};
  }

  // Tokens, scores and kinds of the children of one node, from the candidates of all parts.
  void settle(int64_t depth, float* logits, bool is_shared, int64_t index) const {
    const Look look = look_at(depth, logits, is_shared, index);
    const int64_t at = look.source * parts_;
    const auto [top, sum] = total_of(at);
    space_.row_tops[index] = top;
    space_.factors[index] = 1.0f / sum;
    int64_t taken[kMostParts] = {};
    int64_t child = space_.first[look.node], rank = 0;
    const int64_t begin = child, end = space_.first[look.node + 1];
    for (; child < end; ++rank) {
      const int64_t token = next_candidate(at, taken).token;
      if (rank == (draft_.draws[look.sequence] == kSampled ? child - begin : draft_.ranks[child])) {
        put(depth, look, is_shared, child++, token, top, sum, end - begin == 1);
      }
    }
  }

  // All candidates of one node of dynamic trees. A candidate's score is at most its parent's, and -inf for impossible
  // tokens and logits that are not finite.
  void keep_candidates(int64_t depth, int64_t index) const {
    const int64_t P = num_inner(depth), K = draft_.num_candidates, s = index / P, place = index % P;
    const int64_t node = s * draft_.num_nodes + inner(depth, place), to = s * num_all() + level_begin(depth) + place * K;
    const auto [top, sum] = total_of(index * parts_);
    int64_t taken[kMostParts] = {};
    for (int64_t rank = 0; rank < K; ++rank) {
      const auto [token, key] = next_candidate(index * parts_, taken);
      const float gain = key - top - std::log(sum);
      draft_.candidates[to + rank] = token;
      draft_.path_scores[to + rank] = draft_.scores[node] + (std::isnan(gain) ? -INFINITY : std::min(gain, 0.0f));
      draft_.candidate_parents[to + rank] = draft_.node_numbers[node];
    }
  }

  // The best candidates of a level of one sequence become the next expanded nodes, the best first; among equals the
  // first.
  void expand_best(int64_t depth, int64_t sequence) const {
    const int64_t K = draft_.num_candidates, count = num_inner(depth) * K, begin = level_begin(depth);
    const int64_t from = sequence * num_all() + begin, to = sequence * draft_.num_nodes + level(depth + 1);
    const float* scores = draft_.path_scores + from;
    int64_t* order = space_.order + sequence * K * K;
    std::iota(order, order + count, 0);
    std::partial_sort(order, order + K, order + count, [scores](int64_t a, int64_t b) {
      return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
    });
    for (int64_t i = 0; i < K; ++i) {
      draft_.tokens[to + i] = draft_.candidates[from + order[i]];
      draft_.scores[to + i] = scores[order[i]];
      draft_.node_parents[to + i] = inner(depth, order[i] / K);
      draft_.node_numbers[to + i] = begin + order[i];
    }
  }

  // Number of candidates of a sequence of dynamic trees, and the first child of a level.
  int64_t num_all() const { return level_begin(depth_); }
  int64_t level_begin(int64_t depth) const {
    const int64_t K = draft_.num_candidates;
    return depth == 0 ? 1 : 1 + K + (depth - 1) * K * K;
  }

  struct Candidate {
    int64_t token;
    float key;
  };

  // The next best candidate of the parts; `taken` counts those taken from each part.
  Candidate next_candidate(int64_t at, int64_t (&taken)[kMostParts]) const {
    int64_t best = -1;
    float key = 0;
    for (int64_t i = 0; i < parts_; ++i) {
      if (taken[i] == space_.counts[at + i]) continue;
      const float other = space_.keys[(at + i) * draft_.num_candidates + taken[i]];
      if (best >= 0 && !(other > key)) continue;
      best = i;
      key = other;
    }
    return {space_.candidates[(at + best) * draft_.num_candidates + taken[best]++], key};
  }

  void put(int64_t depth, const Look& look, bool is_shared, int64_t child, int64_t token, float top, float sum, bool is_only) const {
    const int64_t to = look.sequence * draft_.num_nodes + child, parent = look.sequence * draft_.num_nodes + look.node;
    const float distance = look.logits[token] * look.scale - top;
    draft_.tokens[to] = token;
    draft_.scores[to] = draft_.scores[parent] + (distance - std::log(sum));
    if (draft_.rows == nullptr) return;
    // A token without probability in the draft distribution is a choice, not a draw.
    const bool is_drawn = draft_.draws[look.sequence] == kSampled && stated_probs(Lanes{} + distance, 1.0f / sum)[0] > 0;
    draft_.kinds[to] = !is_drawn ? kOneHot : is_only ? kIndependent : kWithoutReplacement;
    draft_.row_of[to] = is_drawn ? row_of(depth, is_shared, look.place) : -1;
  }

  // Probabilities of a draft distribution from distances to the largest logit, like `stated_probs` in draft_draws.py.
  static Lanes stated_probs(Lanes distances, float factor) {
    const Lanes probs = exponential(distances) * factor;
    return probs < std::numeric_limits<float>::min() ? Lanes{} : probs;
  }

  // One part of the distribution from which a look's children were drawn.
  void state(int64_t depth, float* logits, bool is_shared, int64_t index, int64_t part) const {
    const Look look = look_at(depth, logits, is_shared, index);
    float* row = draft_.rows + (look.sequence * draft_.num_rows + row_of(depth, is_shared, look.place)) * draft_.vocab;
    const float top = space_.row_tops[index], factor = space_.factors[index];
    const int64_t begin = part * part_, end = std::min(begin + part_, width_);
    if (part == parts_ - 1) std::fill(row + width_, row + draft_.vocab, 0.0f);
    if (std::isnan(top)) return std::fill(row + begin, row + end, 0.0f);
    for (int64_t k = begin; k < end; k += kLanes) {
      store_below(row, k, end, stated_probs(load_filled(look.logits, k, end) * look.scale - top, factor));
    }
  }

  // Elements k.. of a row, those before `end`.
  static void store_below(float* row, int64_t k, int64_t end, Lanes values) {
    if (k + kLanes <= end) return store_lanes(row + k, values);
    for (int64_t i = 0; k + i < end; ++i) row[k + i] = values[i];
  }

  int64_t row_of(int64_t depth, bool is_shared, int64_t place) const {
    return is_shared ? depth : space_.inner_levels[depth] + place;
  }

  const Draft& draft_;
  const int64_t width_, stride_, part_, parts_;
  const ChildrenSpace space_;
  int64_t depth_ = 0;
  mutable Barrier barrier_;
};

}  // namespace
