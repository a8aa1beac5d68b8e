"""What a head's checkpoint holds, for people, and what about it is suspicious."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from foretoken.formats.checkpoint import HeadCheckpoint

_LARGEST_NORM = 1e4


def describe_head(name: str, checkpoint: HeadCheckpoint) -> dict[str, Any]:
    """Facts about a head, JSON-ready; name: of its format."""
    config: Any = checkpoint.config
    tensors = checkpoint.weights.values()
    facts = {
        "format": name,
        "method": config.method,
        "heads": config.num_heads,
        "layers": getattr(config, "num_layers", None),
        "hidden_size": config.hidden_size,
        "vocabulary": config.vocab_size,
        "drafted_vocabulary": getattr(config, "draft_vocab_size", None),
        "lm_head": "own" if getattr(config, "own_lm_head", True) else "the target's",
        "tied_blocks": getattr(config, "tied_blocks", getattr(config, "tie_weights", None)),
        "has_bias": getattr(config, "has_bias", None),
        "prefix": config.prefix.model_dump() if getattr(config, "prefix", None) else None,
        "parameters": sum(tensor.numel() for tensor in tensors if tensor.is_floating_point()),
        "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}),
        "weight_bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        "target": None if checkpoint.target is None else checkpoint.target.model_dump(exclude_none=True),
        "acceptance": checkpoint.acceptance,
        "choices": None if checkpoint.choices is None else len(checkpoint.choices),
        "notes": dict(checkpoint.notes) or None,
    }
    return {key: value for key, value in facts.items() if value is not None}


def describe_tensors(checkpoint: HeadCheckpoint) -> list[dict[str, Any]]:
    """Every tensor with its shape and size of numbers, JSON-ready."""
    rows = []
    for key, tensor in checkpoint.weights.items():
        numbers = tensor.float()
        rows.append(
            {
                "tensor": key,
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "largest": numbers.abs().max().item() if tensor.numel() else 0.0,
                "norm": numbers.norm().item(),
            }
        )
    return rows


def suspicious_tensors(rows: list[dict[str, Any]]) -> list[str]:
    """What a trained head should not look like; rows: as `describe_tensors` gives them."""
    found = []
    for row in rows:
        if 0 in row["shape"] or row["dtype"].startswith("int"):
            continue
        if row["largest"] == 0 and not row["tensor"].endswith("bias"):
            found.append(f"{row['tensor']} is zero everywhere")
        if row["norm"] > _LARGEST_NORM * max(1.0, (row["shape"] or [1])[0] ** 0.5):
            found.append(f"{row['tensor']} has norm {row['norm']:.3g}")
    return found


@contextmanager
def kept_warnings() -> Iterator[list[str]]:
    """Collects what readers of formats warn about, instead of logging it."""
    messages: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, keeper = logging.getLogger("foretoken.formats"), Keeper()
    logger.addHandler(keeper)
    propagated, logger.propagate = logger.propagate, False
    try:
        yield messages
    finally:
        logger.propagate = propagated
        logger.removeHandler(keeper)
