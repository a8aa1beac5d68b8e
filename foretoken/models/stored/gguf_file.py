"""Reads what a GGUF file of llama.cpp holds, or the files of a split model: settings, tensors, and where they lie.

Tensors are read one at a time; integers stay integers. A file is open only while it is read, and never mapped into
memory: a mapped file that shrinks ends the process. This module knows no architecture.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import ModelError
from foretoken.decoder.quantized import QuantizedMatrix, can_store_blocks, store_blocks
from foretoken.models.stored.gguf_blocks import FORMATS, Unpacked
from foretoken.models.stored.gguf_header import DENSE_TYPES, GgufHeader, StoredTensor, damaged, opened, read_headers

_WEIGHTS_AT_ONCE = 1 << 20  # unpacked at once; a choice: some 12 MiB with temporaries
_DENSE = dict(zip(DENSE_TYPES, (torch.float32, torch.float16, torch.bfloat16), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """The headers of a model's files, and access to its tensors; a file that changed since raises `ModelError`.

    Attributes:
        headers: Of each file, several for a split model; the first one has the settings.
        tensors: All tensors by their names; they lie inside their files, and do not overlap.
        kept: Matrices that were read, by their names and dtypes: all who ask get the same.
    """

    headers: Sequence[GgufHeader]
    tensors: dict[str, StoredTensor]
    kept: dict[tuple[str, torch.dtype], QuantizedMatrix] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The first file."""
        return self.headers[0].path

    @property
    def values(self) -> dict[str, Any]:
        """See `GgufHeader`."""
        return self.headers[0].values

    def array(self, key: str) -> list[Any] | None:
        """See `GgufHeader`."""
        return self.headers[0].array(key)

    @property
    def is_quantized(self) -> bool:
        """Whether any tensor is stored in integers."""
        return any(each.is_quantized for each in self.tensors.values())

    @property
    def num_weights(self) -> int:
        """Of all tensors."""
        return sum(prod(each.shape) for each in self.tensors.values())

    @property
    def bytes_per_weight(self) -> float:
        """The mean over all tensors."""
        return sum(each.num_bytes for each in self.tensors.values()) / max(1, self.num_weights)

    def bytes_in_memory(self, name: str, dtype: torch.dtype) -> int:
        """Returns the bytes of a tensor in memory: as a `QuantizedMatrix`, or in a dtype if it is not quantized."""
        stored = self.tensors[name]
        if not stored.is_quantized:
            return prod(stored.shape) * dtype.itemsize
        form = FORMATS[stored.type_name]
        scales = form.scales.itemsize / form.group + (2 / form.block if form.scales == torch.int8 else 0)
        return int(prod(stored.shape) * (form.bits / 8 + scales * (1 + form.has_offsets)))

    def matrix(
        self, name: str, dtype: torch.dtype, order: Tensor | None = None, *, part: int | None = None
    ) -> QuantizedMatrix:
        """Returns a matrix that is stored in integers; raises `ModelError` for scales that are not finite.

        Args:
            name: Of the tensor.
            dtype: Of inputs and outputs, see `QuantizedMatrix`.
            order: (rows,) int64, the rows in another order, always the same one; None for their own.
            part: The index of a matrix in a tensor (matrices, rows, cols), which is read at each call. Whole matrices
                are read once.
        """
        if part is not None:
            return self._read_matrix(name, dtype, order, part)
        if (name, dtype) not in self.kept:
            self.kept[name, dtype] = self._read_matrix(name, dtype, order, None)
        return self.kept[name, dtype]

    def _read_matrix(self, name: str, dtype: torch.dtype, order: Tensor | None, part: int | None) -> QuantizedMatrix:
        stored = self.tensors[name]
        form = FORMATS[stored.type_name]
        if can_store_blocks():
            made = QuantizedMatrix.empty(
                stored.shape[-2:], bits=form.bits, group=form.group, dtype=dtype, scale_dtype=form.scales,
                has_offsets=form.has_offsets, offsets_are_lowest=form.offsets_are_lowest,
            )  # fmt: skip
            if not store_blocks(made, self._rows(name, None, part), stored.type_name, order, form.table):
                raise self._not_finite(name)
            return made
        numbers, scales, offsets = zip(*self._pieces(name, order, part), strict=True)
        return QuantizedMatrix.of(
            torch.cat(numbers),
            bits=form.bits,
            group=form.group,
            offsets_are_lowest=form.offsets_are_lowest,
            group_scales=torch.cat(scales),
            group_offsets=torch.cat(offsets) if form.has_offsets else None,
            dtype=dtype,
        )

    def dense(self, name: str, order: Tensor | None = None) -> Tensor:
        """Returns a tensor as it is stored, or in float32 if it is stored in integers; otherwise as `matrix`."""
        stored = self.tensors[name]
        if not stored.is_quantized:
            tensor = self._rows(name, order).view(_DENSE[stored.type_name]).view(stored.shape)
            self._check_finite(name, tensor)
            return tensor
        form = FORMATS[stored.type_name]
        tensor, start = torch.empty(prod(stored.shape[:-1]), stored.shape[-1]), 0
        for numbers, scales, offsets in self._pieces(name, order):
            part = tensor[start : start + len(numbers)].view(*scales.shape, -1)
            lift = 1 << form.bits - 1 if form.offsets_are_lowest else 0
            torch.mul(numbers.view(part.shape) + lift, scales.float().unsqueeze(2), out=part)
            if offsets is not None:
                part += offsets.unsqueeze(2)
            start += len(numbers)
        return tensor.view(stored.shape)

    def _rows(self, name: str, order: Tensor | None, part: int | None = None) -> Tensor:
        """Returns a copy of the bytes of a tensor, or of a part of it, (rows of all, bytes of a row) uint8."""
        stored = self.tensors[name]
        if part is None and stored.stride:
            return torch.cat([self._rows(name, order, index) for index in range(stored.shape[0])])
        num_bytes = stored.num_bytes // (1 if part is None else stored.shape[0])
        header = self.headers[stored.file]
        with opened(header.path, header.version) as cursor:
            offset = stored.start + (part or 0) * (stored.stride or num_bytes)
            raw = np.fromfile(cursor.file, np.uint8, num_bytes, offset=offset)
        if len(raw) < num_bytes:
            raise damaged(header.path, f"the file ends before the data of {name}")
        axes = (stored.shape[:-1] or stored.shape) if part is None else stored.shape[1:2]
        rows = torch.from_numpy(raw).view(prod(axes), -1)
        return rows if order is None else rows[order]

    def _pieces(self, name: str, order: Tensor | None, part: int | None = None) -> Iterator[Unpacked]:
        """Unpacks a matrix in pieces: numbers (rows, K) int8, scales and offsets (rows, K / group)."""
        stored = self.tensors[name]
        form, cols = FORMATS[stored.type_name], stored.shape[-1]
        for rows in self._rows(name, order, part).split(max(1, _WEIGHTS_AT_ONCE // cols)):
            numbers, scales, offsets = form.unpack(rows.view(-1, form.num_bytes))
            self._check_finite(name, scales)
            if offsets is not None:
                self._check_finite(name, offsets)
                offsets = offsets.view(len(rows), -1)
            yield numbers.reshape(len(rows), cols), scales.view(len(rows), -1), offsets

    def _check_finite(self, name: str, tensor: Tensor) -> None:
        if not tensor.isfinite().all():
            raise self._not_finite(name)

    def _not_finite(self, name: str) -> ModelError:
        return ModelError(f"{name} of '{self.path}' holds NaN or infinite values. Copy or download the file again.")


def read_gguf(path: Path) -> GgufFile:
    """Reads the headers of a model's file, or of all its parts if the name is that of the first part.

    Raises `ModelError` if a file is damaged or missing, or a tensor has a type that is not read.
    """
    headers, tensors = read_headers(path), dict[str, StoredTensor]()
    for index, header in enumerate(headers):
        own = {}
        for name, each in header.tensors.items():
            num_bytes = _num_bytes(header.path, name, each.type_name, each.shape)
            if each.start + num_bytes > header.num_bytes:
                raise damaged(header.path, f"the file ends before the data of {name}")
            if name in tensors:
                raise damaged(header.path, f"{name} is in an earlier part too")
            own[name] = each._replace(num_bytes=num_bytes, file=index)
        for one, other in pairwise(sorted(own, key=lambda name: own[name].start)):
            if own[other].start < own[one].start + own[one].num_bytes:
                raise damaged(header.path, f"the data of {one} and {other} overlap")
        tensors |= own
    return GgufFile(headers=headers, tensors=tensors)


def _num_bytes(path: Path, name: str, kind: str, shape: tuple[int, ...]) -> int:
    if kind in _DENSE:
        block, num_bytes = 1, _DENSE[kind].itemsize
    elif kind in FORMATS:
        block, num_bytes = FORMATS[kind][:2]
    else:
        raise ModelError(
            f"{name} of '{path}' is stored as {kind}. Expected {', '.join([*FORMATS, *_DENSE])}. Choose a file such "
            "as Q4_K_M or Q8_0."
        )
    if min(shape) == 0 or shape[-1] % block or (kind in FORMATS and len(shape) not in (2, 3)):
        expected = f"a matrix with rows of a multiple of {block} weights" if block > 1 else "at least one number"
        raise ModelError(
            f"{name} of '{path}' is {list(shape)} in {kind}. Expected {expected}. Copy or download the file again."
        )
    return prod(shape) // block * num_bytes
