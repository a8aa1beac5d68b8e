"""Reads the header of a GGUF file: its values, and where its tensors lie. Needs no torch.

The header is read with bounds on every count, so that a damaged file cannot ask for time or memory.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from foretoken.core.checks import shown
from foretoken.core.errors import ModelError, listed, one_line
from foretoken.files.bounded_reads import check_regular
from foretoken.models.names import part_names

_MOST_ENTRIES = 1 << 16  # metadata keys, or tensors; a choice: the largest public files have some 2,000
_MOST_ITEMS = 1 << 22  # of an array; a choice: vocabularies and their merges have some 500,000
_MOST_NAME_BYTES = 1 << 12  # of a key, a tensor's name or a token
_MOST_TEXT_BYTES = 1 << 24  # of a value; chat templates have some 10,000
_PIECE_BYTES = 1 << 20  # read at once; a choice, far above `_MOST_NAME_BYTES`
_ROUNDED_ITEMS = 1 << 12  # of a longer array, which belongs to the tokenizer, numbers are as they are
_TEXT, _ARRAY = 8, 9
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_TYPES = (
    *("F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K"),
    *("Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16"),
    *("I32", "I64", "F64", "IQ1_M", "BF16", "Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8", "TQ1_0", "TQ2_0", "IQ4_NL_4_4"),
    *("IQ4_NL_4_8", "IQ4_NL_8_8", "MXFP4", "NVFP4", "Q1_0", "Q2_0"),
)  # by their numbers in files
DENSE_TYPES = ("F32", "F16", "BF16")


class StoredTensor(NamedTuple):
    """Where a tensor lies in a file; its type as llama.cpp names it, and its shape from the rows on.

    `num_bytes`: filled in by `read_gguf`, like `file`, the index of the part of a split model. `stride`: bytes from one
    matrix of a tensor (matrices, rows, cols) to the next; 0 if they are side by side.
    """

    type_name: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int = 0
    stride: int = 0
    file: int = 0

    @property
    def is_quantized(self) -> bool:
        """Whether it is stored in integers."""
        return self.type_name not in DENSE_TYPES

    @property
    def is_matrix(self) -> bool:
        """Whether it has rows."""
        return len(self.shape) > 1

    def split_rows(self, counts: Sequence[int]) -> Iterator[StoredTensor]:
        """Splits the rows, or the numbers of a vector, into tensors of `counts` rows each."""
        axis = len(self.shape) - (2 if self.is_matrix else 1)
        matrices, rows = prod(self.shape[:axis]), self.shape[axis]
        row_bytes, start = self.num_bytes // (matrices * rows), self.start
        for count in counts:
            shape = (*self.shape[:axis], count, *self.shape[axis + 1 :])
            stride = 0 if matrices == 1 else rows * row_bytes
            yield StoredTensor(self.type_name, shape, start, matrices * count * row_bytes, stride, self.file)
            start += count * row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """The header of a file.

    Attributes:
        path: Of the file.
        version: What tells that the file has not changed; its third number is the file's size in bytes.
        values: The header's values by their keys.
        tensors: All tensors by their names.
    """

    path: Path
    version: tuple[int, ...]
    values: dict[str, Any]
    tensors: dict[str, StoredTensor]

    @property
    def num_bytes(self) -> int:
        """The size of the file."""
        return self.version[2]

    def array(self, key: str) -> list[Any] | None:
        """Returns an array; None if the key is missing or has another value."""
        value = self.values.get(key)
        return value if isinstance(value, list) else None


def read_headers(path: Path) -> list[GgufHeader]:
    """Reads the headers of a model's files, one for each part of a split model; the first one has the settings.

    Raises `ModelError` if a file is missing or damaged, or is another part than the first.
    """
    headers = [_read_header(part) for part in _split_parts(path)]
    count = headers[0].values.get("split.count", 0)
    if count > 1 and len(headers) == 1:
        raise ModelError(
            f"'{path}' is a part of a model in {count} files. Expected the first one with its own name, "
            f"NAME-00001-of-{count:05}.gguf, beside the others. Give the parts their own names again."
        )
    return headers


def _split_parts(path: Path) -> list[Path]:
    """Returns the files of a model by its first, `NAME-00001-of-00003.gguf`; a file without parts stands alone."""
    parts = [path.with_name(name) for name in part_names(path.name)]
    if path != parts[0]:
        raise ModelError(
            f"'{path}' is part {parts.index(path) + 1} of a model in {len(parts)} files. Expected the first one, which "
            f"has the settings. Name '{parts[0]}'."
        )
    missing = [each.name for each in parts[1:] if not each.exists()]
    if missing and path.exists():
        raise ModelError(
            f"'{path}' is part 1 of a model in {len(parts)} files, and there is no {listed(missing)} beside it. "
            "Expected all parts in one directory. Copy or download them too."
        )
    return parts


_recent: deque[GgufHeader] = deque(maxlen=2)  # a target's and a draft model's: the tokenizer is read after the model


def _read_header(path: Path) -> GgufHeader:
    with opened(path) as cursor:
        known = next((each for each in list(_recent) if (each.path, each.version) == (path, cursor.version)), None)
        if known is not None:
            return known
        if cursor.size < 4 or cursor.read(4) != b"GGUF":
            raise ModelError(f"'{path}' is no GGUF file. Expected one that begins with 'GGUF'.")
        version = cursor.number("I")
        if version not in (2, 3):
            raise ModelError(
                f"'{path}' has version {version} of GGUF. Expected version 2 or 3, little endian. Convert the model "
                "again with a recent llama.cpp."
            )
        num_tensors, num_values = cursor.count(_MOST_ENTRIES, "tensors"), cursor.count(_MOST_ENTRIES, "values")
        values: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.name(values)
            values[key] = cursor.value()
        found: dict[str, StoredTensor] = {}
        for _ in range(num_tensors):
            name = cursor.name(found)
            found[name] = cursor.tensor()
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise cursor.damaged(f"general.alignment is {shown(alignment)}, not a power of 2")
        first = -(-cursor.at // alignment) * alignment
        tensors = {name: each._replace(start=first + each.start) for name, each in found.items()}
        header = GgufHeader(path=path, version=cursor.version, values=values, tensors=tensors)
        _recent.append(header)
        return header


def damaged(path: Path, why: str) -> ModelError:
    """Returns the error for a damaged file."""
    return ModelError(f"'{path}' is damaged: {why}. Copy or download it again.")


class _Cursor:
    """Reads a header from its start, never past the end of the file."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        state = os.fstat(file.fileno())
        self.path, self.file, self.at, self.size = path, file, 0, state.st_size
        self.version = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)

    def damaged(self, why: str) -> ModelError:
        return damaged(self.path, why)

    def read(self, count: int) -> bytes:
        data = self.file.read(count) if count <= self.size - self.at else b""
        if len(data) < count:  # too much was asked for, or the file was cut meanwhile
            raise self.damaged("the file ends inside its header")
        self.at += count
        return data

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
        return self.array() if kind == _ARRAY else self.scalar(kind)

    def array(self) -> list[Any]:
        item, count = self.number("I"), self.count(_MOST_ITEMS, "items of an array")
        if item == _TEXT:
            return self.texts(count)
        if item not in _SCALARS:
            raise self.damaged(f"a value of its header has the unknown type {item}")
        if count <= _ROUNDED_ITEMS:
            return [self.scalar(item) for _ in range(count)]
        form = f"<{count}{_SCALARS[item]}"
        return list(struct.unpack(form, self.read(struct.calcsize(form))))

    def texts(self, count: int) -> list[str]:
        """Reads the texts of an array, which may be hundreds of thousands: many from one piece of the file."""
        texts, piece, begin = list[str](), b"", 0
        for _ in range(count):
            if len(piece) < begin + 8 + _MOST_NAME_BYTES:
                piece, begin = piece[begin:] + self.file.read(_PIECE_BYTES), 0
            length = int.from_bytes(piece[begin : begin + 8], "little")
            if length > _MOST_NAME_BYTES:
                raise self.damaged(f"its header speaks of {length} bytes of a text, more than {_MOST_NAME_BYTES}")
            end = begin + 8 + length
            if end > len(piece):
                raise self.damaged("the file ends inside its header")
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

    def tensor(self) -> StoredTensor:
        """Reads a tensor's type, shape and place in the data, after its name."""
        dimensions = self.number("I")
        if not 0 < dimensions <= 4:
            raise self.damaged(f"a tensor has {dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        kind, offset = self.number("I"), self.number("Q")
        return StoredTensor(_TYPES[kind] if kind < len(_TYPES) else f"type {kind}", shape, offset)


@contextmanager
def opened(path: Path, version: tuple[int, ...] | None = None) -> Iterator[_Cursor]:
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
