"""Reads what a GGUF file of llama.cpp holds: the values and tensors of its header, and the tensors themselves.

The header is read with bounds on every count, so that a damaged file cannot ask for time or memory. Tensors are read
one at a time; integers stay integers. The file is open only while it is read, and never mapped into memory: a mapped
file that shrinks ends the process. This module knows no architecture.
"""

from __future__ import annotations

import os
import struct
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from foretoken.core.checks import shown
from foretoken.core.errors import ModelError, one_line
from foretoken.decoder.native_storage import can_store_blocks, store_blocks
from foretoken.decoder.quantized import QuantizedMatrix
from foretoken.files.bounded_reads import check_regular
from foretoken.models.config_checks import is_size
from foretoken.models.quantization.gguf_blocks import FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from foretoken.models.quantization.gguf_blocks import Unpacked

_MOST_ENTRIES = 1 << 16  # metadata keys, or tensors; a choice: the largest public files have some 2,000
_MOST_ITEMS = 1 << 22  # of an array; a choice: vocabularies and their merges have some 500,000
_MOST_NAME_BYTES = 1 << 12  # of a key, a tensor's name or a token
_MOST_TEXT_BYTES = 1 << 24  # of a value; chat templates have some 10,000
_PIECE_BYTES = 1 << 20  # read at once; a choice, far above `_MOST_NAME_BYTES`
_KEPT_ITEMS = 1 << 12  # longer arrays are skipped: they belong to the tokenizer
_WEIGHTS_AT_ONCE = 1 << 20  # unpacked at once; a choice: some 12 MiB with temporaries
_TEXT, _ARRAY = 8, 9
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_TYPES = (
    *("F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K"),
    *("Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16"),
    *("I32", "I64", "F64", "IQ1_M", "BF16", "Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8", "TQ1_0", "TQ2_0", "IQ4_NL_4_4"),
    *("IQ4_NL_4_8", "IQ4_NL_8_8", "MXFP4", "NVFP4", "Q1_0", "Q2_0"),
)  # by their numbers in files
_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class StoredTensor(NamedTuple):
    """Where a tensor lies in a file; its type as llama.cpp names it, and its shape from the rows on.

    `stride`: bytes from one matrix of a tensor (matrices, rows, cols) to the next; 0 if they are side by side.
    """

    type_name: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int
    stride: int = 0

    @property
    def is_quantized(self) -> bool:
        """Whether it is stored in integers."""
        return self.type_name in FORMATS

    @property
    def is_matrix(self) -> bool:
        """Whether it has rows."""
        return len(self.shape) > 1

    def split_rows(self, counts: Sequence[int]) -> Iterator[StoredTensor]:
        """Yields tensors of `counts` rows each, or numbers of a vector, one after another in this one."""
        axis = len(self.shape) - (2 if self.is_matrix else 1)
        matrices, rows = prod(self.shape[:axis]), self.shape[axis]
        row_bytes, start = self.num_bytes // (matrices * rows), self.start
        for count in counts:
            shape = (*self.shape[:axis], count, *self.shape[axis + 1 :])
            stride = 0 if matrices == 1 else rows * row_bytes
            yield StoredTensor(self.type_name, shape, start, matrices * count * row_bytes, stride)
            start += count * row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """The header of a file, and access to its tensors; a file that changed since raises `ModelError`.

    Attributes:
        path: Of the file.
        version: What tells that the file has not changed.
        values: The header's values by their keys; None for arrays of texts, and for long arrays. See `array`.
        array_starts: Where those arrays begin, by their keys.
        tensors: All tensors by their names; they lie inside the file, and do not overlap.
    """

    path: Path
    version: tuple[int, ...]
    values: dict[str, Any]
    array_starts: dict[str, int]
    tensors: dict[str, StoredTensor]

    def array(self, key: str) -> list[Any] | None:
        """Returns an array of the header, also a long one; None if the key is missing or has another value."""
        if key in self.array_starts:
            with _opened(self.path, self.version) as cursor:
                cursor.skip(self.array_starts[key])
                return cursor.array(keeps_all=True)
        value = self.values.get(key)
        return value if isinstance(value, list) else None

    @property
    def bytes_per_weight(self) -> float:
        """The mean over all tensors."""
        tensors = self.tensors.values()
        return sum(each.num_bytes for each in tensors) / max(1, sum(prod(each.shape) for each in tensors))

    def matrix(
        self, name: str, dtype: torch.dtype, order: Tensor | None = None, *, part: int | None = None
    ) -> QuantizedMatrix:
        """Returns a matrix that is stored in integers.

        Args:
            name: Of the tensor.
            dtype: Of inputs and outputs, see `QuantizedMatrix`.
            order: (rows,) int64, the rows in another order; None for their own.
            part: The index of a matrix in a tensor (matrices, rows, cols).

        Raises:
            ModelError: For scales that are not finite.
        """
        stored = self.tensors[name]
        form = FORMATS[stored.type_name]
        if can_store_blocks():
            scale_dtype = torch.float16 if form.is_half else torch.float32
            made = QuantizedMatrix.empty(
                stored.shape[-2:], bits=form.bits, group=form.group, dtype=dtype, scale_dtype=scale_dtype,
                has_offsets=form.has_offsets,
            )  # fmt: skip
            if not store_blocks(made, self._rows(name, None, part), stored.type_name, order, form.table):
                raise self._not_finite(name)
            return made
        numbers, scales, offsets = zip(*self._pieces(name, order, part), strict=True)
        return QuantizedMatrix.of(
            torch.cat(numbers),
            bits=form.bits,
            group=form.group,
            group_scales=torch.cat(scales),
            group_offsets=torch.cat(offsets) if form.has_offsets else None,
            dtype=dtype,
        )

    def dense(self, name: str, order: Tensor | None = None) -> Tensor:
        """Returns a tensor as it is stored, or in float32 if it is stored in integers; arguments as for `matrix`.

        Raises:
            ModelError: For numbers that are not finite.
        """
        stored = self.tensors[name]
        if not stored.is_quantized:
            tensor = self._rows(name, order).view(_DENSE[stored.type_name]).view(stored.shape)
            self._check_finite(name, tensor)
            return tensor
        tensor, start = torch.empty(prod(stored.shape[:-1]), stored.shape[-1]), 0
        for numbers, scales, offsets in self._pieces(name, order):
            part = tensor[start : start + len(numbers)].view(*scales.shape, -1)
            torch.mul(numbers.view(part.shape), scales.float().unsqueeze(2), out=part)
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
        with _opened(self.path, self.version) as cursor:
            offset = stored.start + (part or 0) * (stored.stride or num_bytes)
            raw = np.fromfile(cursor.file, np.uint8, num_bytes, offset=offset)
        if len(raw) < num_bytes:
            raise _damaged(self.path, f"the file ends before the data of {name}")
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


