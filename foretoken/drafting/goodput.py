"""The controller: in each iteration it does what brings most expected tokens per second (`plans`).

The seconds are those of the cost model (`costs`), the tokens those of the acceptance model (`acceptance`). Both are
estimates, and both learn only from what is done. `Exploration` is the one rule by which something else is done.

Drafters that cost almost nothing, such as lookups, are asked first and in every iteration: what they found is judged,
not what they usually find. An answer without nodes leaves an iteration of plain decoding. Other drafters are asked one
by one, each time the one that adds most, until none adds any. The proposals of all are merged, lookups continue below
the best leaves of others, and the nodes that are worth their cost are verified. Chains of drafters that follow
`PathFloors` end while they are drafted. Another chain, or a head's tree of fixed shape, of a single drafter that takes
time is verified whole, so that the host need not read it: there the depth is all that is chosen.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from math import log
from typing import TYPE_CHECKING, NamedTuple

import torch

from foretoken.core.records import Declined, SequenceStep, StepRecord
from foretoken.core.token_tree import MAX_NODES, PROBE, DrawKind, TokenTree
from foretoken.drafting import host_trees
from foretoken.drafting.acceptance import KeptAcceptance, Known, Learner
from foretoken.drafting.base import UNBOUNDED, Allotment, Allowance, Ask, Continue
from foretoken.drafting.costs import LONGEST, CostModel, is_little
from foretoken.drafting.exploration import Exploration, Reading, Unread
from foretoken.drafting.plans import AtHand, Candidate, Costs, DraftPlan, best_depth, select_nodes, stop
from foretoken.trees.merge import Continuation, merge_trees, prune, with_continuations
from foretoken.trees.stopping import PathFloors

if TYPE_CHECKING:
    from foretoken.runner.costs import CostCurve

_FREE = 0.03  # share of a plain iteration: a drafter that takes less on average is always asked, and first
_WIDTH_RATE = 0.1  # weight of a draft in the mean number of nodes per level
_LEAST_FLOOR = 1e-9  # probability of a path
_DECIDE_EVERY = 8  # most iterations that share a decision once it repeats; fewer at first


class _Answer(NamedTuple):
    """A drafter's trees, as it returned them and on the host; no rows if they have no nodes."""

    tree: TokenTree
    rows: list[host_trees.HostRow]


