"""Drafters and their controller behind one interface: the loop asks for a tree and reports what was accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Self

import torch

from foretoken.core.backend import StageClock
from foretoken.core.records import AskedDrafter, Declined, StepRecord
from foretoken.core.token_tree import PROBE, TokenTree
from foretoken.drafters.base import Committed, DraftContext, Drafter, DraftRequest, TargetReads
from foretoken.drafting.base import Allotment, Ask, Continue, Controller, Leaf
from foretoken.drafting.draft_guard import DraftGuard, SafeDraft, within_node_limits
from foretoken.drafting.exploration import Followed
from foretoken.drafting.goodput import Goodput
from foretoken.grammars.drafts import FORCED, GrammarBounds, constrained_tree

if TYPE_CHECKING:
    from foretoken.core.passes import Tap
    from foretoken.sampling.batch import SamplingBatch


class DraftNoise:
    """Contexts with each drafter's own noise; kept between proposals while the batch stays the same."""

    def __init__(self) -> None:
        self._batch: SamplingBatch | None = None
        self._are_coupled: list[bool] = []
        self._kept: dict[int, SamplingBatch] = {}

    def of(self, context: DraftContext, drafter: int) -> DraftContext:
        """Returns a context with the noise of drafter 0, 1, …; drafter 0 has the requests' own noise."""
        batch, are_coupled = context.sampling, list(context.is_coupled)
        if not drafter or batch.is_all_greedy or all(are_coupled):
            return context
        if self._batch is not batch or self._are_coupled != are_coupled:
            self._batch, self._are_coupled, self._kept = batch, are_coupled, {}
        own = self._kept.get(drafter)
        if own is None:
            rows = torch.tensor([not each for each in are_coupled], device=batch.greedy.device)
            own = self._kept[drafter] = replace(batch, noise=batch.noise.of_drafter(drafter, rows))
        return replace(context, sampling=own)


_LONGEST_CONTINUATION = 10  # tokens


class _Asked(NamedTuple):
    """A drafter that was asked: its index, its answer, and `AskedDrafter.num_missed`."""

    drafter: int
    answer: SafeDraft
    num_missed: int

    @property
    def depth(self) -> int:
        """The most levels of its trees."""
        return self.answer.tree.max_depth


class Draft(NamedTuple):
    """A valid tree and how it was made.

    Attributes:
        tree: Over the roots of the batch.
        num_proposed: Nodes of each sequence, see `SequenceStep`.
        error: Reason why a drafter's own tree was dropped, or None.
        declined: Reason why no drafter was asked, or None.
        is_committed: Whether drafters get `commit` after this iteration.
        is_learned: Whether the controller learns from this iteration. Not if requests or prompts left nothing to draft,
            and not from tokens that a grammar forced, because they say nothing about the drafters.
        asked: The drafters that were asked, in order.
        clock: Its laps are the seconds of each of these; None if no drafter was asked.
    """

    tree: TokenTree
    num_proposed: Sequence[int | None]
    error: str | None = None
    declined: Declined | None = None
    is_committed: bool = True
    is_learned: bool = False
    asked: Sequence[_Asked] = ()
    clock: StageClock | None = None


def joint_reads(drafters: Sequence[Drafter]) -> TargetReads:
    """Returns what several drafters read of the target: every tap once, in the order of the drafters."""
    taps: dict[Tap, None] = dict.fromkeys(tap for drafter in drafters for tap in drafter.reads.taps)
    return TargetReads(
        taps=tuple(taps),
        top_k=max((drafter.reads.top_k for drafter in drafters), default=0),
        is_last_enough=all(drafter.reads.is_last_enough for drafter in drafters),
        attention_tokens=max((drafter.reads.attention_tokens for drafter in drafters), default=0),
        attention_every=min((every for drafter in drafters if (every := drafter.reads.attention_every)), default=0),
    )


