"""The controller of several drafters: which drafter to ask, which nodes to verify, where lookups continue drafts.

Drafters that cost almost nothing are asked first. The others are asked one by one, each time the one that adds most
tokens per second, until none adds any (`asking`). All proposals are merged into one tree. Chains of lookups are grafted
below the best leaves that others proposed. Nodes are bought (`buying`). A drafter that is not asked is tried now and
then (`ProbeSchedule`), so that a change of text is noticed.

Letters: B sequences, N nodes, D levels.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from foretoken.core.records import Declined
from foretoken.core.token_tree import MAX_NODES, PROBE
from foretoken.drafting.asking import AtHand, Candidate, Costs, KnownDrafter, best_depth, choose
from foretoken.drafting.base import UNBOUNDED, Allotment, Allowance, Ask
from foretoken.drafting.buying import buy, drawn_nodes
from foretoken.drafting.draft_costs import FadingLine
from foretoken.drafting.host_trees import (
    HostMerge,
    LookupChain,
    count_followed,
    grafts_on,
    learn_chain,
    on_host,
    valued,
    values_of,
    with_values,
)
from foretoken.drafting.measured_gain import WEIGHT_AT_PROBE
from foretoken.trees.merge import grafted, merge_trees

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from foretoken.core.records import AskedDrafter, StepRecord
    from foretoken.core.token_tree import TokenTree
    from foretoken.drafting.base import Continue
    from foretoken.drafting.buying import Purchase
    from foretoken.drafting.calibration import KeptAcceptance, Learner
    from foretoken.drafting.host_trees import HostTree
    from foretoken.runner.costs import CostCurve
    from foretoken.trees.merge import Graft

_FREE = 0.03  # share of a plain iteration: a cheaper drafter is always asked, and first
_WIDTH_RATE = 0.1  # weight of a draft in the mean number of nodes bought per level
_LEARN_EVERY = 8  # learns from every 8th iteration without drafts
_REASON_EVERY = 32  # iterations without drafts that share one reason


class _Answer(NamedTuple):
    """A drafter's tree.

    Attributes:
        tree: As the drafter returned it.
        host: The tree on the host.
        values: (B, N) calibrated.
        reach: (B, D) probability that the tree is right down to each depth.
    """

    tree: TokenTree
    host: HostTree
    values: NDArray[np.float64]
    reach: NDArray[np.float64]


class SeveralDrafters:
    """A controller for any number of drafters."""

    def __init__(
        self,
        cost: CostCurve,
        *,
        nodes_by_depth: Sequence[Sequence[int]],
        max_nodes: int,
        timed: Sequence[Sequence[tuple[int, float]]] = (),
    ) -> None:
        """Starts without observations of acceptance.

        Args:
            cost: Seconds of a pass.
            nodes_by_depth: Of each drafter, see `foretoken.drafters.base.Drafter`.
            max_nodes: Most nodes of a verified tree, root included.
            timed: Of each drafter, see `DraftSeconds`; empty for none.
        """
        self._cost, self._max_nodes = cost, max_nodes
        self._known = [
            KnownDrafter(*each) for each in zip(nodes_by_depth, timed or [()] * len(nodes_by_depth), strict=True)
        ]
        self._host, self._merging = FadingLine(), FadingLine()  # by emitted tokens; by trees with nodes
        self._num_declined = 0  # in a row
        self._declined: Declined | None = None
        self._kept: KeptAcceptance | None = None
        self._free = frozenset[int]()  # drafters that cost almost nothing
        self._begin(0)

    @property
    def learners(self) -> list[Learner]:
        """What is worth storing for the next process."""
        return [each for known in self._known for each in (known.calibration, known.grafts, known.first_reach)]

    def keep_learned(self, kept: KeptAcceptance) -> None:
        """Stores what is learned from now on: now and then, and when this controller or the process ends."""
        self._kept = kept
        weakref.finalize(self, kept.keep)

    def _begin(self, batch_size: int) -> None:
        self._batch = batch_size
        self._answers: dict[int, _Answer] = {}  # in the order of arrival
        self._asked: dict[int, int] = {}  # levels
        self._judged: set[int] = set()  # drafters that were considered for probes
        self._grafts: list[LookupChain] = []
        self._bought: Purchase | None = None

    def allot(self, batch_size: int) -> Allotment:
        """Asks the free drafters, or the first drafter that pays if none is free; no drafter while none pays."""
        self._begin(batch_size)
        plain = self._plain()
        self._free = frozenset(i for i, known in enumerate(self._known) if known.seconds.of_deepest <= _FREE * plain)
        first = self._asking(Ask(sorted(self._free))) if self._free else self.further({})
        if first is not None:
            self._num_declined = 0
            return Allotment(allowances=[Allowance(depth=UNBOUNDED, nodes=self._max_nodes)] * batch_size, first=first)
        self._asked.clear()
        self._num_declined += 1
        if self._declined is None or self._num_declined % _REASON_EVERY == 1:
            self._declined = self._reason()
        return Allotment.nothing(batch_size, self._declined)

    def further(self, trees: Mapping[int, TokenTree]) -> Ask | None:
        """Returns the drafter that adds most, or a drafter to be tried; None if there is neither."""
        self._take(trees)
        costly = [i for i in range(len(self._known)) if i not in self._asked and i not in self._free]
        if not costly:
            return None
        at_hand, costs = self._at_hand(), self._costs()
        candidates = {i: self._candidate(i) for i in costly}
        paying = {i: each for i, each in candidates.items() if not self._known[i].probes.savings.is_spent}
        choice = choose(at_hand, paying, costs)
        if choice.drafter is not None:
            self._judged.add(choice.drafter)
            self._known[choice.drafter].probes.reset()
            return self._asking(Ask((choice.drafter,), choice.depth))
        for i in costly:
            if i in self._judged:
                continue
            self._judged.add(i)
            known, (depth, _) = self._known[i], best_depth(at_hand, candidates[i], costs)
            width = self._batch * float(candidates[i].widths[:depth].sum())
            added = (
                float(candidates[i].seconds[depth - 1])
                + self._cost(round(self._batch + width))
                - self._cost(self._batch)
            )
            is_probe = known.probes.advance(added / self._plain())
            if known.probes.is_beginning:
                known.calibration.age(WEIGHT_AT_PROBE)
                known.first_reach.age(WEIGHT_AT_PROBE)
            if is_probe:
                return self._asking(Ask((i,), depth))
        return None

    def _asking(self, ask: Ask) -> Ask:
        self._asked.update((i, min(ask.depth, self._known[i].deepest)) for i in ask.drafters)
        return ask

    def select(self, trees: Mapping[int, TokenTree], continued: Continue | None = None) -> TokenTree:
        """Returns the nodes worth their cost, grafted nodes included. Synchronises with the host."""
        self._take(trees)
        answers = self._fitting()
        if not answers:
            return next(iter(trees.values()))
        draft_s = self._draft_s() + float(self._merging(len(answers)))
        device = next(iter(answers.values())).tree.tokens.device
        if any(answer.tree.distributions is not None for answer in answers.values()):
            merged, host = self._merged(answers, continued)
            bought = self._bought = buy(
                host, self._cost, self._host, draft_s=draft_s, max_nodes=self._max_nodes,
                is_drawn=drawn_nodes(merged),
            )  # fmt: skip
            self._note_widths(bought)
            return bought.taken_from(merged)
        host = self._merged_on_host(answers, continued)
        bought = self._bought = buy(host, self._cost, self._host, draft_s=draft_s, max_nodes=self._max_nodes)
        self._note_widths(bought)
        return bought.on(device)

    def _merged(self, answers: Mapping[int, _Answer], continued: Continue | None) -> tuple[TokenTree, HostTree]:
        """Merges trees that hold drawn nodes, and grafts lookups below them; returns also a copy on the host."""
        # In the order of asking: whether a later drafter was asked may depend on what earlier ones drew.
        trees = [with_values(answer.tree, answer.values) for answer in answers.values()]
        merged = merge_trees(trees, max_nodes=MAX_NODES, drafters=list(answers))
        host = on_host(merged)
        grafts = [] if continued is None else self._grafts_on(host, continued)
        if not grafts:
            return merged, host
        merged = grafted(merged, grafts, max_nodes=MAX_NODES)
        return merged, on_host(merged)

    def _merged_on_host(self, answers: Mapping[int, _Answer], continued: Continue | None) -> HostTree:
        trees = [valued(answer.host, answer.values) for answer in answers.values()]
        union = HostMerge(trees, list(answers), max_nodes=MAX_NODES)
        host = union.tree()
        grafts = [] if continued is None else self._grafts_on(host, continued)
        for graft in grafts:
            union.graft(graft)
        return union.tree() if grafts else host

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
                if most > room:
                    continue
                room -= most
            result[i] = answer
        return result

    def learn_step(self, record: StepRecord) -> None:
        """Learns acceptance and seconds. Without drafts, learns from every n-th iteration only."""
        generated, steps = sum(step.num_emitted for step in record.sequences), record.sequences
        for i, known in enumerate(self._known):
            if i not in self._asked:
                known.probes.save()
        # Beside prompts the pass and the host do more work than for the trees.
        if self._num_declined % _LEARN_EVERY == 0 and not record.num_prompt_tokens:
            self._cost.learn_seconds(record.num_tokens, record.seconds.verify)
            self._host.add(generated, record.seconds.accept + record.seconds.commit)
        if self._num_declined:
            return
        for asked in record.asked:
            self._learn_seconds(asked)
        rest = record.seconds.draft - sum(asked.seconds for asked in record.asked)
        self._merging.add(sum(answer.tree.width > 1 for answer in self._answers.values()), max(rest, 0.0))
        if len(steps) != self._batch:  # the batch failed and was decoded again one by one
            return
        self._learn_trees(record)
        if self._kept is not None:
            self._kept.learned()

    def _take(self, trees: Mapping[int, TokenTree]) -> None:
        for i, tree in trees.items():
            if i in self._answers:
                continue
            self._asked.setdefault(i, self._known[i].deepest)
            self._batch, host = tree.batch_size, on_host(tree)
            values = values_of(host, self._known[i].calibration)
            deepest = int(host.depths.max(initial=0))
            places = host.depths + (deepest + 1) * np.arange(self._batch)[:, None]
            sums = np.bincount(
                places[host.is_drafted], values[host.is_drafted], self._batch * (deepest + 1)
            ).reshape(self._batch, -1)[:, 1:]  # fmt: skip
            reach = np.minimum.accumulate(np.minimum(sums, 1.0), axis=1)
            self._answers[i] = _Answer(tree, host, values, reach)

    def _at_hand(self) -> AtHand:
        """Returns the answers so far. Where several trees go as deep, their nodes count as those of one tree."""
        answers = [answer for answer in self._answers.values() if answer.reach.shape[1]]
        deepest = max((answer.reach.shape[1] for answer in answers), default=0)
        padded = [np.pad(answer.reach, ((0, 0), (0, deepest - answer.reach.shape[1]))) for answer in answers]
        reach = np.max(padded, axis=0) if padded else np.zeros((self._batch, 0))
        values = []
        total = np.maximum(np.sum(padded, axis=0), 1e-9) if padded else reach
        for answer in answers:
            rows, nodes = np.nonzero(answer.host.is_drafted)
            levels = answer.host.depths[rows, nodes] - 1
            values.append(answer.values[rows, nodes] * (reach / total)[rows, levels])
        pooled = -np.sort(-np.concatenate(values)) if values else np.zeros(0)
        return AtHand(reach, pooled, self._draft_s())

    def _candidate(self, i: int) -> Candidate:
        known = self._known[i]
        depths = np.arange(1.0, known.deepest + 1)
        seconds = np.asarray(known.seconds(depths), dtype=np.float64)
        widths = np.maximum(known.widths, 1.0)  # a level takes at least one node: unbought levels bring nothing
        reach = known.reach(frozenset(self._answers) - self._free)  # given the answers that cost something
        return Candidate(reach.probabilities(), widths, seconds)

    def _costs(self) -> Costs:
        merging = max(float(self._merging(2.0)) - float(self._merging(1.0)), 0.0)
        return Costs(self._cost.seconds, lambda tokens: np.asarray(self._host(tokens)), merging)

    def _draft_s(self) -> float:
        return sum(float(self._known[i].seconds(float(self._asked[i]))) for i in self._answers)

    def _plain(self) -> float:
        return self._cost(self._batch) + float(self._host(float(self._batch)))

    def _reason(self) -> Declined:
        at_hand, costs, plain = self._at_hand(), self._costs(), self._cost(self._batch)
        candidates = [self._candidate(i) for i in range(len(self._known))]
        found = [(*best_depth(at_hand, each, costs), each) for each in candidates]
        depth, _, best = max(found, key=lambda each: each[1])
        width = self._batch + round(self._batch * float(best.widths[:depth].sum()))
        return Declined(
            width=width,
            pass_cost=self._cost(width) / plain,
            draft_cost=float(best.seconds[depth - 1]) / plain,
            acceptance=float(best.reach[0]),
            hit_rate=1.0,
        )

    def _grafts_on(self, host: HostTree, continued: Continue) -> list[Graft]:
        chains, grafts = grafts_on(host, continued, [known.grafts for known in self._known])
        self._grafts += chains
        return grafts

    def _note_widths(self, bought: Purchase) -> None:
        before = sum(1 << i for i in self._free)
        for i in self._answers:
            if i in self._free:
                continue
            known, sources = self._known[i], bought.host.sources
            is_new = bought.kept & bought.host.is_drafted & (sources >> i & 1 == 1) & (sources & before == 0)
            levels = np.bincount(bought.host.depths[is_new], minlength=known.deepest + 1)[1 : known.deepest + 1]
            asked = slice(0, self._asked[i])
            known.widths[asked] += _WIDTH_RATE * (levels[asked] / self._batch - known.widths[asked])
            before |= 1 << i

    def _learn_seconds(self, asked: AskedDrafter) -> None:
        seconds = self._known[asked.index].seconds
        if asked.depth or not seconds.is_known or asked.seconds > float(seconds(0.0)):
            seconds.learn_seconds(asked.depth, asked.seconds)

    def _learn_trees(self, record: StepRecord) -> None:
        """Counts which nodes the generated tokens followed, of each drafter given the drafters asked before it."""
        steps = record.sequences
        right: dict[int, list[int]] = {}
        before, costly = [0] * self._batch, frozenset[int]()
        for i, answer in self._answers.items():
            known = self._known[i]
            right[i] = count_followed(answer.host, known.calibration, steps)
            for row, step in enumerate(steps):
                known.reach(costly).learn_draft(
                    before=before[row], right=right[i][row], asked=self._asked[i], generated=len(step.tokens)
                )
            before = [max(pair) for pair in zip(before, right[i], strict=True)]
            costly |= {i} - self._free
        for each in self._grafts:
            learn_chain(self._known[each.drafter].grafts, each, steps[each.leaf.row].tokens)
        if record.num_prompt_tokens:
            return
        for asked in record.asked:
            if asked.index in right and asked.index not in self._free:
                self._spend(asked, record, right)

    def _spend(self, asked: AskedDrafter, record: StepRecord, right: Mapping[int, Sequence[int]]) -> None:
        """Charges a drafter that costs something against the same iteration without it."""
        others = [levels for i, levels in right.items() if i != asked.index]
        tokens = without = len(record.sequences)
        for row, step in enumerate(record.sequences):
            tokens += step.num_accepted
            without += min(step.num_accepted, max((levels[row] for levels in others), default=0))
        known, seconds = self._known[asked.index], asked.seconds
        if not known.probes.num_idle:  # reading a prompt is no reason to stop asking
            seconds = min(seconds, float(known.seconds(float(asked.depth))))
        rest = record.seconds.total - asked.seconds
        if self._bought is not None:
            own = int((self._bought.kept & (self._bought.host.sources == 1 << asked.index)).sum())
            width = self._bought.width
            wider = min(self._cost(width) - self._cost(max(width - own, self._batch)), 0.9 * rest)
            seconds, rest = seconds + wider, rest - wider
        # In tokens per sequence that the other drafters would have brought meanwhile.
        loss = (seconds * without / max(rest, 1e-9) - (tokens - without)) / self._batch
        known.probes.spend(loss, tokens / self._batch)
