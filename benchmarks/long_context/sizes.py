"""Decodes with every drafter behind texts of given lengths, in batches, in turn with plain decoding."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.long_context.passes import PassBytes, bytes_of, row_bytes
from benchmarks.long_context.prompts import prompts_of
from benchmarks.rivals.machine import DisturbanceWatch, available_bytes
from foretoken import LLM, SamplingParams
from foretoken.core.errors import ConfigError, ForetokenError
from foretoken.core.records import Declined
from foretoken.drafting.base import Allotment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.core.records import StepRecord
    from foretoken.drafting.base import Controller
    from foretoken.entrypoints.config import Setup
    from foretoken.files.atomic_files import JournalFile
    from foretoken.models.loading import LoadedModel

# Iterations that do not count: after plain decoding the first one cannot draft; the second copies rows of sparse_kv.
_SKIPPED = 2
_SPARE = 128  # rows of a slot for trees, and the rounding of slots
_SPARE_BYTES = 1 << 30  # for everything but KV rows; a choice
_SPARSE_ROOM = 512  # rows of a slot of sparse_kv behind its budget


class Switch:
    """A controller that drafts nothing while `is_on` is False; iterations are then those of plain decoding."""

    def __init__(self, controller: Controller) -> None:
        self._controller, self.is_on = controller, True

    def allot(self, batch_size: int, num_prompt_tokens: int = 0) -> Allotment:
        """See `Controller`."""
        if self.is_on:
            return self._controller.allot(batch_size, num_prompt_tokens)
        declined = Declined(width=batch_size, pass_cost=1.0, draft_cost=0.0, acceptance=None, hit_rate=0.0)
        return Allotment.nothing(batch_size, declined)

    def learn_step(self, record: StepRecord) -> None:
        """Learns from iterations that the controller has chosen."""
        if self.is_on:
            self._controller.learn_step(record)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._controller, name)

    @classmethod
    def within(cls, llm: LLM) -> Switch:
        """Puts a switch between an engine and its controller, in place."""
        drafting = llm._engine._drafting
        controller = drafting._usual.controller
        assert controller is not None, "a setup has a drafter"
        switch = cls(controller)
        drafting._usual = drafting._usual._replace(controller=switch)
        return switch


@dataclass(slots=True)
class Meter:
    """Adds up iterations in which all sequences of a batch decode; `add` goes to `LLM` as `on_step`."""

    batch: int = 0
    seconds: float = 0.0
    tokens: int = 0
    iterations: int = 0
    levels: int = 0
    _seen: int = 0
    _before: float = 0.0

    def start(self, batch: int) -> None:
        """Forgets everything."""
        self.__init__(batch)  # type: ignore[misc]

    def add(self, record: StepRecord) -> None:
        """Counts an iteration, unless it reads prompts, lacks a sequence, or is one of the first two."""
        before, self._before = self._before, time.perf_counter()
        is_full = len(record.sequences) == self.batch
        if record.num_prompt_tokens or not is_full or any(step.ends_prompt for step in record.sequences):
            return
        self._seen += 1
        if self._seen > _SKIPPED:
            self.seconds += self._before - before
            self.tokens += sum(step.num_emitted for step in record.sequences)
            self.levels += max(step.tree_depth for step in record.sequences)
            self.iterations += 1

    @property
    def rate(self) -> float:
        """Tokens a second of the whole batch; raises `ConfigError` if no iteration counted."""
        if not self.iterations:
            raise ConfigError("the texts ended before any iteration counted. Expected longer ones. Raise --tokens.")
        return self.tokens / self.seconds


@dataclass(slots=True, kw_only=True)
class Cell:
    """One drafter behind one number of rows in one batch size.

    Attributes:
        rows: Tokens of each text at its end.
        batch: B.
        setup: Name of the drafter.
        passes: Bytes of the iterations' parts.
        plain: Tokens per second of plain decoding, whole batch, by round; the prompts' time is left out.
        drafted: The same with the drafter.
        tokens: Emitted tokens with the drafter, in counted iterations of all rounds.
        iterations: These iterations.
        levels: Drafted levels in them.
        num_same: Texts that equal plain decoding's.
        num_texts: Texts.
        prompt_s: Seconds that the first prompt took in the cells' engine.
        foreign_s: Processor seconds that others took meanwhile; None where the system does not tell.
        wall_s: Seconds of all rounds, prompts included.
    """

    rows: int
    batch: int
    setup: str
    passes: PassBytes
    plain: list[float] = field(default_factory=list)
    drafted: list[float] = field(default_factory=list)
    tokens: int = 0
    iterations: int = 0
    levels: int = 0
    num_same: int = 0
    num_texts: int = 0
    prompt_s: float = 0.0
    foreign_s: float | None = None
    wall_s: float = 0.0

    @classmethod
    def read(cls, line: dict[str, Any]) -> Cell:
        """Returns the cell of a JSON object."""
        return cls(**{**line, "passes": PassBytes(*line["passes"])})

    @property
    def key(self) -> tuple[int, int, str]:
        """Rows, batch and setup."""
        return self.rows, self.batch, self.setup

    @property
    def tau(self) -> float:
        """Emitted tokens of a sequence for each pass of the target."""
        return self.tokens / (self.batch * self.iterations)

    @property
    def speed_ups(self) -> list[float]:
        """Over plain decoding of the same round."""
        return [drafted / plain for drafted, plain in zip(self.drafted, self.plain, strict=True)]

    @property
    def speed_up(self) -> float:
        """The median over rounds."""
        return median(self.speed_ups)

    @property
    def depth(self) -> float:
        """Drafted levels for each pass of the target."""
        return self.levels / self.iterations

    @property
    def modelled(self) -> float | None:
        """The speed-up if bytes alone cost time, with this cell's tau and depth."""
        return self.passes.speed_up(self.tau, self.depth)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What is measured.

    Attributes:
        rows: Tokens of a text at its end, prompt and output, in the order of measurement.
        batches: Sizes, in this order.
        setups: Drafters.
        max_tokens: Output tokens of each text.
        rounds: Pairs of a drafted and a plain decoding.
        texts: Token ids of long prompts.
        until: `time.monotonic()` after which no cell begins.
    """

    rows: Sequence[int]
    batches: Sequence[int]
    setups: Sequence[Setup]
    max_tokens: int
    rounds: int
    texts: Sequence[Sequence[int]]
    until: float


def measure(model: LoadedModel, grid: Grid, journal: JournalFile, say: Callable[[str], None]) -> list[str]:
    """Measures cells that the journal lacks, and adds a line for each; returns a sentence for each that was left out.

    Raises:
        ConfigError: When a number of rows exceeds the positions of the model.
    """
    if max(grid.rows) > model.context_len:
        raise ConfigError(
            f"--rows {max(grid.rows)} is more than the {model.context_len} positions of '{model.name}'. Expected no "
            "more. Or raise max_position_embeddings in the config.json of a copy: its acceptance there means little."
        )
    known, left_out = {Cell.read(line).key for line in journal.lines}, list[str]()
    is_gpu = model.device.type == "cuda"
    free = torch.cuda.mem_get_info(model.device)[0] if is_gpu else available_bytes()
    for rows in grid.rows:
        for setup in grid.setups:
            missing = [batch for batch in grid.batches if (rows, batch, setup.name) not in known]
            fitting = [batch for batch in missing if free is None or needed_bytes(model, rows, batch) <= free]
            left_out += [
                f"{setup.name} behind {rows} rows in a batch of {batch}: its KV rows need "
                f"{needed_bytes(model, rows, batch) / 2**30:.1f} GiB, and {(free or 0) / 2**30:.1f} GiB are free."
                for batch in missing
                if batch not in fitting
            ]
            if not fitting:
                continue
            if time.monotonic() > grid.until:
                left_out.append(f"{setup.name} behind {rows} rows: no time was left.")
                continue
            try:
                _measure_setup(model, grid, setup, rows, fitting, journal, say)
            except ForetokenError as err:  # a run of hours goes on with the next drafter
                left_out.append(f"{setup.name} behind {rows} rows: {err}")
            gc.collect()  # the KV cache of one engine goes before that of the next comes
    return left_out


def needed_bytes(model: LoadedModel, rows: int, batch: int) -> int:
    """Returns the memory of a batch's KV rows, and of a drafter with a tenth of them."""
    own = batch * (rows + _SPARE) * row_bytes(model)
    return own + own // 10 + batch * _SPARSE_ROOM * row_bytes(model) + _SPARE_BYTES