class _Team(NamedTuple):
    """The drafters of an iteration.

    Attributes:
        guards: The first of the engine's drafters.
        controller: Decides how much they draft; None without drafters.
        lookups: Indices of drafters that can continue drafts of others.
    """

    guards: Sequence[DraftGuard]
    controller: Controller | None
    lookups: Sequence[int]

    @classmethod
    def of(cls, guards: Sequence[DraftGuard], controller: Controller | None) -> Self:
        return cls(guards, controller, [index for index, guard in enumerate(guards) if guard.can_continue])


class Drafting:
    """Any number of drafters behind guards, and the controller that decides how much they draft.

    Attributes:
        names: Of the drafters, switched-off drafters included.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        controller: Controller | None,
        *,
        vocab_size: int,
        max_nodes: int,
        device: torch.device,
        for_predictions: Controller | None = None,
    ) -> None:
        """Takes drafters that are attached; none, and no controller, for plain decoding.

        Args:
            vocab_size: V of the target.
            max_nodes: Widest tree that the cache has room for.
            device: Where trees must lie.
            for_predictions: Replaces `controller` while a request of the batch brings a prediction. Only then the last
                drafter is asked and told of requests. None if predictions make no difference.
        """
        self._predicted: set[int] = set()  # slots of requests with predictions
        self._have_missed = False  # whether drafters did not get the last `commit`
        # Drafts that wait until the drafters have got a `commit`, and the controller that allotted them.
        self._held: tuple[Controller, Allotment] | None = None
        self._guards = [
            DraftGuard(drafter, vocab_size=vocab_size, max_nodes=max_nodes, device=device) for drafter in drafters
        ]
        is_added = for_predictions is not None
        self._usual = self._team = _Team.of(self._guards[: len(drafters) - is_added], controller)
        self._predicting = _Team.of(self._guards, for_predictions) if is_added else self._usual
        self._device = device
        self._noise, self._followed = DraftNoise(), Followed()
        self.names = [guard.name for guard in self._guards]
        self._credits: dict[int, tuple[str, ...]] = {}
        self._max_nodes, self._nodes_by_depth = max_nodes, [list(drafter.nodes_by_depth) for drafter in drafters]
        self.reads = joint_reads(drafters)
        # The features that each drafter reads; None for all of them in this order.
        self._columns: list[list[int] | None] = []
        for drafter in drafters[: len(self._usual.guards)]:
            columns = [self.reads.taps.index(tap) for tap in drafter.reads.taps]
            self._columns.append(None if columns == list(range(len(self.reads.taps))) else columns)

    @property
    def are_merged(self) -> bool:
        """Whether the last draft may hold nodes of several drafters."""
        return len(self._team.guards) > 1

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Tells the drafters that a sequence begins in a slot."""
        self._followed.begin(slot, request)
        if isinstance(controller := self._usual.controller, Goodput):
            controller.begin_text(is_alone=self._followed.num_texts == 1)
        for guard in self._usual.guards:
            guard.begin(slot, request)
        if request.prediction is not None and self._predicting is not self._usual:
            self._guards[-1].begin(slot, request)
            self._predicted.add(slot)
            if isinstance(controller := self._predicting.controller, Goodput):
                controller.forget(len(self._guards) - 1)

    def reusable(self, slot: int, length: int) -> int:
        """Returns how many of the first positions of a slot no drafter needs to read again, see `PrefixKeeper`."""
        while (least := min((guard.reusable(slot, length) for guard in self._usual.guards), default=length)) < length:
            length = least  # All drafters must accept the shorter prefix.
        return length

    def propose(self, context: DraftContext, num_prompt_tokens: int = 0) -> Draft:
        """Returns a tree over each root: what drafters propose within the allowances and what is worth its cost.

        Drafters with `TargetReads.is_last_enough` get no `commit` of iterations that the controller declines. The first
        draft after such an iteration waits one iteration, so that the drafters get the last `commit` before it.

        `num_prompt_tokens`: prompt tokens of other sequences that a pass without drafts would read.
        """
        self._team = self._predicting if self._predicted.intersection(context.slots) else self._usual
        guards, controller, lookups = self._team
        if controller is None or not any(guard.is_active for guard in guards):
            return self._no_draft(context, is_committed=False)
        have_missed, self._have_missed = self._have_missed, False
        held = None if self._held is None else self._take_held(controller, len(context.slots))
        if isinstance(controller, Goodput):
            controller.expect(self._followed.unread(context, len(guards)))
        allotment = held or controller.allot(len(context.slots), num_prompt_tokens)
        if allotment.is_empty:
            self._have_missed = allotment.declined is not None and self.reads.is_last_enough
            return self._no_draft(context, allotment.declined, is_committed=not self._have_missed, is_learned=True)
        if have_missed:
            self._held = controller, allotment
            return self._no_draft(context)
        limits, context = context.max_nodes, _within(context, allotment)
        if max(context.max_depth) <= 0:
            return self._no_draft(context)
        trees: dict[int, TokenTree] = {}
        asked: list[_Asked] = []
        clock = StageClock(self._device, max_events=None)
        ask: Ask | None = allotment.first or Ask(range(len(guards)))
        while ask is not None:
            bounded = _bounded(context, ask)
            for index in ask.drafters:
                answer = guards[index].propose(self._noise.of(bounded, index))
                clock.mark()
                trees[index] = answer.tree
                asked.append(_Asked(index, answer, self._followed.missed(index, bounded, answer.tree.max_depth)))
            ask = controller.further(dict(trees))
        tree = controller.select(trees, self._continuation(context) if lookups else None)
        if min(limits) < self._max_nodes:
            is_drawn = tree.distributions is not None
            tree = within_node_limits(tree, [self._limit(most) if is_drawn else most for most in limits])
        if len(guards) == 1 and tree.source is not None:
            # With one drafter, `source` only marks probe nodes.
            tree = replace(tree, source=(tree.source & PROBE) | 1)
        proposed = _num_proposed([each.answer.num_proposed for each in asked], context.max_depth)
        errors = {each.drafter: each.answer.error for each in asked if each.answer.error is not None}
        error = errors[min(errors)] if errors else None
        return Draft(tree, proposed, error, is_learned=True, asked=asked, clock=clock)

    def _take_held(self, controller: Controller, batch_size: int) -> Allotment | None:
        held, self._held = self._held, None
        if held is None or held[0] is not controller or len(held[1].allowances) != batch_size:
            return None
        return held[1]

    def _limit(self, most: int) -> int | None:
        """Returns a bound of nodes for trees with drawn tokens; None if they cannot have more."""
        if most >= self._max_nodes:
            return None
        if self._team.lookups and self.are_merged:  # nodes of their continuations come on top
            return most
        sizes = self._nodes_by_depth[: len(self._team.guards)]
        possible = 1 + sum(nodes[min(most, len(nodes)) - 1] - 1 for nodes in sizes)
        return None if possible <= most else most

    def constrained(self, draft: Draft, bounds: Sequence[GrammarBounds | None]) -> Draft:
        """Returns a draft that the grammars of its B sequences cut and extended, see `grammars.drafts`.

        `bounds`: None for sequences without a grammar.
        """
        if not any(bounds):
            return draft
        found = constrained_tree(draft.tree, bounds, source=1 << len(self.names))
        return draft._replace(tree=found.tree, is_learned=draft.is_learned and not found.num_forced)

    def _continuation(self, context: DraftContext) -> Continue:
        lookups = self._team.lookups

        def continued(leaf: Leaf) -> list[tuple[int, Sequence[int]]]:
            row, path = leaf
            depth = min(context.max_depth[row] - len(path), _LONGEST_CONTINUATION)
            found: list[tuple[int, Sequence[int]]] = []
            for index in lookups if depth > 0 else ():
                tokens = self._guards[index].continue_from(context.slots[row], context.tokens[row], path, depth)
                if tokens:
                    found.append((index, tokens))
            return found

        return continued

    def asked(self, draft: Draft) -> list[AskedDrafter]:
        """Returns the drafters that were asked, with seconds. Call it after the host has waited for the draft."""
        if draft.clock is None:
            return []
        return [
            AskedDrafter(
                index=each.drafter, name=self.names[each.drafter], depth=each.depth, seconds=seconds,
                num_missed=each.num_missed,
            )
            for each, seconds in zip(draft.asked, draft.clock.laps(), strict=True)
        ]  # fmt: skip

    def _no_draft(
        self,
        context: DraftContext,
        declined: Declined | None = None,
        *,
        is_committed: bool = True,
        is_learned: bool = False,
    ) -> Draft:
        tree = TokenTree.roots([tokens[-1] for tokens in context.tokens], device=self._device)
        num_proposed = [None] * len(context.slots)
        return Draft(tree, num_proposed, declined=declined, is_committed=is_committed, is_learned=is_learned)

    def commit(self, committed: Committed) -> None:
        """Tells every drafter which positions entered the target's KV cache, with the features that it reads."""
        for guard, columns in zip(self._usual.guards, self._columns, strict=True):
            features = committed.features
            if columns is None or features is None:
                guard.commit(committed)
            else:
                guard.commit(replace(committed, features=features[:, columns] if columns else None))

    def release(self, slot: int) -> None:
        """Tells the drafters that a slot is free."""
        more = self._followed.release(slot)
        if isinstance(controller := self._usual.controller, Goodput):
            controller.end_text(more)
        for guard in self._usual.guards:
            guard.release(slot)
        if slot in self._predicted:
            self._guards[-1].release(slot)
            self._predicted.remove(slot)

    def learn_step(self, draft: Draft, record: StepRecord) -> None:
        """Reports the result of a draft to the controller, if `Draft.is_learned`."""
        if self._team.controller is not None and draft.is_learned:
            self._team.controller.learn_step(record)

    def plain_seconds(self, num_sequences: int) -> float | None:
        """Returns the measured seconds of an iteration without drafts; None if there is no measurement."""
        measured = getattr(self._usual.controller, "plain_seconds", None)
        return None if measured is None else measured(num_sequences)

    def credit(self, source: int) -> tuple[str, ...]:
        """Returns the names of the drafters in a bit set of `TokenTree.source`; a grammar's forced tokens come last."""
        known = self._credits.get(source)
        if known is None:
            known = tuple(name for bit, name in enumerate((*self.names, FORCED)) if source >> bit & 1)
            self._credits[source] = known
        return known


def _num_proposed(counts: Sequence[Sequence[int] | None], max_depth: Sequence[int]) -> list[int | None]:
    """Returns the proposed nodes of each sequence over all drafters; None if not asked for or unknown."""
    proposed: list[int | None] = [0 if depth > 0 else None for depth in max_depth]
    for each in counts:
        if each is None:
            return [None] * len(max_depth)
        for row, count in enumerate(each):
            if (known := proposed[row]) is not None:
                proposed[row] = known + count
    return proposed


def _bounded(context: DraftContext, ask: Ask) -> DraftContext:
    if ask.depth >= max(context.max_depth) and ask.floors is None:
        return context
    return replace(context, max_depth=[min(each, ask.depth) for each in context.max_depth], floors=ask.floors)


def _within(context: DraftContext, allotment: Allotment) -> DraftContext:
    max_depth: list[int] = []
    max_nodes: list[int] = []
    for depth, nodes, allowance in zip(context.max_depth, context.max_nodes, allotment.allowances, strict=True):
        max_depth.append(min(depth, allowance.depth))
        max_nodes.append(max(min(nodes, allowance.nodes), 1))
    return replace(context, max_depth=max_depth, max_nodes=max_nodes)
