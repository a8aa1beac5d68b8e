"""Seconds of passes, drafts and host: modelled for a described machine, or measured on this one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from foretoken.planning.plan import NO_DRAFT, PlannedDraft
from foretoken.planning.sizes import Machine, ModelSizes, drafter_sizes, pass_seconds

if TYPE_CHECKING:
    from foretoken.runner.costs import PassCosts

HOST_S = 1e-3  # of an iteration on an accelerator: RESULTS, "A GPU, H100"
# Shares of the nominal bandwidth and arithmetic that passes reach: benchmarks/results/gpu-h100.json, a pass of one
# token at context 8192 (77 % of 3.35 TB/s) and a large GEMM (80 % of 989 TFLOP/s).
BANDWIDTH_SHARE, FLOPS_SHARE = 0.77, 0.8
_MEASURED_ERROR = 0.08  # of an iteration's seconds; a choice: two busy cores differ by so much between runs
_ROOFLINE_ERROR = 0.15  # of an iteration's seconds: tests/planning/test_predictions.py compares with the H100


def nominal_machine(bytes_per_s: float, flops_per_s: float, memory_bytes: float) -> Machine:
    """Returns the machine that reaches the usual shares of its nominal bandwidth and arithmetic."""
    return Machine(
        bytes_per_s=BANDWIDTH_SHARE * bytes_per_s, flops_per_s=FLOPS_SHARE * flops_per_s, memory_bytes=memory_bytes
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCosts:
    """Costs of a described machine for a target of some sizes; `host_s`: seconds of the host in an iteration."""

    target: ModelSizes
    machine: Machine
    host_s: float = HOST_S
    error: float = _ROOFLINE_ERROR

    def verify(self, draft: PlannedDraft, batch: int, context: float) -> float:
        """See `IterationCosts`."""
        return pass_seconds(self.target, self.machine, contexts=[context] * batch, width=1 + draft.nodes)

    def draft(self, draft: PlannedDraft, batch: int, context: float) -> float:
        """See `IterationCosts`."""
        sizes = drafter_sizes(draft.method, self.target)
        if sizes is None:
            return 0.0
        passes = -(-draft.depth // sizes.levels)
        rows = max(draft.nodes / draft.depth, 1.0)  # fed to each pass
        seen = context if sizes.window is None else min(context, sizes.window)
        return passes * pass_seconds(sizes.reads, self.machine, contexts=[seen] * batch, width=rows)

    def host(self, draft: PlannedDraft, batch: int) -> float:
        """See `IterationCosts`."""
        del draft, batch
        return self.host_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Iterations:
    """Means over the iterations of one drafter, or of plain decoding, in the engine."""

    tokens: float  # tokens of a pass, over the whole batch
    # Seconds of the passes over the seconds of such passes as they were timed alone: caches are colder here, features
    # are read, and other programs run.
    pass_ratio: float
    draft_s: float  # seconds of the draft stage, which are above 0 even if nothing is drafted
    host_s: float  # seconds outside of passes and drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedDrafter:
    """Seconds of a drafter's drafts."""

    lines: Mapping[int, tuple[float, float]]  # by batch: seconds of a draft without levels, and seconds of a level
    seen: Iterations | None = None  # its iterations of one sequence in the engine, if there were any
    seen_depth: int = 0  # depth of the drafts in these iterations

    def seconds(self, batch: int, depth: int, plain: Iterations) -> float:
        """Returns the seconds of a draft of `depth` levels for the whole batch, linear between the timed batches.

        The slowdown of `plain` iterations, without drafts, counts if drafts were not seen in the engine.
        """
        alone = self._alone(batch, depth)
        if self.seen is None or not (known := self._alone(1, self.seen_depth)):
            return plain.draft_s + plain.pass_ratio * alone
        return plain.draft_s + max(self.seen.draft_s - plain.draft_s, 0.0) / known * alone

    def _alone(self, batch: int, depth: int) -> float:
        return _between({size: fixed + depth * level for size, (fixed, level) in self.lines.items()}, batch)


