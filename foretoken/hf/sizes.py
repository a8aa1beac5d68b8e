"""Names of sizes and layer types in configurations, known without importing transformers."""

from __future__ import annotations

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
)
LARGEST_SIZE = 1 << 28  # the largest size published is a vocabulary or context of some ten millions
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})


def is_size(value: object) -> bool:
    """Whether a value is a whole number that a model may have as a size."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST_SIZE
