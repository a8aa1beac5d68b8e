"""Measures the seconds of drafts at load, before the first request.

The controller then knows the cost of drafts before any request. The first slow drafts, which allocate memory and
capture graphs, are over as well.

The controller compares drafts with passes that were timed earlier, perhaps weeks ago. Another program on the machine
slows both. Passes are therefore timed between the drafts, and the drafts' seconds are divided by the slowdown of the
passes.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from foretoken.core.backend import has_cuda_runtime, own_torch_state
from foretoken.core.passes import Pass
from foretoken.core.sampling_params import SamplingParams
from foretoken.core.token_tree import TokenTree
from foretoken.drafters.base import Committed, DraftContext, DraftRequest
from foretoken.drafting.draft_guard import DraftGuard
from foretoken.drafting.untrusted_drafter import UntrustedDrafter
from foretoken.sampling.batch import SamplingBatch, SamplingRequest

if TYPE_CHECKING:
    from foretoken.drafters.base import Drafter, TargetHandle

_PROMPT_LEN = 8
_DEEPEST = 4  # most levels of the timed drafts
_NUM_DRAFTS = 15  # the first reads the prompt; then one level and the deepest in turns
_NUM_NEEDED = 4  # drafts, two of each depth: the first are slow
_LIMIT_S = 1.0  # no further draft after this, once the needed drafts were timed
_SLOT = 0


def time_drafts(drafter: Drafter, target: TargetHandle) -> list[tuple[int, float]]:
    """Returns depth and seconds of some drafts over a text of zeros.

    Seconds are divided by the slowdown of passes of one token since `target.costs` was measured.

    Args:
        drafter: Attached, without a sequence in slot 0.
        target: What the drafter was attached to; the rows of slot 0 are written.

    Returns:
        One entry per draft with nodes. Empty for a drafter from another package, which would take the text for a
        request, and for one that proposes nothing or fails.
    """
    deepest = min(_DEEPEST, len(drafter.nodes_by_depth) - 1)
    if isinstance(drafter, UntrustedDrafter) or target.context_len <= _PROMPT_LEN + deepest:
        return []
    guard = DraftGuard(
        drafter, vocab_size=target.vocab_size, max_nodes=drafter.nodes_by_depth[-1], device=target.device
    )  # fmt: skip
    params, tokens = SamplingParams(temperature=0.0), [0] * (_PROMPT_LEN + 1)
    timed: list[tuple[int, float]] = []
    passes: list[float] = []
    begin = time.perf_counter()
    with own_torch_state():
        guard.begin(_SLOT, DraftRequest(request_id="draft timing", prompt=list(tokens), params=params))
        guard.commit(_prompt_in_cache(tokens[:-1], target))
        context = DraftContext(
            slots=[_SLOT],
            tokens=[tokens],
            max_depth=[deepest],
            max_nodes=[drafter.nodes_by_depth[-1]],
            sampling=SamplingBatch.build(
                [SamplingRequest(params=params, seed=0)], target.vocab_size, target.device
            ),
            is_coupled=[False],
        )  # fmt: skip
        shallow = replace(context, max_depth=[1])
        root = Pass.of_tree(
            TokenTree.roots([0], device=target.device),
            slots=[_SLOT], prefix_lens=[_PROMPT_LEN], last_position=_PROMPT_LEN,
        )  # fmt: skip
        while len(timed) < _NUM_DRAFTS and (len(timed) < _NUM_NEEDED or time.perf_counter() - begin < _LIMIT_S):
            start = _now(target.device)
            depth = guard.propose(shallow if len(timed) % 2 else context).tree.max_depth
            if not depth:
                break
            end = _now(target.device)
            timed.append((depth, end - start))
            target.run(root)
            passes.append(_now(target.device) - end)
        guard.release(_SLOT)
    slower = min(passes) / target.costs(1) if passes else 1.0  # than when passes were timed
    return [(depth, seconds / slower) for depth, seconds in timed]


def _now(device: torch.device) -> float:
    if has_cuda_runtime(device):
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _prompt_in_cache(tokens: list[int], target: TargetHandle) -> Committed:
    """Returns a prompt that the target has read, and its features."""
    work = Pass.of_chains([tokens], slots=[_SLOT], prefix_lens=[0], device=target.device)
    return Committed(slots=[_SLOT], starts=[0], tokens=[tokens], features=target.run(work).features)
