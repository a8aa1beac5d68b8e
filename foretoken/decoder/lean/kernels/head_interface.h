// Description of a draft head for the kernels, in the memory layout of `native_head.py`.
#pragma once

#include <cstdint>

#include "interface.h"

extern "C" {

// A matrix with its dtype and bias; a null weight means no matrix.
struct HeadMatrix {
  Matrix matrix;
  int64_t is_bfloat16;
};

enum HeadKind : int64_t {
  kFromFeature = 0,  // Medusa: every step reads the feature alone
  kFromPath = 1,     // Hydra: [feature; embeddings of the tokens drafted before]
  kFromState = 2,    // MLP speculator: the state of the parent node, and the embedding of the node's token
};

// One step, for the children of the nodes of one depth. With y, the input of the LM head:
//   kFromFeature: y = feature
//   kFromPath:    a, b = halves of first(u), u the concatenation; y = a + silu(b)
//   kFromState:   y = gelu(norm(first(state) + embedding_scale * embedding)), which is also the state
// Then y <- y + silu(block(y)) for every block, and logits = lm_head(y), scaled and capped.
struct HeadStep {
  HeadMatrix first, lm_head;
  Norm norm;                      // RMS norm with a bias
  const HeadMatrix* blocks;
  int64_t num_blocks;
  const void* embedding;          // (num_tokens, E or W)
  int64_t num_tokens, embedding_is_bfloat16;
  float embedding_scale;
  float logit_scale, logit_softcap;  // scale 1: none, cap 0: none
};

struct Head {
  int64_t kind, num_steps, hidden, width, vocab;  // E, W and V, the width of logits
  const int64_t* token_map;                       // the token of each row of the LM heads; null: row i is token i
  float feature_rms, feature_epsilon;             // kFromState: root mean square that features are scaled to; 0: no scaling
  const HeadStep* steps;
};

// A head of one decoder block; the block's output x becomes the state of the next step. For a state s and the embedding
// e of the next token, the block reads fuse([e; s]); without `fuse` it reads state_norm(s), and e as second input.
// logits = lm_head(norm(x)), scaled and capped; the next state is x, or norm(x).
struct AutoregressiveHead {
  HeadMatrix fuse, lm_head;       // (E, 2 E), (Vd, E); E is the hidden size of the block
  const int64_t* token_map;       // (Vd,), the token of each row of the LM head; null: row i is token i
  int64_t vocab;                  // V, the width of logits
  const void* embedding;          // (num_tokens, E)
  int64_t num_tokens, embedding_is_bfloat16;
  int64_t feeds_normed;           // whether the next state is norm(x)
  Norm norm, state_norm;          // (E,)
  float embedding_scale;
  float logit_scale, logit_softcap;  // scale 1: none, cap 0: none
};

}  // extern "C"
