"""Sizes of a head's decoder layer: those of the target's own blocks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from foretoken.models.rotary import STATIC_KINDS, target_scaling

if TYPE_CHECKING:
    from foretoken.models.loading import LoadedModel


def layer_like(target: LoadedModel) -> dict[str, Any]:
    """Values of `LayerConfig`, rotary scaling included where that is static."""
    config = target.config
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    scaling = target_scaling(config)
    if scaling is not None and scaling["rope_type"] not in STATIC_KINDS:
        logging.getLogger(__name__).warning(
            "%s: its rotary scaling '%s' depends on the length of texts; the head's decoder block rotates without",
            target.name,
            scaling["rope_type"],
        )
        scaling = None
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": head_dim + head_dim % 2,
        "intermediate_size": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-6,
        **({} if scaling is None else {"rope_scaling": scaling}),
    }
