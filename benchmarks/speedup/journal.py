"""Keeps what was measured, one JSON line a prompt and method, so that an interrupted run goes on.

A prompt counts as measured at one size and temperature when all methods have decoded it, plain decoding among them:
speed-ups relate decodings that followed each other, so half a round is measured anew as a whole.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from foretoken.files.atomic_files import JournalFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from benchmarks.rivals.machine import Disturbance
    from foretoken.bench.measurement import Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One prompt decoded by one method.

    Attributes:
        size: Of the target, as in "24 x 1024".
        method: Of drafting, or "plain".
        temperature: Of the request.
        prompt: Index into the prompt set.
        runner: Of the target.
        seconds: Of decoding, prefill left out.
        tokens: Output tokens.
        tau: Tokens per target pass, the target's own included.
        pass_ms: Milliseconds of a target pass, mean.
        draft_ms: Milliseconds of drafting per target pass, mean.
        host_ms: Milliseconds of everything else per target pass, mean: accepting, committing, text.
        declined: Share of the passes in which the controller chose not to draft.
        text: Output token ids.
        wall_s: Seconds of the whole request.
        foreign_s: Processor seconds that others took meanwhile; None where the system does not tell.
    """

    size: str
    method: str
    temperature: float
    prompt: int
    runner: str
    seconds: float
    tokens: int
    tau: float
    pass_ms: float
    draft_ms: float
    host_ms: float
    declined: float
    text: list[int]
    wall_s: float
    foreign_s: float | None

    @classmethod
    def of(cls, measurement: Measurement, size: str, prompt: int, disturbance: Disturbance) -> Line:
        """From what one prompt took."""
        metrics = measurement.metrics
        return cls(
            size=size,
            method=measurement.setup,
            temperature=measurement.temperature,
            prompt=prompt,
            runner=measurement.runner,
            seconds=sum(measurement.seconds),
            tokens=sum(measurement.tokens),
            tau=measurement.tau,
            pass_ms=measurement.verify_ms,
            draft_ms=measurement.draft_ms,
            host_ms=measurement.host_ms - measurement.draft_ms,
            declined=metrics.num_declined / max(metrics.steps, 1),
            text=measurement.texts[0],
            wall_s=disturbance.wall_seconds,
            foreign_s=disturbance.foreign_seconds,
        )

    @property
    def key(self) -> tuple[str, float, int]:
        """Of the round that it belongs to: size, temperature and prompt."""
        return self.size, self.temperature, self.prompt


class Journal:
    """A file of lines; its first line holds the conditions that all others were measured under.

    Attributes:
        conditions: These conditions.
        date: On which the file was begun, as in 2026-11-22.
    """

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

    def rounds(self, size: str, temperature: float, methods: Iterable[str]) -> list[dict[str, Line]]:
        """Whole rounds by prompt, each with a line by method."""
        wanted = list(methods)
        found = sorted(key for key in self._lines if key[:2] == (size, temperature) and self.holds(key, wanted))
        return [self._lines[key] for key in found]

    def _keep(self, line: Line) -> None:
        self._lines.setdefault(line.key, {})[line.method] = line