def _damaged(path: Path, why: str) -> ModelError:
    return ModelError(f"'{path}' is damaged: {why}. Copy or download it again.")


class _Cursor:
    """Reads a header from its start, never past the end of the file."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        state = os.fstat(file.fileno())
        self.path, self.file, self.at, self.size = path, file, 0, state.st_size
        self.version = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)

    def damaged(self, why: str) -> ModelError:
        return _damaged(self.path, why)

    def skip(self, count: int) -> None:
        """Goes on behind the next `count` bytes."""
        self._move(count)
        self.file.seek(self.at)

    def read(self, count: int) -> bytes:
        self._move(count)
        data = self.file.read(count)
        if len(data) < count:  # it was cut meanwhile
            raise self.damaged("the file ends inside its header")
        return data

    def _move(self, count: int) -> None:
        if count > self.size - self.at:
            raise self.damaged("the file ends inside its header")
        self.at += count

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.read(struct.calcsize(f"<{form}")))[0]

    def count(self, most: int, what: str) -> int:
        count = int(self.number("Q"))
        if count > most:
            raise self.damaged(f"its header speaks of {count} {what}, more than {most}")
        return count

    def text(self, most: int = _MOST_NAME_BYTES) -> str:
        return self.read(self.count(most, "bytes of a text")).decode("utf-8", "replace")

    def name(self, known: dict[str, Any]) -> str:
        """Reads the name of a key or a tensor that is not known yet."""
        name = self.text()
        if not name.isprintable() or not name or name in known:
            raise self.damaged(f"the name {shown(name)} is there twice or cannot be printed")
        return name

    def value(self) -> Any:
        kind = self.number("I")
        if kind == _TEXT:
            return self.text(_MOST_TEXT_BYTES)
        return self.array(keeps_all=False) if kind == _ARRAY else self.scalar(kind)

    def array(self, *, keeps_all: bool) -> list[Any] | None:
        """Reads an array after its type; returns None for texts and long arrays unless `keeps_all`."""
        item, count = self.number("I"), self.count(_MOST_ITEMS, "items of an array")
        if item == _TEXT:
            return self.texts(count, keeps_all=keeps_all)
        if item not in _SCALARS:
            raise self.damaged(f"a value of its header has the unknown type {item}")
        if count <= _KEPT_ITEMS:
            return [self.scalar(item) for _ in range(count)]
        form = f"<{count}{_SCALARS[item]}"
        if keeps_all:
            return list(struct.unpack(form, self.read(struct.calcsize(form))))
        self.skip(struct.calcsize(form))
        return None

    def texts(self, count: int, *, keeps_all: bool) -> list[Any] | None:
        """Reads or skips the texts of an array, which may be hundreds of thousands: many from one piece of the file."""
        texts: list[Any] | None = [] if keeps_all else None
        piece, begin = b"", 0
        for _ in range(count):
            if len(piece) < begin + 8 + _MOST_NAME_BYTES:
                piece, begin = piece[begin:] + self.file.read(_PIECE_BYTES), 0
            length = int.from_bytes(piece[begin : begin + 8], "little")
            if length > _MOST_NAME_BYTES:
                raise self.damaged(f"its header speaks of {length} bytes of a text, more than {_MOST_NAME_BYTES}")
            end = begin + 8 + length
            if end > len(piece):
                raise self.damaged("the file ends inside its header")
            if texts is not None:
                texts.append(piece[begin + 8 : end].decode("utf-8", "replace"))
            begin = end
        self.at = self.file.tell() - len(piece) + begin
        self.file.seek(self.at)
        return texts

    def scalar(self, kind: int) -> Any:
        if kind not in _SCALARS:
            raise self.damaged(f"a value of its header has the unknown type {kind}")
        number = self.number(_SCALARS[kind])
        # The shortest decimal fraction that rounds to the float32: 1e-06 instead of 9.999999974752427e-07.
        return float(str(np.float32(number))) if kind == 6 else number

    def tensor(self) -> tuple[str, tuple[int, ...], int]:
        """Reads a tensor's type, shape and place in the data, after its name."""
        dimensions = self.number("I")
        if not 0 < dimensions <= 4:
            raise self.damaged(f"a tensor has {dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        kind, offset = self.number("I"), self.number("Q")
        return _TYPES[kind] if kind < len(_TYPES) else f"type {kind}", shape, offset


@contextmanager
def _opened(path: Path, version: tuple[int, ...] | None = None) -> Iterator[_Cursor]:
    """Opens a file for the block; `version`: of the file that was read before, None for the first time."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            cursor = _Cursor(path, file)
            if version not in (None, cursor.version):
                raise ModelError(
                    f"'{path}' was changed while it was read. Expected a file that stays as it is. Load it again when "
                    "nothing writes there."
                )
            yield cursor
    except FileNotFoundError as err:
        raise ModelError(f"there is no file '{path}'. Expected a GGUF file. Check the path.") from err
    except OSError as err:
        raise ModelError(f"'{path}' cannot be read: {one_line(err)}. Expected a GGUF file.") from err


def read_gguf(path: Path) -> GgufFile:
    """Reads a file's header; raises `ModelError` if the file is damaged or a tensor has a type that is not read."""
    with _opened(path) as cursor:
        return _read_header(path, cursor)


def _read_header(path: Path, cursor: _Cursor) -> GgufFile:
    if cursor.size < 4 or cursor.read(4) != b"GGUF":
        raise ModelError(f"'{path}' is no GGUF file. Expected one that begins with 'GGUF'.")
    version = cursor.number("I")
    if version not in (2, 3):
        raise ModelError(
            f"'{path}' has version {version} of GGUF. Expected version 2 or 3, little endian. Convert the model again "
            "with a recent llama.cpp."
        )
    num_tensors, num_values = cursor.count(_MOST_ENTRIES, "tensors"), cursor.count(_MOST_ENTRIES, "values")
    values: dict[str, Any] = {}
    starts: dict[str, int] = {}
    for _ in range(num_values):
        key = cursor.name(values)
        at = cursor.at
        values[key] = cursor.value()
        if values[key] is None:
            starts[key] = at + 4  # after the type
    found: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for _ in range(num_tensors):
        name = cursor.name(found)
        found[name] = cursor.tensor()
    alignment = values.get("general.alignment", 32)
    if not is_size(alignment) or alignment & (alignment - 1):
        raise cursor.damaged(f"general.alignment is {shown(alignment)}, not a power of 2")
    first = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, (kind, shape, offset) in found.items():
        num_bytes = _num_bytes(path, name, kind, shape)
        if first + offset + num_bytes > cursor.size:
            raise cursor.damaged(f"the file ends before the data of {name}")
        tensors[name] = StoredTensor(kind, shape, first + offset, num_bytes)
    for one, other in pairwise(sorted(tensors, key=lambda name: tensors[name].start)):
        if tensors[other].start < tensors[one].start + tensors[one].num_bytes:
            raise cursor.damaged(f"the data of {one} and {other} overlap")
    return GgufFile(path=path, version=cursor.version, values=values, array_starts=starts, tensors=tensors)


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
