"""Chooses the controller for some drafters, from their options and from the seconds of drafts and passes.

Drafts are timed at load, so the controller knows their cost before any request. The first slow drafts, which allocate
memory and capture graphs, are over as well. The controller compares drafts with passes that were timed earlier, perhaps
weeks ago. Another program on the machine slows both. Passes are therefore timed between the drafts, and the drafts'
seconds are divided by the slowdown of the passes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from foretoken.core.backend import has_cuda_runtime, own_torch_state, reads_are_free, runs_cpu_kernels
from foretoken.core.passes import Pass
from foretoken.core.sampling_params import SamplingParams
from foretoken.core.token_tree import MAX_NODES, TokenTree
from foretoken.drafters.base import (
    READ_SHARE,
    Committed,
    DraftContext,
    DraftRequest,
    FloorsFollower,
    MeasuredDrafter,
    SparingReader,
)
from foretoken.drafting.acceptance import KeptAcceptance, pair_key
from foretoken.drafting.base import Controller, Fixed
from foretoken.drafting.costs import fastest_by_depth
from foretoken.drafting.draft_guard import DraftGuard, UntrustedDrafter
from foretoken.drafting.goodput import Goodput
from foretoken.drafting.policies import BatchTable, ByBatchSize, Heuristic, SmartSpec
from foretoken.runner.costs import keep_points, read_points
from foretoken.runner.decoders import as_key, facts_of_passes
from foretoken.sampling.batch import SamplingBatch, SamplingRequest
from foretoken.trees.stopping import STOP_CONTROLS

if TYPE_CHECKING:
    from foretoken.drafters.base import Drafter, DrafterOptions, TargetHandle

_PROMPT_LEN = 8
_MOST_TIMED = 4  # levels of the deepest timed drafts
_NUM_DRAFTS = 15  # the first reads the prompt; then one level and the deepest in turns
_NUM_NEEDED = 4  # drafts, two of each depth: the first are slow
_LIMIT_S = 1.0  # no further draft after this, once the needed drafts were timed
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
        drafters: Attached to the target, at least one.
        target: Gives seconds of passes; drafts are timed on it.
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
    is_single = len(options) == 1 and not options[0].can_prune_tree and options[0].tree != "dynamic"
    made = _goodput(drafters, target, timed, selects=not is_single)
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
    known = read_points(key, {"drafts": range(1, _MOST_TIMED + 1)})
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

    The drafter of predictions is last.
    """
    if len(drafters) == 1:  # no costs of passes are measured for plain decoding
        return _goodput(drafters)
    if len(options) < len(drafters) or not all(each.is_adaptive for each in options):
        return Fixed(most_nodes(drafters), [drafter.nodes_by_depth[-1] for drafter in drafters])
    return _goodput(drafters, target)


def _goodput(
    drafters: Sequence[Drafter],
    target: TargetHandle | None = None,
    timed: Sequence[Sequence[tuple[int, float]]] = (),
    *,
    selects: bool = True,
) -> Goodput:
    """Returns a controller; `target` has the costs of passes.

    `selects`: whether nodes of trees are selected, else only of chains that end early.
    """
    widest = max(drafter.nodes_by_depth[-1] for drafter in drafters)
    ends_early = []
    if target is not None and timed:
        ends_early = [_ends_early(*each, target.device) for each in zip(drafters, timed, strict=True)]
    return Goodput(
        None if target is None else target.costs,
        nodes_by_depth=[drafter.nodes_by_depth for drafter in drafters],
        max_nodes=max(widest, min(most_nodes(drafters), _MOST_SELECTED)),
        is_read=selects or any(ends_early),
        ends_early=ends_early,
        timed=timed,
        expected=drafters[0].expected_acceptance if isinstance(drafters[0], MeasuredDrafter) and not selects else (),
        read_shares=[each.read_share if isinstance(each, SparingReader) else READ_SHARE for each in drafters],
    )