def _between(known: Mapping[int, float], at: float) -> float:
    """Returns a value by size: linear between known sizes, and on along the last two beyond them."""
    sizes = sorted(known)
    if len(sizes) == 1:
        return known[sizes[0]]
    after = min(max(bisect_left(sizes, at), 1), len(sizes) - 1)
    low, high = sizes[after - 1], sizes[after]
    return known[low] + (at - low) / (high - low) * (known[high] - known[low])


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPasses:
    """Seconds of passes as timed alone, behind few (`near_context`) and many (`far_context`) committed tokens."""

    near: PassCosts
    far: PassCosts
    near_context: float
    far_context: float

    def __call__(self, draft: PlannedDraft, batch: int, context: float) -> float:
        """Returns the seconds of a verification; linear in the context.

        A single sequence has a wide pass where its drafter proposes, and a pass of one token elsewhere.
        """
        if batch == 1 and 0 < draft.asks < 1:
            wide = self._seconds(1, 1 + draft.nodes / draft.asks, context)
            return draft.asks * wide + (1 - draft.asks) * self._seconds(1, 1, context)
        return self._seconds(batch, batch * (1 + draft.nodes), context)

    def _seconds(self, batch: int, tokens: float, context: float) -> float:
        near, far = (costs.verification(batch, tokens) for costs in (self.near, self.far))
        share = (context - self.near_context) / (self.far_context - self.near_context)
        return max(near + share * max(far - near, 0.0), near / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCosts:
    """Costs of this machine at one temperature."""

    target: ModelSizes  # for drafters that do not exist yet
    passes: TimedPasses
    plain: Mapping[int, Iterations]  # iterations of plain decoding, by batch
    free: Mapping[int, Iterations]  # iterations of a drafter that costs next to nothing, by batch
    drafters: Mapping[str, TimedDrafter]  # by name
    error: float = _MEASURED_ERROR

    @property
    def flops_per_s(self) -> float:
        """Nominal arithmetic, operations a second, from the widest timed pass over a prompt."""
        width, seconds = self.passes.near.prompt.points[-1]
        return 2 * self.target.active_weights * width / seconds / FLOPS_SHARE

    def verify(self, draft: PlannedDraft, batch: int, context: float) -> float:
        """See `IterationCosts`."""
        return self._ratio(draft, batch) * self.passes(draft, batch, context)

    def draft(self, draft: PlannedDraft, batch: int, context: float) -> float:
        """See `IterationCosts`."""
        timed = self.drafters.get(draft.name)
        if timed is not None:
            return timed.seconds(batch, draft.depth, self.plain[min(self.plain)])
        sizes = drafter_sizes(draft.method, self.target)
        if sizes is None:
            return self.free[min(self.free)].draft_s
        # A drafter that does not exist yet: plain passes in proportion to its weights.
        share = sizes.reads.weights / self.target.active_weights
        return -(-draft.depth // sizes.levels) * share * self.verify(NO_DRAFT, batch, context)

    def host(self, draft: PlannedDraft, batch: int) -> float:
        """See `IterationCosts`."""
        if not draft.depth:
            return max(_between({size: each.host_s + each.draft_s for size, each in self.plain.items()}, batch), 0.0)
        by_batch = {size: each.host_s for size, each in self.free.items()}
        timed = self.drafters.get(draft.name)
        own = 1.0 if timed is None or timed.seen is None else timed.seen.host_s / by_batch[min(by_batch)]
        return max(own * _between(by_batch, batch), 0.0)

    def _ratio(self, draft: PlannedDraft, batch: int) -> float:
        """Returns the ratio of passes in the engine, by the tokens of a pass.

        It lies between plain decoding and the free drafter at the nearest timed batch. A drafter that was seen has a
        factor over that: reading features, for example, takes time as well. The factor grows with the nodes.
        """
        timed, own = self.drafters.get(draft.name), 1.0
        if timed is not None and timed.seen is not None and timed.seen.tokens > 1:
            factor = timed.seen.pass_ratio / self._usual(timed.seen.tokens, 1)
            own += (factor - 1) * min(draft.nodes / (timed.seen.tokens - 1), 1.0)
        return own * self._usual(batch * (1 + draft.nodes), batch)

    def _usual(self, tokens: float, batch: int) -> float:
        nearest = min(self.plain.keys() & self.free.keys(), key=lambda size: abs(size - batch))
        ends = sorted([self.plain[nearest], self.free[nearest]], key=lambda each: each.tokens)
        return float(np.interp(tokens, [each.tokens for each in ends], [each.pass_ratio for each in ends]))
