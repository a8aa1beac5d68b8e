// Arguments of the kernels, in the memory layout of `arguments.py`, and their return codes.
#pragma once

#include <cstdint>

extern "C" {

// What the scales and offsets of groups are stored in. kCoded: in int8, times a number in half precision for 256 weights.
enum ScaleKind : int64_t { kFloat = 0, kHalf = 1, kCoded = 2 };

// A row-major matrix (rows, cols) in the model's dtype, and its bias (rows,) or null. Or numbers in 8, 6, 5 or 4 bits: a
// weight is number * group scale + group offset, and a row of products is multiplied by the row's scale. Where offsets are
// the lowest weights, numbers count from 0 on.
//
// Numbers stand in panels of 16 rows, the last one filled up with zeros, and cols are filled up to a multiple of 64. A
// panel is a sequence of blocks of 64 bytes; bytes 4 r to 4 r + 3 of a block belong to row r. In 8 bits they are four
// numbers side by side, a quad; for fewer bits see `quantized.h`. Scales and offsets of groups are (panels, groups, 16),
// and numbers for 256 weights (panels, cols / 256, 16).
struct Matrix {
  const void* weight;
  const float* bias;
  int64_t rows, cols;
  const float* scales;  // (rows,), or null
  int64_t pass_bytes;   // of all matrices that a pass reads once, this one included; 0 if the matrix is soon read again
  int64_t bits;         // 8, 6, 5 or 4; 0: in the model's dtype
  const void *group_scales, *group_offsets;        // null: 1, and 0
  const uint16_t *super_scales, *super_offsets;    // of coded ones
  int64_t group;                // weights side by side that share a scale and an offset: a power of 2 from 16 on, from 32 on in 5 bits
  int64_t scale_kind;           // a `ScaleKind`
  int64_t offsets_are_lowest;   // whether they are the weights of the lowest number, which is 0 then; in fewer than 8 bits
  int64_t input_bits;        // of a rounded input: 8, 16 or 24; see `quantized.h`
  int64_t input_group;       // inputs that share a scale, a power of 2 from 128 on; 0: all of a token
  const int32_t* input_order;  // (cols,): column k of the numbers is for input input_order[k]; null: for input k
};

// A norm over a row of known size; a null weight means no norm.
struct Norm {
  const float *weight, *bias;  // (size,); the bias may be null
  float epsilon;
  int32_t kind;                // a `NormKind`
};

enum NormKind : int32_t { kRmsNorm = 0, kLayerNorm = 1 };
enum Activation : int64_t { kSilu = 0, kGeluTanh = 1, kGelu = 2, kReluSquared = 3 };

// Feed-forward layers; each token takes `top_k` of them, and the matrices of its `Layer` if these are there. A dense layer has a
// count of 0.
struct Experts {
  Matrix router;  // (count, hidden)
  // The matrices of all experts one below another: gate (if there are gates) and up of an expert, (intermediate, hidden) each; (hidden,
  // intermediate). In integers, each of them begins with a panel.
  Matrix gate_up, down;
  Matrix shared_gate;  // (1, hidden), of the outputs of the layer's own matrices; a null weight means no gate
  int64_t count, top_k, intermediate;
  int64_t is_normalised;        // whether the weights of a token's experts are divided by their sum, plus `epsilon`
  int64_t is_sigmoid;           // whether scores are sigmoids of the router's logits, otherwise their softmax
  int64_t is_gated;             // whether they have gates
  const float* score_bias;      // (count,), added to scores where experts are chosen, not to weights; or null
  float epsilon, factor;        // factor: of the weights in the end
};

// What a layer has in place of attention or beside it, see `recurrent.h`. Its projections, the outputs of `inputs`, stand in a row of
// a token. From `row_at` on are the inputs of the convolution, then the raw steps of all heads, then their raw
// betas (delta rule alone): that part of the row, `row_size`, is stored for later passes.
enum RecurrentKind : int64_t { kNothing = 0, kConvolution = 1, kDelta = 2, kStateSpace = 3 };
constexpr int kMostInputs = 6;
struct Recurrent {
  Matrix inputs[kMostInputs], output;
  int64_t kind;                               // a `RecurrentKind`
  int64_t num_inputs, width;                  // of a row
  int64_t row_at, row_size, gate_at;          // gate: of the outputs
  int64_t factor_at;                          // of a convolution alone: what its inputs are multiplied with
  int64_t channels;
  int64_t query_at, key_at, value_at;         // among the channels
  int64_t key_heads, heads, key_dim, value_dim;
  int64_t norm_size, gates_first;             // outputs that are normed together; whether the gate comes before the norm
  int64_t state_at, rows_before;              // in a block of states, and in a row, see `Pass`
  const int32_t* places;                      // (width,), the columns of the inputs' outputs; null: side by side
  const float* factors;                       // (width,), of the columns; null: 1
  const float *taps, *tap_bias;               // (window + 1, channels), (channels,) or null
  const float *decay, *step_bias, *skip;      // (heads,); skip: the values' own part of the outputs, or null
  Norm norm;                                  // (heads * value_dim,), or none
  float beta_scale, output_factor;
};

struct Layer {
  Matrix query, key, value, output;
  Matrix gate, up, down;  // without gate: the activation of `up`; without all three: experts alone, or nothing
  Experts experts;
  Norm attention_norm, attention_post_norm, mlp_norm, mlp_post_norm;  // (hidden,), post norms: of a branch before the branch is added
  Norm side_norm;             // (hidden,), of a second input that attention reads before the first; of the first layer alone
  Norm query_norm, key_norm;  // (head_dim,), or over all heads of a token
  const float *cos, *sin;     // (num_positions, pairs)
  void *keys, *values;        // row r of a head of a slot is row slot * slot_rows + head * head_rows + r; see `cache_rows.h`
  int64_t pairs;              // the first `pairs` elements of a head rotate with the next ones; 0: no rotation
  int64_t window;             // a token sees keys less than this many positions back; 0: all
  int64_t activation;         // an `Activation`
  int64_t norms_all_heads;    // whether one norm covers all heads of queries or keys
  int64_t gates_heads;        // whether each head of queries has a gate of its output behind it
  float scale, softcap;       // of attention scores; 0: no cap
  float attention_factor, mlp_factor, gate_factor;  // of what attention and the feed-forward layer add; of what is activated
  Recurrent recurrent;        // in place of attention, whose matrices are null then; or beside it, with the same inputs
};

struct Model {
  int64_t is_bfloat16;
  int64_t num_layers, hidden, heads, kv_heads, head_dim, vocab, num_positions;
  int64_t capacity, num_slots;  // most rows of a slot; slots that share rows may begin within each other
  int64_t slot_rows, head_rows, layer_rows;  // rows from one slot, and from one head, to the next; all rows of a layer
  int64_t rows_are_rounded;  // whether cache rows are in int8, otherwise in the model's dtype
  int64_t intermediate;      // widest of the dense layers
  int64_t num_experts, top_k, expert_intermediate;  // largest of any layer
  int64_t window;            // rows before a token that its convolution reads; 0: no layer is recurrent
  int64_t state_size, row_size;  // floats of a block of states: states of all layers, and a row of all layers
  int64_t recurrent_width, recurrent_channels, recurrent_heads, recurrent_outputs, recurrent_keys;  // largest of any layer
  float embedding_scale, logit_scale, logit_softcap;  // 0: no cap
  Matrix embedding;          // (vocab, hidden), without a bias
  Norm final_norm;           // (hidden,)
  Matrix head;
  const int64_t* head_tokens;  // (rows of the head,), the token of each, all different; null: row i is token i
  int64_t num_logits;          // V, the width of logits; -inf for tokens without a row
  const Layer* layers;
};

// New tokens of several sequences, one sequence after another. A sequence has a prefix and a tree of nodes behind it:
// first the nodes of earlier passes, then a node for each new token. A node sees the prefix, its ancestors and itself.
struct Pass {
  int64_t num_threads, num_sequences, num_logits;
  const int64_t* tokens;                 // (M,)
  const float* inputs;                   // (M, hidden), in place of the tokens' embeddings; or null
  const float* sides;                    // (M, hidden), the second input of the first layer, if it has one
  const int64_t *positions, *parents;    // (W,), a parent is a node of the same sequence, or -1
  const int64_t *slots, *prefix;         // (S,)
  const int64_t *starts, *node_starts;   // (S + 1,), the first token and node of each sequence
  const int64_t* logit_rows;             // (R,) ascending, the tokens that need logits
  float* logits;                         // (R, V), or null
  const float* inverse_temperature;      // (R,), 0 chooses the largest logit; null: every row does
  const int64_t* seeds;                  // (R,)
  const int64_t* impossible;             // (U,) tokens whose logits become -inf before one is chosen
  int64_t* chosen;                       // (R,) the tokens after the rows, -1 if the largest logit is not finite; or null
  const int64_t* attention_rows;         // (A,) ascending, the tokens whose attention weights are needed
  float* attention;                      // (S, L, KV heads, C), zeros; gets the weights of cache rows, summed over these tokens; or null
  const int64_t* taps;                   // (F,) boundary indices; layers + 1 means after the final norm
  // Of recurrent layers. A row has what all layers keep of a token, `row_size` floats. A block of states has the states of
  // all layers behind some tokens, then `window` rows, of the last of these. A sequence begins with the state of a block.
  // Known tokens follow, which are computed again from their rows: a chain behind the block, then the sequence's earlier
  // nodes. A pass makes the rows of its nodes, and may make a block: of the state behind the chain and the first
  // `settled` nodes, whose rows nobody needs.
  float* const* states_from;             // (S,), null: before any text
  float* const* states_to;               // (S,), null: no block is made
  float* const* rows_to;                 // (S,), of the nodes that are not settled
  const float* const* known;             // rows of known tokens
  const int64_t* known_starts;           // (S + 1,)
  const int64_t* settled;                // (S,), a chain that every other node comes after; 0 beside earlier nodes
  int64_t num_impossible;
  int64_t num_attention, attention_cols;  // A, and C: at least the rows of every sequence, prefix and nodes
  int64_t num_taps;
  int64_t is_append;                     // whether the last layer computes keys and values alone, without output
  int64_t features_are_bfloat16;         // otherwise float32
  void* features;                        // (M, F, hidden)
  void* workspace;                       // of at least `foretoken_workspace_bytes`
};

// A matrix (rows, cols) as a GGUF file has it, row by row, and the panels of `Matrix` that it becomes. Row r of the
// result is row order[r] of the file.
struct StoredBlocks {
  const uint8_t* blocks;
  const int64_t* order;  // (rows,), or null
  int64_t kind;          // the index of the blocks' type in `kBlockForms`
  int64_t rows, cols;
  uint8_t* numbers;
  void *scales, *offsets;  // offsets: null where blocks have none
  uint16_t *super_scales, *super_offsets;
  const int8_t* table;     // the numbers that the codes of a block stand for; null where codes are numbers
};

}  // extern "C"

// The result of a call: 0, or the argument that would have led to a read or write out of bounds. `arguments.py`
// has the same numbers.
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
  kAttentionRows = 13,
  kNotFinite = 14,
};
