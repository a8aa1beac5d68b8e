"""Describes a head's checkpoint for people, and lists suspicious tensors.

Our own format states all facts in `config.json` and in the header of its tensors. They are read without torch, since
torch takes seconds to import.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from foretoken.core.errors import ModelError
from foretoken.files.bounded_reads import check_regular, read_json_object, tensor_headers
from foretoken.heads import head_methods

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from foretoken.formats.checkpoint import HeadCheckpoint

_LARGEST_NORM = 1e4
_NATIVE_KEY, _NATIVE_WEIGHTS = "foretoken_head", "model.safetensors"
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # by safetensors' names
_OTHERS = {"I64": "int64", "I32": "int32", "BOOL": "bool"}
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "bool": 1}


def native_facts(directory: Path) -> dict[str, Any] | None:
    """Returns the facts of `describe_head` for a head of our own format, from configuration and header alone.

    Returns:
        None for other directories, and for damaged heads that only a full reading can describe.

    Raises:
        ModelError: If the file of weights is missing or damaged.
    """
    try:
        config = read_json_object(directory / "config.json")
        method, sizes = config[_NATIVE_KEY], config["config"]
        facts = {key: sizes[name] for key, name in _SIZES.items()} | _block_facts(sizes)
        heads = None if _BLOCK in sizes else sizes["num_heads"]
        target = config.get("target") and {key: value for key, value in config["target"].items() if value is not None}
        notes, choices = dict(config.get("notes") or {}), config.get("choices")
        num_choices = None if choices is None else len(choices)
        acceptance = config.get("acceptance")
        if acceptance is not None and not isinstance(acceptance, list):
            return None
    except (ModelError, ValueError, LookupError, TypeError, AttributeError):
        return None
    if method not in head_methods():
        return None
    tensors = _tensors(directory / _NATIVE_WEIGHTS)
    if not {dtype for _, _, dtype in tensors} <= _BYTES.keys():
        return None
    facts = {
        "format": "native",
        "method": method,
        "heads": heads,
        "layers": sizes.get("num_layers"),
        **facts,
        "drafted_vocabulary": sizes.get("draft_vocab_size"),
        "lm_head": "own" if any(key.startswith("lm_head") for key, _, _ in tensors) else "the target's",
        "tied_blocks": sizes.get("tied_blocks", sizes.get("tie_weights")),
        "has_bias": sizes.get("has_bias"),
        "prefix": sizes.get("prefix"),
        "parameters": sum(size for _, size, dtype in tensors if dtype in _FLOATS.values()),
        "dtypes": sorted({dtype for _, _, dtype in tensors}),
        "weight_bytes": sum(size * _BYTES[dtype] for _, size, dtype in tensors),
        "target": target,
        "acceptance": acceptance,
        "choices": num_choices,
        "notes": notes or None,
    }
    return {key: value for key, value in facts.items() if value is not None}


_SIZES = {"hidden_size": "hidden_size", "vocabulary": "vocab_size"}
_BLOCK = "num_steps"  # heads with a decoder block have steps instead of a number of heads
_VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norms", "feeds_normed")


def _block_facts(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts that only heads of the EAGLE family have."""
    if _BLOCK not in sizes:
        return {}
    return {
        "steps": sizes[_BLOCK],
        "taps": list(sizes.get("boundaries", ["final"])),
        "width": sizes.get("draft_hidden_size") or sizes["hidden_size"],
        "embedding": "own" if sizes.get("own_embedding") else "the target's",
        "variants": [name for name in _VARIANTS if sizes.get(name)] or None,
        "layer": sizes["layer"],
    }


def _tensors(path: Path) -> list[tuple[str, int, str]]:
    """Returns the names, numbers of elements and dtypes of a file's tensors."""
    try:
        check_regular(path)
        headers = tensor_headers(path)
    except (SafetensorError, OSError) as err:
        raise ModelError(f"{path} is missing or damaged: {err}. Copy or train it again.") from err
    return [
        (key, prod(header.shape), (_FLOATS | _OTHERS).get(header.dtype, header.dtype))
        for key, header in headers.items()
    ]


def describe_head(name: str, checkpoint: HeadCheckpoint) -> dict[str, Any]:
    """Returns facts about a head, JSON-ready; name: of its format."""
    config: Any = checkpoint.config
    tensors = checkpoint.weights.values()
    is_own = any(key.startswith("lm_head") for key in checkpoint.weights)
    facts = {
        "format": name,
        "method": config.method,
        "heads": getattr(config, "num_heads", None),
        "layers": getattr(config, "num_layers", None),
        "hidden_size": config.hidden_size,
        "vocabulary": config.vocab_size,
        "drafted_vocabulary": getattr(config, "draft_vocab_size", None),
        "lm_head": "own" if is_own else "the target's",
        **_block_facts(config.model_dump(mode="json")),
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
    """Returns shape, dtype and size of numbers of every tensor, JSON-ready."""
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
    """Returns sentences about tensors of `describe_tensors` that a trained head should not have."""
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
    """Collects the warnings of format readers instead of logging them."""
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
