"""The controller that buys nodes one by one: of all drafted nodes of a batch, those that are worth their cost.

Every node has a calibrated probability of being accepted with its whole path (`calibration`). No node is worth more
than its parent, so the most valuable nodes of all sequences together are trees. With p_1 ≥ p_2 ≥ … their values, B
sequences and c(T) the seconds of a pass over T tokens, the first k of them bring B + p_1 + … + p_k tokens in
c(B + k) + d + h seconds, d those of drafting and h those of the host; the best k is taken. Several drafters' trees are
merged before.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from foretoken.control.base import UNBOUNDED, Allotment, Allowance
from foretoken.control.calibration import Calibration
from foretoken.control.fading_line import FadingLine
from foretoken.control.paying_depth import PayingDepth
from foretoken.control.probing import WEIGHT_AT_PROBE, ProbeSchedule
from foretoken.core.records import Declined
from foretoken.core.token_tree import PROBE, DrawKind
from foretoken.trees.merge import merge_trees, prune

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from foretoken.core.records import SequenceStep, StepRecord
    from foretoken.core.token_tree import TokenTree
    from foretoken.runner.cost_curve import CostCurve

_FADE = 0.5 ** (1 / 40)  # of what drafts brought, by iteration
_NO_GAIN = 0.98  # below this share of plain decoding's speed, drafts are given up for a while
_LEAST_GAIN = 0.96  # what drafts were given up for counts as no worse, so that a few good ones bring them back
_DRAFTS_KEPT = 9
_LEARN_EVERY = 8  # iterations without drafts, of which one is learned from


class _OnHost(NamedTuple):
    """What calibration reads of one drafter's trees; all (B, N)."""

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    depths: NDArray[np.int64]
    scores: NDArray[np.float32] | None
    is_drafted: NDArray[np.bool_]


