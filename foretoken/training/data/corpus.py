"""Builds `train/` and `held_out/` from sources: splits records, limits their number, reports progress."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from foretoken.core.errors import ConfigError, RequestError
from foretoken.training.data.packed import PACKED_TOKENS, PackedForm, PackedTokens, PackedWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from foretoken.training.data.records import Document, Record, Source

TRAIN, HELD_OUT = "train", "held_out"


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
    `RequestError` when a source cannot be read or a part would be empty.
    """
    parts = [TRAIN] if not plan.held_out_fraction and not plan.held_out_sources else [TRAIN, HELD_OUT]
    used = [makers(TRAIN), *([makers(HELD_OUT)] if plan.held_out_sources else [])]
    form = PackedForm.of(tokenizer, vocab_size)
    with PACKED_TOKENS.new(directory, force=force) as building, ExitStack() as files:
        writers = {part: files.enter_context(closing(PackedWriter(building / part, form))) for part in parts}
        clock = _Clock(plan, on_progress)
        for record, document in _limited(used[0], plan.sources, plan.num_documents, clock):
            clock.wrote(record, writers[plan.part(record)].add(document))
            if plan.max_tokens is not None and writers[TRAIN].num_tokens >= plan.max_tokens:
                break
        if plan.held_out_sources:
            for record, document in _limited(used[1], plan.held_out_sources, plan.num_documents, clock):
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


def _limited(
    maker: DocumentMaker, sources: Sequence[Source], limit: int | None, clock: _Clock
) -> Iterator[tuple[Record, Document]]:
    documents = maker.documents(record for source in sources for record in source.records())
    clock.use_maker(maker)
    return islice(documents, limit)


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
    documents: int = 0
    tokens: int = 0
    begin: float = field(default_factory=time.perf_counter)
    _maker: DocumentMaker | None = None
    _resumed_tokens: int = 0
    _resumed_share: float = 0.0
    _made: int = 0  # documents of the current maker
    _size: int = 0  # size of its records so far
    _is_main: bool = False

    def use_maker(self, maker: DocumentMaker) -> None:
        self._is_main = self._maker is None
        self._maker, self._made, self._size = maker, 0, 0

    def wrote(self, record: Record, num_tokens: int) -> None:
        self.documents += 1
        self._made += 1
        self.tokens += num_tokens
        self._size += record.size
        if self._maker is not None and self._made <= self._maker.num_resumed:
            self._resumed_tokens += num_tokens
            self._resumed_share = self._share()
        is_whole = self._maker is None or not self._maker.num_waiting  # else the rate would be of one among many
        if self.on_progress is not None and is_whole:
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
