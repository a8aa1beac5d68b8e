"""Costs of a decoder's passes: measured once for a machine and model, stored for a month.

The costs decide which decoder runs, how deep chains are, and how many nodes a tree has by default. They differ by
machine and dtype: with matrix units or memory-bound weights, 16 tokens cost as much as one; in float32 with a small
cache they cost more.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from foretoken.core.backend import runs_cpu_kernels
from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder.slot_cache import SlotCache, affordable_rows
from foretoken.files.user_cache import KeptEntries, is_number
from foretoken.runner.decoders import as_key, facts_of_passes, layer_shapes, make_decoder
from foretoken.runner.self_test import NUM_ROWS, refusing

if TYPE_CHECKING:
    from foretoken.decoder.base import Decoder
    from foretoken.models.loaded import LoadedModel

# To measure the curve of trees; the curves of steps and prompts get a sixth each. A choice: a longer load against
# widths that are estimated. The width that runs when the time is over is finished: at most three more passes.
LIMIT_S = 2.0
# Of one width; a choice: the fastest pass counts, so a longer burst hides more interruptions and loads slower.
_BURST_S = 0.005
_LONG_S = 1.0  # the first pass counts if it takes longer; a choice: warming up takes tenths of a second at most


class CostCurve:
    """Seconds of a pass by width: piecewise linear between measured widths, linear past the last one.

    A pass never costs more than a wider pass, because disturbances only add to measured times.
    """

    def __init__(self, widths: Sequence[int], seconds: Sequence[float]) -> None:
        """Creates a curve through measured points; widths ascend."""
        self._widths, self._seconds = list(widths), [float(each) for each in seconds]
        self._rising = rising = [*accumulate(reversed(self._seconds), min)][::-1]
        span = self._widths[-1] - self._widths[-2] if len(rising) > 1 else 1
        self._slope = (rising[-1] - rising[-2]) / span if len(rising) > 1 else 0.0  # past the widest pass

    @property
    def points(self) -> list[tuple[int, float]]:
        """Measured widths and seconds."""
        return list(zip(self._widths, self._seconds, strict=True))

    @classmethod
    def measure(
        cls,
        run: Callable[[int], None],
        widths: Sequence[int],
        *,
        repeats: int = 3,
        limit_s: float = LIMIT_S,
        longest_s: float = math.inf,
    ) -> CostCurve:
        """Times passes of each width, until `limit_s` is spent: widths that double first, then those between.

        A width runs once without being timed, then at least twice; the fastest pass counts. So no first pass, which
        reads weights from files and allocates memory, is kept.

        Args:
            run: Runs one pass of a width and waits for its end.
            widths: Ascending.
            repeats: Rounds over the timed widths, while there is time.
            limit_s: Seconds after which no further width begins, once two are timed.
            longest_s: Seconds of a pass after which wider passes are left out; at least two widths are timed.
        """
        begin, best, widest = time.perf_counter(), dict[int, float](), math.inf
        for width in _doubling_first(widths):
            if len(best) > 1 and (width > widest or time.perf_counter() - begin > limit_s):
                continue
            best[width] = _warm_seconds(run, width)
            if best[width] > longest_s:
                widest = min(widest, width)
        for _ in range(repeats - 1):
            for width in sorted(best):
                if time.perf_counter() - begin <= limit_s:
                    best[width] = min(best[width], _fastest(run, width))
        return cls(sorted(best), [best[width] for width in sorted(best)])

    def seconds(self, widths: Any) -> Any:
        """Returns seconds for an array of widths, in the array's shape."""
        inside = np.interp(widths, self._widths, self._rising)
        return inside + self._slope * np.maximum(np.asarray(widths) - self._widths[-1], 0.0)

    def __call__(self, width: float) -> float:
        """Returns the seconds of one pass without numpy: controllers ask several times a pass."""
        rising, widths = self._rising, self._widths
        if width >= widths[-1]:
            return rising[-1] + self._slope * (width - widths[-1])
        after = bisect_right(widths, width)
        if not after:
            return rising[0]
        share = (width - widths[after - 1]) / (widths[after] - widths[after - 1])
        return rising[after - 1] + share * (rising[after] - rising[after - 1])


