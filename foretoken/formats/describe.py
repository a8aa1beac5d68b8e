"""Describes a head's checkpoint for people, and lists suspicious tensors.

Our own format states all facts in `config.json` and in the header of its tensors. They are read without torch, since
torch takes seconds to import.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError

from foretoken.core.errors import ModelError
from foretoken.files.bounded_reads import check_regular, read_json_object, tensor_headers
from foretoken.heads import head_methods

if TYPE_CHECKING:
    from foretoken.formats.checkpoint import HeadCheckpoint

# For each row; a choice, far above the norms of trained weights: damaged ones reach the limits of their dtype.
_LARGEST_NORM = 1e4
_NATIVE_KEY, _NATIVE_WEIGHTS = "foretoken_head", "model.safetensors"
_DTYPES = {  # names and bytes by safetensors' names
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "I64": ("int64", 8), "I32": ("int32", 4), "BOOL": ("bool", 1),
}  # fmt: skip


def native_facts(directory: Path) -> dict[str, Any] | None:
    """Returns the facts of `describe_head` for a head of our own format, from configuration and header alone.

    Returns None for other directories, and for damaged heads that only a full reading can describe. Raises `ModelError`
    if the file of weights is missing or damaged.
    """
    try:
        config = read_json_object(directory / "config.json")
        method, sizes = config[_NATIVE_KEY], dict(config["config"])
        acceptance = config.get("acceptance")
        if method not in head_methods() or (acceptance is not None and not isinstance(acceptance, list)):
            return None
        _facts("native", method, sizes, [], config)  # fails if the configuration is damaged
    except (ModelError, ValueError, LookupError, TypeError, AttributeError):
        return None
    tensors = _tensors(directory / _NATIVE_WEIGHTS)
    return None if tensors is None else _facts("native", method, sizes, tensors, config)


class _Tensor(NamedTuple):
    key: str
    size: int  # elements
    dtype: str
    num_bytes: int


_BLOCK = "num_steps"  # heads with a decoder block have steps instead of a number of heads
_VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norms", "feeds_normed")


def _facts(
    name: str, method: str, sizes: Mapping[str, Any], tensors: list[_Tensor], extras: Mapping[str, Any]
) -> dict[str, Any]:
    choices = extras.get("choices")
    block = {}
    if _BLOCK in sizes:
        block = {
            "steps": sizes[_BLOCK],
            "taps": list(sizes.get("boundaries", ["final"])),
            "width": sizes.get("draft_hidden_size") or sizes["hidden_size"],
            "embedding": "own" if sizes.get("own_embedding") else "the target's",
            "variants": [each for each in _VARIANTS if sizes.get(each)] or None,
            "layer": sizes["layer"],
        }
    facts = {
        "format": name,
        "method": method,
        "heads": None if block else sizes["num_heads"],
        "layers": sizes.get("num_layers"),
        "hidden_size": sizes["hidden_size"],
        "vocabulary": sizes["vocab_size"],
        **block,
        "drafted_vocabulary": sizes.get("draft_vocab_size"),
        "lm_head": "own" if any(each.key.startswith("lm_head") for each in tensors) else "the target's",
        "tied_blocks": sizes.get("tied_blocks", sizes.get("tie_weights")),
        "has_bias": sizes.get("has_bias"),
        "prefix": sizes.get("prefix"),
        "parameters": sum(each.size for each in tensors if "float" in each.dtype),
        "dtypes": sorted({each.dtype for each in tensors}),
        "weight_bytes": sum(each.num_bytes for each in tensors),
        "target": {key: value for key, value in (extras.get("target") or {}).items() if value is not None} or None,
        "acceptance": extras.get("acceptance"),
        "choices": None if choices is None else len(choices),
        "notes": dict(extras.get("notes") or {}) or None,
    }
    return {key: value for key, value in facts.items() if value is not None}


def _tensors(path: Path) -> list[_Tensor] | None:
    """Returns the tensors of a file, or None if it has dtypes that only torch knows."""
    try:
        check_regular(path)
        headers = tensor_headers(path)
    except (SafetensorError, OSError) as err:
        raise ModelError(f"{path} is missing or damaged: {err}. Copy or train it again.") from err
    if not {header.dtype for header in headers.values()} <= _DTYPES.keys():
        return None
    found = []
    for key, header in headers.items():
        (dtype, width), size = _DTYPES[header.dtype], prod(header.shape)
        found.append(_Tensor(key, size, dtype, size * width))
    return found


def describe_head(name: str, checkpoint: HeadCheckpoint) -> dict[str, Any]:
    """Returns facts about a head, JSON-ready; name: of its format."""
    tensors = [
        _Tensor(key, tensor.numel(), str(tensor.dtype).removeprefix("torch."), tensor.numel() * tensor.element_size())
        for key, tensor in checkpoint.weights.items()
    ]
    sizes = checkpoint.config.model_dump(mode="json")
    return _facts(name, checkpoint.config.method, sizes, tensors, checkpoint.extras())


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
