"""Reads records from text files and from JSON lines or arrays."""

from __future__ import annotations

import glob
import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from foretoken.core.errors import RequestError
from foretoken.training.data.records import Record, read_row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Something that records can be read from, as often as wanted.

    Attributes:
        name: For `meta.json` and messages.
        records: Reads them in a fixed order; raises `RequestError` at what cannot be read.
        total: Sum of the sizes of all records and of what is left out, in `unit`; None when not known beforehand.
        unit: "bytes" or "rows".
    """

    name: str
    records: Callable[[], Iterator[Record]]
    total: int | None = None
    unit: str = "bytes"


def text_source(path: str) -> Source:
    """Text files; each is one document.

    Args:
        path: A file, a directory (all files below it, hidden ones left out) or a glob (`**` goes into directories).

    Raises:
        RequestError: When there is no such file.
    """
    files = _files(path, ())

    def records() -> Iterator[Record]:
        for file in files:
            try:
                data = file.read_bytes()
                text = data.decode("utf-8-sig")
            except OSError as err:
                raise RequestError(f"'{file}' cannot be read: {err}.") from err
            except UnicodeDecodeError as err:
                raise RequestError(f"'{file}' is not UTF-8 text: {err}. Leave it out with a glob.") from err
            if text.strip():
                yield Record(where=str(file), text=text, size=len(data))

    return Source(name=path, records=records, total=sum(file.stat().st_size for file in files))


def json_source(path: str, *, text_column: str = "text") -> Source:
    """Rows of JSON files: `.jsonl`, `.jsonl.gz`, or `.json` with one array, as ShareGPT is published.

    Args:
        path: A file, a directory (its files with these suffixes) or a glob.
        text_column: See `read_row`, which also tells the forms of a row.

    Raises:
        RequestError: When there is no such file.
    """
    files = _files(path, _JSON_SUFFIXES)

    def records() -> Iterator[Record]:
        for file in files:
            yield from _array_rows(file, text_column) if file.suffix == ".json" else _line_rows(file, text_column)

    is_packed = any(file.suffix == ".gz" for file in files)  # how much a compressed file holds shows only at its end
    return Source(name=path, records=records, total=None if is_packed else sum(file.stat().st_size for file in files))


def file_source(path: str, *, text_column: str = "text") -> Source:
    """A text or JSON source, whichever the suffix says."""
    return json_source(path, text_column=text_column) if path.endswith(_JSON_SUFFIXES) else text_source(path)


def _files(path: str, suffixes: Sequence[str]) -> list[Path]:
    """The files that a path names, sorted."""
    place = Path(path)
    if place.is_file():
        return [place]
    if place.is_dir():
        found = [file for file in place.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(place))]
        found = [file for file in found if not suffixes or file.name.endswith(tuple(suffixes))]
    else:
        found = [Path(name) for name in glob.glob(path, recursive=True) if Path(name).is_file()]  # noqa: PTH207 - `**`
    if not found:
        kind = f" with {', '.join(suffixes)} files" if suffixes else ""
        raise RequestError(f"there is no file '{path}'. Expected a file, a directory{kind} or a glob that finds files.")
    return sorted(found)


def _is_hidden(path: Path) -> bool:
    """Whether any part of a path starts with a dot."""
    return any(part.startswith(".") for part in path.parts)


def _line_rows(file: Path, text_column: str) -> Iterator[Record]:
    """Records of a file of JSON lines; blank lines are left out."""
    number = 0
    try:
        with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as err:  # UnicodeDecodeError too
                    raise RequestError(f"{file}:{number} is not valid JSON: {err}.") from err
                record = read_row(row, f"{file}:{number}", text_column=text_column, size=len(line))
                if record is not None:
                    yield record
    except (OSError, EOFError, zlib.error) as err:
        raise RequestError(f"'{file}' cannot be read after line {number}: {err}.") from err


def _array_rows(file: Path, text_column: str) -> Iterator[Record]:
    """Records of a file that holds one JSON array."""
    try:
        data = file.read_bytes()
        rows = json.loads(data)
    except OSError as err:
        raise RequestError(f"'{file}' cannot be read: {err}.") from err
    except ValueError as err:
        raise RequestError(f"'{file}' is not valid JSON: {err}. Name files of JSON lines .jsonl.") from err
    if not isinstance(rows, list):
        raise RequestError(f"'{file}' holds {type(rows).__name__}. Expected an array of rows.")
    for number, row in enumerate(rows):
        record = read_row(row, f"{file}: row {number}", text_column=text_column, size=len(data) // len(rows))
        if record is not None:
            yield record
