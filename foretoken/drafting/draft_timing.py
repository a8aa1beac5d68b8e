"""What a draft takes, measured before the first request: nobody waits for text yet.

The controller then need not draft while it decodes to find out that drafts are dear here. The first drafts, which
allocate and capture, are over as well.

The controller compares drafts with passes that were timed at another moment, perhaps weeks ago. Another program on the
machine slows both down: passes are therefore timed between the drafts, and the drafts' seconds are divided by how many
times as long as then passes take now.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from foretoken.core.backend import has_cuda_runtime
from foretoken.core.passes import Pass
from foretoken.core.sampling_params import SamplingParams
from foretoken.core.token_tree import TokenTree
from foretoken.core.torch_state import own_torch_state
from foretoken.drafters.base import Committed, DraftContext, DraftRequest
from foretoken.drafting.draft_guard import DraftGuard
from foretoken.drafting.untrusted_drafter import UntrustedDrafter
from foretoken.sampling.batch import SamplingBatch, SamplingRequest

if TYPE_CHECKING:
    from foretoken.drafters.base import Drafter, TargetHandle

_PROMPT_LEN = 8
_DEEPEST = 4  # of the timed drafts, at most
_NUM_DRAFTS = 15  # the first reads the prompt; then by turns of one level and of the deepest
_NUM_NEEDED = 4  # drafts, two of each depth: the first ones are slow
_LIMIT_S = 1.0  # no further draft after that, once those were timed
_SLOT = 0


def time_drafts(drafter: Drafter, target: TargetHandle) -> list[tuple[int, float]]:
    """Depth and seconds of some drafts over a text of zeros, the fastest of which say what drafting takes.

    Where passes of one token between the drafts take longer than `target.costs` says, drafts are told shorter likewise.

    Args:
        drafter: Attached, and without a sequence in slot 0.
        target: What it was attached to; the rows of slot 0 are written.

    Returns:
        Of each draft that had nodes; none for a drafter of others, which would take the text for a request, and for
        one that proposes nothing or fails.
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
    slower = max(min(passes, default=0.0) / target.costs(1), 1.0)  # than when passes were timed
    return [(depth, seconds / slower) for depth, seconds in timed]


def _now(device: torch.device) -> float:
    """Seconds on a clock, once all that was begun on the device is over."""
    if has_cuda_runtime(device):
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _prompt_in_cache(tokens: list[int], target: TargetHandle) -> Committed:
    """A prompt that the target has read, and its features."""
    work = Pass.of_chains([tokens], slots=[_SLOT], prefix_lens=[0], device=target.device)
    return Committed(slots=[_SLOT], starts=[0], tokens=[tokens], features=target.run(work).features)
