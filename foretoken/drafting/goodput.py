"""The controller: in each iteration it does what brings most expected tokens per second (`plans`).

The seconds are those of the cost model (`costs`), the tokens those of the acceptance model (`acceptance`). Both are
estimates, and both learn only from what is done. `Exploration` is the one rule by which something else is done.

Several drafters are asked one by one, each time the one that adds most, until none adds any. Drafters that cost almost
nothing are asked first. The proposals of all are merged, lookups continue below the best leaves of others, and the
nodes that are worth their cost are verified. A chain, or a head's tree of fixed shape, of a single drafter is verified
whole, so that the host need not read it: there the depth is all that is chosen.

Letters: B sequences, N nodes, D levels.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from foretoken.core.records import Declined
from foretoken.core.token_tree import MAX_NODES, PROBE, DrawKind
from foretoken.drafting.acceptance import LevelAcceptance, NodeAcceptance, log_odds_of
from foretoken.drafting.base import UNBOUNDED, Allotment, Allowance, Ask
from foretoken.drafting.costs import LONGEST, CostModel
from foretoken.drafting.exploration import Exploration
from foretoken.drafting.host_trees import (
    HostMerge,
    LookupChain,
    grafts_on,
    kept_nodes,
    learn_chain,
    learn_followed,
    on_host,
    path_values,
    valued,
    with_values,
)
from foretoken.drafting.plans import AtHand, Candidate, Costs, best_depth, buy, stop
from foretoken.trees.merge import grafted, merge_trees, prune

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from foretoken.core.records import SequenceStep, StepRecord
    from foretoken.core.token_tree import TokenTree
    from foretoken.drafting.acceptance import KeptAcceptance, Learner
    from foretoken.drafting.base import Continue
    from foretoken.drafting.host_trees import HostTree
    from foretoken.drafting.plans import DraftPlan
    from foretoken.runner.costs import CostCurve
    from foretoken.trees.merge import Graft

_FREE = 0.03  # share of a plain iteration: a cheaper drafter is always asked, and first
_WIDTH_RATE = 0.1  # weight of a draft in the mean number of nodes per level
_DECIDE_EVERY = 4  # iterations that share a decision once it repeats


class _Known:
    """Estimates of one drafter.

    Attributes:
        deepest: Levels of its deepest drafts.
        nodes: Of the nodes that it proposes.
        grafts: Of the chains that it proposes below drafts of other drafters.
        levels: By the drafters that were asked before and cost something.
        widths: (D,) nodes that are verified per level of a sequence.
        hits: Share of the sequences for which it proposes anything.
    """

    def __init__(self, nodes_by_depth: Sequence[int], expected: Sequence[float], *, is_read: bool) -> None:
        self.nodes_by_depth, self.deepest = nodes_by_depth, min(len(nodes_by_depth) - 1, 64)
        self.nodes, self.grafts = NodeAcceptance(), NodeAcceptance()
        self.levels = {frozenset[int](): LevelAcceptance(self.deepest, expected)}
        self.shape = np.diff(nodes_by_depth)[: self.deepest].astype(np.float64)
        self.widths = np.minimum(self.shape, 1.0) if is_read else self.shape.copy()
        self.hits = 1.0

    def after(self, others: frozenset[int]) -> LevelAcceptance:
        if others not in self.levels:
            self.levels[others] = self.levels[frozenset()].halved()
        return self.levels[others]

    def age(self) -> None:
        self.nodes.age()
        for levels in self.levels.values():
            levels.age()


class _Answer(NamedTuple):
    """A drafter's tree.

    Attributes:
        tree: As the drafter returned it.
        host: The tree on the host.
        odds: (B, N), see `log_odds_of`.
        values: (B, N) calibrated.
        reach: (B, D) probability that the tree is right down to each depth.
    """

    tree: TokenTree
    host: HostTree
    odds: NDArray[np.float64] | None
    values: NDArray[np.float64]
    reach: NDArray[np.float64]


class Goodput:
    """The controller of any number of drafters."""

    def __init__(
        self,
        cost: CostCurve | None,
        *,
        nodes_by_depth: Sequence[Sequence[int]],
        max_nodes: int,
        is_read: bool = True,
        timed: Sequence[Sequence[tuple[int, float]]] = (),
        expected: Sequence[float] = (),
    ) -> None:
        """Starts without observations.

        Args:
            cost: Seconds of a pass; None if none were measured.
            nodes_by_depth: Of each drafter, see `foretoken.drafters.base.Drafter`.
            max_nodes: Most nodes of a verified tree, root included.
            is_read: Whether nodes are bought. False for a single drafter whose trees are verified whole.
            timed: Depth and seconds of each drafter's timed drafts; empty for none.
            expected: Of a single drafter, see `LevelAcceptance`.
        """
        self._max_nodes, self._is_read = max_nodes, is_read
        self._known = [_Known(nodes, expected, is_read=is_read) for nodes in nodes_by_depth]
        deepest = [known.deepest for known in self._known]
        self._costs = CostModel(cost, deepest, timed or [()] * len(deepest))
        self._exploration = Exploration()
        self._kept: KeptAcceptance | None = None
        self._held: Allotment | None = None  # a decision that holds until an iteration
        self._held_until = self._last_depth = 0
        self._gain = 0.0  # plain iterations that an iteration with drafts saves, fading
        self._free = frozenset[int]()
        self._begin(0)

    @property
    def learners(self) -> list[Learner]:
        """What is worth storing for the next process."""
        return [each for known in self._known for each in (known.nodes, known.grafts, known.after(frozenset()))]

    def keep_learned(self, kept: KeptAcceptance) -> None:
        """Stores what is learned from now on: now and then, and when this controller or the process ends."""
        self._kept = kept
        weakref.finalize(self, kept.keep)

    def plain_seconds(self, batch_size: int) -> float | None:
        """Returns the seconds of an iteration without drafts; None before one was measured."""
        costs = self._costs
        return costs.machine * costs.plain(batch_size) if costs.num_passes(batch_size) >= 1 else None

    def _begin(self, batch_size: int) -> None:
        self._batch = batch_size
        self._answers: dict[int, _Answer] = {}  # in the order of arrival
        self._asked: dict[int, int] = {}  # levels
        self._plan: DraftPlan | None = None
        self._grafts: list[LookupChain] = []

    def allot(self, batch_size: int) -> Allotment:
        """Asks the free drafters, or the first drafter that pays; nobody if none pays or plain decoding is measured."""
        self._exploration.next()
        held, now = self._held, self._exploration.count
        is_ended = now >= self._held_until or (self._exploration.is_spent and held is not None and not held.is_empty)
        if held is not None and not is_ended and len(held.allowances) == batch_size:
            if self._is_read:
                self._begin(batch_size)
                if held.first is not None:
                    self._asking(held.first)
            return held
        self._held = None
        self._begin(batch_size)
        first = None if self._exploration.is_spent else self._first(self._costs.plain(batch_size))
        if first is None:
            self._exploration.note(("plain", batch_size))
            self._held, self._held_until = Allotment.nothing(batch_size, self._reason()), self._exploration.next_try
            return self._held
        if self._is_look_due():
            self._begin(batch_size)
            return Allotment.nothing(batch_size)
        depth = UNBOUNDED if self._is_read else first.depth
        allotment = Allotment(allowances=[Allowance(depth=depth, nodes=self._max_nodes)] * batch_size, first=first)
        if len(self._known) == 1 and self._plan is not None and first.depth == self._last_depth:
            self._held, self._held_until = allotment, now + _DECIDE_EVERY
        self._last_depth = first.depth
        return allotment

    def _first(self, plain: float) -> Ask | None:
        if self._is_read:
            drafts = [float(self._costs.draft(i)[-1]) for i in range(len(self._known))]
            self._free = frozenset(i for i, seconds in enumerate(drafts) if seconds <= _FREE * plain)
            if self._free:
                return self._asking(Ask(sorted(self._free)))
        return self.further({})

    def _is_look_due(self) -> bool:
        is_known = self._costs.num_passes(self._batch) >= 1
        return self._exploration.is_due(("plain", self._batch), self._gain if is_known else 0.0)

    def _reason(self) -> Declined:
        costs = self._all_costs()
        candidates = [self._candidate(i) for i in range(len(self._known))]
        plans = [best_depth(AtHand.nothing(self._batch), each, costs) for each in candidates]
        i = max(range(len(plans)), key=lambda i: plans[i].rate)
        width = max(round(plans[i].width), self._batch + 1)
        return Declined(
            width=width,
            pass_cost=float(costs.passes[width] / costs.passes[self._batch]),
            draft_cost=float(candidates[i].seconds[plans[i].depth - 1] / costs.passes[self._batch]),
            acceptance=float(candidates[i].reach[0]) if self._known[i].after(frozenset()).num_seen else None,
            hit_rate=self._known[i].hits,
        )

    def further(self, trees: Mapping[int, TokenTree]) -> Ask | None:
        """Returns the drafter that adds most, or a drafter to be tried; None if there is neither."""
        if self._is_read:
            self._take(trees)
        costly = [i for i in range(len(self._known)) if i not in self._asked and i not in self._free]
        if not costly:
            return None
        at_hand, costs = self._at_hand(), self._all_costs()
        plans = {i: best_depth(at_hand, self._candidate(i), costs) for i in costly}
        best = max(costly, key=lambda i: plans[i].rate)
        now = stop(at_hand, costs)
        if plans[best].rate > now.rate:
            self._plan = plans[best]
            self._exploration.note(best)
            return self._asking(Ask((best,), plans[best].depth))
        for i in costly:
            loss = (plans[i].seconds * now.rate - plans[i].tokens) / self._batch
            if self._exploration.is_due(i, loss):
                if self._exploration.is_beginning(i):
                    self._known[i].age()
                    self._costs.age(i)
                return self._asking(Ask((i,), plans[i].depth))
        return None

    def _asking(self, ask: Ask) -> Ask:
        self._asked.update((i, min(ask.depth, self._known[i].deepest)) for i in ask.drafters)
        return ask

    def _all_costs(self) -> Costs:
        passes = self._costs.passes(self._batch, self._batch * self._max_nodes)
        merging = self._costs.merging.line[1]
        return Costs(passes, self._costs.host, merging)

    def _candidate(self, i: int) -> Candidate:
        known = self._known[i]
        levels = known.after(frozenset(self._answers) - self._free)  # given the answers that cost something
        widths = np.maximum(known.widths, known.hits)  # a level takes at least one node: unbought levels bring nothing
        miss, seconds, hits = self._costs.draft(i)[0], self._costs.draft(i)[1:], known.hits
        return Candidate(hits * levels.survival(), widths, hits * seconds + (1 - hits) * miss)

    def _at_hand(self) -> AtHand:
        """Returns the answers so far. Where several trees go as deep, their nodes count as those of one tree."""
        answers = [answer for answer in self._answers.values() if answer.reach.shape[1]]
        if not answers:
            return AtHand.nothing(self._batch)._replace(draft_s=self._draft_s())
        deepest = max(answer.reach.shape[1] for answer in answers)
        padded = [np.pad(answer.reach, ((0, 0), (0, deepest - answer.reach.shape[1]))) for answer in answers]
        reach, total = np.max(padded, axis=0), np.maximum(np.sum(padded, axis=0), 1e-9)
        values = []
        for answer in answers:
            rows, nodes = np.nonzero(answer.host.is_drafted)
            levels = answer.host.depths[rows, nodes] - 1
            values.append(answer.values[rows, nodes] * (reach / total)[rows, levels])
        return AtHand(reach, -np.sort(-np.concatenate(values)), self._draft_s())

    def _draft_s(self) -> float:
        return sum(float(self._costs.draft(i)[depth]) for i, depth in self._asked.items())

    def _take(self, trees: Mapping[int, TokenTree]) -> None:
        for i, tree in trees.items():
            if i in self._answers:
                continue
            self._asked.setdefault(i, self._known[i].deepest)
            self._batch, host = tree.batch_size, on_host(tree)
            odds = log_odds_of(host.scores, host.parents)
            values = path_values(host, self._known[i].nodes, odds)
            deepest = int(host.depths.max(initial=0))
            places = host.depths + (deepest + 1) * np.arange(self._batch)[:, None]
            sums = np.bincount(places[host.is_drafted], values[host.is_drafted], self._batch * (deepest + 1))
            levels = sums.reshape(self._batch, -1)[:, 1:]
            reach = np.minimum.accumulate(np.minimum(levels, 1.0), axis=1)
            self._answers[i] = _Answer(tree, host, odds, values, reach)

    def select(self, trees: Mapping[int, TokenTree], continued: Continue | None = None) -> TokenTree:
        """Returns the nodes worth their cost, grafted nodes included. Synchronises if nodes are bought."""
        if not self._is_read:
            (tree,) = trees.values()
            return tree
        self._take(trees)
        answers = self._fitting()
        if not answers:
            return next(iter(trees.values()))
        is_drawn: NDArray[np.bool_] | None = None
        device = next(iter(trees.values())).tokens.device
        if any(answer.tree.distributions is not None for answer in answers.values()):
            merged, host = self._merged(answers, continued)
            if merged.distributions is not None:
                is_drawn = (merged.distributions.kinds != DrawKind.ONE_HOT).cpu().numpy()
        else:
            merged, host = None, self._merged_on_host(answers, continued)
        assert host.scores is not None
        values = np.exp(host.scores.astype(np.float64))
        draft_s = self._draft_s() + self._costs.merging(len(answers))
        bought = buy(host, values, self._all_costs(), draft_s=draft_s, max_nodes=self._max_nodes, is_drawn=is_drawn)
        self._note_widths(host, bought.kept)
        if merged is None:
            has_sources = len(self._known) > 1 or bool(host.sources.any())
            return kept_nodes(host, bought.kept, device, has_sources=has_sources)
        if not bought.is_everything:
            merged = prune(merged, torch.from_numpy(bought.kept).to(device))
        return merged.narrowed()

    def _merged(self, answers: Mapping[int, _Answer], continued: Continue | None) -> tuple[TokenTree, HostTree]:
        """Merges trees that hold drawn nodes, and grafts lookups below them; returns also a copy on the host."""
        # In the order of asking: whether a later drafter was asked may depend on what earlier ones drew.
        trees = [with_values(answer.tree, answer.values) for answer in answers.values()]
        if len(self._known) == 1:
            return trees[0], on_host(trees[0])
        merged = merge_trees(trees, max_nodes=MAX_NODES, drafters=list(answers))
        host = on_host(merged)
        grafts = [] if continued is None else self._grafts_on(host, continued)
        if not grafts:
            return merged, host
        merged = grafted(merged, grafts, max_nodes=MAX_NODES)
        return merged, on_host(merged)

    def _merged_on_host(self, answers: Mapping[int, _Answer], continued: Continue | None) -> HostTree:
        trees = [valued(answer.host, answer.values) for answer in answers.values()]
        if len(self._known) == 1:
            return trees[0]
        union = HostMerge(trees, list(answers), max_nodes=MAX_NODES)
        host = union.tree()
        grafts = [] if continued is None else self._grafts_on(host, continued)
        for graft in grafts:
            union.graft(graft)
        return union.tree() if grafts else host

    def _grafts_on(self, host: HostTree, continued: Continue) -> list[Graft]:
        chains, grafts = grafts_on(host, continued, [known.grafts for known in self._known])
        self._grafts += chains
        return grafts

    def _fitting(self) -> dict[int, _Answer]:
        """Returns the trees to merge, in the order of arrival.

        Drawn nodes and probes are verified at any cost, so a tree with such nodes is merged as a whole or not at all.
        The size of its drafter's greatest tree decides: the size of the tree at hand may depend on what was drawn.
        """
        room, result = self._max_nodes - 1, dict[int, _Answer]()
        for i, answer in self._answers.items():
            if answer.tree.width < 2:
                continue
            if answer.tree.distributions is not None or (answer.host.sources[:, 1:] & PROBE).any():
                known = self._known[i]
                most = known.nodes_by_depth[self._asked[i] if self._asked[i] < known.deepest else -1] - 1
                if most > room and len(self._known) > 1:
                    continue
                room -= most
            result[i] = answer
        return result

    def _note_widths(self, host: HostTree, kept: NDArray[np.bool_]) -> None:
        before = sum(1 << i for i in self._free)
        for i in self._answers:
            known, is_new = self._known[i], kept & host.is_drafted
            if len(self._known) > 1:
                is_new &= (host.sources >> i & 1 == 1) & (host.sources & before == 0)
            levels = np.bincount(host.depths[is_new], minlength=known.deepest + 1)[1 : known.deepest + 1]
            asked = slice(0, self._asked[i])
            known.widths[asked] += _WIDTH_RATE * (levels[asked] / self._batch - known.widths[asked])
            before |= 1 << i

    def learn_step(self, record: StepRecord) -> None:
        """Learns acceptance and seconds. While nobody is asked, learns from every n-th iteration only."""
        steps, is_asked = record.sequences, bool(self._asked)
        is_due = self._exploration.count % _DECIDE_EVERY == 0
        emitted = sum(step.num_emitted for step in steps)
        if is_asked and not record.num_prompt_tokens:
            loss = self._loss(record, emitted)
            self._exploration.charge(loss)
            self._gain -= _WIDTH_RATE * (loss + self._gain)
        else:
            self._exploration.charge(0.0)
        if is_asked or is_due or self._held is None:
            self._costs.learn(record)
        if not is_asked:
            return
        if not self._is_read:
            self._learn_depths(steps)
        elif len(steps) == self._batch:  # else the batch failed and was decoded again one by one
            self._learn_trees(steps)
        if self._kept is not None:
            self._kept.learned()

    def _loss(self, record: StepRecord, emitted: int) -> float:
        """Returns by how much an iteration was slower than plain decoding of its tokens."""
        costs, batch, width = self._costs, len(record.sequences), record.num_tokens
        expected = float(costs.passes(batch, width)[width] + costs.host(emitted))
        for each in record.asked:
            expected += float(costs.draft(each.index)[min(each.depth, self._known[each.index].deepest)])
        seconds = min(record.seconds.total / costs.machine, LONGEST * expected)
        return seconds / costs.plain(batch) - emitted / batch

    def _learn_depths(self, steps: Sequence[SequenceStep]) -> None:
        (known,) = self._known
        for step in steps:
            if step.tree_depth or step.num_proposed is not None:  # else it was not asked for
                known.hits += _WIDTH_RATE * ((step.tree_depth > 0) - known.hits)
        known.widths = known.shape * known.hits
        drafted = [step for step in steps if step.tree_depth]
        right, last = [step.num_accepted for step in drafted], [step.tree_depth for step in drafted]
        known.after(frozenset()).learn([0] * len(drafted), right, last)

    def _learn_trees(self, steps: Sequence[SequenceStep]) -> None:
        """Counts which nodes the generated tokens followed, of each drafter given the drafters asked before it."""
        before, costly = [0] * self._batch, frozenset[int]()
        for i, answer in self._answers.items():
            known = self._known[i]
            right = learn_followed(answer.host, known.nodes, answer.odds, steps)
            has_hit = answer.host.is_drafted.any(1)
            hits = np.flatnonzero(has_hit).tolist()
            if hits:
                last = [min(self._asked[i], len(steps[b].tokens)) for b in hits]
                known.after(costly).learn([before[b] for b in hits], [right[b] for b in hits], last)
            known.hits += _WIDTH_RATE * (float(has_hit.mean()) - known.hits)
            before = [max(pair) for pair in zip(before, right, strict=True)]
            costly |= {i} - self._free
        for each in self._grafts:
            learn_chain(self._known[each.drafter].grafts, each, steps[each.leaf.row].tokens)
