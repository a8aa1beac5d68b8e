// What the kernels are handed, in the memory layout of `structures.py`, and what they return.
#pragma once

#include <cstdint>

extern "C" {

// A row-major matrix (rows, cols) in the model's dtype, and its bias (rows,) or null; or one of int8 with the scale of
// every row (rows,), else null.
struct Matrix {
  const void* weight;
  const float* bias;
  int64_t rows, cols;
  const float* scales;
  int64_t pass_bytes;  // of all matrices that a pass reads once, this one among them; 0 where they are read again at once
};

// A norm over `size` elements of a row, known from where it stands; without a weight there is none.
struct Norm {
  const float *weight, *bias;  // (size,); the bias may be null
  float epsilon;
  int32_t kind;                // a `NormKind`
};

enum NormKind : int32_t { kRmsNorm = 0, kLayerNorm = 1 };
enum Activation : int64_t { kSilu = 0, kGeluTanh = 1, kGelu = 2 };

// Gated layers of which each token takes `top_k`; of no experts (count 0) where a layer is dense.
struct Experts {
  Matrix router;                // (count, hidden)
  const void *gate_up, *down;   // (count, 2 * intermediate, hidden), gate first; (count, hidden, intermediate)
  int64_t count, top_k, intermediate;
  int64_t is_normalised;        // whether the weights of a token's experts are made to sum to 1
};

struct Layer {
  Matrix query, key, value, output;
  Matrix gate, up, down;  // no gate: the activation of `up`; none of them: experts
  Experts experts;
  Norm attention_norm, attention_post_norm, mlp_norm, mlp_post_norm;  // (hidden,), post: of what is added to the stream
  Norm side_norm;             // (hidden,), of a second input that attention reads before the first; of the first layer alone
  Norm query_norm, key_norm;  // (head_dim,), or over all heads of a token
  const float *cos, *sin;     // (num_positions, pairs)
  void *keys, *values;        // rows of head_dim: row r of a head of a slot is row slot * slot_rows + head * head_rows + r
  int64_t pairs;              // the first `pairs` elements of a head are rotated with the next ones; 0: none are
  int64_t window;             // keys less than this many positions back are seen; 0 for all
  int64_t activation;         // an `Activation`
  int64_t norms_all_heads;    // whether the norms of queries and keys are taken over all heads at once
  float scale, softcap;       // of attention scores; no cap: 0
};

struct Model {
  int64_t is_bfloat16, num_layers, hidden, heads, kv_heads, head_dim, vocab, num_positions;
  int64_t capacity, num_slots;  // most rows of a slot; slots may share rows, and begin within each other then
  int64_t slot_rows, head_rows, layer_rows;  // of the cache: from a slot, and a head, to the next; all rows of a layer
  int64_t intermediate;      // widest of the dense layers
  int64_t has_post_norms;    // whether some layer has one
  int64_t num_experts, top_k, expert_intermediate;  // greatest of any layer
  float embedding_scale, logit_softcap;             // no cap: 0
  const void* embedding;     // (vocab, hidden)
  Norm final_norm;           // (hidden,)
  Matrix head;
  const Layer* layers;
};

// New tokens of several sequences, one sequence after another. Behind its prefix a sequence has a tree of nodes: first those
// that earlier passes fed, then a node for each new token. A node sees the prefix, its ancestors and itself.
struct Pass {
  int64_t num_threads, num_sequences, num_logits;
  const int64_t* tokens;                 // (M,)
  const float* inputs;                   // (M, hidden) in the place of the tokens' embeddings; or null
  const float* sides;                    // (M, hidden), the second input of the first layer, where it has one
  const int64_t *positions, *parents;    // (W,), a parent is a node of the same sequence, -1 where there is none
  const int64_t *slots, *prefix;         // (S,)
  const int64_t *starts, *node_starts;   // (S + 1,), where each sequence's tokens and nodes begin
  const int64_t* logit_rows;             // (R,) ascending, the tokens whose logits are wanted
  float* logits;                         // (R, vocab), or null
  const float* inverse_temperature;      // (R,), 0 to choose the greatest logit; or null for all of them
  const int64_t* seeds;                  // (R,)
  const int64_t* impossible;             // (U,) tokens whose logits become -inf before one is chosen
  int64_t* chosen;                       // (R,) the tokens after the rows, -1 where the greatest logit is not finite; or null
  const int64_t* taps;                   // (F,) boundary indices; layers + 1 means after the final norm
  int64_t num_impossible;
  int64_t num_taps;
  int64_t is_append;                     // whether the last layer computes keys and values alone, and nothing comes out
  int64_t features_are_bfloat16;         // else they are float32
  void* features;                        // (M, F, hidden)
  void* workspace;                       // of at least `foretoken_workspace_bytes`
};

// How the tokens of a sequence's draft are chosen, see `DraftDraws`; and how one was, see `DrawKind`.
enum Draw : int64_t { kGreedily = 0, kCoupled = 1, kSampled = 2 };
enum DrawKind : int64_t { kOneHot = 0, kIndependent = 1, kWithoutReplacement = 2 };

// Draft trees of B sequences, all of one shape of N nodes: level by level, the children of a node side by side.
//
// Dynamic trees of D levels have nodes for the root and for the K best candidates of each level, which are expanded: K is
// `num_candidates`, N = 1 + D K, and in the shape node i of a level is the child of node i of the level above. Which
// candidates they are, and whose children, differs from sequence to sequence. All K candidates of all expanded nodes are
// kept, C = 1 + K + (D - 1) K K with the root; the last level is not expanded, and its nodes stay as they are.
struct Draft {
  int64_t num_sequences, num_nodes;
  int64_t num_candidates;            // greatest rank and one
  int64_t num_rows, vocab;           // R, V: sizes of `rows`
  const int64_t *parents, *ranks;    // (N,), of the shape
  const int64_t* draws;              // (B,) `Draw`
  const float* inverse_temperature;  // (B,), not read where a sequence is drafted greedily
  const int64_t *seeds, *root_positions;  // (B,)
  int64_t* tokens;                   // (B, N), of which the roots are there
  float* scores;                     // (B, N), log-probability of the path down to a node; those of the roots are there
  int64_t *kinds, *row_of;           // (B, N), of which the roots' are there; both may be null where `rows` is
  float* rows;                       // (B, R, V) stated distributions; null where no sequence is sampled, and of dynamic trees
  // Of dynamic trees, else null:
  int64_t *node_parents, *node_numbers;  // (B, N), of expanded nodes: parents, and which of the candidates they are; those of the root are there
  int64_t* candidates;               // (B, C) tokens, level by level, of each parent the best first; that of the root is there
  float* path_scores;                // (B, C), their `scores`; likewise
  int64_t* candidate_parents;        // (B, C), the candidate that each is a child of; likewise
};

}  // extern "C"

// What a call returns: 0, or what of its arguments would have been read or written out of bounds. `structures.py` has the
// same numbers.
enum class Status : int64_t {
  kDone = 0,
  kNoMemory = 1,
  kMissing = 2,
  kThreads = 3,
  kTokens = 4,
  kPositions = 5,
  kSlots = 6,
  kCacheRows = 7,
  kParents = 8,
  kSequences = 9,
  kLogitRows = 10,
  kShape = 11,
  kDraws = 12,
};
