"""Chooses the controller for some drafters, from their options and from what drafts and passes take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretoken.core.backend import reads_are_free, runs_cpu_kernels
from foretoken.core.token_tree import MAX_NODES
from foretoken.drafters.base import READ_SHARE, FloorsFollower, MeasuredDrafter, SparingReader
from foretoken.drafting.acceptance import KeptAcceptance, pair_key
from foretoken.drafting.base import Fixed
from foretoken.drafting.costs import fastest_by_depth
from foretoken.drafting.draft_timing import MOST_TIMED, time_drafts
from foretoken.drafting.goodput import Goodput
from foretoken.drafting.policies import ByBatchSize, Heuristic, SmartSpec
from foretoken.runner.costs import keep_points, read_points
from foretoken.runner.decoders import as_key, facts_of_passes
from foretoken.trees.stopping import STOP_CONTROLS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.drafters.base import Drafter, DrafterOptions, TargetHandle
    from foretoken.drafting.base import Controller
    from foretoken.drafting.policies import BatchTable

_WORTH_READING_S = 1e-3  # of a level; a choice: reading and cutting a chain takes the host about 0.1 ms
_MOST_SELECTED = 128  # least cap of nodes in a tree of several drafters; a drafter with wider trees raises the cap


def choose_controller(
    options: Sequence[DrafterOptions],
    drafters: Sequence[Drafter],
    target: TargetHandle,
    control: str | BatchTable = "goodput",
    *,
    keeps_acceptance: bool = True,
) -> Controller:
    """Returns the controller for some drafters.

    Args:
        options: Of the drafters that have options.
        drafters: Attached drafters, at least one.
        target: What the drafters are attached to. Gives seconds of passes; drafts are timed on it.
        control: One of `CONTROLS`, or vLLM's table of depths by batch size. Every other policy than "goodput" also
            applies to drafters with a fixed depth, which bounds it.
        keeps_acceptance: Whether acceptance counts are read from and kept in the cache directory.

    Returns:
        `Fixed` if options fix the draft size, a stop rule ends drafts, or a caller made the drafter; else `Goodput`. It
        selects nodes of several drafters, lookups, dynamic trees and chains that end early; otherwise it chooses
        the depth of whole drafts.
    """
    sizes = most_nodes(drafters), [drafter.nodes_by_depth[-1] for drafter in drafters]
    if not isinstance(control, str):
        return ByBatchSize(control, *sizes)
    if control == "heuristic":
        return Heuristic(*sizes)
    if control == "smartspec":
        timed = [time_drafts(drafter, target) for drafter in drafters]
        return SmartSpec(target.costs, timed, [drafter.nodes_by_depth for drafter in drafters], sizes[0])
    if control in ("fixed", *STOP_CONTROLS) or not options or not all(each.is_adaptive for each in options):
        return Fixed(*sizes)
    timed = [_drafts_of(*each, target) for each in zip(drafters, options, strict=True)]
    if len(options) == 1 and not options[0].can_prune_tree and options[0].tree != "dynamic":
        (drafter,) = drafters
        ends_early = _ends_early(drafter, target, timed[0])
        made = Goodput(
            target.costs, nodes_by_depth=[drafter.nodes_by_depth], max_nodes=drafter.nodes_by_depth[-1],
            is_read=ends_early, ends_early=[ends_early], timed=timed,
            expected=drafter.expected_acceptance if isinstance(drafter, MeasuredDrafter) else (),
            read_shares=list(map(_read_share, drafters)),
        )  # fmt: skip
    else:
        made = _selecting(drafters, target, timed)
    key = pair_key(target.model, options) if keeps_acceptance else None
    if key is not None:
        made.keep_learned(KeptAcceptance(made.learners, key))
    return made


def _drafts_of(drafter: Drafter, options: DrafterOptions, target: TargetHandle) -> list[tuple[int, float]]:
    """Returns depth and seconds of timed drafts; long drafts on a CPU as they were timed in the last month."""
    model = target.model
    if model is None or model.is_borrowed or not runs_cpu_kernels(target.device):
        return time_drafts(drafter, target)
    key = as_key({"drafts": 1, "options": repr(options)} | facts_of_passes(model, target.runner))
    known = read_points(key, {"drafts": range(1, MOST_TIMED + 1)})
    if known is not None:
        return known["drafts"]
    timed = time_drafts(drafter, target)
    fastest = fastest_by_depth(timed)
    if fastest.get(1, 0.0) >= _WORTH_READING_S:
        keep_points(key, {"drafts": sorted(fastest.items())})
    return timed


def choose_for_predictions(
    options: Sequence[DrafterOptions], drafters: Sequence[Drafter], target: TargetHandle
) -> Controller:
    """Returns the controller while requests bring predictions: as `choose_controller`, without timing drafts.

    Args:
        options: Of the drafters that have options; the drafter of predictions is last.
        drafters: Attached drafters; the drafter of predictions is last.
        target: What the drafters are attached to.
    """
    if len(drafters) == 1:  # no costs of passes are measured for plain decoding
        return _selecting(drafters)
    if len(options) < len(drafters) or not all(each.is_adaptive for each in options):
        return Fixed(most_nodes(drafters), [drafter.nodes_by_depth[-1] for drafter in drafters])
    return _selecting(drafters, target)


def _ends_early(drafter: Drafter, target: TargetHandle, timed: Sequence[tuple[int, float]]) -> bool:
    """Decides whether chains end by the probability of their path, and are read: where that costs little."""
    if not (isinstance(drafter, FloorsFollower) and drafter.follows_floors and reads_are_free(target.device)):
        return False
    return min((seconds / depth for depth, seconds in timed), default=0.0) >= _WORTH_READING_S


def _selecting(
    drafters: Sequence[Drafter],
    target: TargetHandle | None = None,
    timed: Sequence[Sequence[tuple[int, float]]] = (),
) -> Goodput:
    """Returns a controller that reads drafters' trees and selects nodes; `target` has the costs of passes."""
    widest = max(drafter.nodes_by_depth[-1] for drafter in drafters)
    ends_early: list[bool] = []
    if target is not None and timed:
        ends_early = [_ends_early(drafter, target, each) for drafter, each in zip(drafters, timed, strict=True)]
    return Goodput(
        None if target is None else target.costs,
        nodes_by_depth=[drafter.nodes_by_depth for drafter in drafters],
        max_nodes=max(widest, min(most_nodes(drafters), _MOST_SELECTED)),
        timed=timed,
        ends_early=ends_early,
        read_shares=list(map(_read_share, drafters)),
    )


def _read_share(drafter: Drafter) -> float:
    return drafter.read_share if isinstance(drafter, SparingReader) else READ_SHARE


def most_nodes(drafters: Sequence[Drafter]) -> int:
    """Returns the nodes of the widest tree that is verified, root included.

    The width has room for the proposals of all drafters together, up to the bound of trees. Whole drafts are verified
    as they are. Where nodes are selected, drawn nodes and probes are never left out.
    """
    return min(1 + sum(drafter.nodes_by_depth[-1] - 1 for drafter in drafters), MAX_NODES)
