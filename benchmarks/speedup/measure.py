"""Decodes every prompt with every method, in turn, at every size and temperature."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.machine import foreign_seconds
from benchmarks.speedup.rows import Journal, Line
from benchmarks.speedup.sizes import Size, weights_bytes
from foretoken.bench.compare import SetupEngines, in_turn, measure_anew
from foretoken.bench.workload import Workload
from foretoken.core.errors import RequestError
from foretoken.entrypoints.config import PLAIN, parse_setup
from foretoken.models.loading import load_model, load_tokenizer

if TYPE_CHECKING:
    Round = tuple[float, int]  # temperature and prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured; the options of `foretoken bench` by the same names. The i-th prompt gets `seed + i`."""

    methods: Sequence[str]  # plain decoding is always measured as well
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


def measure(places: Mapping[Size, Path], settings: Settings, journal: Journal, say: Callable[[str], None]) -> None:
    """Measures what the journal lacks, the largest target first; places: directories of the targets."""
    missing = {
        size: [
            (temperature, prompt)
            for temperature in settings.temperatures
            for prompt in range(size.num_prompts)
            if not journal.holds((size.name, temperature, prompt), settings.names)
        ]
        for size in places
    }
    for size in sorted(places, key=lambda size: weights_bytes(places[size]), reverse=True):
        if missing[size]:
            _measure_size(size, places[size], missing[size], settings, journal, say)
            gc.collect()  # engines and weights of one size go before those of the next come


def _measure_size(
    size: Size, place: Path, missing: Sequence[Round], settings: Settings, journal: Journal, say: Callable[[str], None]
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
            started, foreign = time.perf_counter(), foreign_seconds()
            measurement = engines.measure(name, temperature, [prompt])
            taken = time.perf_counter() - started, foreign_seconds() - foreign
            journal.add(Line.of(measurement, size.name, prompt, *taken))
        seconds = time.perf_counter() - begin
        say(f"{size.name}, T {temperature:g}, prompt {prompt + 1} of {size.num_prompts}: {seconds:.1f} s")
