"""Reads records, still text, and makes `train/` and `held_out/` of them: splits, limits, reports progress.

Sources are text files, JSON files and data sets. Records are documents, prompts with completions, or conversations.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import os
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from foretoken.core.errors import ConfigError, RequestError, foreign_errors_as, nearest_name_hint, one_line
from foretoken.text.prompt_rows import Message, PromptRow, json_lines, read_prompt_row
from foretoken.training.data.packed import PACKED_TOKENS, Document, PackedForm, PackedTokens, PackedWriter

if TYPE_CHECKING:
    from foretoken.text.prompt_rows import JsonRow

TRAIN, HELD_OUT = "train", "held_out"


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
        raise RequestError(f"'{file}' is not valid JSON: {err}. If it holds JSON lines, rename it to .jsonl.") from err
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DataProgress:
    """The progress of making data."""

    documents: int  # written so far
    tokens: int
    seconds: float  # since the start; documents stored by an earlier run took none of them
    tokens_per_s: float  # of this run
    seconds_left: float | None = None  # None if the size of the input is unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The result of `build_corpus`."""

    parts: dict[str, PackedTokens]
    progress: DataProgress  # of the whole run
    skipped: Counter[str]  # number of records left out, by reason
    num_resumed: int  # documents of an earlier run


class DocumentMaker(Protocol):
    """Makes documents of records: `Encoder` or `SelfDistiller`."""

    skipped: Counter[str]
    num_resumed: int
    num_waiting: int  # made together with the last one, and not yielded yet

    def documents(self, records: Iterable[Record]) -> Iterator[tuple[Record, Document]]:
        """Yields documents with their records, in order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusPlan:
    """The selection of training data; raises `ConfigError` when the values do not fit together.

    `held_out_fraction` is the share of records for `held_out/`, chosen by a hash of their content: a record goes to the
    same side in every order and every mixture.
    """

    sources: Sequence[Source]
    held_out_fraction: float = 0.0
    held_out_sources: Sequence[Source] = ()  # of `held_out/` instead of a fraction
    num_documents: int | None = None  # most documents of both parts together, and of the held-out sources
    max_tokens: int | None = None  # `train/` ends with the document that reaches this number of tokens

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("there is no source. Expected at least one text file, JSON file or data set.")
        if not 0.0 <= self.held_out_fraction < 1.0:
            raise ConfigError(f"held_out_fraction is {self.held_out_fraction}. Expected at least 0 and below 1.")
        if self.held_out_fraction and self.held_out_sources:
            raise ConfigError("a held-out fraction and a held-out file exclude each other. Pass one of them.")
        for name, value in (("num_documents", self.num_documents), ("max_tokens", self.max_tokens)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}. Expected at least 1.")

    def part(self, record: Record) -> str:
        """Returns the directory of a record of `sources`."""
        return HELD_OUT if record.share < self.held_out_fraction else TRAIN

    @property
    def total(self) -> int | None:
        """The size of all sources, if it is known and in one unit."""
        sizes = [source.total for source in self.sources]
        is_known = len({source.unit for source in self.sources}) == 1
        return sum(size or 0 for size in sizes) if is_known and None not in sizes else None


def build_corpus(
    directory: Path,
    plan: CorpusPlan,
    tokenizer: Any,
    makers: Callable[[str], DocumentMaker],
    *,
    vocab_size: int | None = None,
    meta: dict[str, Any] | None = None,
    force: bool = False,
    on_progress: Callable[[DataProgress], None] | None = None,
) -> Corpus:
    """Makes `directory/train` and, if the plan has it, `directory/held_out`; both appear or neither.

    `makers` returns the maker of documents for "train" (the main sources) or "held_out" sources. `vocab_size` is the
    upper bound of token ids; None for the tokenizer's. Raises `ConfigError` when a source cannot be used,
    `RequestError` when a source cannot be read, a part would be empty, or a token is above the bound.
    """
    parts = [TRAIN] if not plan.held_out_fraction and not plan.held_out_sources else [TRAIN, HELD_OUT]
    used = [makers(TRAIN), *([makers(HELD_OUT)] if plan.held_out_sources else [])]
    form = PackedForm.of(tokenizer, vocab_size)
    with PACKED_TOKENS.new(directory, force=force) as building, ExitStack() as files:
        writers = {part: files.enter_context(closing(PackedWriter(building / part, form))) for part in parts}
        clock = _Clock(plan, on_progress, used[0])
        for record, document in _limited(used[0], plan.sources, plan.num_documents):
            clock.wrote(record, writers[plan.part(record)].add(document))
            if plan.max_tokens is not None and writers[TRAIN].num_tokens >= plan.max_tokens:
                break
        for maker in used[1:]:
            clock.use_held_out(maker)
            for record, document in _limited(maker, plan.held_out_sources, plan.num_documents):
                clock.wrote(record, writers[HELD_OUT].add(document))
        skipped = sum((maker.skipped for maker in used), Counter[str]())
        for part, writer in writers.items():
            _finish_part(writer, part, plan, {**(meta or {}), "skipped": dict(skipped)})
    return Corpus(
        parts={part: PackedTokens.open(directory / part) for part in parts},
        skipped=skipped,
        num_resumed=sum(maker.num_resumed for maker in used),
        progress=clock.progress(),
    )


def _limited(maker: DocumentMaker, sources: Sequence[Source], limit: int | None) -> Iterator[tuple[Record, Document]]:
    return islice(maker.documents(record for source in sources for record in source.records()), limit)


def _finish_part(writer: PackedWriter, part: str, plan: CorpusPlan, meta: dict[str, Any]) -> None:
    sources = plan.held_out_sources if part == HELD_OUT and plan.held_out_sources else plan.sources
    try:
        writer.finish(
            part=part,
            sources=[source.name for source in sources],
            held_out_fraction=plan.held_out_fraction,
            num_documents_limit=plan.num_documents,
            max_tokens=plan.max_tokens,
            **meta,
        )
    except RequestError as err:
        names = ", ".join(source.name for source in sources)
        share = f" with held_out_fraction {plan.held_out_fraction}" if plan.held_out_fraction else ""
        raise RequestError(f"{part} data of {names}{share}: {err}") from err


@dataclass(slots=True)
class _Clock:
    """Counts written documents and reports progress; documents of an earlier run do not count for the speed."""

    plan: CorpusPlan
    on_progress: Callable[[DataProgress], None] | None
    maker: DocumentMaker
    documents: int = 0
    tokens: int = 0
    begin: float = field(default_factory=time.perf_counter)
    _resumed_tokens: int = 0
    _resumed_share: float = 0.0
    _made: int = 0  # documents of the current maker
    _size: int = 0  # size of its records so far
    _is_main: bool = True

    def use_held_out(self, maker: DocumentMaker) -> None:
        self.maker, self._made, self._size, self._is_main = maker, 0, 0, False

    def wrote(self, record: Record, num_tokens: int) -> None:
        self.documents += 1
        self._made += 1
        self.tokens += num_tokens
        self._size += record.size
        if self._made <= self.maker.num_resumed:
            self._resumed_tokens += num_tokens
            self._resumed_share = self._share()
        if self.on_progress is not None and not self.maker.num_waiting:  # else the rate would be of one among many
            self.on_progress(self.progress())

    def progress(self) -> DataProgress:
        seconds = time.perf_counter() - self.begin
        share, before = self._share(), self._resumed_share
        is_known = self._is_main and share > before
        return DataProgress(
            documents=self.documents,
            tokens=self.tokens,
            seconds=seconds,
            tokens_per_s=(self.tokens - self._resumed_tokens) / max(seconds, 1e-9),
            seconds_left=seconds * max(0.0, 1.0 - share) / (share - before) if is_known else None,
        )

    def _share(self) -> float:
        plan = self.plan
        limits = ((self._size, plan.total), (self._made, plan.num_documents), (self.tokens, plan.max_tokens))
        return max((done / limit for done, limit in limits if limit), default=0.0)
