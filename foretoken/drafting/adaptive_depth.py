"""How deep a draft pays: expected tokens per second from measured costs and measured acceptance.

With c(T) the seconds of a target pass over T tokens, d(K) those of drafting K levels, h(n) those of the host for n
tokens, w(K) the nodes of a draft of depth K, q the probability that the drafter has anything to say and A_k the
probability that at least k of its tokens survive, asking for a draft of depth K earns n = 1 + A_1 + … + A_K tokens in
c(w(K)) + d(K) + h(n) seconds with probability q, and else one token in c(1) + d(0) + h(1). Of these depths the best is
taken among those whose draft, were nothing of it accepted, would lose at most half of what earlier drafts gained.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from foretoken.core.records import Declined
from foretoken.drafting.base import Allotment, Allowance
from foretoken.drafting.draft_costs import FadingLine, fastest_by_depth
from foretoken.drafting.probing import WEIGHT_AT_PROBE, ProbeSchedule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from foretoken.core.records import StepRecord
    from foretoken.core.token_tree import TokenTree
    from foretoken.drafting.base import Continue
    from foretoken.runner.costs import CostCurve

_HALF_LIFE = 40.0  # drafts after which an observation counts half
_DRAFTS_KEPT = 9
_REFRESH_EVERY = 8  # iterations for which costs are taken from the table
_DECIDE_EVERY = 32  # iterations without drafts after which the decision is made anew
_LARGEST_RATIO = 2.0  # of what an iteration took to what it is known to take: one that was interrupted says little
_GUESS, _LEAST_RATE, _LARGEST_RATE = 0.6, 0.05, 0.98  # rate where none is known, and of those that are believed
_SCALE_WEIGHT = 1.5  # accepted tokens that expected rates are worth as they are
_PRIOR = 4.0  # tokens that the expected rate is worth at each depth
_STEEPEST = 0.5  # of a rate to the one before, as far as it is expected alone: deeper drafts are tried then
_MOST_FIXED = 16.0  # levels that what is done once a draft may take
_NUM_FREE = 2  # drafts whose seconds are not held against the next ones: the first reads the prompt
_FADE = 0.5 ** (1.0 / _HALF_LIFE)


class AdaptiveDepth:
    """A controller that chooses the depth of the next draft from what recent drafts brought; for one drafter."""

    def __init__(
        self,
        cost: CostCurve,
        nodes_by_depth: Sequence[int],
        *,
        timed: Sequence[tuple[int, float]] = (),
        expected: Sequence[float] = (),
    ) -> None:
        """A controller that has seen nothing of the drafter yet.

        Args:
            cost: Seconds of a pass.
            nodes_by_depth: Of the drafter, see `foretoken.drafters.base.Drafter`.
            timed: Depth and seconds of drafts that were timed before, as far as there are some.
            expected: P(token d survives | the ones before did) by depth, as far as it is known.
        """
        max_depth = len(nodes_by_depth) - 1
        self._cost, self._max_depth = cost, max_depth
        self._nodes = list(nodes_by_depth)
        self._reached = [0.0] * max_depth  # drafts whose first d tokens were tested or accepted, fading
        self._accepted = [0.0] * max_depth  # of these, the ones that accepted token d
        known = [min(max(each, _LEAST_RATE), _LARGEST_RATE) for each in expected] or [_GUESS]
        self._expected = [*known, *([known[-1]] * max_depth)][:max_depth]
        self._asked = self._answered = 1.0  # sequences that were to be drafted for, and those that were, fading
        self._fixed = _fixed_levels(timed)  # what a draft takes besides its levels, in levels
        self._levels = deque(  # seconds a level of recent drafts
            (seconds / (self._fixed + depth) for depth, seconds in timed), maxlen=_DRAFTS_KEPT
        )
        self._misses: deque[float] = deque(maxlen=_DRAFTS_KEPT)  # seconds of recent calls that brought nothing
        # For each of these drafts: the pass time of its iteration divided by the known pass time.
        self._slower: deque[float] = deque([1.0] * min(len(timed), _DRAFTS_KEPT), maxlen=_DRAFTS_KEPT)
        self._host = FadingLine()  # seconds of accepting and committing by tokens emitted
        self._is_asking = False
        self._is_wanted = False  # whether drafting pays from the next iteration on, of which drafters hear first
        self._probes = ProbeSchedule()
        self._table: tuple[int, list[float]] | None = None  # batch size, seconds of passes by depth
        self._age = 0
        self._reason: Declined | None = None  # of the last decision against drafting
        self._price = 0.0  # what a probe adds to an iteration of plain decoding, as a share of it
        self._declining: Allotment | None = None  # made for that decision

    @property
    def declined(self) -> Declined | None:
        """Why the last call of `depth` chose not to draft; None where it chose a draft, be it to learn from."""
        return None if self._is_asking else self._reason

    def allot(self, batch_size: int) -> Allotment:
        """The same depth for everyone."""
        depth = self.depth(batch_size)
        may_draft_next = depth > 0 or self._is_wanted or self._probes.is_near
        known = self._declining
        if depth == 0 and known is not None and (len(known.allowances), known.may_draft_next) == (
            batch_size, may_draft_next
        ):  # fmt: skip
            return known
        allowance = Allowance(depth=depth, nodes=self._nodes[-1])
        allotment = Allotment(
            allowances=[allowance] * batch_size, declined=self.declined, may_draft_next=may_draft_next
        )
        self._declining = None if depth else allotment
        return allotment

    def further(self, trees: Mapping[int, TokenTree]) -> None:
        """There is nobody else to ask."""

    def select(self, trees: Mapping[int, TokenTree], continued: Continue | None = None) -> TokenTree:
        """The drafter's tree: how deep it may be was decided before."""
        del continued
        (tree,) = trees.values()
        return tree

    def depth(self, batch_size: int) -> int:
        """Depth that earns the most tokens per second for a batch; 0 where plain decoding does.

        Args:
            batch_size: Sequences in the pass.
        """
        is_announced = self._is_asking or self._is_wanted or not self._probes.num_idle
        best = self._paying_depth(batch_size) if self._is_due(batch_size) else 0
        self._is_wanted = best > 0 and not is_announced
        self._is_asking = best > 0 and is_announced
        if self._is_asking:
            self._probes.reset()
            return best
        self._is_asking = self._probes.advance(self._price)
        if self._probes.is_beginning:
            self._age_evidence()
        return int(self._is_asking)

    def _is_due(self, batch_size: int) -> bool:
        """Whether to decide anew: while nothing is drafted, an iteration teaches nothing that would change much."""
        idle = self._probes.num_idle
        is_idle = idle > 1 and not self._is_asking and not self._is_wanted
        return not is_idle or idle % _DECIDE_EVERY == 0 or self._table is None or self._table[0] != batch_size

    def _paying_depth(self, batch_size: int) -> int:
        """The depth that earns most; 0 where plain decoding does.

        Plain numbers, not arrays: for a dozen depths numpy's operations take several times as long.
        """
        # The fastest: a draft that also reads a prompt, or all that passed while nothing was drafted, takes many times
        # as long and says nothing of the next one.
        # If another program slows the machine down, passes take longer too; known pass times follow slowly.
        slower = self._slowdown()
        level, miss = _fastest(self._levels) / slower, _fastest(self._misses) / slower
        passes = self._pass_seconds(batch_size)
        host, host_per_token = self._host.line
        plain = passes[0] + host + host_per_token * batch_size
        hit, stake = self._answered / self._asked, self._probes.savings.stake
        conditional = self._conditional()
        survival = tokens = 1.0
        best = best_within = 0  # of all depths, and of those that do not lose more than may be lost
        rate = rate_within = 0.0
        for depth, each in enumerate(conditional, start=1):
            survival *= each
            tokens += survival
            draft = max((self._fixed + depth) * level, miss)
            asked = passes[depth] + draft + host + host_per_token * batch_size * tokens
            reached = (hit * tokens + 1 - hit) / (hit * asked + (1 - hit) * (plain + miss))
            if reached > rate:
                best, rate = depth, reached
            # What a draft loses of which nothing is accepted.
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

    def learn(self, record: StepRecord) -> None:
        """Counts an iteration's drafts and their cost; of iterations without drafts, now and then one."""
        if not self._is_asking:
            self._probes.save()
            if self._probes.num_idle % _REFRESH_EVERY:
                return
        emitted = sum(step.num_emitted for step in record.sequences)
        if not record.num_prompt_tokens:  # else the pass took longer than its trees do, and the host had others too
            if self._is_asking:
                self._slower.append(record.seconds.verify / self._cost(record.num_tokens))
            self._cost.learn(record.num_tokens, record.seconds.verify)
            self._host.learn(emitted, record.seconds.accept + record.seconds.commit)
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
        """Accounts for an iteration with a draft against plain decoding.

        A draft that is made because it pays counts as fast as recent ones, and the rest as at most twice what it is
        known to take: reading a prompt, or another program on the machine, is no reason to give up.
        """
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
        """Seconds of passes at depths 0, 1, …; read off the curve anew now and then, as it hardly moves."""
        if self._table is None or self._table[0] != batch_size or self._age >= _REFRESH_EVERY:
            self._table, self._age = (batch_size, [self._cost(batch_size * nodes) for nodes in self._nodes]), 0
        self._age += 1
        return self._table[1]

    def _slowdown(self) -> float:
        """Returns the present pass time divided by the known pass time, at least 1."""
        return max(_fastest(self._slower), 1.0)

    def _age_evidence(self) -> None:
        """Makes what was accepted before a probe count less than the probe, which may find another text."""
        share = WEIGHT_AT_PROBE / max(self._reached[0], WEIGHT_AT_PROBE)
        self._reached = [each * share for each in self._reached]
        self._accepted = [each * share for each in self._accepted]

    def _conditional(self) -> list[float]:
        """P(token survives | the ones before did) by depth, drawn towards what is expected where little is known.

        Expected rates count in their proportion: all are scaled by what was accepted for what they had led to expect.
        """
        led_to = sum(reached * expected for reached, expected in zip(self._reached, self._expected, strict=True))
        scale = (sum(self._accepted) + _SCALE_WEIGHT) / (led_to + _SCALE_WEIGHT)
        rates: list[float] = []
        for accepted, reached, expected in zip(self._accepted, self._reached, self._expected, strict=True):
            least = _STEEPEST * rates[-1] if rates else 0.0
            guess = min(max(scale * expected, least), 1.0)
            rates.append((accepted + _PRIOR * guess) / (reached + _PRIOR))
        return rates


def _fixed_levels(timed: Sequence[tuple[int, float]]) -> float:
    """How many levels take as long as what is done once a draft, by the fastest drafts of two depths.

    Were drafts held to take as long as their levels alone, a shallow one would make deeper ones seem dearer than they
    are, and nobody would try them.
    """
    fastest = fastest_by_depth(timed)
    shallow, deep = min(fastest, default=0), max(fastest, default=0)
    if shallow == deep:
        return 0.0
    level = max((fastest[deep] - fastest[shallow]) / (deep - shallow), 0.0)
    most = _MOST_FIXED * level
    return min(max(fastest[shallow] - shallow * level, 0.0), most) / level if level else _MOST_FIXED


def _fastest(seconds: Sequence[float]) -> float:
    """Seconds of the fastest of recent drafts; 0 before enough of them were made to tell."""
    return min(seconds) if len(seconds) >= _NUM_FREE else 0.0
