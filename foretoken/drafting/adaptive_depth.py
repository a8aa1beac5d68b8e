"""Chooses the draft depth with the most expected tokens per second, from measured costs and measured acceptance.

Letters:

- K: depth of a draft. B: sequences of the batch.
- c(T): seconds of a target pass over T tokens. w(K): nodes of a draft of depth K.
- d(K): seconds of drafting K levels. h(n): seconds of the host for n emitted tokens.
- q: probability that the drafter proposes anything. A_k: probability that at least k of its tokens are accepted.

A draft of depth K takes c(w(K)) + d(K) + h(n) seconds and emits n = 1 + A_1 + … + A_K tokens, with probability q. With
probability 1 - q it takes c(1) + d(0) + h(1) seconds and emits one token. The controller takes the best depth. It skips
depths that would lose more than half of what earlier drafts gained if nothing were accepted.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from foretoken.core.records import Declined
from foretoken.drafting.base import Allotment, Allowance
from foretoken.drafting.draft_costs import FadingLine, fastest_by_depth
from foretoken.drafting.measured_gain import WEIGHT_AT_PROBE, ProbeSchedule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from foretoken.core.records import StepRecord
    from foretoken.core.token_tree import TokenTree
    from foretoken.drafting.base import Continue
    from foretoken.runner.costs import CostCurve

_HALF_LIFE = 40.0  # drafts after which an observation counts half
_DRAFTS_KEPT = 9
_REFRESH_EVERY = 8  # iterations between two reads of the cost curve
_DECIDE_EVERY = 32  # iterations without drafts between two decisions
_LARGEST_RATIO = 2.0  # clips an iteration at twice its known seconds: it was probably interrupted
_GUESS, _LEAST_RATE, _LARGEST_RATE = 0.6, 0.05, 0.98  # rate before any observation; bounds of all rates
_SCALE_WEIGHT = 1.5  # accepted tokens that the prior of expected rates is worth
_PRIOR = 4.0  # tokens that the expected rate is worth at each depth
_STEEPEST = 0.5  # least ratio of an expected rate to the rate one level above, so that deeper drafts are tried
_MOST_FIXED = 16.0  # cap on the fixed cost of a draft, in levels
_NUM_FREE = 2  # first drafts that are not charged: the first draft reads the prompt
_FADE = 0.5 ** (1.0 / _HALF_LIFE)


class AdaptiveDepth:
    """Chooses the depth of the next draft from recent drafts. A controller for one drafter."""

    def __init__(
        self,
        cost: CostCurve,
        nodes_by_depth: Sequence[int],
        *,
        timed: Sequence[tuple[int, float]] = (),
        expected: Sequence[float] = (),
    ) -> None:
        """Starts without observations.

        Args:
            cost: Seconds of a pass.
            nodes_by_depth: Of the drafter, see `foretoken.drafters.base.Drafter`.
            timed: Depth and seconds of drafts that were timed before.
            expected: P(token d is accepted | the tokens before it are) by depth; may be shorter than the drafts are
                deep.
        """
        max_depth = len(nodes_by_depth) - 1
        self._cost, self._max_depth = cost, max_depth
        self._nodes = list(nodes_by_depth)
        self._reached = [0.0] * max_depth  # drafts with d tokens tested or accepted, fading
        self._accepted = [0.0] * max_depth  # number of these drafts in which token d was accepted
        known = [min(max(each, _LEAST_RATE), _LARGEST_RATE) for each in expected] or [_GUESS]
        self._expected = [*known, *([known[-1]] * max_depth)][:max_depth]
        self._asked = self._answered = 1.0  # sequences that asked for a draft, and sequences that got one, fading
        self._fixed = _fixed_levels(timed)  # fixed cost of a draft, in levels
        self._levels = deque(  # seconds per level of recent drafts
            (seconds / (self._fixed + depth) for depth, seconds in timed), maxlen=_DRAFTS_KEPT
        )
        self._misses: deque[float] = deque(maxlen=_DRAFTS_KEPT)  # seconds of recent calls that proposed nothing
        # Pass time of each of these iterations divided by the known pass time.
        self._slower: deque[float] = deque([1.0] * min(len(timed), _DRAFTS_KEPT), maxlen=_DRAFTS_KEPT)
        self._host = FadingLine()  # seconds of accepting and committing by emitted tokens
        self._is_asking = False
        self._probes = ProbeSchedule()
        self._table: tuple[int, list[float]] | None = None  # batch size, and seconds of passes by depth
        self._age = 0
        self._reason: Declined | None = None  # of the last decision against drafting
        self._price = 0.0  # seconds that a probe adds, as a share of a plain iteration
        self._declining: Allotment | None = None  # the allotment of that decision

    @property
    def declined(self) -> Declined | None:
        """Reason why the last call of `depth` chose not to draft; None if it chose a draft or a probe."""
        return None if self._is_asking else self._reason

    def allot(self, batch_size: int) -> Allotment:
        """Returns the same depth for every sequence."""
        depth = self.depth(batch_size)
        known = self._declining
        if depth == 0 and known is not None and len(known.allowances) == batch_size:
            return known
        allowance = Allowance(depth=depth, nodes=self._nodes[-1])
        allotment = Allotment(allowances=[allowance] * batch_size, declined=self.declined)
        self._declining = None if depth else allotment
        return allotment

    def further(self, trees: Mapping[int, TokenTree]) -> None:
        """Returns None: there is only one drafter."""

    def select(self, trees: Mapping[int, TokenTree], continued: Continue | None = None) -> TokenTree:
        """Returns the drafter's tree unchanged."""
        del continued
        (tree,) = trees.values()
        return tree

    def depth(self, batch_size: int) -> int:
        """Returns the depth with the most expected tokens per second; 0 for plain decoding."""
        best = self._paying_depth(batch_size) if self._is_due(batch_size) else 0
        if best:
            self._probes.reset()
            self._is_asking = True
            return best
        self._is_asking = self._probes.advance(self._price)
        if self._probes.is_beginning:
            self._age_evidence()
        return int(self._is_asking)

    def _is_due(self, batch_size: int) -> bool:
        idle = self._probes.num_idle
        is_idle = idle > 1 and not self._is_asking
        return not is_idle or idle % _DECIDE_EVERY == 0 or self._table is None or self._table[0] != batch_size

    def _paying_depth(self, batch_size: int) -> int:
        # The fastest: a draft that also reads a prompt, or the backlog of undrafted tokens, takes many times as long.
        # Another program on the machine slows passes down too; known pass times follow slowly.
        slower = self._slowdown()
        level, miss = _fastest(self._levels) / slower, _fastest(self._misses) / slower
        passes = self._pass_seconds(batch_size)
        host, host_per_token = self._host.line
        plain = passes[0] + host + host_per_token * batch_size
        hit, stake = self._answered / self._asked, self._probes.savings.stake
        conditional = self._conditional()
        survival = tokens = 1.0
        best = best_within = 0  # best of all depths; best of those with an allowed loss
        rate = rate_within = 0.0
        for depth, each in enumerate(conditional, start=1):
            survival *= each
            tokens += survival
            draft = max((self._fixed + depth) * level, miss)
            asked = passes[depth] + draft + host + host_per_token * batch_size * tokens
            reached = (hit * tokens + 1 - hit) / (hit * asked + (1 - hit) * (plain + miss))
            if reached > rate:
                best, rate = depth, reached
            # Loss if nothing of the draft is accepted.
            if reached > rate_within and passes[depth] - passes[0] + draft <= stake * plain:
                best_within, rate_within = depth, reached
        if rate_within > 1.0 / plain and not self._probes.savings.is_spent:
            return best_within
        self._reason = Declined(
            width=batch_size * self._nodes[best],
            pass_cost=passes[best] / passes[0],
            draft_cost=max((self._fixed + best) * level, miss) / passes[0],
            acceptance=conditional[0] if self._reached[0] else None,
            hit_rate=hit,
        )
        self._price = (max((self._fixed + 1) * level, miss) + passes[1] - passes[0]) / plain
        self._declining = None
        return 0

    def learn_step(self, record: StepRecord) -> None:
        """Learns from the drafts and costs of an iteration. Without drafts, learns from every n-th iteration only."""
        if not self._is_asking:
            self._probes.save()
            if self._probes.num_idle % _REFRESH_EVERY:
                return
        emitted = sum(step.num_emitted for step in record.sequences)
        if not record.num_prompt_tokens:  # else the pass and the host also worked for prompts
            if self._is_asking:
                self._slower.append(record.seconds.verify / self._cost(record.num_tokens))
            self._cost.learn_seconds(record.num_tokens, record.seconds.verify)
            self._host.add(emitted, record.seconds.accept + record.seconds.commit)
        deepest = max((step.tree_depth for step in record.sequences), default=0)
        if deepest:
            self._levels.append(record.seconds.draft / (self._fixed + deepest))
        elif self._is_asking:
            self._misses.append(record.seconds.draft)
        if self._is_asking and not record.num_prompt_tokens:
            self._spend(record, deepest, emitted / len(record.sequences))
        for step in record.sequences:
            if self._is_asking:
                self._asked = self._asked * _FADE + 1
                self._answered = self._answered * _FADE + (step.tree_depth > 0)
            if step.tree_depth == 0:
                continue
            tested = min(step.num_accepted + 1, step.tree_depth, self._max_depth)
            self._reached = [each * _FADE + (depth < tested) for depth, each in enumerate(self._reached)]
            self._accepted = [each * _FADE + (depth < step.num_accepted) for depth, each in enumerate(self._accepted)]

    def _spend(self, record: StepRecord, deepest: int, tokens: float) -> None:
        """Charges recent seconds for a draft that was expected to pay; clips other seconds at twice the known ones."""
        seconds = record.seconds.total
        batch_size = len(record.sequences)
        if not self._probes.num_idle:
            known = self._cost(record.num_tokens) + float(self._host(batch_size * tokens))
            rest = min(seconds - record.seconds.draft, _LARGEST_RATIO * known)
            known_draft = (self._fixed + deepest) * _fastest(self._levels) / self._slowdown()
            seconds = rest + min(known_draft, record.seconds.draft)
        plain = float(self._pass_seconds(batch_size)[0] + self._host(batch_size))
        self._probes.spend(seconds / plain - tokens, tokens)

    def _pass_seconds(self, batch_size: int) -> list[float]:
        if self._table is None or self._table[0] != batch_size or self._age >= _REFRESH_EVERY:
            self._table, self._age = (batch_size, [self._cost(batch_size * nodes) for nodes in self._nodes]), 0
        self._age += 1
        return self._table[1]

    def _slowdown(self) -> float:
        return max(_fastest(self._slower), 1.0)

    def _age_evidence(self) -> None:
        """Lowers the weight of what was seen before a probe: the text may have changed."""
        share = WEIGHT_AT_PROBE / max(self._reached[0], WEIGHT_AT_PROBE)
        self._reached = [each * share for each in self._reached]
        self._accepted = [each * share for each in self._accepted]

    def _conditional(self) -> list[float]:
        """P(token is accepted | the tokens before it are) by depth; expected rates are scaled to past acceptance."""
        led_to = sum(reached * expected for reached, expected in zip(self._reached, self._expected, strict=True))
        scale = (sum(self._accepted) + _SCALE_WEIGHT) / (led_to + _SCALE_WEIGHT)
        rates: list[float] = []
        for accepted, reached, expected in zip(self._accepted, self._reached, self._expected, strict=True):
            least = _STEEPEST * rates[-1] if rates else 0.0
            guess = min(max(scale * expected, least), 1.0)
            rates.append((accepted + _PRIOR * guess) / (reached + _PRIOR))
        return rates


def _fixed_levels(timed: Sequence[tuple[int, float]]) -> float:
    """Returns the fixed seconds of a draft, in levels, from the fastest drafts of two depths.

    Without a fixed cost, a shallow draft would make deeper drafts seem too expensive to try.
    """
    fastest = fastest_by_depth(timed)
    shallow, deep = min(fastest, default=0), max(fastest, default=0)
    if shallow == deep:
        return 0.0
    level = max((fastest[deep] - fastest[shallow]) / (deep - shallow), 0.0)
    most = _MOST_FIXED * level
    return min(max(fastest[shallow] - shallow * level, 0.0), most) / level if level else _MOST_FIXED


def _fastest(seconds: Sequence[float]) -> float:
    return min(seconds) if len(seconds) >= _NUM_FREE else 0.0