def _doubling_first(widths: Sequence[int]) -> list[int]:
    """Returns widths that at least double from one to the next, then the others, both ascending.

    >>> _doubling_first((1, 2, 3, 4, 5, 6, 8))
    [1, 2, 4, 8, 3, 5, 6]
    """
    doubling: list[int] = []
    for width in widths:
        if not doubling or width >= 2 * doubling[-1]:
            doubling.append(width)
    return [*doubling, *(width for width in widths if width not in doubling)]


def _warm_seconds(run: Callable[[int], None], width: int) -> float:
    first = _seconds(run, width)
    return first if first > _LONG_S else min(_seconds(run, width), _fastest(run, width))


def _fastest(run: Callable[[int], None], width: int) -> float:
    """Returns the seconds of the fastest of several passes in a row: decoding also finds caches warm."""
    begin, best = time.perf_counter(), _seconds(run, width)
    while time.perf_counter() - begin < _BURST_S:
        best = min(best, _seconds(run, width))
    return best


def _seconds(run: Callable[[int], None], width: int) -> float:
    start = time.perf_counter()
    run(width)
    return time.perf_counter() - start


_KEPT = KeptEntries(file="foretoken-costs.json", mark="foretoken_costs", holder="curves", what="measured costs")
FILE = _KEPT.file
_LIKELY_S = (1e-7, 3600.0)  # bounds of a plausible pass; kept files with other values are damaged


def read_points(key: str, widths: Mapping[str, Sequence[int]]) -> dict[str, list[tuple[int, float]]] | None:
    """Returns (width, seconds) pairs of each curve that was measured in the last month, or None.

    `widths` has the required curves, with the widths that each may have, ascending; the first width is required.
    """
    entry = _KEPT.read(key)
    if entry is None or not all(_is_likely(entry.get(name), allowed) for name, allowed in widths.items()):
        return None
    return {name: list(zip(entry[name]["widths"], entry[name]["seconds"], strict=True)) for name in widths}


def keep_points(key: str, points: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    """Stores curves as (width, seconds) pairs under a key, beside other entries of the last month."""
    curves: dict[str, Any] = {}
    for name, pairs in points.items():
        curves[name] = {"widths": [width for width, _ in pairs], "seconds": [seconds for _, seconds in pairs]}
    _KEPT.keep(key, curves)


def _is_likely(curve: Any, allowed: Sequence[int]) -> bool:
    if not isinstance(curve, dict):
        return False
    widths: Any = curve.get("widths")
    seconds: Any = curve.get("seconds")
    if not isinstance(widths, list) or not isinstance(seconds, list) or len(widths) != len(seconds):
        return False
    if any(type(width) is not int for width in widths) or widths != [w for w in allowed if w in widths]:
        return False
    low, high = _LIKELY_S
    if widths[:1] != [*allowed[:1]] or not all(is_number(value) and low <= value <= high for value in seconds):
        return False
    return bool(10 * min(seconds) >= seconds[0])  # a faster wide pass is noise, but not by a factor of ten


# Nodes of a tree; a choice: dense where a node more is decided, sparse where time bounds the measurement.
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)
_PROMPT_WIDTHS = (1, 32, 128, 512)  # tokens of a prompt chunk; a choice, costs between them are interpolated
_STEP_WIDTHS = (1, 4)  # sequences; a choice, costs between them are interpolated
_CURVES = {"tree": WIDTHS, "step": _STEP_WIDTHS, "prompt": _PROMPT_WIDTHS}
COSTS_PREFIX = 128  # committed rows while trees and steps are timed; a choice: a short conversation
_LONGEST_PROMPT_S = 0.5  # no wider chunk is timed after a longer one; a choice, part of `LIMIT_S`
_FORMAT = 6  # of the kept file; older files are measured again
_log = logging.getLogger(__name__)


