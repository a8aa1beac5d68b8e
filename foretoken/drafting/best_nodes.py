"""A controller for the trees of one drafter that buys the nodes that are worth their cost.

Every node has a calibrated probability that its whole path is accepted (`calibration`). Nodes are bought by that
probability over the whole batch (`buying`). For several drafters see `several_drafters`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from foretoken.core.records import Declined
from foretoken.drafting.base import UNBOUNDED, Allotment, Allowance
from foretoken.drafting.buying import buy, drawn_nodes, earnings_by_depth
from foretoken.drafting.calibration import Calibration
from foretoken.drafting.draft_costs import FadingLine, LevelSeconds
from foretoken.drafting.host_trees import count_followed, on_host, valued, values_of, with_values
from foretoken.drafting.measured_gain import WEIGHT_AT_PROBE, ProbeSchedule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from foretoken.core.records import StepRecord
    from foretoken.core.token_tree import TokenTree
    from foretoken.drafting.base import Continue
    from foretoken.drafting.buying import Earnings, Purchase
    from foretoken.drafting.host_trees import HostTree
    from foretoken.runner.costs import CostCurve

_FADE = 0.5 ** (1 / 40)  # decay per draft
_LOOK_EVERY = 8  # every 8th draft goes one level deeper than pays, to measure that level


class PayingDepth:
    """Chooses the depth of the next draft by what recent drafts would have earned at every depth.

    Attributes:
        seconds: Of drafts by depth.
    """

    def __init__(self, deepest: int) -> None:
        """Starts without observations; deepest: most levels of a draft."""
        self.seconds = LevelSeconds()
        self._deepest = self._best = deepest
        self._added = np.zeros((2, deepest))  # expected tokens and saved tokens of each level, fading
        self._weights = np.zeros(deepest)  # drafts that had the level, fading
        self._num_asked = self._num_timed = 0

    def next(self) -> int:
        """Returns the levels of the next draft."""
        self._num_asked += 1
        return min(self._best + (self._num_asked % _LOOK_EVERY == 0), self._deepest)

    def learn_seconds(self, depth: int, seconds: float) -> None:
        """Learns the seconds of a draft, except of the first, which reads the prompt; depth: its levels, at least 1."""
        if self._num_timed:
            self.seconds.learn_seconds(depth, seconds)
        self._num_timed += 1

    def learn_earnings(self, earned: Earnings, *, batch_size: int, plain_s: float) -> None:
        """Learns the expected earnings of a draft at each of its depths.

        Args:
            earned: At depths 1, 2, …
            batch_size: Sequences.
            plain_s: Seconds of an iteration of plain decoding.
        """
        levels = min(len(earned.tokens), self._deepest)
        totals = np.ones((2, 1 + levels))  # without a draft, then at each depth
        totals[0, 1:] = earned.tokens[:levels] / batch_size
        totals[1, 1:] = earned.seconds[:levels] / plain_s
        self._added *= _FADE
        self._weights *= _FADE
        self._added[:, :levels] += totals[:, 1:] - totals[:, :-1]
        self._weights[:levels] += 1.0
        if not self.seconds.is_known:  # otherwise drafting would seem to cost nothing
            return
        known = int(np.count_nonzero(self._weights))
        tokens, seconds = 1.0 + (self._added[:, :known] / self._weights[:known]).cumsum(1)
        seconds += self.seconds(np.arange(1, known + 1)) / plain_s
        self._best = int((tokens / seconds).argmax()) + 1


_FADE = 0.5 ** (1 / 40)  # decay per iteration
_NO_GAIN = 0.98  # drafting stops for a while below this share of plain decoding's speed
_LEAST_GAIN = 0.96  # the gain when drafting stops counts as at least this, so that a few good drafts bring it back
_DRAFTS_KEPT = 9
_LEARN_EVERY = 8  # learns from every 8th iteration without drafts


class BestNodes:
    """Buys the nodes of one drafter's trees that are worth their cost. A controller for one drafter."""

    def __init__(self, cost: CostCurve, *, max_nodes: int, deepest: int | None = None) -> None:
        """Starts without observations.

        Args:
            cost: Seconds of a pass.
            max_nodes: Most nodes of a verified tree, root included.
            deepest: Most levels of drafts that are made level by level; the controller chooses how many. None for
                drafts that take the same time at any depth.
        """
        self._cost, self._max_nodes = cost, max_nodes
        self._calibration = Calibration()
        self._host = FadingLine()  # seconds of accepting and committing by emitted tokens
        self._drafts: deque[float] = deque(maxlen=_DRAFTS_KEPT)  # seconds of recent drafts
        self._gain = 1.0  # estimated speed with drafts divided by speed without, fading
        self._acceptance: float | None = None  # of the most probable node of recent drafts
        self._probes = ProbeSchedule()
        self._is_asking = True
        self._depth = None if deepest is None else PayingDepth(deepest)
        self._levels = 0  # of the present or last draft
        self._tree: HostTree | None = None  # of the last call of `select`
        self._width = 0
        self._price = 0.0  # seconds that a probe adds, as a share of a plain iteration
        self._declining: Allotment | None = None  # allotment of the present iterations without drafts

    def allot(self, batch_size: int) -> Allotment:
        """Returns whole drafts for every sequence, or no drafts while drafts do not pay."""
        self._tree = None
        if self._gain >= _NO_GAIN and not self._probes.savings.is_spent:
            self._probes.reset()
            self._is_asking = True
        else:
            self._is_asking = self._probes.advance(self._price)
            if self._probes.is_beginning:
                self._calibration.age(WEIGHT_AT_PROBE)
        if self._is_asking:
            self._declining = None
            depth = UNBOUNDED if self._depth is None else self._depth.next()
            return Allotment(allowances=[Allowance(depth=depth, nodes=self._max_nodes)] * batch_size)
        if self._declining is None or len(self._declining.allowances) != batch_size:
            self._declining = self._decline(batch_size)
        return self._declining

    def _decline(self, batch_size: int) -> Allotment:
        plain, wide = self._cost(batch_size), self._cost(self._width)
        self._price = (self._draft_s + wide - plain) / (plain + float(self._host(batch_size)))
        declined = Declined(
            width=self._width,
            pass_cost=wide / plain,
            draft_cost=self._draft_s / plain,
            acceptance=self._acceptance,
            hit_rate=1.0,
        )
        return Allotment.nothing(batch_size, declined)

    def further(self, trees: Mapping[int, TokenTree]) -> None:
        """Returns None: there is only one drafter."""

    def select(self, trees: Mapping[int, TokenTree], continued: Continue | None = None) -> TokenTree:
        """Returns the nodes worth their cost. Synchronises with the host."""
        del continued
        (tree,) = trees.values()
        self._levels = tree.max_depth
        self._tree = on_host(tree)
        values = values_of(self._tree, self._calibration)
        bought = buy(
            valued(self._tree, values), self._cost, self._host, draft_s=self._draft_s, max_nodes=self._max_nodes,
            is_drawn=drawn_nodes(tree),
        )  # fmt: skip
        self._note(bought)
        return bought.taken_from(tree if tree.distributions is None else with_values(tree, values))

    def learn_step(self, record: StepRecord) -> None:
        """Learns acceptance and seconds. Without drafts, learns from every n-th iteration only."""
        if not self._is_asking:
            self._probes.save()
            if self._probes.num_idle % _LEARN_EVERY:
                return
        num_generated = sum(step.num_emitted for step in record.sequences)
        if not record.num_prompt_tokens:  # else the pass and the host also worked for prompts
            self._cost.learn_seconds(record.num_tokens, record.seconds.verify)
            self._host.add(num_generated, record.seconds.accept + record.seconds.commit)
        if not self._is_asking:
            return
        self._drafts.append(record.seconds.draft)
        if self._depth is not None and self._levels and not record.num_prompt_tokens:
            self._depth.learn_seconds(self._levels, record.seconds.draft)
        if not record.num_prompt_tokens:
            self._spend(record, num_generated / len(record.sequences))
        if self._tree is not None and len(self._tree.tokens) == len(record.sequences):
            count_followed(self._tree, self._calibration, record.sequences)

    @property
    def _draft_s(self) -> float:
        if self._depth is not None:
            return float(self._depth.seconds(float(self._levels)))
        return min(self._drafts, default=0.0)

    def _spend(self, record: StepRecord, tokens: float) -> None:
        seconds = record.seconds.total
        if not self._probes.num_idle:
            seconds += self._draft_s - record.seconds.draft
        batch_size = len(record.sequences)
        plain = self._cost(batch_size) + float(self._host(batch_size))
        self._probes.spend(seconds / plain - tokens, tokens)

    def _note(self, bought: Purchase) -> None:
        host, batch = bought.host, len(bought.kept)
        plain = batch / (self._cost(batch) + float(self._host(batch)))
        self._gain = max(self._gain + (1 - _FADE) * (bought.rate / plain - self._gain), _LEAST_GAIN)
        self._width = max(bought.width, batch + 1)
        if host.is_drafted.any():
            self._acceptance = float(bought.values[host.is_drafted].max())
        if self._depth is not None and self._levels:
            draft_s = self._depth.seconds(np.arange(1, self._levels + 1))
            earned = earnings_by_depth(bought.ranked, self._cost, self._host, draft_s)
            self._depth.learn_earnings(earned, batch_size=batch, plain_s=batch / plain)
