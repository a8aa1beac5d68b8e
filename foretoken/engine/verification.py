"""What an iteration's verification asks of the decoder, and what comes of it before anything is committed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from foretoken.core.backend import reads_are_free
from foretoken.core.passes import TokenChoice

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from torch import Tensor

    from foretoken.core.passes import Pass
    from foretoken.core.tree_trace import TreeTrace
    from foretoken.decoder.base import PassOutput
    from foretoken.engine.drafting import Draft
    from foretoken.engine.outcomes import Outcome
    from foretoken.engine.prefill import Chunk
    from foretoken.engine.sequence import Sequence


class Verified(NamedTuple):
    """One iteration of some sequences up to acceptance, nothing committed yet.

    Attributes:
        trees: The pass without its chunks of prompts, which follow.
        chunks: Of sequences that join.
        draft: What was verified.
        output: Of the whole pass.
        outcomes: What survived.
        lossy_tv: See `StepRecord`.
        traces: See `SequenceStep`; one a sequence.
    """

    trees: Pass
    chunks: list[Chunk]
    draft: Draft
    output: PassOutput
    outcomes: list[Outcome]
    lossy_tv: float
    traces: Seq[TreeTrace | None]

    def logits_of(self, row: int) -> Tensor:
        """(N, V) logits of one sequence's tree."""
        return logits_of(self.output)[self.trees.offsets[row] : self.trees.offsets[row + 1]]


def token_choice(
    sequences: Seq[Sequence], trees: Pass, impossible_ids: Tensor | None, device: torch.device
) -> TokenChoice | None:
    """How a decoder may choose tokens of requests whose distribution nothing but temperature changes.

    What it chooses for others is not looked at.

    Args:
        sequences: One a tree.
        trees: The pass over them.
        impossible_ids: (U,) int64, token ids that are never generated; None for none.
        device: Of the decoder.

    Returns:
        None where the greatest logits are all that is wanted.
    """
    params = [s.params for s in sequences]
    scales = [0.0 if p.is_greedy or not p.is_plain else 1 / p.temperature for p in params]
    if not reads_are_free(device) or (impossible_ids is None and not any(scales)):
        return None
    counts = np.diff(trees.offsets)
    seeds = np.array([s.sampling.seed for s in sequences], dtype=np.int64)
    return TokenChoice(
        inverse_temperature=torch.from_numpy(np.repeat(np.array(scales, dtype=np.float32), counts)),
        seeds=torch.from_numpy(np.repeat(seeds, counts)),
        impossible_ids=impossible_ids,
    )


def logits_of(output: PassOutput) -> Tensor:
    """The logits of a verification, which every decoder gives, also where it chooses tokens besides."""
    if output.logits is None:
        raise RuntimeError("a verification has logits")
    return output.logits