class PassCosts(NamedTuple):
    """Costs of a runner's passes.

    Attributes:
        tree: By nodes of one sequence's tree, with all logits.
        step: Of one token of each sequence, by number of sequences.
        prompt: By tokens of a prompt chunk, without logits.
    """

    tree: CostCurve
    step: CostCurve
    prompt: CostCurve

    def verification(self, num_sequences: int, num_tokens: float) -> float:
        """Returns the seconds of a verification of `num_sequences` trees with `num_tokens` nodes in total."""
        further_sequences = max(self.step(num_sequences) - self.tree(num_sequences), 0.0)  # beyond their tokens
        return self.tree(num_tokens) + further_sequences


def pass_costs(model: LoadedModel, decoder: str, *, is_refreshed: bool = False) -> PassCosts:
    """Returns what passes of a model cost on this machine, with torch's present number of threads.

    The first call measures and logs a line. Later calls read `foretoken-costs.json` in the cache directory, for a
    month.

    `is_refreshed`: whether to measure again. Raises `ModelError` if the decoder is measured and does not fit the model,
    `PassError` if there is no memory for the passes; also torch.OutOfMemoryError.
    """
    key = _key(model, decoder)
    known = None if is_refreshed else read_points(key, _CURVES)
    if known is not None:
        return PassCosts(**{name: CostCurve(*zip(*pairs, strict=True)) for name, pairs in known.items()})
    _log.info("timing passes of the %s runner once on this machine (a few seconds)", decoder)
    costs = measure_costs(model, decoder)
    keep_points(key, {name: getattr(costs, name).points for name in _CURVES})
    return costs


def measure_costs(
    model: LoadedModel, decoder: str, *, limit_s: float = LIMIT_S, prefix: int = COSTS_PREFIX
) -> PassCosts:
    """Times passes of a new decoder, one of `DECODERS`, on its own KV slots, and frees both; does not prove it.

    Trees take `limit_s` seconds, see `CostCurve.measure`; steps and prompts get a sixth each. While trees and steps are
    timed, each sequence has `prefix` committed rows, at most half of the context. Raises as `pass_costs`.
    """
    shapes = layer_shapes(model)
    num_slots = _STEP_WIDTHS[-1]
    kinds: dict[str, Any] = {"dtype": model.dtype, "device": model.device, "is_rounded": model.kv_cache_dtype == "int8"}
    rows = affordable_rows(shapes, **kinds) // num_slots
    needed = max(2 * prefix, prefix + WIDTHS[-1], min(_PROMPT_WIDTHS[-1], model.context_len))
    rows = max(NUM_ROWS, min(rows, needed))
    cache = SlotCache(shapes, num_slots=num_slots, capacity=rows, **kinds)
    passes = _Passes(model, cache, make_decoder(decoder, model, cache, ()), prefix)
    with refusing(model.architecture, f"cannot be timed on {decoder}", "It cannot be used as a target."):
        tree = CostCurve.measure(passes.tree, passes.tree_widths, limit_s=limit_s)
        step = CostCurve.measure(passes.step, _STEP_WIDTHS, limit_s=limit_s / 6)
        widths = passes.prompt_widths
        prompt = CostCurve.measure(passes.prompt, widths, limit_s=limit_s / 6, longest_s=_LONGEST_PROMPT_S)
    return PassCosts(tree, step, prompt)


_SEEN_PASSES = 5  # of a width before it can contradict; a choice: the median ignores two interrupted passes
_SEEN_WIDTHS = 2  # with so many passes; a choice: two can contradict a curve's shape, one never
_SEEN_PREFIX = 4 * COSTS_PREFIX  # rows; a choice: longer contexts cost more than the curve says
_LEAST_S = 1e-3  # a shorter pass says little, as the host's share differs
# Largest factor between the errors of two widths, beyond which a curve is dropped. A choice: `CostModel` corrects less
# while running, and single cold passes were wrong by 2 to 3.
_CONTRADICTED = 1.6


def contradicts(seen: Mapping[int, Sequence[float]], told: CostCurve) -> bool:
    """Decides whether real passes contradict a curve's shape, whatever the machine's speed at the moment.

    `seen`: seconds of passes by width.
    """
    ratios = [
        median(seconds) / told(width) for width, seconds in seen.items()
        if len(seconds) >= _SEEN_PASSES and told(width) >= _LEAST_S
    ]  # fmt: skip
    return len(ratios) >= _SEEN_WIDTHS and max(ratios) > _CONTRADICTED * min(ratios)


