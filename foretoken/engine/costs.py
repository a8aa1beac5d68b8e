"""What a target pass costs by its width: measured once a machine, model and runner, then kept true while decoding.

The curve decides how deep chains are drafted and how many nodes a tree has by default. It differs by machine and dtype:
with matrix units or plenty of memory-bound weights 16 tokens cost what one does, in float32 on a small cache they do
not.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.core.user_cache import cache_directory
from foretoken.target.lean.build import kernels_version
from foretoken.target.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.target.loading import LoadedModel

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)
_PREFIX = 128  # committed rows while passes are timed
_LIMIT_S = 2.0
_BURST_S = 0.005
_LEARNING_RATE = 0.1  # weight of one pass in the cost of its width
# Tokens that a tree of n nodes brings, relative to plain decoding: published trees gain roughly by the logarithm of
# their nodes (EAGLE-2 2406.16858 figure 8, Sequoia 2402.12374 figure 2).
_GAIN_BY_DOUBLING = 0.6
_FORMAT = 2


class CostCurve:
    """Seconds of a target pass by the number of tokens in it, piecewise linear between measured widths.

    Never less than for fewer tokens, and linear past the last measured width.
    """

    def __init__(self, widths: Sequence[int], seconds: Sequence[float]) -> None:
        """A curve through measured points.

        Args:
            widths: Ascending.
            seconds: One entry a width.
        """
        self._widths = np.array(widths, dtype=np.float64)
        self._seconds = np.array(seconds, dtype=np.float64)

    @property
    def points(self) -> list[tuple[int, float]]:
        """Measured widths and seconds."""
        return [(int(width), float(seconds)) for width, seconds in zip(self._widths, self._seconds, strict=True)]

    @classmethod
    def measure(
        cls, run: Callable[[int], None], *, max_width: int, repeats: int = 3, limit_s: float = _LIMIT_S
    ) -> CostCurve:
        """Times passes of growing width, round after round, until `limit_s` is spent.

        Args:
            run: Runs one pass over that many tokens.
            max_width: Widest pass allowed.
            repeats: Rounds after the first, which warms up; a width's fastest pass counts, as the least disturbed one.
            limit_s: Seconds after which no further width is begun, once every width has run and two are timed.
        """
        widths = [width for width in WIDTHS if width <= max_width]
        best = [float("inf")] * len(widths)
        begin = time.perf_counter()
        for repeat in range(repeats + 1):  # the first round warms caches and allocators
            for index, width in enumerate(widths):
                if time.perf_counter() - begin > limit_s and repeat > 0 and index > 1:
                    break
                seconds = _fastest(run, width)
                if repeat:
                    best[index] = min(best[index], seconds)
        known = [(width, seconds) for width, seconds in zip(widths, best, strict=True) if seconds < float("inf")]
        return cls([width for width, _ in known], [seconds for _, seconds in known])

    def seconds(self, widths: Any) -> Any:
        """Seconds of passes; widths: an array of numbers of tokens, gives an array of the same shape."""
        rising = np.maximum.accumulate(self._seconds)
        inside = np.interp(widths, self._widths, rising)
        if len(rising) == 1:
            return inside
        slope = (rising[-1] - rising[-2]) / (self._widths[-1] - self._widths[-2])
        return inside + slope * np.maximum(np.asarray(widths) - self._widths[-1], 0.0)

    def __call__(self, width: int) -> float:
        """Seconds of a pass over `width` tokens."""
        return float(self.seconds(width))

    def learn(self, width: int, seconds: float) -> None:
        """Moves the measured point of a width, if there is one, towards a pass that was just made."""
        index = int(np.searchsorted(self._widths, width))
        if index < len(self._widths) and self._widths[index] == width:
            self._seconds[index] += _LEARNING_RATE * (seconds - self._seconds[index])

    def tree_nodes(self) -> int:
        """Nodes of a tree that bring the most tokens per second, if gains follow the logarithm of the nodes."""
        gains = 1 + _GAIN_BY_DOUBLING * np.log2(self._widths)
        return int(self._widths[np.argmax(gains / self.seconds(self._widths))])


def _fastest(run: Callable[[int], None], width: int) -> float:
    """Seconds of the fastest of several passes in a row: decoding repeats a width too, and finds its caches warm."""
    begin, best = time.perf_counter(), float("inf")
    while best == float("inf") or time.perf_counter() - begin < _BURST_S:
        start = time.perf_counter()
        run(width)
        best = min(best, time.perf_counter() - start)
    return best


def pass_costs(model: LoadedModel, runner: str) -> CostCurve:
    """The cost curve of a model on this machine, with torch's present number of threads.

    Measured the first time: every width once, then again and again for two seconds. Later it is read from `costs.json`
    in the cache directory. A file that cannot be read or written is done without.

    Args:
        model: A loaded causal LM.
        runner: Which runner was asked for, see `Runner`.
    """
    path, key = cache_directory() / "costs.json", _key(model, runner)
    known = _read(path)
    if key in known:
        return CostCurve(*known[key])
    curve = measure_costs(Runner(model, num_slots=1, context_len=2 * _PREFIX, max_nodes=WIDTHS[-1], runner=runner))
    points = curve.points
    _write(path, {**known, key: [[width for width, _ in points], [seconds for _, seconds in points]]})
    return curve


def measure_costs(target: Runner, *, limit_s: float = _LIMIT_S, repeats: int = 3) -> CostCurve:
    """Times chains of growing width; uses the rows of slot 0.

    Args:
        target: With an idle slot 0.
        limit_s: See `CostCurve.measure`.
        repeats: Likewise.
    """
    prefix = min(_PREFIX, target.context_len // 2)
    trees = {width: _chain(width, target.device) for width in WIDTHS if width <= target.max_nodes}

    def run(width: int) -> None:
        target.verify([0], [prefix], trees[width]).logits[0, -1, 0].item()  # waits for an accelerator

    return CostCurve.measure(run, max_width=target.max_nodes, limit_s=limit_s, repeats=repeats)


def _chain(width: int, device: torch.device) -> TokenTree:
    """A chain of one token, repeated."""
    return TokenTree.from_rows([TreeRow([1] * width, range(-1, width - 1))], device=device)


def _key(model: LoadedModel, runner: str) -> str:
    """Names what the costs depend on: machine, threads, versions, runner and the sizes of the model."""
    sizes = {name: value for name, value in model.config.to_dict().items() if isinstance(value, int)}
    facts = {
        "format": _FORMAT,
        "torch": torch.__version__,
        "processor": sorted((name, str(value)) for name, value in torch.cpu.get_capabilities().items()),
        "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else str(model.device),
        "threads": torch.get_num_threads(),
        "runner": runner,
        "kernels": kernels_version(),
        "architecture": type(model.module).__name__,
        "dtype": str(model.dtype),
        "sizes": sorted(sizes.items()),
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def _read(path: Path) -> dict[str, Any]:
    """Curves measured before; nothing where there is no file or it is damaged."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return {
            key: [[int(width) for width in widths], [float(value) for value in seconds]]
            for key, (widths, seconds) in known.items()
            if len(widths) == len(seconds) > 0
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(path: Path, curves: dict[str, Any]) -> None:
    """Replaces the file in one move."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".json")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(curves, file)
        Path(name).replace(path)
    except OSError:
        return
