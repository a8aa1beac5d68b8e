"""What a target pass costs by its width: measured once a machine, model and runner, then kept true while decoding.

The curve decides how deep chains are drafted and how many nodes a tree has by default. It differs by machine and dtype:
with matrix units or plenty of memory-bound weights 16 tokens cost what one does, in float32 on a small cache they do
not.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from foretoken.core.backend import has_cuda_runtime
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.core.user_cache import may_replace, open_cache, read_kept, say_nothing_is_kept, write_kept
from foretoken.decoder.lean.build import kernels_version
from foretoken.runner.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from foretoken.hf.loading import LoadedModel

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)
_PREFIX = 128  # committed rows while passes are timed
_LIMIT_S = 2.0
_BURST_S = 0.005
_LEARNING_RATE = 0.1  # weight of one pass in the cost of its width
# Tokens that a tree of n nodes brings, relative to plain decoding: published trees gain roughly by the logarithm of
# their nodes (EAGLE-2 2406.16858 figure 8, Sequoia 2402.12374 figure 2).
_GAIN_BY_DOUBLING = 0.6
_FORMAT = 3
_FILE = "foretoken-costs.json"
_FILE_FORMAT = 1
_MARK = b'{"foretoken_costs":'  # what the file begins with
_log = logging.getLogger(__name__)
_LARGEST_FILE = 1 << 20  # bytes, of about a thousand curves
_LONGEST_AGE_S = 30 * 24 * 3600  # drivers, clocks and the machine's other users change
_LIKELY_S = (1e-7, 3600.0)  # no pass is faster or slower


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


def pass_costs(model: LoadedModel, runner: str, *, is_refreshed: bool = False) -> CostCurve:
    """The cost curve of a model on this machine, with torch's present number of threads.

    Measured the first time: every width once, then again and again for two seconds. Later it is read from
    `foretoken-costs.json` in the cache directory, for a month. A file that is damaged, or cannot be read or written, is
    done without; one of that name that foretoken did not write stays as it is.

    Args:
        model: A loaded causal LM.
        runner: Which runner was asked for, see `Runner`.
        is_refreshed: Whether to measure anew, whatever is known.
    """
    directory, key = open_cache(), _key(model, runner)
    path = None if directory is None else directory / _FILE
    known = {} if path is None else _read(path)
    if key in known and not is_refreshed:
        return CostCurve(known[key]["widths"], known[key]["seconds"])
    _log.info("timing passes of this model, once on this machine: takes a few seconds")
    curve = measure_costs(Runner(model, num_slots=1, context_len=2 * _PREFIX, max_nodes=WIDTHS[-1], runner=runner))
    if path is not None:
        widths, seconds = zip(*curve.points, strict=True)
        _write(path, {**known, key: {"measured": time.time(), "widths": widths, "seconds": seconds}})
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
        logits = target.verify([0], [prefix], trees[width]).logits
        assert logits is not None, "a verification gives all logits"
        logits[-1, 0].item()  # waits for an accelerator

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
        "device": torch.cuda.get_device_name(model.device) if has_cuda_runtime(model.device) else str(model.device),
        "threads": torch.get_num_threads(),
        "runner": runner,
        "kernels": kernels_version(),
        "sanitizers": os.environ.get("FORETOKEN_SANITIZE", "0") != "0",
        "architecture": type(model.module).__name__,
        "dtype": str(model.dtype),
        "sizes": sorted(sizes.items()),
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def _read(path: Path) -> dict[str, Any]:
    """Curves that were measured before and can be true; nothing where there is no file of ours or it is damaged."""
    data = read_kept(path, limit=_LARGEST_FILE)
    if data is None or not data.startswith(_MARK):
        return {}
    try:
        known = json.loads(data).get("curves")
    except (ValueError, RecursionError):  # no JSON, no UTF-8; nested beyond what the parser bears
        return {}
    now = time.time()
    return {key: entry for key, entry in known.items() if _is_likely(entry, now)} if isinstance(known, dict) else {}


def _is_likely(entry: Any, now: float) -> bool:
    """Whether an entry of the file can be a curve of the last month: some of `WIDTHS`, from 1 on, and their seconds."""
    if not isinstance(entry, dict):
        return False
    measured: Any = entry.get("measured")
    widths: Any = entry.get("widths")
    seconds: Any = entry.get("seconds")
    if not _is_number(measured) or not now - _LONGEST_AGE_S < measured <= now:
        return False
    if not isinstance(widths, list) or not isinstance(seconds, list) or len(widths) != len(seconds):
        return False
    if any(type(width) is not int for width in widths) or widths != [w for w in WIDTHS if w in widths]:
        return False
    low, high = _LIKELY_S
    if widths[:1] != [1] or not all(_is_number(value) and low <= value <= high for value in seconds):
        return False
    return bool(10 * min(seconds) >= seconds[0])  # a wider pass that is faster is noise, but not so much


def _is_number(value: Any) -> bool:
    """Whether a value of JSON, which may be a truth value, NaN or an integer of any size, is a finite number."""
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _write(path: Path, curves: dict[str, Any]) -> None:
    """Replaces the file; does without where that is not possible, or where it is somebody else's."""
    if not may_replace(path, mark=_MARK):
        _log.warning(
            "measured costs are not kept: '%s' is not a file that foretoken wrote, and stays as it is. Move it away, "
            "or set FORETOKEN_CACHE to another directory.", path,
        )  # fmt: skip
        return
    try:
        write_kept(path, json.dumps({"foretoken_costs": _FILE_FORMAT, "curves": curves}).encode())
    except OSError as err:
        say_nothing_is_kept(str(err))
