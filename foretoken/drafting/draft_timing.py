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
MOST_TIMED = 4  # levels of the deepest timed drafts
_NUM_DRAFTS = 15  # the first reads the prompt; then one level and the deepest in turns
_NUM_NEEDED = 4  # drafts, two of each depth: the first are slow
_LIMIT_S = 1.0  # no further draft after this, once the needed drafts were timed


def time_drafts(drafter: Drafter, target: TargetHandle, num_sequences: int = 1) -> list[tuple[int, float]]:
    """Returns depth and seconds of some drafts over texts of zeros.

    Seconds are divided by the slowdown of passes of one token a sequence since `target.costs` was measured.

    Args:
        drafter: Attached, without sequences in the first slots.
        target: What the drafter was attached to; rows of the first slots are written.
        num_sequences: Sequences of each draft, at most the slots.

    Returns:
        One entry per draft with nodes. Empty for a drafter from another package, which would take the text for a
        request, and for one that proposes nothing or fails.
    """
    deepest = min(MOST_TIMED, len(drafter.nodes_by_depth) - 1)
    if isinstance(drafter, UntrustedDrafter) or target.context_len <= _PROMPT_LEN + deepest:
        return []
    guard = DraftGuard(
        drafter, vocab_size=target.vocab_size, max_nodes=drafter.nodes_by_depth[-1], device=target.device
    )  # fmt: skip
    params, tokens = SamplingParams(temperature=0.0), [0] * (_PROMPT_LEN + 1)
    timed: list[tuple[int, float]] = []
    passes: list[float] = []
    begin, n = time.perf_counter(), num_sequences
    with own_torch_state():
        for slot in range(n):
            guard.begin(slot, DraftRequest(request_id=f"draft timing {slot}", prompt=list(tokens), params=params))
        guard.commit(_prompts_in_cache(tokens[:-1], n, target))
        context = DraftContext(
            slots=range(n),
            tokens=[tokens] * n,
            max_depth=[deepest] * n,
            max_nodes=[drafter.nodes_by_depth[-1]] * n,
            sampling=SamplingBatch.build(
                [SamplingRequest(params=params, seed=0)] * n, target.vocab_size, target.device
            ),
            is_coupled=[False] * n,
        )  # fmt: skip
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


def _prompts_in_cache(tokens: list[int], n: int, target: TargetHandle) -> Committed:
    """Returns n equal prompts that the target has read, and their features."""
    work = Pass.of_chains([tokens] * n, slots=range(n), prefix_lens=[0] * n, device=target.device)
    return Committed(slots=range(n), starts=[0] * n, tokens=[tokens] * n, features=target.run(work).features)
