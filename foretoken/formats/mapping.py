"""Maps another format's tensor names to entries of a head's state dictionary, for reading and for writing.

The same table serves both directions, so a round trip changes nothing. A head stacks tensors that formats store
separately: a `Place` is a name and indices into the first dimensions. Several names may share a place; their tensors
must then be equal.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from foretoken.core.errors import ModelError, listed
from foretoken.core.validation import validated
from foretoken.formats.checkpoint import check_keys
from foretoken.heads.base import HeadConfig, build_head

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from foretoken.formats.files import Weights
    from foretoken.heads.decoder_layer import LayerConfig

_MOST_PARTS = 64


class Place(NamedTuple):
    """Place of a tensor in a head's state dictionary: a name, and indices into the first dimensions."""

    name: str
    at: tuple[int, ...] = ()


def head_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a head's state dictionary."""
    with torch.device("meta"):
        return {name: tuple(part.shape) for name, part in build_head(config).state_dict().items()}


def wanted_shapes(table: Mapping[str, Place], config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the file's tensors."""
    shapes = head_shapes(config)
    return {key: shapes[place.name][len(place.at) :] for key, place in table.items()}


def read_tensors(
    weights: Weights,
    table: Mapping[str, Place],
    config: HeadConfig,
    *,
    ignored: Iterable[str] = (),
    extra: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, Tensor]:
    """Reads a head's state dictionary from a file.

    Args:
        weights: The file.
        table: Places by the file's keys; a key may be missing if another key shares its place.
        config: The head's sizes.
        ignored: Unused keys of the file.
        extra: Shapes of further tensors that must exist and be finite; the caller fetches them.

    Raises:
        ModelError: With all missing, unexpected and mis-shaped keys, or all that are not finite, or those that share a
            place and differ.
    """
    wanted = {**wanted_shapes(table, config), **(extra or {})}
    unused = set(ignored)
    found = {key: shape for key, shape in weights.shapes.items() if key not in unused}
    present = {place for key, place in table.items() if key in found}
    repeated = [key for key, place in table.items() if key not in found and place in present]
    check_keys(weights.name, found, {key: shape for key, shape in wanted.items() if key not in repeated})
    if extra:
        check_values(weights.name, weights.fetch(extra))
    return assemble(weights.name, weights.fetch([key for key in table if key in found]), table, config)


def assemble(
    name: str, tensors: Mapping[str, Tensor], table: Mapping[str, Place], config: HeadConfig
) -> dict[str, Tensor]:
    """Builds a state dictionary from tensors of checked shapes; name: of the file, for messages."""
    check_values(name, tensors)
    first: dict[Place, str] = {}
    for key, tensor in tensors.items():
        other = first.setdefault(table[key], key)
        if other != key and not torch.equal(tensors[other], tensor):
            raise ModelError(
                f"'{other}' and '{key}' of '{name}' differ. Expected equal tensors, as its weights are tied."
            )
    default = next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), torch.float32)
    result = {}
    for ours, shape in head_shapes(config).items():
        parts = {place.at: tensors[key] for place, key in first.items() if place.name == ours}
        if () in parts:
            result[ours] = parts[()].contiguous()
            continue
        dtypes = {part.dtype for part in parts.values()} or {default}
        whole = torch.empty(shape, dtype=max(dtypes, key=lambda one: (one.itemsize, str(one))))
        for index, part in parts.items():
            whole[index] = part
        result[ours] = whole
    return result


def scatter(weights: Mapping[str, Tensor], table: Mapping[str, Place]) -> dict[str, Tensor]:
    """Returns the file's tensors from a head's state dictionary, as copies."""
    return {key: weights[place.name][place.at].clone().contiguous() for key, place in table.items()}


def check_values(name: str, tensors: Mapping[str, Tensor]) -> None:
    """Raises `ModelError` with the names of all tensors that are quantised or not finite."""
    packed = [key for key, tensor in tensors.items() if tensor.is_floating_point() and tensor.itemsize < 2]
    if packed:
        raise ModelError(f"'{name}' holds quantised tensors: {listed(packed)}. Expected floats of 16 bits or more.")
    bad = [key for key, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        raise ModelError(f"tensors of '{name}' hold numbers that are not finite: {listed(bad)}. Train it again.")


def check_token_map(name: str, token_map: Tensor, vocab_size: int) -> None:
    """Raises `ModelError` unless the map has different tokens of the vocabulary, int64; name: of the file."""
    is_map = token_map.dtype == torch.int64 and token_map.unique().numel() == token_map.numel()
    if not is_map or bool(((token_map < 0) | (token_map >= vocab_size)).any()):
        raise ModelError(f"the token_map of '{name}' is no map. Expected different tokens in 0..{vocab_size - 1}.")


def with_ties(
    config: HeadConfig, weights: dict[str, Tensor], names: Iterable[str] = ("weight", "bias")
) -> tuple[Any, dict[str, Tensor]]:
    """Marks a head's blocks as tied if they are equal; released code repeated one module.

    Args:
        config: Has `tied_blocks`.
        weights: Its state dictionary.
        names: Tensors with blocks along dimension 1.
    """
    stacked = [name for name in names if name in weights]
    if any(weights[name].shape[1] < 2 for name in stacked) or not stacked:
        return config, weights
    if not all(torch.equal(weights[name], weights[name][:, :1].expand_as(weights[name])) for name in stacked):
        return config, weights
    tied = {name: weights[name][:, :1].contiguous() for name in stacked}
    return config.model_copy(update={"tied_blocks": True}), weights | tied


def most_common(values: Iterable[int], *, name: str, what: str) -> int:
    """Returns the size of most tensors, so that errors name the odd one; raises `ModelError` without any."""
    counted = Counter(values).most_common(1)
    if not counted:
        raise ModelError(f"'{name}' does not tell its {what}. Expected tensors that do. Copy or convert it again.")
    return counted[0][0]


def count(indices: Iterable[int], *, name: str, what: str) -> int:
    """Returns the largest index plus one; raises `ModelError` for an implausible number."""
    number = max(indices, default=-1) + 1
    if number > _MOST_PARTS:
        raise ModelError(f"'{name}' numbers {number} {what}. Expected at most {_MOST_PARTS}.")
    return number


def make_config(kind: type[HeadConfig | LayerConfig], name: str, **sizes: Any) -> Any:
    """Builds a configuration from a file's sizes; raises `ModelError` for invalid sizes."""
    for key in ("num_heads", "num_layers"):
        if isinstance(sizes.get(key), int) and sizes[key] > _MOST_PARTS:
            raise ModelError(f"head '{name}' has {key} {sizes[key]}. Expected at most {_MOST_PARTS}.")
    return validated(kind, sizes, f"head '{name}'", error=ModelError, advice="Copy or convert it again.")