class BestNodes:
    """A controller for any number of drafters."""

    def __init__(self, cost: CostCurve, *, num_drafters: int, max_nodes: int, deepest: int | None = None) -> None:
        """A controller that knows nothing of the drafters yet.

        Args:
            cost: Seconds of a pass.
            num_drafters: How many trees `select` gets.
            max_nodes: Most nodes of a verified tree, root included.
            deepest: Levels at most of drafts that are made level by level, of which no more are asked for than pay;
                None for drafts that take the same time however deep they are.
        """
        self._cost, self._max_nodes = cost, max_nodes
        self._calibrations = [Calibration() for _ in range(num_drafters)]
        self._host = FadingLine()  # seconds of accepting and committing by tokens generated
        self._drafts: deque[float] = deque(maxlen=_DRAFTS_KEPT)  # seconds of recent ones
        self._gain = 1.0  # speed with drafts over speed without, as estimated for recent drafts, fading
        self._acceptance: float | None = None  # of the most probable node of recent drafts
        self._probes = ProbeSchedule()
        self._is_asking = True
        self._depth = None if deepest is None else PayingDepth(deepest)
        self._asked = UNBOUNDED  # levels of the present draft
        self._brought: NDArray[np.float64] = np.zeros(deepest or 0)  # tokens expected of its levels, for a sequence
        self._trees: list[_OnHost] = []  # those of the last call of `select`, before they were merged
        self._width = 0
        self._price = 0.0  # what a probe adds to an iteration of plain decoding, as a share of it
        self._declining: Allotment | None = None  # of the present iterations without drafts

    def allot(self, batch_size: int) -> Allotment:
        """Whole drafts for everyone, or nothing while drafts do not pay."""
        self._trees = []
        if self._gain >= _NO_GAIN and not self._probes.is_spent:
            self._probes.reset()
            self._is_asking = True
        else:
            self._is_asking = self._probes.advance(self._price)
            if self._probes.is_beginning:
                for calibration in self._calibrations:
                    calibration.age(WEIGHT_AT_PROBE)
        if self._is_asking:
            self._declining = None
            self._asked = UNBOUNDED if self._depth is None else self._depth.next()
            return Allotment(allowances=[Allowance(depth=self._asked, nodes=self._max_nodes)] * batch_size)
        known, may_draft_next = self._declining, self._probes.is_near or self._gain >= _NO_GAIN
        if known is None or (len(known.allowances), known.may_draft_next) != (batch_size, may_draft_next):
            known = self._declining = self._decline(batch_size, may_draft_next)
        return known

    def _decline(self, batch_size: int, may_draft_next: bool) -> Allotment:
        """No draft for anyone, and why."""
        plain, wide = self._cost(batch_size), self._cost(self._width)
        self._price = (self._draft_s + wide - plain) / (plain + float(self._host(batch_size)))
        declined = Declined(
            width=self._width,
            pass_cost=wide / plain,
            draft_cost=self._draft_s / plain,
            acceptance=self._acceptance,
            hit_rate=1.0,
        )
        return Allotment(
            allowances=[Allowance(depth=0, nodes=1)] * batch_size, declined=declined, may_draft_next=may_draft_next
        )

    def select(self, trees: Sequence[TokenTree]) -> TokenTree:
        """The nodes worth their cost. Synchronises with the host."""
        self._trees = [_on_host(tree) for tree in trees]
        valued = []
        for tree, host, calibration in zip(trees, self._trees, self._calibrations, strict=True):
            values = _falling(calibration.probabilities(host.depths, host.scores), host)
            log_values = torch.from_numpy(np.log(np.maximum(values, 1e-30))).to(torch.float32)
            valued.append(replace(tree, scores=log_values.to(tree.tokens.device)))
        merged = valued[0] if len(valued) == 1 else merge_trees(valued, max_nodes=self._max_nodes)
        kept = self._bought(merged, _on_host(merged))
        return (merged if kept is None else prune(merged, kept)).narrowed()

    def learn(self, record: StepRecord) -> None:
        """Counts which nodes were accepted, what passes and drafts took; without drafts, now and then."""
        if not self._is_asking:
            self._probes.save()
            if self._probes.num_idle % _LEARN_EVERY:
                return
        num_generated = sum(step.num_emitted for step in record.sequences)
        if not record.num_prompt_tokens:  # else the pass took longer than its trees do
            self._cost.learn(record.num_tokens, record.seconds.verify)
        self._host.learn(num_generated, record.seconds.accept + record.seconds.commit)
        if not self._is_asking:
            return
        self._drafts.append(record.seconds.draft)
        if self._depth is not None and not record.num_prompt_tokens:
            rest_s = record.seconds.total - record.seconds.draft
            self._depth.learn(self._asked, self._brought, draft_s=record.seconds.draft, rest_s=rest_s)
        if not record.num_prompt_tokens:
            self._spend(record, num_generated / len(record.sequences))
        for host, calibration in zip(self._trees, self._calibrations, strict=False):
            if len(host.tokens) == len(record.sequences):
                _count(host, calibration, record.sequences)

    @property
    def _draft_s(self) -> float:
        """Seconds of the fastest of recent drafts: one that also reads a prompt says nothing of the next."""
        return min(self._drafts, default=0.0)

    def _spend(self, record: StepRecord, tokens: float) -> None:
        """Accounts for an iteration with drafts against plain decoding; see `AdaptiveDepth`."""
        seconds = record.seconds.total
        if not self._probes.num_idle:
            seconds += self._draft_s - record.seconds.draft
        batch_size = len(record.sequences)
        plain = self._cost(batch_size) + float(self._host(batch_size))
        self._probes.spend(seconds / plain - tokens, tokens)

    def _bought(self, tree: TokenTree, host: _OnHost) -> torch.Tensor | None:
        """(B, N) bool, the nodes that are worth their cost; None for all of them."""
        assert host.scores is not None, "the trees are valued"
        batch = len(host.tokens)
        is_fixed = np.zeros_like(host.is_drafted)
        if tree.distributions is not None:  # a cut that looks at what was drawn would bias the output
            is_fixed |= (tree.distributions.kinds != DrawKind.ONE_HOT).cpu().numpy() & host.is_drafted
        if tree.source is not None:  # the drafter wants the target's answer there, whatever it costs
            is_fixed |= (tree.source & PROBE).ne(0).cpu().numpy() & (host.depths > 0)
        is_fixed = _with_ancestors(is_fixed, host)
        values = np.exp(_falling(host.scores.astype(np.float64), host))
        candidates = np.where(host.is_drafted & ~is_fixed, values, -1.0).ravel()
        order = np.argsort(-candidates, kind="stable")
        worth = candidates[order]
        worth = worth[worth > 0]
        num_fixed = batch + int(is_fixed.sum())
        tokens = batch + float(values[is_fixed & host.is_drafted].sum()) + np.concatenate([[0.0], worth.cumsum()])
        seconds = self._cost.seconds(num_fixed + np.arange(len(tokens))) + self._draft_s + self._host(tokens)
        best = int((tokens / seconds).argmax())
        self._note(batch, num_fixed + best, float(tokens[best] / seconds[best]))
        if host.is_drafted.any():
            self._acceptance = float(values[host.is_drafted].max())
        kept = is_fixed.ravel()
        kept[order[:best]] = True
        if len(self._brought):
            places = np.flatnonzero(kept & host.is_drafted.ravel())
            levels = np.minimum(host.depths.ravel()[places], len(self._brought)) - 1
            self._brought = np.bincount(levels, values.ravel()[places], len(self._brought)) / batch
        if best == len(worth):
            return None
        return torch.from_numpy(kept.reshape(host.tokens.shape)).to(tree.tokens.device)

    def _note(self, batch: int, width: int, rate: float) -> None:
        """Keeps what a decision was based on."""
        plain = batch / (self._cost(batch) + float(self._host(batch)))
        self._gain = max(self._gain + (1 - _FADE) * (rate / plain - self._gain), _LEAST_GAIN)
        self._width = max(width, batch + 1)


