"""Splits and joins tensors over the ranks of tensor parallelism."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError, ModelError, listed
from foretoken.formats.files import HeadFiles, Weights

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MOST_RANKS = 4096
_ROW_PARALLEL = re.compile(r".*\.(o_proj|down_proj)\.weight")
_REPLICATED = re.compile(r".*(layernorm|\.norm)\.weight")


def split_dim(key: str) -> int | None:
    """Along which dimension a tensor is split; None for one that every rank holds whole."""
    if _REPLICATED.fullmatch(key):
        return None
    return 1 if _ROW_PARALLEL.fullmatch(key) else 0


def split(key: str, tensor: Tensor, rank: int, tp_size: int) -> Tensor:
    """A rank's part of a tensor, with memory of its own.

    Raises:
        ConfigError: When it cannot be split evenly.
    """
    dim = split_dim(key)
    if dim is None or tp_size == 1:
        return tensor.clone()
    if tensor.shape[dim] % tp_size:
        raise ConfigError(f"tp_size is {tp_size}. Expected a divisor of {tensor.shape[dim]}, a size of '{key}'.")
    return tensor.chunk(tp_size, dim)[rank].clone()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """All ranks of a checkpoint.

    Attributes:
        parts: By rank, without tensors that are not the heads'.
        merged: The whole tensors. Shapes are those that the parts add up to, as far as they are there.
    """

    parts: Mapping[int, Weights]
    merged: Weights

    @classmethod
    def of(cls, files: HeadFiles, *, ignored: re.Pattern[str]) -> Ranks:
        """The ranks that hold heads: all of them, or the last stage where layers are split as well.

        Raises:
            ModelError: When some are missing.
        """
        mapping = files.config.get("mapping") or {}
        tp_size = mapping.get("tp_size", mapping.get("world_size", max(files.ranks, default=0) + 1))
        stages = mapping.get("pp_size", 1)
        if not isinstance(tp_size, int) or not isinstance(stages, int) or not 1 <= tp_size * stages <= MOST_RANKS:
            raise ModelError(
                f"'{files.path}' is split over {shown(tp_size)} ranks in {shown(stages)} stages. Expected counts."
            )
        world = files.ranks or {0: files.weights}
        missing = [f"rank{rank}.safetensors" for rank in range(tp_size * stages) if rank not in world]
        if missing:
            raise ModelError(f"'{files.path}' lacks {listed(missing)}. Expected a file of each rank. Copy it again.")
        unknown = [f"rank{rank}.safetensors" for rank in world if rank >= tp_size * stages]
        if unknown:
            raise ModelError(f"'{files.path}' holds {listed(unknown)}, beyond the ranks of its config.json.")
        first = tp_size * (stages - 1)
        parts = {
            rank: world[rank].renamed(lambda key: None if ignored.fullmatch(key) else key)
            for rank in range(first, first + tp_size)
        }
        return cls(parts=parts, merged=_merge(str(files.path), parts))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """What the files hold; keys name the rank where there are several."""
        return {
            self._label(rank, key): shape for rank, part in self.parts.items() for key, shape in part.shapes.items()
        }

    def wanted(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """What the files should hold for tensors of these whole shapes."""
        return {
            self._label(rank, key): _part_shape(key, shape, len(self.parts))
            for rank in self.parts
            for key, shape in shapes.items()
        }

    def _label(self, rank: int, key: str) -> str:
        """A key in messages."""
        return key if len(self.parts) == 1 else f"rank{rank}: {key}"


def _part_shape(key: str, shape: tuple[int, ...], tp_size: int) -> tuple[int, ...]:
    """A rank's share of a shape."""
    dim = split_dim(key)
    return tuple(size // tp_size if index == dim else size for index, size in enumerate(shape))


def _merge(name: str, parts: Mapping[int, Weights]) -> Weights:
    """Whole tensors."""
    shapes: dict[str, tuple[int, ...]] = {}
    for key in dict.fromkeys(key for part in parts.values() for key in part.shapes):
        found, dim = [part.shapes[key] for part in parts.values() if key in part.shapes], split_dim(key)
        whole = list(found[0])
        if dim is not None and dim < len(whole):
            whole[dim] = sum(shape[dim] for shape in found if dim < len(shape))
        shapes[key] = tuple(whole)

    def fetch(keys: Iterable[str]) -> dict[str, Tensor]:
        keys = list(keys)
        tensors = [part.fetch(keys) for part in parts.values()]
        return {key: _join(name, key, [one[key] for one in tensors]) for key in keys}

    return Weights(name=name, shapes=shapes, fetch=fetch)


def _join(name: str, key: str, tensors: list[Tensor]) -> Tensor:
    """One tensor from the parts of all ranks."""
    dim = split_dim(key)
    if dim is not None:
        return torch.cat(tensors, dim)
    if any(not torch.equal(tensors[0], tensor) for tensor in tensors[1:]):
        raise ModelError(f"'{key}' of '{name}' differs between ranks. Expected the same in each.")
    return tensors[0]
