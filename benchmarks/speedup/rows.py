"""Keeps a line for each prompt and method in a file, and turns lines into rows: medians and quartiles over prompts.

A prompt counts as measured at one size and temperature when all methods have decoded it, plain decoding among them:
speed-ups relate decodings that followed each other, so half a round is measured anew as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from foretoken.bench.sweep import Quartiles
from foretoken.entrypoints.config import PLAIN
from foretoken.files.atomic_files import JournalFile

if TYPE_CHECKING:
    from foretoken.bench.compare import Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One prompt decoded by one method; `method` may be "plain"."""

    size: str  # of the target, as in "24 x 1024"
    method: str
    temperature: float
    prompt: int  # index into the prompt set
    runner: str
    seconds: float  # of decoding, prefill left out
    tokens: int
    tau: float
    pass_ms: float  # of a target pass, mean; likewise drafting and everything else for each pass
    draft_ms: float
    host_ms: float
    declined: float  # share of the passes
    text: list[int]
    wall_s: float  # of the whole request
    foreign_s: float  # processor seconds that others took meanwhile

    @classmethod
    def of(cls, measurement: Measurement, size: str, prompt: int, wall_s: float, foreign_s: float) -> Line:
        """From what one prompt took."""
        metrics = measurement.metrics
        return cls(
            size=size, method=measurement.setup, temperature=measurement.temperature, prompt=prompt,
            runner=measurement.runner, seconds=sum(measurement.seconds), tokens=sum(measurement.tokens),
            tau=measurement.tau, pass_ms=measurement.verify_ms, draft_ms=measurement.draft_ms,
            host_ms=measurement.host_ms - measurement.draft_ms,
            declined=metrics.num_declined / max(metrics.steps, 1), text=measurement.texts[0],
            wall_s=wall_s, foreign_s=foreign_s,
        )  # fmt: skip

    @property
    def key(self) -> tuple[str, float, int]:
        """Of the round that it belongs to: size, temperature and prompt."""
        return self.size, self.temperature, self.prompt

    @property
    def rate(self) -> float:
        """Tokens per second of decoding."""
        return self.tokens / self.seconds


class Journal:
    """A file of lines; its first line holds the conditions that all others were measured under, and the date."""

    def __init__(self, path: Path, conditions: Mapping[str, Any]) -> None:
        """Opens the file, or makes it. A line that an interruption cut off is removed.

        Raises:
            ConfigError: When the lines that are there were measured under other conditions.
        """
        self._file = JournalFile(path, conditions, advice="Give another --runs, or remove that file.")
        self.conditions, self.date = self._file.conditions, self._file.date
        self._lines: dict[tuple[str, float, int], dict[str, Line]] = {}
        for line in self._file.lines:
            self._keep(Line(**line))

    def add(self, line: Line) -> None:
        """Keeps a line, in place of an older one of the same method and prompt."""
        self._file.add(asdict(line))
        self._keep(line)

    def holds(self, key: tuple[str, float, int], methods: Iterable[str]) -> bool:
        """Whether a round is whole; key: see `Line.key`."""
        return set(methods) <= self._lines.get(key, {}).keys()

    def rounds(self, size: str, temperature: float, methods: Sequence[str]) -> list[dict[str, Line]]:
        """Whole rounds by prompt, each with a line by method."""
        found = sorted(key for key in self._lines if key[:2] == (size, temperature) and self.holds(key, methods))
        return [self._lines[key] for key in found]

    def _keep(self, line: Line) -> None:
        self._lines.setdefault(line.key, {})[line.method] = line


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method on one target at one temperature, over the prompts that all methods have decoded."""

    size: str
    temperature: float
    method: str
    runner: str
    num_prompts: int
    tokens_per_s: Quartiles
    speed_up: Quartiles  # over plain decoding, prompt by prompt
    tau: Quartiles
    efficiency: Quartiles  # speed-up over tau of the same prompt
    plain_pass_ms: float  # in plain decoding, median; the same for all methods
    pass_ms: float
    draft_ms: float
    host_ms: float
    declined: float
    num_same_text: int  # prompts whose text equals plain decoding's
    foreign_cores: float  # that others kept busy meanwhile, mean


def rows_of(journal: Journal, sizes: Sequence[str], temperatures: Sequence[float], methods: Sequence[str]) -> list[Row]:
    """Rows of everything that is measured whole; sizes: the smallest first; methods: plain decoding among them."""
    rounds = [journal.rounds(size, temperature, methods) for temperature in temperatures for size in sizes]
    return [_row(found, method) for found in rounds if found for method in methods]


def _row(rounds: Sequence[Mapping[str, Line]], method: str) -> Row:
    own, plain = [found[method] for found in rounds], [found[PLAIN] for found in rounds]
    ratios = [mine.rate / theirs.rate for mine, theirs in zip(own, plain, strict=True)]
    return Row(
        size=own[0].size, temperature=own[0].temperature, method=method, runner=own[0].runner, num_prompts=len(own),
        tokens_per_s=Quartiles.of_values(line.rate for line in own), speed_up=Quartiles.of_values(ratios),
        tau=Quartiles.of_values(line.tau for line in own),
        efficiency=Quartiles.of_values(ratio / line.tau for ratio, line in zip(ratios, own, strict=True)),
        plain_pass_ms=median(line.pass_ms for line in plain), pass_ms=median(line.pass_ms for line in own),
        draft_ms=median(line.draft_ms for line in own), host_ms=median(line.host_ms for line in own),
        declined=sum(line.declined for line in own) / len(own),
        num_same_text=sum(mine.text == theirs.text for mine, theirs in zip(own, plain, strict=True)),
        foreign_cores=max(0.0, sum(line.foreign_s for line in own) / sum(line.wall_s for line in own)),
    )  # fmt: skip


def pays_from(rows: Sequence[Row], method: str, temperature: float) -> float | None:
    """The plain pass, in milliseconds, from which on a method is faster than plain decoding.

    Between two sizes the speed-up is taken to go along a line over the logarithm of the pass.

    Returns:
        0 where it is faster at every size that was measured, None where it is not faster at the largest.
    """
    points = sorted(
        (row.plain_pass_ms, row.speed_up.median)
        for row in rows
        if row.method == method and row.temperature == temperature
    )
    if not points or points[-1][1] <= 1.0:
        return None
    below = [number for number, (_, speed_up) in enumerate(points) if speed_up <= 1.0]
    if not below:
        return 0.0
    (left, under), (right, over) = points[below[-1]], points[below[-1] + 1]
    return exp(log(left) + (log(right) - log(left)) * (1.0 - under) / (over - under))
