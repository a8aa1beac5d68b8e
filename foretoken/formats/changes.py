"""Changes to a head between reading and writing: dtype, number of heads."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from foretoken.core.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.formats.checkpoint import HeadCheckpoint

_HEAD = re.compile(r"(first|lm_heads)\.(\d+)\..*")
_STACKED = ("weight", "bias", "lm_head")


def with_dtype(checkpoint: HeadCheckpoint, dtype: torch.dtype) -> HeadCheckpoint:
    """The head in another dtype.

    Raises:
        ConfigError: When numbers become infinite in it.
    """
    weights = {key: part.to(dtype) if part.is_floating_point() else part for key, part in checkpoint.weights.items()}
    lost = sorted(key for key, part in weights.items() if not bool(torch.isfinite(part).all()))
    if lost:
        raise ConfigError(f"{dtype} cannot hold numbers of {', '.join(lost)}. Expected a wider dtype, as bfloat16.")
    return replace(checkpoint, weights=weights)


def first_heads(checkpoint: HeadCheckpoint, num_heads: int) -> HeadCheckpoint:
    """The head with only its first few heads.

    Raises:
        ConfigError: When there are not as many, or what they compute depends on their number.
    """
    config: Any = checkpoint.config
    if num_heads == config.num_heads:
        return checkpoint
    if not 1 <= num_heads < config.num_heads:
        raise ConfigError(f"{num_heads} heads are asked for. Expected 1 to {config.num_heads}, as its tensors hold.")
    if config.method not in ("medusa", "hydra"):
        raise ConfigError(
            f"a head of method '{config.method}' computes something else with fewer stages. Keep them all."
        )
    weights = {}
    for key, tensor in checkpoint.weights.items():
        match = _HEAD.fullmatch(key)
        if match is None:
            weights[key] = tensor[:num_heads].contiguous() if key in _STACKED else tensor
        elif int(match[2]) < num_heads:
            weights[key] = tensor
    choices = checkpoint.choices
    return replace(
        checkpoint,
        config=config.model_copy(update={"num_heads": num_heads}),
        weights=weights,
        acceptance=None if checkpoint.acceptance is None else checkpoint.acceptance[:num_heads],
        choices=None if choices is None else [path for path in choices if len(path) <= num_heads],
    )
