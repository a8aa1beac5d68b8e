"""Records, still text, of text files, JSON files and data sets: documents, prompts with completions, conversations."""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ConfigError, RequestError, foreign_errors_as, nearest_name_hint, one_line
from foretoken.text.prompt_rows import PromptRow, json_lines, read_prompt_row

if TYPE_CHECKING:
    from foretoken.text.prompt_rows import JsonRow, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One document before its tokens."""

    where: str  # for messages: "notes.txt", "chats.jsonl:12"
    text: str = ""  # the document, or the completion of `prompt`
    prompt: str | None = None  # the text before the completion; None for a plain document
    messages: tuple[Message, ...] | None = None  # turns of a conversation, with `role` and `content`; else None
    later_turns: tuple[str, ...] = ()  # the user's further turns, which follow the target's own answers
    first_key: str = ""  # `key` of the record that a later turn comes from; "" for a record of a source
    size: int = 0  # the part of its source's total that this record took

    @property
    def key(self) -> str:
        """SHA-256 of the content, without `where`, as hexadecimal digits; of all turns of a conversation the first's.

        The turns of one conversation therefore lie on the same side of a split.
        """
        content = json.dumps([self.text, self.prompt, self.messages, *self.later_turns], sort_keys=True)
        return self.first_key or hashlib.sha256(content.encode()).hexdigest()

    @property
    def share(self) -> float:
        """A number in 0..1 from a hash of the content, spread evenly over contents."""
        return int(self.key[:12], 16) / 16**12

    def followed(self, answer: str) -> Record | None:
        """Returns the next turn, after the target's answer to this one; None if there is no further turn."""
        row = PromptRow(where=self.where, messages=self.messages or (), later_turns=self.later_turns).followed(answer)
        if row is None:
            return None
        return Record(where=self.where, messages=row.messages, later_turns=row.later_turns, first_key=self.key)


def read_row(row: Any, where: str, *, text_column: str = "text", size: int = 0) -> Record | None:
    """Returns a record from a row, or None without text.

    `row` has a form of `foretoken.text.prompt_rows`; a `prompt` may have a `completion`, `response` or `output`. A
    `text_column` other than "text" comes before all other forms. Raises `RequestError` when no form fits, a value is
    not of its type, or a role is unknown.
    """
    if text_column != "text":
        if not isinstance(row, Mapping) or text_column not in row:
            columns = list(map(str, row)) if isinstance(row, Mapping) else []
            raise RequestError(
                f"{where} has the columns {columns}, not '{text_column}'. {nearest_name_hint(text_column, columns)}"
            )
        row = {"text": row[text_column]}
    found = read_prompt_row(row, where)
    record = Record(
        where=where, text=(found.raw if found.answer is None else found.answer), messages=found.messages or None,
        prompt=None if found.answer is None else found.raw, later_turns=found.later_turns, size=size,
    )  # fmt: skip
    return record if record.messages or record.prompt or record.text.strip() else None


@dataclass(frozen=True, slots=True)
class Document:
    """One document as tokens, special ones included; `supervised`: which count as labels, None for all."""

    tokens: Sequence[int]
    supervised: Sequence[bool] | None = None

    def __post_init__(self) -> None:
        if self.supervised is not None and len(self.supervised) != len(self.tokens):
            raise RequestError(
                f"a document has {len(self.tokens)} tokens and {len(self.supervised)} flags. Expected one flag a token."
            )


_JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source of records, which can be read repeatedly."""

    name: str  # in `meta.json` and messages
    records: Callable[[], Iterator[Record]]  # reads them in a fixed order; raises `RequestError` for a damaged file
    total: int | None = None  # sum of the sizes of all records, skipped ones included; None if unknown beforehand
    unit: str = "bytes"  # of `total`, or "rows"


def text_source(path: str) -> Source:
    """Returns text files as a source; each file is one document.

    `path` is a file, a directory (all files below it, without hidden ones) or a glob (`**` enters directories). Raises
    `RequestError` when there is no such file.
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
    """Returns rows of `.jsonl`, `.jsonl.gz`, or `.json` with an array; arguments as `text_source` and `read_row`."""
    files = _files(path, _JSON_SUFFIXES)

    def records() -> Iterator[Record]:
        for file in files:
            yield from _records(_array_rows(file) if file.suffix == ".json" else _line_rows(file), text_column)

    is_packed = any(file.suffix == ".gz" for file in files)  # whose contents have an unknown size
    return Source(name=path, records=records, total=None if is_packed else sum(file.stat().st_size for file in files))


def file_source(path: str, *, text_column: str = "text") -> Source:
    """Returns a text or JSON source, by the suffix."""
    return json_source(path, text_column=text_column) if path.endswith(_JSON_SUFFIXES) else text_source(path)


