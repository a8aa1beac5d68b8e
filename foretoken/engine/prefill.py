"""Prompts on their way into the KV cache: which chunks ride in the next pass, and what is done once it is over."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from foretoken.core.passes import Pass
from foretoken.drafters.base import Committed
from foretoken.engine.prefill_budget import PrefillBudget

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from torch import Tensor

    from foretoken.engine.drafting import Drafting
    from foretoken.engine.sequence import Sequence
    from foretoken.runner.runner import Runner


class Chunk(NamedTuple):
    """Consecutive prompt tokens of one sequence; slot: of the cache, start: rows filled before."""

    sequence: Sequence
    slot: int
    start: int
    tokens: Seq[int]


class Prefill:
    """Feeds prompts, all but the last token of each, which is the first root.

    Attributes:
        budget: How many prompt tokens a pass takes.
    """

    def __init__(self, target: Runner, drafting: Drafting, max_num_batched_tokens: int | None = None) -> None:
        """Nothing is being fed.

        Args:
            target: Whose cache is filled.
            drafting: Gets the features.
            max_num_batched_tokens: See `PrefillBudget`.
        """
        self.budget = PrefillBudget(max_num_batched_tokens)
        self._target, self._drafting = target, drafting

    @staticmethod
    def is_over(sequence: Sequence) -> bool:
        """Whether the whole prompt of a sequence is in the cache."""
        return sequence.num_cached == len(sequence.tokens) - 1

    def next_chunks(self, sequences: Seq[Sequence], num_decoding: int) -> list[Chunk]:
        """What the next pass takes of some prompts, first come first served.

        Args:
            sequences: Running ones, in the order in which they joined; those whose prompt is in the cache are left out.
            num_decoding: Tokens of the pass that belong to sequences that are decoding.
        """
        chunks, left = [], self.budget.tokens(num_decoding, self._target.prefill_chunk)
        for sequence in sequences:
            if self.is_over(sequence) or sequence.slot is None or left == 0:
                continue
            start = sequence.num_cached
            tokens = sequence.tokens[start : min(len(sequence.tokens) - 1, start + left)]
            chunks.append(Chunk(sequence, sequence.slot, start, tokens))
            left -= len(tokens)
        return chunks

    def num_next_tokens(self, sequences: Seq[Sequence], num_decoding: int) -> int:
        """Tokens of `next_chunks` together; arguments as there."""
        left = sum(len(one.tokens) - 1 - one.num_cached for one in sequences if one.slot is not None)
        return min(left, self.budget.tokens(num_decoding, self._target.prefill_chunk))

    def as_pass(self, chunks: Seq[Chunk]) -> Pass:
        """Some chunks, without logits."""
        return Pass.of_chains(
            [chunk.tokens for chunk in chunks],
            slots=[chunk.slot for chunk in chunks],
            prefix_lens=[chunk.start for chunk in chunks],
            device=self._target.device,
        )

    def learn(self, chunks: Seq[Chunk], features: Tensor | None, seconds: float, num_decoding: int) -> None:
        """Notes what a pass has put into the cache, and tells the drafter.

        Args:
            chunks: Of the pass.
            features: (M, F, D) of their tokens, or None without taps.
            seconds: Of the whole pass.
            num_decoding: Its tokens that belong to sequences that are decoding.
        """
        num_prompt = sum(len(chunk.tokens) for chunk in chunks)
        self.budget.learn(seconds, num_decoding=num_decoding, num_prompt=num_prompt)
        if not chunks:
            return
        self._drafting.commit(
            Committed(
                slots=[chunk.slot for chunk in chunks],
                starts=[chunk.start for chunk in chunks],
                tokens=[chunk.tokens for chunk in chunks],
                features=features,
            )
        )
        for chunk in chunks:
            count = len(chunk.tokens)
            chunk.sequence.num_cached += count
            chunk.sequence.metrics.prefill_seconds += seconds * count / (num_prompt + num_decoding)
