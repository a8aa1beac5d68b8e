"""Builds the pass of an iteration, and holds its result before anything is committed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from foretoken.core.backend import reads_are_free
from foretoken.core.passes import Pass, TokenChoice
from foretoken.engine.sequence import slot_of

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from torch import Tensor

    from foretoken.core.records import TreeTrace
    from foretoken.core.token_tree import TokenTree
    from foretoken.decoder.base import PassOutput
    from foretoken.drafting.drafting import Draft
    from foretoken.engine.outcomes import Outcome
    from foretoken.engine.prefill import Chunk, Prefill
    from foretoken.engine.sequence import Sequence
    from foretoken.runner.runner import Runner


class Verification(NamedTuple):
    """The work of one iteration for the target: B trees, and chunks of prompts.

    Attributes:
        sequences: B; decoding sequences, then sequences whose prompts end in this pass.
        tree: Their trees, probes included; the root alone where a prompt ends.
        offsets: B + 1; node i of tree b has row `offsets[b] + i` of the logits.
        trees: The part of the pass with the trees of decoding sequences; None without any.
        chunks: Chunks of prompts, the rest of the pass.
    """

    sequences: list[Sequence]
    tree: TokenTree
    offsets: Seq[int]
    trees: Pass | None
    chunks: list[Chunk]

    @property
    def num_decoding(self) -> int:
        """Tokens of the pass that belong to decoding sequences."""
        return 0 if self.trees is None else self.trees.num_tokens


class VerifiedBatch(NamedTuple):
    """One iteration of some sequences after acceptance and before commit.

    Attributes:
        asked: The work of the target.
        draft: The trees of decoding sequences.
        output: Output of the whole pass.
        outcomes: Decision of acceptance for each sequence.
        lossy_tv: See `StepRecord`.
        traces: See `SequenceStep`; one for each sequence.
    """

    asked: Verification
    draft: Draft
    output: PassOutput
    outcomes: list[Outcome]
    lossy_tv: float
    traces: Seq[TreeTrace | None]

    def logits_of(self, row: int) -> Tensor:
        """Returns the (N, V) logits of one sequence's tree."""
        return logits_of(self.output)[self.asked.offsets[row] : self.asked.offsets[row + 1]]


def verification(
    target: Runner, prefill: Prefill, decoding: list[Sequence], joining: list[Sequence], draft: Draft
) -> tuple[Verification, Pass]:
    """Returns the work of an iteration and its pass; `draft` is for `decoding`, `joining` still read prompts."""
    passes, trees, num_nodes = list[Pass](), None, 0
    if decoding:
        slots, lengths = [slot_of(s) for s in decoding], [len(s.tokens) - 1 for s in decoding]
        trees = target.verification(slots, lengths, draft.tree)
        num_nodes = trees.num_tokens
        passes.append(trees)
    chunks = prefill.next_chunks(joining, num_nodes)
    if chunks:
        passes.append(prefill.as_pass(chunks))
    ending = [chunk.sequence for chunk in chunks if chunk.is_last]
    asked = Verification(
        sequences=[*decoding, *ending],
        tree=draft.tree.with_roots([s.tokens[-1] for s in ending]),
        offsets=[*([0] if trees is None else trees.offsets), *range(num_nodes + 1, num_nodes + 1 + len(ending))],
        trees=trees,
        chunks=chunks,
    )
    return asked, passes[0] if len(passes) == 1 else passes[0].with_chains(passes[1])


def token_choice(
    sequences: Seq[Sequence], offsets: Seq[int], impossible_ids: Tensor | None, device: torch.device
) -> TokenChoice | None:
    """Tells a decoder how to choose tokens of requests that use temperature alone.

    For other requests the decoder's choice is ignored.

    Args:
        sequences: One for each tree.
        offsets: B + 1, first row of logits of each tree.
        impossible_ids: (U,) int64, token ids that are never generated; None for none.
        device: The decoder's device.

    Returns:
        None if the greatest logits are enough.
    """
    params = [s.params for s in sequences]
    scales = [0.0 if p.is_greedy or not p.is_plain else 1 / p.temperature for p in params]
    if not reads_are_free(device) or (impossible_ids is None and not any(scales)):
        return None
    counts = np.diff(offsets)
    seeds = np.array([s.sampling.seed for s in sequences], dtype=np.int64)
    return TokenChoice(
        inverse_temperature=torch.from_numpy(np.repeat(np.array(scales, dtype=np.float32), counts)),
        seeds=torch.from_numpy(np.repeat(seeds, counts)),
        impossible_ids=impossible_ids,
    )


def logits_of(output: PassOutput) -> Tensor:
    """Returns the logits of a verification; raises `RuntimeError` if the output has none."""
    if output.logits is None:
        raise RuntimeError("a verification has logits")
    return output.logits
