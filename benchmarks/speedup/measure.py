"""Decodes every prompt with every method, in turn, at every size and temperature."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.rivals.machine import DisturbanceWatch
from benchmarks.speedup.journal import Line
from benchmarks.speedup.sizes import weights_bytes
from foretoken.bench.compare import in_turn, measure_anew
from foretoken.bench.workload import SetupEngines, Workload
from foretoken.core.errors import RequestError
from foretoken.entrypoints.config import PLAIN, parse_setup
from foretoken.models.loading import load_model, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from benchmarks.speedup.journal import Journal
    from benchmarks.speedup.sizes import Size

    Round = tuple[float, int]  # temperature and prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured.

    Attributes:
        methods: As `foretoken bench -s` takes them, without plain decoding, which is always measured.
        prompts: As many as the size with the most of them takes.
        temperatures: 0 for greedy; above, every request is sampled with its own seed.
        max_tokens: Output tokens of every request.
        seed: Of the first prompt; the i-th gets `seed + i`.
        dtype: Of target and drafters.
        device: "cpu", or another torch device.
        runner: See `LLM`.
    """

    methods: Sequence[str]
    prompts: Sequence[str]
    temperatures: Sequence[float]
    max_tokens: int
    seed: int
    dtype: str
    device: str
    runner: str

    @property
    def names(self) -> list[str]:
        """Of everything that is measured."""
        return [PLAIN, *(parse_setup(method).name for method in self.methods)]


class TimeLeft:
    """Tells how long the rest takes, from what is done: a round's time goes with the size of the weights."""

    def __init__(self, work: Mapping[Size, tuple[int, int]]) -> None:
        """Starts with what is to do; work: by size, weights in bytes and rounds."""
        self._bytes = {size: num_bytes for size, (num_bytes, _) in work.items()}
        self._left = {size: num_rounds for size, (_, num_rounds) in work.items()}
        self._seconds = self._done = 0.0

    def finish_round(self, size: Size, seconds: float) -> str:
        """Counts a round; gives the time left in words."""
        self._left[size] -= 1
        self._seconds += seconds
        self._done += self._bytes[size]
        rest = sum(self._bytes[size] * rounds for size, rounds in self._left.items())
        minutes, seconds_left = divmod(round(self._seconds * rest / self._done), 60)
        return f"about {minutes}:{seconds_left:02d} left"


def measure(places: Mapping[Size, Path], settings: Settings, journal: Journal, say: Callable[[str], None]) -> None:
    """Measures what the journal lacks, the largest target first.

    Args:
        places: Directories of the targets.
        settings: What.
        journal: Gets a line for every prompt and method.
        say: Gets progress, a line at a time.
    """
    missing = {
        size: [
            (temperature, prompt)
            for temperature in settings.temperatures
            for prompt in range(size.num_prompts)
            if not journal.holds((size.name, temperature, prompt), settings.names)
        ]
        for size in places
    }
    time_left = TimeLeft({size: (weights_bytes(places[size]), len(missing[size])) for size in places})
    for size in sorted(places, key=lambda size: weights_bytes(places[size]), reverse=True):
        if missing[size]:
            _measure_size(size, places[size], missing[size], settings, journal, say, time_left)
            gc.collect()  # engines and weights of one size go before those of the next come


def _measure_size(
    size: Size,
    place: Path,
    missing: Sequence[Round],
    settings: Settings,
    journal: Journal,
    say: Callable[[str], None],
    time_left: TimeLeft,
) -> None:
    """All missing rounds of one target."""
    say(f"{size.name}: loading")
    loaded, tokenizer = load_model(str(place), dtype=settings.dtype, device=settings.device), load_tokenizer(str(place))
    if tokenizer is None:
        raise RequestError(f"'{place}' has no tokenizer. Expected tokenizer files beside the weights.")
    measure_anew(loaded, settings.runner, 1)  # what is kept may be of a busier hour
    workload = Workload(
        prompts=settings.prompts[: size.num_prompts],
        temperatures=settings.temperatures,
        max_tokens=settings.max_tokens,
        seed=settings.seed,
    )
    setups = [parse_setup(method, target=str(place)) for method in settings.methods]
    engines = SetupEngines(loaded, tokenizer, setups, workload, runner=settings.runner)
    warm: float | None = None
    for temperature, prompt in missing:
        if warm != temperature:
            engines.warm_up(temperature)
            warm = temperature
        begin = time.perf_counter()
        for name in in_turn(engines.names, prompt):
            watch = DisturbanceWatch()
            with watch.during(os.getpid()):
                measurement = engines.measure(name, temperature, [prompt])
            journal.add(Line.of(measurement, size.name, prompt, watch.finish()))
        seconds = time.perf_counter() - begin
        left = time_left.finish_round(size, seconds)
        say(f"{size.name}, T {temperature:g}, prompt {prompt + 1} of {size.num_prompts}: {seconds:.1f} s, {left}")