def _ends_early(drafter: Drafter, timed: Sequence[tuple[int, float]], device: torch.device) -> bool:
    """Decides whether chains end by the probability of their path, and are read: where that costs little."""
    if not (isinstance(drafter, FloorsFollower) and drafter.follows_floors and reads_are_free(device)):
        return False
    return min((seconds / depth for depth, seconds in timed), default=0.0) >= _WORTH_READING_S


def most_nodes(drafters: Sequence[Drafter]) -> int:
    """Returns the nodes of the widest tree that is verified, root included.

    The width has room for the proposals of all drafters together, up to the bound of trees. Whole drafts are verified
    as they are. Where nodes are selected, drawn nodes and probes are never left out.
    """
    return min(1 + sum(drafter.nodes_by_depth[-1] - 1 for drafter in drafters), MAX_NODES)


def time_drafts(drafter: Drafter, target: TargetHandle, num_sequences: int = 1) -> list[tuple[int, float]]:
    """Returns depth and seconds of some drafts with nodes, over texts of zeros in the first slots, which are written.

    Seconds are divided by the slowdown of passes of one token a sequence since `target.costs` was measured. Empty for a
    drafter from another package, which would take the text for a request, and for one that proposes nothing or fails.
    """
    deepest = min(_MOST_TIMED, len(drafter.nodes_by_depth) - 1)
    if isinstance(drafter, UntrustedDrafter) or target.context_len <= _PROMPT_LEN + deepest:
        return []
    guard = DraftGuard(
        drafter, vocab_size=target.vocab_size, max_nodes=drafter.nodes_by_depth[-1], device=target.device
    )  # fmt: skip
    timed: list[tuple[int, float]] = []
    passes: list[float] = []
    begin, n = time.perf_counter(), num_sequences
    with own_torch_state():
        context = _texts_of_zeros(guard, target, n, deepest, drafter.nodes_by_depth[-1])
        shallow = replace(context, max_depth=[1] * n)
        roots = Pass.of_tree(
            TokenTree.roots([0] * n, device=target.device),
            slots=range(n), prefix_lens=[_PROMPT_LEN] * n, last_position=_PROMPT_LEN,
        )  # fmt: skip
        while len(timed) < _NUM_DRAFTS and (len(timed) < _NUM_NEEDED or time.perf_counter() - begin < _LIMIT_S):
            start = _now(target.device)
            depth = guard.propose(shallow if len(timed) % 2 else context).tree.max_depth
            if not depth:
                break
            end = _now(target.device)
            timed.append((depth, end - start))
            target.run(roots)
            passes.append(_now(target.device) - end)
        for slot in range(n):
            guard.release(slot)
    slower = min(passes) / target.costs(n) if passes else 1.0  # than when passes were timed
    return [(depth, seconds / slower) for depth, seconds in timed]


def _now(device: torch.device) -> float:
    if has_cuda_runtime(device):
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _texts_of_zeros(guard: DraftGuard, target: TargetHandle, n: int, deepest: int, max_nodes: int) -> DraftContext:
    """Begins n equal texts, and lets target and drafter read them."""
    params, tokens = SamplingParams(temperature=0.0), [0] * (_PROMPT_LEN + 1)
    for slot in range(n):
        guard.begin(slot, DraftRequest(request_id=f"draft timing {slot}", prompt=list(tokens), params=params))
    read = [tokens[:-1]] * n
    features = target.run(Pass.of_chains(read, slots=range(n), prefix_lens=[0] * n, device=target.device)).features
    guard.commit(Committed(slots=range(n), starts=[0] * n, tokens=read, features=features))
    sampling = SamplingBatch.build([SamplingRequest(params=params, seed=0)] * n, target.vocab_size, target.device)
    return DraftContext(
        slots=range(n), tokens=[tokens] * n, max_depth=[deepest] * n, max_nodes=[max_nodes] * n, sampling=sampling,
        is_coupled=[False] * n,
    )  # fmt: skip