def forget_costs(model: LoadedModel, decoder: str) -> None:
    """Drops the stored costs, so that the next process measures again; nothing happens without stored costs."""
    key = _key(model, decoder)
    if read_points(key, _CURVES) is not None:
        _KEPT.keep(key, {})


class CostWatch:
    """Compares the first real passes with the stored costs, and forgets costs that the passes contradict."""

    def __init__(self, model: LoadedModel, decoder: str) -> None:
        """Reads the stored costs; without any, and on accelerators, where passes end later, nothing is compared."""
        self._model, self._decoder = model, decoder
        stored = read_points(_key(model, decoder), _CURVES) if runs_cpu_kernels(model.device) else None
        self._told = None if stored is None else CostCurve(*zip(*stored["tree"], strict=True))
        self._seen: dict[int, list[float]] = {}

    @property
    def is_over(self) -> bool:
        """Whether further passes are not compared."""
        is_known = sum(len(each) == _SEEN_PASSES for each in self._seen.values()) >= _SEEN_WIDTHS
        return self._told is None or is_known

    def saw(self, work: Pass, seconds: float) -> None:
        """Takes the seconds of a pass; only verifications of one sequence behind a short prefix count."""
        if self._told is None or not work.has_all_logits or work.num_sequences > 1 or work.num_layers is not None:
            return
        own = self._seen.setdefault(work.num_tokens, [])
        if work.prefix_lens[0] <= _SEEN_PREFIX and len(own) < _SEEN_PASSES:
            own.append(seconds)
        if self.is_over and contradicts(self._seen, self._told):
            _log.info("measured costs of the %s runner are not those of its passes; the next load measures again.",
                      self._decoder)  # fmt: skip
            forget_costs(self._model, self._decoder)


class _Passes:
    """Passes like the engine's, to be timed. Tokens differ, so that a mixture of experts uses many experts."""

    def __init__(self, model: LoadedModel, cache: SlotCache, decoder: Decoder, prefix: int) -> None:
        self._cache, self._decoder, self._device = cache, decoder, model.device
        self._prefix = min(prefix, model.context_len // 2, cache.capacity // 2)
        self._last_position = min(model.context_len, cache.capacity) - 1
        self.tree_widths = [width for width in WIDTHS if width <= cache.capacity - self._prefix]
        self.prompt_widths = [width for width in _PROMPT_WIDTHS if width <= self._last_position + 1]
        self._tokens = [(7 * i + 3) % model.vocab_size for i in range(max(WIDTHS + _PROMPT_WIDTHS))]
        self._chains = {width: self._chain(width) for width in self.tree_widths}
        self._roots = {width: TokenTree.roots(self._tokens[:width], device=self._device) for width in _STEP_WIDTHS}

    def tree(self, width: int) -> None:
        self._verify(self._chains[width])

    def step(self, width: int) -> None:
        self._verify(self._roots[width])

    def prompt(self, width: int) -> None:
        tokens = self._tokens[:width]
        self._run(Pass.of_chains([tokens], slots=[0], prefix_lens=[0], device=self._device))

    def _chain(self, width: int) -> TokenTree:
        return TokenTree.from_rows([TreeRow(self._tokens[:width], range(-1, width - 1))], device=self._device)

    def _verify(self, tree: TokenTree) -> None:
        slots, prefix_lens = range(tree.batch_size), [self._prefix] * tree.batch_size
        if self._cache.states is not None:
            self._cache.states.assume(self._prefix)
        self._run(Pass.of_tree(tree, slots=slots, prefix_lens=prefix_lens, last_position=self._last_position))

    def _run(self, work: Pass) -> None:
        self._decoder.run(work)
        torch.zeros((), device=self._device).item()  # waits for an accelerator, also after passes without logits


def _key(model: LoadedModel, decoder: str) -> str:
    return as_key({"format": _FORMAT} | facts_of_passes(model, decoder))
