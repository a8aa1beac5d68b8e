"""Drafters and their controller as the loop sees them: one thing that proposes a tree and learns what became of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Self

from foretoken.core.records import AskedDrafter
from foretoken.core.stage_clock import Laps
from foretoken.core.token_tree import MAX_NODES, PROBE, TokenTree
from foretoken.drafters.base import MeasuredDrafter, TargetReads
from foretoken.drafting.adaptive_depth import AdaptiveDepth
from foretoken.drafting.base import Ask, Fixed
from foretoken.drafting.best_nodes import BestNodes
from foretoken.drafting.calibration import KeptAcceptance, pair_key
from foretoken.drafting.draft_costs import BesidePrompts
from foretoken.drafting.draft_guard import DraftGuard, SafeDraft, within_node_limits
from foretoken.drafting.draft_noise import DraftNoise
from foretoken.drafting.draft_timing import time_drafts
from foretoken.drafting.measured_gain import MeasuredGain
from foretoken.drafting.several_drafters import SeveralDrafters
from foretoken.grammars.drafts import FORCED, constrained_tree

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from foretoken.core.passes import Tap
    from foretoken.core.records import Declined, StepRecord
    from foretoken.drafters.base import Committed, DraftContext, Drafter, DraftRequest, TargetHandle
    from foretoken.drafters.options import DrafterOptions
    from foretoken.drafting.base import Allotment, Continue, Controller, Leaf
    from foretoken.grammars.drafts import GrammarBounds

_MOST_BOUGHT = 128  # nodes of a tree that several drafters' nodes are bought for, unless one drafter's are more
_LONGEST_GRAFT = 10  # tokens


class Draft(NamedTuple):
    """A valid tree, and what is to know of how it came about.

    Attributes:
        tree: Over the batch's roots.
        num_proposed: Of each of its sequences, see `SequenceStep`.
        error: Why a drafter's own tree was dropped, or None.
        declined: Why no drafter was asked, or None.
        is_committed: Whether drafters are to hear what becomes of it.
        asked: The places of those that were asked, in that order, and how deep each one's tree is at most.
        laps: What each of these took; None where nobody was asked.
        has_forced: Whether the tree holds tokens that nobody but a grammar proposed.
        measures_plain: Whether nothing is drafted for the controller to see what that takes.
    """

    tree: TokenTree
    num_proposed: Sequence[int | None]
    error: str | None = None
    declined: Declined | None = None
    is_committed: bool = True
    asked: Sequence[tuple[int, int]] = ()
    laps: Laps | None = None
    has_forced: bool = False
    measures_plain: bool = False


def joint_reads(drafters: Sequence[Drafter]) -> TargetReads:
    """What several drafters read of the target together: every tap once, in the order of who names it first."""
    taps: dict[Tap, None] = dict.fromkeys(tap for drafter in drafters for tap in drafter.reads.taps)
    return TargetReads(
        taps=tuple(taps),
        top_k=max((drafter.reads.top_k for drafter in drafters), default=0),
        is_last_enough=all(drafter.reads.is_last_enough for drafter in drafters),
    )


def choose_controller(
    options: Sequence[DrafterOptions], drafters: Sequence[Drafter], target: TargetHandle
) -> Controller:
    """Who decides how much is drafted.

    Args:
        options: Of the drafters that have some.
        drafters: Attached ones, at least one.
        target: What they are attached to. Gives seconds of passes, and drafts are timed on it.

    Returns:
        The one that asks for whole drafts where options fix their size or a caller made the drafter; else the one that
        chooses among several drafters and buys their nodes, the one that buys nodes of dynamic trees and of trees that
        are drafted at once, and the one that chooses a depth for a drafter that drafts level by level; these three as
        long as drafting pays by the clock.
    """
    widest = max(drafter.nodes_by_depth[-1] for drafter in drafters)
    if len(options) > 1 and all(each.is_adaptive for each in options):
        several = _several(drafters, target, [time_drafts(drafter, target) for drafter in drafters])
        key = pair_key(target.model, options)
        if key is not None:
            several.keep_learned(KeptAcceptance(several.learners, key))
        return MeasuredGain(several)
    if not options or not all(each.is_adaptive for each in options):
        return Fixed(most_nodes(drafters), [drafter.nodes_by_depth[-1] for drafter in drafters])
    is_dynamic = len(options) == 1 and options[0].tree == "dynamic"
    if len(options) == 1 and not is_dynamic and not (options[0].can_prune_tree and options[0].tree == "tree"):
        drafter = drafters[0]
        depths = AdaptiveDepth(
            target.costs, drafter.nodes_by_depth, timed=time_drafts(drafter, target),
            expected=drafter.expected_acceptance if isinstance(drafter, MeasuredDrafter) else (),
        )  # fmt: skip
        return MeasuredGain(depths)
    deepest = len(drafters[0].nodes_by_depth) - 1 if is_dynamic else None
    return MeasuredGain(BestNodes(target.costs, max_nodes=widest, deepest=deepest))


def choose_for_predictions(
    options: Sequence[DrafterOptions], drafters: Sequence[Drafter], target: TargetHandle
) -> Controller:
    """Who decides how much is drafted while requests bring predictions; as `choose_controller`, without timing drafts.

    Args:
        options: Of the drafters that have some, of the one that reads predictions last.
        drafters: Attached ones, that one last.
        target: What they are attached to.
    """
    if len(drafters) == 1:  # costs of passes are not measured for plain decoding: the clock alone decides
        return MeasuredGain(Fixed(most_nodes(drafters)))
    if len(options) < len(drafters) or not all(each.is_adaptive for each in options):
        return Fixed(most_nodes(drafters), [drafter.nodes_by_depth[-1] for drafter in drafters])
    return MeasuredGain(_several(drafters, target))


def _several(
    drafters: Sequence[Drafter], target: TargetHandle, timed: Sequence[Sequence[tuple[int, float]]] = ()
) -> SeveralDrafters:
    """A controller of several drafters; timed: see `SeveralDrafters`."""
    widest = max(drafter.nodes_by_depth[-1] for drafter in drafters)
    return SeveralDrafters(
        target.costs,
        nodes_by_depth=[drafter.nodes_by_depth for drafter in drafters],
        max_nodes=max(widest, min(most_nodes(drafters), _MOST_BOUGHT)),
        timed=timed,
    )


def room_beside_prompts(controller: Controller, target: TargetHandle) -> BesidePrompts | None:
    """Who says whether to draft in passes that read prompts; None where drafters are asked in every pass."""
    return None if isinstance(controller, Fixed) else BesidePrompts(target.costs)


def most_nodes(drafters: Sequence[Drafter]) -> int:
    """Nodes of the widest tree that is verified, root included.

    There is room for all that the drafters propose together, as far as trees may have nodes: whole drafts are verified
    as they are, and where nodes are bought, drawn nodes and probes are never left out.
    """
    return min(1 + sum(drafter.nodes_by_depth[-1] - 1 for drafter in drafters), MAX_NODES)


class _Team(NamedTuple):
    """Who is asked in an iteration.

    Attributes:
        guards: The first of the engine's drafters.
        controller: Decides how much they draft; None without drafters.
        lookups: Places of those that can continue what others draft.
    """

    guards: Sequence[DraftGuard]
    controller: Controller | None
    lookups: Sequence[int]

    @classmethod
    def of(cls, guards: Sequence[DraftGuard], controller: Controller | None) -> Self:
        """Of some drafters and their controller."""
        return cls(guards, controller, [index for index, guard in enumerate(guards) if guard.can_continue])


class Drafting:
    """Any number of drafters behind guards, and the controller that decides how much they draft.

    Attributes:
        names: Of the drafters; also of those that have been switched off.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        controller: Controller | None,
        *,
        vocab_size: int,
        max_nodes: int,
        device: torch.device,
        beside_prompts: BesidePrompts | None = None,
        for_predictions: Controller | None = None,
    ) -> None:
        """Puts drafters to work that are attached.

        Args:
            drafters: None for plain decoding.
            controller: None without drafters.
            vocab_size: V, of the target.
            max_nodes: Widest tree that the cache has room for.
            device: Where trees must lie.
            beside_prompts: Says whether to draft in passes that read prompts; None to leave that to the controller.
            for_predictions: Takes the place of `controller` while a request of the batch brings a prediction. The last
                drafter is asked, and told of requests, then alone. None where predictions make no difference.
        """
        self._predicted: set[int] = set()  # slots whose requests brought predictions
        self._is_announced = True  # whether drafters heard of the last iteration
        self._beside_prompts = beside_prompts
        self._guards = [
            DraftGuard(drafter, vocab_size=vocab_size, max_nodes=max_nodes, device=device) for drafter in drafters
        ]
        is_added = for_predictions is not None
        self._usual = self._team = _Team.of(self._guards[: len(drafters) - is_added], controller)
        self._predicting = _Team.of(self._guards, for_predictions) if is_added else self._usual
        self._device = device
        self._noise = DraftNoise()
        self.names = [guard.name for guard in self._guards]
        self._credits: dict[int, tuple[str, ...]] = {}
        self._max_nodes, self._nodes_by_depth = max_nodes, [list(drafter.nodes_by_depth) for drafter in drafters]
        self.reads = joint_reads(drafters)
        # Which of the features each drafter reads; None for all of them in this order.
        self._columns: list[list[int] | None] = []
        for drafter in drafters[: len(self._usual.guards)]:
            columns = [self.reads.taps.index(tap) for tap in drafter.reads.taps]
            self._columns.append(None if columns == list(range(len(self.reads.taps))) else columns)

    @property
    def are_merged(self) -> bool:
        """Whether the last draft may hold nodes of several drafters."""
        return len(self._team.guards) > 1

    def _is_active(self) -> bool:
        """Whether there is a drafter to ask that has not been switched off."""
        return self._team.controller is not None and any(guard.is_active for guard in self._team.guards)

    def begin(self, slot: int, request: DraftRequest) -> None:
        """A sequence begins in a slot."""
        for guard in self._usual.guards:
            guard.begin(slot, request)
        if request.prediction is not None and self._predicting is not self._usual:
            self._guards[-1].begin(slot, request)
            self._predicted.add(slot)

    def reusable(self, slot: int, length: int) -> int:
        """How many of the first positions of a slot no drafter needs to be read again, see `PrefixKeeper`.

        Args:
            slot: Of a sequence that is running or over.
            length: Positions whose tokens are the same, as is the one after them.
        """
        while (least := min((guard.reusable(slot, length) for guard in self._usual.guards), default=length)) < length:
            length = least  # which those have to agree to that would have kept more
        return length

    def propose(self, context: DraftContext, num_prompt_tokens: int = 0) -> Draft:
        """A tree over each root: what drafters propose within the controller's allowances, as far as it pays.

        Args:
            context: Its bounds are those of requests and cache; the controller's are put in here.
            num_prompt_tokens: Of others' prompts that a pass without drafts would read.
        """
        before = self._team
        self._team = self._predicting if self._predicted.intersection(context.slots) else self._usual
        guards, controller, _ = self._team
        if controller is None or not self._is_active():
            return self._no_draft(context, is_committed=False)
        is_late = before is not self._team and not self._is_announced  # drafters hear of an iteration before they draft
        beside = self._beside_prompts
        if is_late or (beside is not None and not beside.has_room(len(context.slots), num_prompt_tokens)):
            self._is_announced = True
            return self._no_draft(context)
        allotment = controller.allot(len(context.slots))
        self._is_announced = True
        if allotment.measures_plain:
            return self._no_draft(context)._replace(measures_plain=True)
        if allotment.declined is not None:
            self._is_announced = allotment.may_draft_next or not self.reads.is_last_enough
            return self._no_draft(context, allotment.declined, is_committed=self._is_announced)
        limits, context = context.max_nodes, _within(context, allotment)
        if max(context.max_depth) <= 0:
            return self._no_draft(context)
        drafts: dict[int, SafeDraft] = {}
        laps = Laps(self._device)
        ask: Ask | None = allotment.first or Ask(range(len(guards)))
        while ask is not None:
            bounded = _no_deeper(context, ask.depth)
            for index in ask.drafters:
                drafts[index] = guards[index].propose(self._noise.of(bounded, index))
                laps.mark()
            ask = controller.further({index: draft.tree for index, draft in drafts.items()})
        trees = {index: draft.tree for index, draft in drafts.items()}
        tree = controller.select(trees, self._continuation(context) if self._team.lookups else None)
        tree = within_node_limits(tree, [self._limit(most) for most in limits])
        if len(guards) == 1 and tree.source is not None:
            # What it says there tells probes only: all nodes are its own.
            tree = replace(tree, source=(tree.source & PROBE) | 1)
        errors = (drafts[index].error for index in sorted(drafts) if drafts[index].error is not None)
        asked = [(index, draft.tree.max_depth) for index, draft in drafts.items()]
        num_proposed = _num_proposed(list(drafts.values()), context.max_depth)
        return Draft(tree, num_proposed, next(errors, None), asked=asked, laps=laps)

    def _limit(self, most: int) -> int | None:
        """The bound of a request, where drafts that are no deeper than it allows may have more nodes; else None."""
        if most >= self._max_nodes:
            return None
        if self._team.lookups and self.are_merged:  # what is grafted comes on top
            return most
        sizes = self._nodes_by_depth[: len(self._team.guards)]
        possible = 1 + sum(nodes[min(most, len(nodes)) - 1] - 1 for nodes in sizes)
        return None if possible <= most else most

    def constrained(self, draft: Draft, bounds: Sequence[GrammarBounds | None]) -> Draft:
        """A draft as the sequences' grammars let it be, see `grammars.drafts`.

        Args:
            draft: Of B trees.
            bounds: Of B sequences; None for those without a grammar.
        """
        if not any(bounds):
            return draft
        found = constrained_tree(draft.tree, bounds, source=1 << len(self.names))
        return draft._replace(tree=found.tree, has_forced=found.num_forced > 0)

    def _continuation(self, context: DraftContext) -> Continue:
        """What the lookups among the drafters say after drafted paths."""
        lookups = self._team.lookups

        def continued(leaf: Leaf) -> list[tuple[int, Sequence[int]]]:
            row, path = leaf
            depth = min(context.max_depth[row] - len(path), _LONGEST_GRAFT)
            found: list[tuple[int, Sequence[int]]] = []
            for index in lookups if depth > 0 else ():
                tokens = self._guards[index].continue_from(context.slots[row], context.tokens[row], path, depth)
                if tokens:
                    found.append((index, tokens))
            return found

        return continued

    def asked(self, draft: Draft) -> list[AskedDrafter]:
        """Who was asked for a draft, with seconds: once the host has waited for what came of it."""
        seconds = [] if draft.laps is None else draft.laps.seconds()
        return [
            AskedDrafter(index=index, name=self.names[index], depth=depth, seconds=each)
            for (index, depth), each in zip(draft.asked, seconds, strict=True)
        ]

    def _no_draft(self, context: DraftContext, declined: Declined | None = None, *, is_committed: bool = True) -> Draft:
        """The roots alone: no drafter is asked."""
        tree = TokenTree.roots(context.roots, device=self._device)
        return Draft(tree, [None] * len(context.slots), declined=declined, is_committed=is_committed)

    def commit(self, committed: Committed) -> None:
        """Positions entered the target's KV: every drafter gets the features it reads."""
        for guard, columns in zip(self._usual.guards, self._columns, strict=True):
            features = committed.features
            if columns is None or features is None:
                guard.commit(committed)
            else:
                guard.commit(replace(committed, features=features[:, columns] if columns else None))

    def release(self, slot: int) -> None:
        """A slot is free."""
        for guard in self._usual.guards:
            guard.release(slot)
        if slot in self._predicted:
            self._guards[-1].release(slot)
            self._predicted.remove(slot)

    def learn(self, draft: Draft, record: StepRecord) -> None:
        """Tells the controller what a draft brought, unless requests or prompts left it nothing to ask for."""
        has_decided = draft.asked or draft.declined is not None or draft.measures_plain
        if self._team.controller is not None and self._is_active() and has_decided:
            self._team.controller.learn(record)

    def plain_seconds(self, num_sequences: int) -> float | None:
        """Returns the seconds of an iteration without drafts, as the controller measured them; None if it has not."""
        measured = getattr(self._usual.controller, "plain_seconds", None)
        return None if measured is None else measured(num_sequences)

    def credit(self, source: int) -> tuple[str, ...]:
        """Names of the drafters in a bit set of `TokenTree.source`, a grammar's forced tokens after them all."""
        known = self._credits.get(source)
        if known is None:
            known = tuple(name for bit, name in enumerate((*self.names, FORCED)) if source >> bit & 1)
            self._credits[source] = known
        return known


def _num_proposed(drafts: Sequence[SafeDraft], max_depth: Sequence[int]) -> list[int | None]:
    """Nodes that all drafters proposed together, of each sequence; None where it was not asked for or is not known."""
    counts = [draft.num_proposed for draft in drafts if draft.num_proposed is not None]
    if len(counts) < len(drafts):
        return [None] * len(max_depth)
    return [sum(each) if depth > 0 else None for depth, *each in zip(max_depth, *counts, strict=True)]


def _no_deeper(context: DraftContext, depth: int) -> DraftContext:
    """A context with a bound on depth."""
    if depth >= max(context.max_depth):
        return context
    return replace(context, max_depth=[min(each, depth) for each in context.max_depth])


def _within(context: DraftContext, allotment: Allotment) -> DraftContext:
    """A context with the tighter of its own bounds and those of an allotment."""
    each = zip(context.max_depth, context.max_nodes, allotment.allowances, strict=True)
    bounds = [(min(depth, allowance.depth), min(nodes, allowance.nodes)) for depth, nodes, allowance in each]
    return replace(
        context, max_depth=[depth for depth, _ in bounds], max_nodes=[max(nodes, 1) for _, nodes in bounds]
    )  # fmt: skip