def _measure_setup(
    model: LoadedModel,
    grid: Grid,
    setup: Setup,
    rows: int,
    batches: Sequence[int],
    journal: JournalFile,
    say: Callable[[str], None],
) -> None:
    """Measures a drafter in some batch sizes; raises `ForetokenError` for what cannot be measured."""
    warm_ups = int(model.device.type == "cuda")  # a round in which CUDA graphs are captured
    numbers = [(warm_ups + grid.rounds) * batch for batch in grid.batches]
    prompts = prompts_of(grid.texts, rows - grid.max_tokens, 1 + sum(numbers))
    first, left = prompts[0], prompts[1:]
    parts = {batch: left[sum(numbers[:at]) :][: numbers[at]] for at, batch in enumerate(grid.batches)}
    meter, most = Meter(), max(batches)
    with LLM(
        model, speculative_config=setup.config, max_num_seqs=most, max_model_len=rows, on_step=meter.add,
        kv_cache_memory_bytes=most * (rows + _SPARE) * row_bytes(model),
    ) as llm:  # fmt: skip
        switch, begin = Switch.within(llm), time.perf_counter()
        llm.generate({"prompt_token_ids": first}, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
        prompt_s = time.perf_counter() - begin
        say(f"{rows} rows, {setup.name}: read the prompt in {prompt_s:.0f} s")
        for batch in batches:
            if time.monotonic() > grid.until:
                raise ForetokenError(f"no time was left for a batch of {batch} and more.")
            empty = partial(Cell, rows=rows, batch=batch, setup=setup.name, prompt_s=prompt_s,
                            passes=bytes_of(setup, llm, rows=rows, batch=batch))  # fmt: skip
            cell = empty()
            watch, begin = DisturbanceWatch(), time.perf_counter()
            with watch.during(os.getpid()):
                for at in range(warm_ups + grid.rounds):
                    part = parts[batch][at * batch :][:batch]
                    _measure_round(llm, switch, meter, cell if at >= warm_ups else empty(), part, grid.max_tokens)
            cell.wall_s, cell.foreign_s = time.perf_counter() - begin, watch.finish().foreign_seconds
            journal.add(asdict(cell))
            say(
                f"{rows} rows, batch {batch}, {setup.name}: {cell.speed_up:.2f} times plain decoding "
                f"({cell.tau:.2f} tokens a pass), {cell.wall_s:.0f} s"
            )


def _measure_round(
    llm: LLM, switch: Switch, meter: Meter, cell: Cell, prompts: Sequence[list[int]], max_tokens: int
) -> None:
    """Decodes with the drafter and then plainly; the drafter thus reads the last tokens of a new prompt itself."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    texts: list[list[list[int]]] = []
    for switch.is_on, rates in ((True, cell.drafted), (False, cell.plain)):
        meter.start(cell.batch)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        texts.append([list(output.outputs[0].token_ids) for output in outputs])
        rates.append(meter.rate)
        if switch.is_on:
            cell.tokens += meter.tokens
            cell.iterations += meter.iterations
            cell.levels += meter.levels
    cell.num_same += sum(drafted == plain for drafted, plain in zip(*texts, strict=True))
    cell.num_texts += len(prompts)