def _on_host(tree: TokenTree) -> _OnHost:
    """A tree's values on the host."""
    source = torch.zeros_like(tree.tokens) if tree.source is None else tree.source
    tokens, parents, depths, sources = torch.stack([tree.tokens, tree.parents, tree.depths, source]).cpu().numpy()
    is_drafted = (parents >= 0) & (sources & PROBE == 0)  # neither the root nor padding nor what was cut off
    scores = None if tree.scores is None else tree.scores.cpu().numpy()
    return _OnHost(tokens, parents, depths, scores, is_drafted)


def _falling(values: NDArray[np.float64], host: _OnHost) -> NDArray[np.float64]:
    """(B, N) values, none above its parent's."""
    rows = np.arange(len(values))[:, None]
    parents = np.maximum(host.parents, 0)
    result = values.copy()
    for depth in range(2, int(host.depths.max(initial=0)) + 1):
        result = np.where(host.depths == depth, np.minimum(result, result[rows, parents]), result)
    return result


def _with_ancestors(nodes: NDArray[np.bool_], host: _OnHost) -> NDArray[np.bool_]:
    """(B, N), some nodes and all on the paths to them, the roots left out."""
    result = nodes.copy()
    for row, node in zip(*np.nonzero(nodes), strict=True):
        above = host.parents[row, node]
        while above > 0 and not result[row, above]:
            result[row, above] = True
            above = host.parents[row, above]
    return result


def _count(host: _OnHost, calibration: Calibration, steps: Sequence[SequenceStep]) -> None:
    """Tells a calibration which nodes the generated tokens followed, verified or not.

    A node deeper than what was generated is left out where all that was generated agrees with it: nobody knows.
    """
    depths: list[int] = []
    scores: list[float] = []
    accepted: list[bool] = []
    for row, step in enumerate(steps):
        follows: list[bool | None] = [True]  # of each node; None where nobody knows
        for node in range(1, host.tokens.shape[1]):
            depth, above = int(host.depths[row, node]), follows[max(int(host.parents[row, node]), 0)]
            does: bool | None = False
            if above is not False and depth > 0:
                is_known = above is True and depth <= len(step.tokens)
                does = int(host.tokens[row, node]) == step.tokens[depth - 1] if is_known else None
            follows.append(does)
            if does is None or not host.is_drafted[row, node]:
                continue
            depths.append(depth)
            accepted.append(does)
            if host.scores is not None:
                scores.append(float(host.scores[row, node]))
    if depths:
        calibration.learn(depths, scores if host.scores is not None else None, accepted)