def _files(path: str, suffixes: Sequence[str]) -> list[Path]:
    if os.path.isfile(path):  # noqa: PTH113 - pathlib raises for some names
        return [Path(path)]
    if os.path.isdir(path):  # noqa: PTH112
        below = [file for file in Path(path).rglob("*") if file.is_file()]
        found = [file for file in below if not any(part.startswith(".") for part in file.relative_to(path).parts)]
        found = [file for file in found if not suffixes or file.name.endswith(tuple(suffixes))]
    else:
        found = [Path(name) for name in glob.glob(path, recursive=True) if Path(name).is_file()]  # noqa: PTH207 - `**`
    if not found:
        kind = f" with {', '.join(suffixes)} files" if suffixes else ""
        raise RequestError(f"there is no file '{path}'. Expected a file, a directory{kind} or a glob that finds files.")
    return sorted(found)


def _records(rows: Iterable[JsonRow], text_column: str) -> Iterator[Record]:
    for row, where, size in rows:
        record = read_row(row, where, text_column=text_column, size=size)
        if record is not None:
            yield record


def _line_rows(file: Path) -> Iterator[JsonRow]:
    number = "0"
    try:
        with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as lines:
            for row in json_lines(lines, str(file)):
                number = row[1].rpartition(":")[2]
                yield row
    except (OSError, EOFError, zlib.error) as err:
        raise RequestError(f"'{file}' cannot be read after line {number}: {err}.") from err


def _array_rows(file: Path) -> Iterator[JsonRow]:
    try:
        data = file.read_bytes()
        rows = json.loads(data)
    except OSError as err:
        raise RequestError(f"'{file}' cannot be read: {err}.") from err
    except (ValueError, RecursionError) as err:
        raise RequestError(f"'{file}' is not valid JSON: {err}. Name files of JSON lines .jsonl.") from err
    if not isinstance(rows, list):
        raise RequestError(f"'{file}' holds {type(rows).__name__}. Expected an array of rows.")
    for number, row in enumerate(rows):
        yield row, f"{file}: row {number}", len(data) // len(rows)


_BUILDERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".arrow": "arrow", ".txt": "text"}
_HEADING = re.compile(r"\s*= [^=].* =\s*")  # WikiText's " = Title = "; its sections have " = = Section = = "


def dataset_source(name: str, *, config: str | None = None, split: str = "train", text_column: str = "text") -> Source:
    """Returns the rows of a data set, streamed, in the forms of `read_row`.

    Rows without text are left out. Articles of WikiText, which are cut into rows, are joined at their headings if the
    first row with text is such a heading (` = Title = `).

    `name`: hub name, a directory (data files, or the output of `save_to_disk`) or a data file. Raises `ConfigError`
    when `datasets` is not installed, `RequestError` when the data set or split cannot be opened.
    """
    try:
        import datasets
    except ImportError as err:
        raise ConfigError(
            f"the data set '{name}' needs the package 'datasets', which is not installed. "
            "Run in foretoken's repository: pip install '.[datasets]'. Or pass files with --jsonl or --text."
        ) from err
    hint = "" if config is None else f" ({config})"
    opening = f"split '{split}' of data set '{name}'{hint} cannot be opened"
    with foreign_errors_as(RequestError, lambda err: f"{opening}: {one_line(err)}."):
        rows, total = _open(datasets, name, config, split)

    def records() -> Iterator[Record]:
        reading, ours = f"data set '{name}' cannot be read", (ConfigError, RequestError)
        with foreign_errors_as(RequestError, lambda err: f"{reading}: {one_line(err)}.", passing=ours):
            numbered = ((row, f"{name}[{split}] row {number}", 1) for number, row in enumerate(rows))
            yield from _articles(_records(numbered, text_column))

    shown = name if config is None else f"{name}/{config}"
    return Source(name=f"{shown}[{split}]", records=records, total=total, unit="rows")


def _open(datasets: Any, name: str, config: str | None, split: str) -> tuple[Any, int | None]:
    datasets.disable_progress_bars()
    path = Path(name)
    if any((path / file).is_file() for file in ("dataset_dict.json", "state.json")):
        saved = datasets.load_from_disk(name)
        saved = saved[split] if isinstance(saved, dict) else saved
        return saved, len(saved)
    if path.is_file():
        builder = _BUILDERS.get("".join(path.suffixes).removesuffix(".gz"), "")
        if not builder:
            raise ValueError(f"its suffix is none of {', '.join(_BUILDERS)}")
        rows = datasets.load_dataset(builder, data_files={split: str(path)}, split=split, streaming=True)
    else:
        rows = datasets.load_dataset(name, config, split=split, streaming=True)
    known = rows.info.splits or {}
    return rows, known[split].num_examples or None if split in known else None


def _articles(records: Iterator[Record]) -> Iterator[Record]:
    """Joins records at WikiText's headings if the first record is one."""
    first = next(records, None)
    if first is None:
        return
    if not _is_heading(first):
        yield first
        yield from records
        return
    lines, size = [first.text], first.size
    begin = first
    for record in records:
        if _is_heading(record):
            yield replace(begin, text="".join(lines), size=size)
            begin, lines, size = record, [], 0
        lines.append(record.text)
        size += record.size
    yield replace(begin, text="".join(lines), size=size)


def _is_heading(record: Record) -> bool:
    return record.prompt is None and record.messages is None and _HEADING.fullmatch(record.text) is not None
