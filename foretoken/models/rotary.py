"""Rotary frequencies with scaling by transformers' formulas, for blocks outside the target.

Only scalings with the same frequencies at every position and length: cached keys keep their angle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

STATIC_KINDS = ("linear", "llama3", "yarn")
_COMPARES_LENGTHS = ("llama3", "yarn")


def scaled_frequencies(
    scaling: Mapping[str, Any], *, theta: float, head_dim: int, device: torch.device
) -> tuple[Tensor, float]:
    """Returns (Dh / 2,) float32 angles per position, and the factor of cosines and sines.

    Args:
        scaling: transformers' `rope_parameters` without the base; one of `STATIC_KINDS`.
        theta: Base.
        head_dim: Dh.
        device: Device of the result.

    Raises:
        ValueError: If the parameters are invalid.
    """
    kind = scaling.get("rope_type")
    if kind not in STATIC_KINDS:
        raise ValueError(f"rope_type is {kind!r}. Expected {', '.join(STATIC_KINDS)}")
    original = scaling.get("original_max_position_embeddings")
    if kind in _COMPARES_LENGTHS and not isinstance(original, int):
        raise ValueError(
            f"original_max_position_embeddings of rotary scaling '{kind}' is {original!r}. Expected a length"
        )
    try:
        config = LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=head_dim,
            max_position_embeddings=original or 1,
            rope_parameters={**scaling, "rope_theta": theta},
        )
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, device)
    except (KeyError, TypeError, ZeroDivisionError, AttributeError) as err:
        raise ValueError(f"rotary scaling {dict(scaling)} makes no sense: {err!r}") from err
    return frequencies, float(factor)


def target_scaling(config: Any) -> dict[str, Any] | None:
    """Returns `rope_type` and parameters of a text configuration without the base; None without scaling."""
    rope = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(part, dict) for part in rope.values()):  # one entry for each kind of layer
        rope = next((part for part in rope.values() if part.get("rope_type", "default") != "default"), {})
    if rope.get("rope_type", "default") == "default":
        return None
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    if scaling["rope_type"] in _COMPARES_LENGTHS:
        scaling.setdefault("original_max_position_embeddings", getattr(config, "max_position_embeddings", None))
    return scaling