class Goodput:
    """The controller of any number of drafters."""

    def __init__(
        self,
        cost: CostCurve | None,
        *,
        nodes_by_depth: Sequence[Sequence[int]],
        max_nodes: int,
        is_read: bool = True,
        ends_early: Sequence[bool] = (),
        timed: Sequence[Sequence[tuple[int, float]]] = (),
        expected: Sequence[float] = (),
        read_shares: Sequence[float] = (),
    ) -> None:
        """Starts without observations.

        Args:
            cost: Seconds of a pass; None if none were measured.
            nodes_by_depth: Of each drafter, see `foretoken.drafters.base.Drafter`.
            max_nodes: Most nodes of a verified tree, root included.
            is_read: Whether nodes are selected. False for a single drafter whose trees are verified whole.
            ends_early: Whether each drafter's chains end by `PathFloors`; empty for none. Such nodes are selected.
            timed: Depth and seconds of each drafter's timed drafts; empty for none.
            expected: Of a single drafter, see `LevelAcceptance`.
            read_shares: See `CostModel`.
        """
        self._max_nodes, self._is_read = max_nodes, is_read
        self._known = [
            Known(nodes, expected, is_read=is_read, ends_early=each)
            for nodes, each in zip(nodes_by_depth, ends_early or [False] * len(nodes_by_depth), strict=True)
        ]
        deepest = [known.deepest for known in self._known]
        self._costs = CostModel(cost, deepest, timed or [()] * len(deepest), read_shares)
        self._exploration, self._reading = Exploration(), Reading()
        self._kept: KeptAcceptance | None = None
        self._held: Allotment | None = None  # a decision that holds until an iteration
        self._held_until = self._last_depth = 0
        self._gain = 0.0  # plain iterations that an iteration with drafts saves, fading
        self._pace = 0.0, 0.0  # tokens and seconds of iterations with drafts, fading
        self._free = frozenset[int]()
        self._begin(0)

    @property
    def learners(self) -> list[Learner]:
        """What is worth storing for the next process."""
        return [each for known in self._known for each in (known.nodes, known.continuations, known.after(frozenset()))]

    def keep_learned(self, kept: KeptAcceptance) -> None:
        """Stores what is learned from now on: now and then, and when this controller or the process ends."""
        self._kept = kept
        weakref.finalize(self, kept.keep)

    def forget(self, drafter: int) -> None:
        """Forgets the acceptance of a drafter and the last decision, because its next drafts follow another text."""
        old = self._known[drafter]
        self._known[drafter] = Known(old.nodes_by_depth, (), is_read=self._is_read, ends_early=old.ends_early)
        self._held = None

    def expect(self, unread: Unread) -> None:
        """Takes what drafters would have to read before they draft for the next batch."""
        self._reading.unread = unread

    def begin_text(self, *, is_alone: bool = True) -> None:
        """Ends a decision that holds, because another text begins; beside other texts estimates go on."""
        self._held = None
        for known in self._known if is_alone else ():
            known.begin_text()

    def end_text(self, expected: float) -> None:
        """Charges what was read for tokens of a text that ended before they came."""
        self._exploration.reading.charge(self._reading.pay(expected) / self._costs.plain(max(self._batch, 1)))

    def plain_seconds(self, batch_size: int) -> float | None:
        """Returns the seconds of an iteration without drafts; None before one was measured."""
        costs = self._costs
        return costs.machine * costs.plain(batch_size) if costs.num_passes(batch_size) >= 1 else None

    def _begin(self, batch_size: int, num_prompt_tokens: int = 0) -> None:
        self._batch, self._num_prompt_tokens = batch_size, num_prompt_tokens
        self._answers: dict[int, _Answer] = {}  # in the order of arrival
        self._asked: dict[int, int] = {}  # levels
        self._union: host_trees.HostMerge | None = None  # of the answers
        self._room = self._max_nodes - 1  # nodes of a tree for drawn nodes and probes
        self._united: dict[int, _Answer] = {}
        self._plan: DraftPlan | None = None
        self._continued: list[host_trees.LookupChain] = []

    def allot(self, batch_size: int, num_prompt_tokens: int = 0) -> Allotment:
        """Asks the free drafters, or the first drafter that pays; nobody if none pays or plain decoding is measured.

        Beside prompts nothing is tried that is not expected to pay.
        """
        self._exploration.next()
        held, now, is_spent = self._held, self._exploration.count, self._exploration.drafts.is_spent
        is_ended = now >= self._held_until or (is_spent and held is not None and not held.is_empty)
        if held is not None and not is_ended and len(held.allowances) == batch_size and not num_prompt_tokens:
            if self._is_read:
                self._begin(batch_size)
                if held.first is not None:
                    self._asking(held.first)
            return held
        self._held = None
        self._begin(batch_size, num_prompt_tokens)
        first = None if is_spent else self._first(self._costs.plain(batch_size))
        if first is None:
            if num_prompt_tokens:
                return Allotment.nothing(batch_size)
            self._exploration.note(("plain", batch_size))
            self._held, self._held_until = Allotment.nothing(batch_size, self._reason()), self._exploration.next_try
            return self._held
        if not num_prompt_tokens and self._is_look_due():
            self._begin(batch_size)
            return Allotment.nothing(batch_size)
        depth = UNBOUNDED if self._is_read else first.depth
        allotment = Allotment(allowances=[Allowance(depth=depth, nodes=self._max_nodes)] * batch_size, first=first)
        if num_prompt_tokens:
            return allotment
        is_repeated = bool(self._free) or (self._plan is not None and first.depth == self._last_depth)
        if len(self._known) == 1 and is_repeated:
            self._held, self._held_until = allotment, now + min(_DECIDE_EVERY, now // _DECIDE_EVERY)
        self._last_depth = first.depth
        return allotment

    def _first(self, plain: float) -> Ask | None:
        if self._is_read:
            self._free = frozenset(i for i in range(len(self._known)) if self._mean_draft_s(i) <= _FREE * plain)
            if self._free:
                return self._asking(Ask(sorted(self._free)))
        return self.further({})

    def _mean_draft_s(self, i: int) -> float:
        """Returns the seconds of asking a drafter for its deepest draft, which it may not have."""
        hits, draft = self._known[i].hits, self._costs.draft(i)
        return hits * draft[-1] + (1 - hits) * draft[0]

    def _is_look_due(self) -> bool:
        is_known = self._costs.num_passes(self._batch) >= 1
        return self._exploration.is_due(("plain", self._batch), self._gain if is_known else 0.0)

    def _reason(self) -> Declined:
        costs, nothing = self._all_costs(), AtHand(self._batch)
        candidates = [self._candidate(i) for i in range(len(self._known))]
        plans = [best_depth(stop(nothing, costs), nothing, each, costs) for each in candidates]
        i = max(range(len(plans)), key=lambda i: plans[i].rate)
        width = min(max(round(plans[i].width), self._batch + 1), len(costs.passes) - 1)
        return Declined(
            width=width,
            pass_cost=costs.passes[width] / costs.passes[self._batch],
            draft_cost=candidates[i].seconds[plans[i].size - 1] / costs.passes[self._batch],
            acceptance=candidates[i].reach[0] if self._known[i].after(frozenset()).num_seen else None,
            hit_rate=self._known[i].hits,
            reading_cost=self._unread_s(i) / costs.passes[self._batch],
        )

    def further(self, trees: Mapping[int, TokenTree]) -> Ask | None:
        """Returns the drafter that adds most, or a drafter to be tried; None if there is neither."""
        if self._is_read:
            self._take(trees)
        costly = [i for i in range(len(self._known)) if i not in self._asked and i not in self._free]
        if self._exploration.reading.is_spent:
            costly = [i for i in costly if self._unread_s(i) <= self._costs.plain(self._batch)]
        if not costly:
            return None
        at_hand, costs = self._at_hand(), self._all_costs()
        now = stop(at_hand, costs)
        bare = {i: best_depth(now, at_hand, self._candidate(i), costs) for i in costly}
        plans = {i: self._and_reading(i, plan, self._reading.share(plan.tokens)) for i, plan in bare.items()}
        best = max(costly, key=lambda i: plans[i].rate)
        if plans[best].rate > now.rate:
            self._plan = plan = plans[best]
            self._exploration.note(best)
            ends_early = self._known[best].ends_early
            if plan.size < self._known[best].deepest and not self._num_prompt_tokens and not ends_early:
                deeper = best_depth(now, at_hand, self._candidate(best), costs, least=plan.size + 1)
                if self._exploration.is_due(("deeper", best), self._loss_of(deeper, plan.rate), goes_on=False):
                    plan = deeper
            return self._asked_plan(best, plan, now.rate)
        for i in costly if not self._num_prompt_tokens else ():
            loss = self._loss_of(self._and_reading(i, bare[i], 1.0), now.rate)  # a try may end with its first draft
            if self._known[i].is_new and self._exploration.may_lose(loss):
                return self._asked_plan(i, plans[i], now.rate)
            if self._exploration.is_due(i, loss):
                if self._exploration.is_beginning(i):
                    self._known[i].age()
                    self._costs.age(i)
                return self._asked_plan(i, plans[i], now.rate)
        return None

    def _asked_plan(self, i: int, plan: DraftPlan, rate: float) -> Ask:
        """Asks for the depth of a plan; or for chains that end where another level brings less than iterations bring.

        That is the best rule if iterations bring as many tokens per second as lately, `rate` at least (Charnov 1976,
        the marginal value theorem). The level that falls below is drafted already; it is selected if it pays.
        """
        known, batch, draft = self._known[i], self._batch, self._costs.draft(i)
        if not known.ends_early:
            return self._asking(Ask((i,), plan.size))
        tokens, seconds = self._pace
        rate = max(rate, tokens / seconds if seconds else plan.rate)
        first = batch + self._num_prompt_tokens
        passes = self._costs.passes(batch, first + batch * known.deepest)
        rates = known.after(frozenset(self._answers) - self._free).rates()
        floors = [0.0] * known.deepest  # nothing follows the deepest level
        for depth in range(1, known.deepest):
            width = first + batch * depth
            level_s = draft[depth + 1] - draft[depth] + passes[width + batch] - passes[width]
            floors[depth - 1] = log(max(rate * level_s / (batch * rates[depth]), _LEAST_FLOOR))
        return self._asking(Ask((i,), known.deepest, PathFloors(*known.nodes.logistic(known.deepest), floors)))

    def _and_reading(self, i: int, plan: DraftPlan, share: float) -> DraftPlan:
        """Adds a share of what a drafter reads first: it is read once for all tokens that are still to come."""
        return plan._replace(seconds=plan.seconds + share * self._unread_s(i))

    def _unread_s(self, i: int) -> float:
        return self._reading.unread.missed.get(i, 0) * self._costs.reading(i)

    def _loss_of(self, plan: DraftPlan, rate: float) -> float:
        """Returns how many plain iterations a plan loses against a rate of tokens per second."""
        return (plan.seconds * rate - plan.tokens) / self._batch

    def _asking(self, ask: Ask) -> Ask:
        self._asked.update((i, min(ask.depth, self._known[i].deepest)) for i in ask.drafters)
        return ask

    def _all_costs(self) -> Costs:
        most = self._batch * self._max_nodes + self._num_prompt_tokens
        return Costs(self._costs.passes(self._batch, most), self._costs.host.line, self._costs.merging.line[1])

    def _candidate(self, i: int) -> Candidate:
        known, draft = self._known[i], self._costs.draft(i)
        survival = known.after(frozenset(self._answers) - self._free).survival()  # given answers that cost something
        hits, miss_s = known.hits, (1 - known.hits) * draft[0]
        return Candidate(
            [hits * each for each in survival],
            [max(width, hits) for width in known.widths],  # at least one node: unselected levels bring nothing
            [hits * seconds + miss_s for seconds in draft[1:]],
        )

    def _at_hand(self) -> AtHand:
        start = AtHand(self._batch, self._num_prompt_tokens, draft_s=self._draft_s())
        if self._union is None:
            return start
        covered, values = list[float](), list[float]()
        for row in self._union.rows:
            levels = [0.0] * (1 + max(row.depths))
            for node in row.drafted():
                values.append(row.values[node])
                levels[row.depths[node]] += row.values[node]
            covered += [0.0] * (len(levels) - 1 - len(covered))
            least = 1.0
            for d, level in enumerate(levels[1:]):
                least = min(least, level)
                covered[d] += least
        return start._replace(covered=covered, values=sorted(values, reverse=True))

    def _draft_s(self) -> float:
        return sum(self._costs.draft(i)[depth] for i, depth in self._asked.items())

    def _take(self, trees: Mapping[int, TokenTree]) -> None:
        """Reads new answers, and unites those with nodes.

        Drawn nodes and probes are verified at any cost, so a tree with such nodes is merged as a whole or not at all.
        The size of its drafter's greatest tree decides: the size of the tree at hand may depend on what was drawn.
        """
        for i, tree in trees.items():
            if i in self._answers:
                continue
            known = self._known[i]
            depth = self._asked.setdefault(i, known.deepest)
            self._batch = tree.batch_size
            rows = host_trees.read_rows(tree, known.nodes) if tree.width > 1 else []
            if known.ends_early:  # where a drawn chain ends depends on what was drawn: `depth` must not
                self._asked[i] = tree.max_depth
            self._answers[i] = _Answer(tree, rows)
            if not rows:
                continue
            if tree.distributions is not None or any(source & PROBE for row in rows for source in row.sources):
                most = known.nodes_by_depth[depth if depth < known.deepest else -1] - 1
                if most > self._room and len(self._known) > 1:
                    continue
                self._room -= most
            self._united[i] = self._answers[i]
            if len(self._known) > 1:
                self._union = self._union or host_trees.HostMerge([row.tokens[0] for row in rows], MAX_NODES)
                self._union.unite(rows, i)

    def select(self, trees: Mapping[int, TokenTree], continued: Continue | None = None) -> TokenTree:
        """Returns the nodes worth their cost, lookups' continuations included. Synchronises if nodes are selected."""
        if not self._is_read:
            (tree,) = trees.values()
            return tree
        self._take(trees)
        tree = next(iter(trees.values()))
        if not self._united:
            return tree
        merged: TokenTree | None = None
        drawn: list[list[bool]] | None = None
        rows = self._answers[0].rows if self._union is None else self._union.rows
        if any(answer.tree.distributions is not None for answer in self._united.values()):
            merged, rows = self._merged_with_draws(continued)
            if merged.distributions is not None:
                drawn = (merged.distributions.kinds != DrawKind.ONE_HOT).tolist()
        elif continued is not None and self._union is not None:
            for chain in self._continuations_of(rows, continued):
                self._union.extend(chain)
        draft_s = self._draft_s() + self._costs.merging(len(self._united))
        selected = select_nodes(
            rows, self._all_costs(), max_nodes=self._max_nodes, draft_s=draft_s,
            num_prompt_tokens=self._num_prompt_tokens, drawn=drawn,
        )  # fmt: skip
        self._note_widths(rows, selected.kept)
        if merged is None:
            has_sources = len(self._known) > 1 or tree.source is not None
            return host_trees.kept_tree(rows, selected.kept, tree.tokens.device, has_sources=has_sources)
        if not selected.is_everything:
            merged = prune(merged, torch.tensor(selected.kept, device=tree.tokens.device))
        return merged.narrowed()

    def _merged_with_draws(self, continued: Continue | None) -> tuple[TokenTree, list[host_trees.HostRow]]:
        """Merges trees that hold drawn nodes, with lookups' continuations; returns also a copy on the host."""
        # In the order of asking: whether a later drafter was asked may depend on what earlier ones drew.
        merged, *others = (host_trees.scored(answer.tree, answer.rows) for answer in self._united.values())
        if self._union is not None:
            merged = merge_trees([merged, *others], max_nodes=MAX_NODES, drafters=list(self._united))
        rows = host_trees.read_rows(merged, None)
        chains = [] if continued is None or self._union is None else self._continuations_of(rows, continued)
        if chains:
            merged = with_continuations(merged, chains, max_nodes=MAX_NODES)
            rows = host_trees.read_rows(merged, None)
        return merged, rows

    def _continuations_of(self, rows: Sequence[host_trees.HostRow], continued: Continue) -> list[Continuation]:
        chains, continuations = host_trees.continuations_of(
            rows, continued, [known.continuations for known in self._known]
        )
        self._continued += chains
        return continuations

    def _note_widths(self, rows: Sequence[host_trees.HostRow], kept: Sequence[Sequence[bool]]) -> None:
        """Counts each selected node for the first drafter that proposed it, free drafters first."""
        order = sorted(self._answers, key=lambda i: i not in self._free)
        levels = {i: [0.0] * self._known[i].deepest for i in order}
        for row, flags in zip(rows, kept, strict=True):
            for node in row.drafted():
                if flags[node]:
                    source = row.sources[node] if len(self._known) > 1 else 1
                    i = next((i for i in order if source >> i & 1), None)
                    if i is not None and row.depths[node] <= len(levels[i]):
                        levels[i][row.depths[node] - 1] += 1
        for i, counts in levels.items():
            widths = self._known[i].widths
            for d in range(min(self._asked[i], len(widths))):
                widths[d] += _WIDTH_RATE * (counts[d] / self._batch - widths[d])

    def learn_step(self, record: StepRecord) -> None:
        """Learns acceptance and seconds.

        An iteration in which only free drafters were asked, and nothing was verified, is one of plain decoding. It is
        not charged. Of such iterations, and of those in which nobody is asked, every n-th one teaches seconds.
        """
        steps, asked = record.sequences, self._asked
        is_drafted = any(step.tree_depth for step in steps) or not self._free.issuperset(asked)
        self._charge(record, is_drafted=is_drafted)
        if is_drafted or self._held is None or self._exploration.count % _DECIDE_EVERY == 0:
            self._costs.learn(record)
        if not asked:
            return
        if not is_drafted and not record.num_prompt_tokens:
            self._exploration.note(("plain", self._batch))
        if not self._is_read:
            self._learn_depths(steps)
        elif len(steps) == self._batch:  # else the batch failed and was decoded again one by one
            self._learn_trees(steps)
        if self._kept is not None:
            self._kept.learned()

    def _charge(self, record: StepRecord, *, is_drafted: bool) -> None:
        """Charges an iteration: what its drafts lost, and its share of what drafters read for the batch."""
        batch = len(record.sequences)
        read_s = sum(self._costs.read_s(each, batch) for each in record.asked)
        self._reading.owed_s += read_s
        if record.num_prompt_tokens:
            self._exploration.charge(0.0)
            return
        emitted = sum(step.num_emitted for step in record.sequences)
        loss = self._loss(record, emitted, read_s) if is_drafted else 0.0
        is_free = self._free.issuperset(self._asked)
        read = self._reading.pay(emitted) / self._costs.plain(batch)
        self._exploration.charge(loss, read if is_free else read + loss)  # what lookups gain pays for no reading
        self._reading.saw(emitted / batch, are_copied=bool(self._united) and is_free)
        if not is_drafted:
            return
        if all(is_little(each.num_missed, batch) for each in record.asked):
            tokens, seconds = ((1 - _WIDTH_RATE) * each for each in self._pace)
            self._pace = tokens + emitted, seconds + record.seconds.total / self._costs.machine
        self._gain -= _WIDTH_RATE * (loss + self._gain)

    def _loss(self, record: StepRecord, emitted: int, read_s: float) -> float:
        """Returns by how much an iteration was slower than plain decoding of its tokens, without what was read."""
        costs, batch, width = self._costs, len(record.sequences), record.num_tokens
        expected = costs.passes(batch, width)[width] + costs.host(emitted)
        for each in record.asked:
            expected += costs.draft(each.index)[min(each.depth, self._known[each.index].deepest)]
        seconds = min(record.seconds.total / costs.machine - read_s, LONGEST * expected)
        return seconds / costs.plain(batch) - emitted / batch

    def _learn_depths(self, steps: Sequence[SequenceStep]) -> None:
        (known,) = self._known
        for step in steps:
            if step.tree_depth or step.num_proposed is not None:  # else it was not asked for
                known.hits += _WIDTH_RATE * ((step.tree_depth > 0) - known.hits)
        known.widths = [known.hits * nodes for nodes in known.shape]
        drafted = [step for step in steps if step.tree_depth]
        right, last = [step.num_accepted for step in drafted], [step.tree_depth for step in drafted]
        known.after(frozenset()).learn([0] * len(drafted), right, last)

    def _learn_trees(self, steps: Sequence[SequenceStep]) -> None:
        """Counts which nodes the generated tokens followed, of each drafter given the drafters asked before it."""
        before, costly = [0] * self._batch, frozenset[int]()
        for i, answer in self._answers.items():
            known = self._known[i]
            hits = [b for b, row in enumerate(answer.rows) if row.drafted()]
            if hits:
                right = host_trees.learn_followed(answer.rows, known.nodes, steps)
                last = [min(self._asked[i], len(steps[b].tokens)) for b in hits]
                if known.ends_early:
                    last = [min(most, max(answer.rows[b].depths)) for most, b in zip(last, hits, strict=True)]
                known.after(costly).learn([before[b] for b in hits], [right[b] for b in hits], last)
                before = list(map(max, before, right))
            known.hits += _WIDTH_RATE * (len(hits) / self._batch - known.hits)
            costly |= {i} - self._free
        for each in self._continued:
            host_trees.learn_chain(self._known[each.drafter].continuations, each, steps[each.leaf.row].tokens)
