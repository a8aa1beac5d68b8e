"""Prompts on their way into the KV cache: which chunks ride in the next pass, and what is done once it is over."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from foretoken.core.backend import integers_on
from foretoken.core.passes import Pass
from foretoken.drafters.base import Committed

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from torch import Tensor

    from foretoken.drafting.drafting import Drafting
    from foretoken.engine.sequence import Sequence
    from foretoken.runner.runner import Runner

_LONGEST_STEP = 2.4  # steps without prompt tokens that one with some is to take
_LEAST = 4  # prompt tokens of a step: a pass of a few tokens takes what one of two does
_FIRST = 16  # prompt tokens of the first step beside decoding sequences, where nothing is known
_FADE = 0.8  # weight of what was known when a step adds to it
_LEAST_FACTOR, _GREATEST_FACTOR = 0.75, 1.25  # by which one step changes the budget, however long it took


class PrefillBudget:
    """Prompt tokens a step.

    Attributes:
        max_num_batched_tokens: Most tokens of a pass, drafted nodes included; None leaves it to what passes take.
    """

    def __init__(self, max_num_batched_tokens: int | None = None) -> None:
        """Nothing is known yet.

        Args:
            max_num_batched_tokens: See the class.
        """
        self.max_num_batched_tokens = max_num_batched_tokens
        self._step_seconds: dict[int, float] = {}  # of steps without prompt tokens, by the size of what is decoding
        self._tokens: float | None = None  # the budget as it is steered

    def tokens(self, num_decoding: int, chunk: int) -> int:
        """Prompt tokens of the next step, at least 1.

        Args:
            num_decoding: Tokens of the pass that belong to sequences that are decoding.
            chunk: Most prompt tokens of any pass.
        """
        budget = chunk
        if self.max_num_batched_tokens is not None:
            budget = min(budget, self.max_num_batched_tokens - num_decoding)
        elif num_decoding:
            # As many as are decoding cost about as much as these: prompts must not starve beside wide steps.
            budget = min(budget, max(int(self._tokens or _FIRST), num_decoding, _LEAST))
        return max(budget, 1)

    def learn(self, seconds: float, *, num_decoding: int, num_prompt: int) -> None:
        """Learns from a step.

        Args:
            seconds: Of the pass.
            num_decoding: Its tokens that belong to sequences that are decoding.
            num_prompt: Its prompt tokens.
        """
        if not num_decoding:
            return
        size = num_decoding.bit_length()
        if not num_prompt:
            known = self._step_seconds.get(size, seconds)
            self._step_seconds[size] = _FADE * known + (1 - _FADE) * seconds
        elif self._step_seconds:
            nearest = min(self._step_seconds, key=lambda each: abs(each - size))
            wanted = _LONGEST_STEP * self._step_seconds[nearest]
            factor = min(max(wanted / max(seconds, 1e-9), _LEAST_FACTOR), _GREATEST_FACTOR)
            tokens = self._tokens or _FIRST
            if factor < 1.0 or num_prompt >= int(tokens):  # a short chunk says nothing of longer ones
                self._tokens = max(min(tokens, num_prompt) * factor if factor < 1.0 else tokens * factor, _LEAST)


class Chunk(NamedTuple):
    """Consecutive prompt tokens of one sequence.

    Attributes:
        sequence: Whose.
        slot: Of the cache.
        start: Rows filled before.
        tokens: At least one.
        is_last: Whether the last of them is the root, after which the sequence's next token is chosen in the same pass.
    """

    sequence: Sequence
    slot: int
    start: int
    tokens: Seq[int]
    is_last: bool

    @property
    def num_prompt(self) -> int:
        """Its tokens without the root."""
        return len(self.tokens) - self.is_last


class Prefill:
    """Feeds prompts. The last token of each is its first root, whose logits are wanted.

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
        """Whether all of a sequence but its root is in the cache."""
        return sequence.num_cached == len(sequence.tokens) - 1

    def next_chunks(self, sequences: Seq[Sequence], num_decoding: int, most: int | None = None) -> list[Chunk]:
        """What the next pass takes of some prompts, first come first served.

        Args:
            sequences: Running ones, in the order in which their prompts are read; those whose prompt is in the cache
                are left out.
            num_decoding: Tokens of the pass that belong to sequences that are decoding.
            most: Prompt tokens of the pass, at most; None for as many as the target takes.
        """
        chunks, left = (
            [],
            self.budget.tokens(num_decoding, min(most or self._target.prefill_chunk, self._target.prefill_chunk)),
        )
        for sequence in sequences:
            if self.is_over(sequence) or sequence.slot is None or left == 0:
                continue
            start, count = sequence.num_cached, min(_num_unread(sequence), left)
            tokens = sequence.tokens[start : start + count]
            is_last = start + count == len(sequence.tokens)
            chunks.append(Chunk(sequence, sequence.slot, start, tokens, is_last))
            left -= count
        return chunks

    def num_next_tokens(self, sequences: Seq[Sequence], num_decoding: int) -> int:
        """Tokens of `next_chunks` together; arguments as there."""
        unread = sum(_num_unread(one) for one in sequences if one.slot is not None and not self.is_over(one))
        return min(unread, self.budget.tokens(num_decoding, self._target.prefill_chunk))

    def as_pass(self, chunks: Seq[Chunk]) -> Pass:
        """Some chunks, with the logits of their roots."""
        work = Pass.of_chains(
            [chunk.tokens for chunk in chunks],
            slots=[chunk.slot for chunk in chunks],
            prefix_lens=[chunk.start for chunk in chunks],
            device=self._target.device,
        )
        ends = zip(chunks, work.offsets[1:], strict=True)
        roots = [end - 1 for chunk, end in ends if chunk.is_last]
        return replace(work, logit_rows=integers_on(roots, self._target.device)) if roots else work

    def learn(self, chunks: Seq[Chunk], features: Tensor | None, seconds: float, num_decoding: int) -> None:
        """Notes what a pass has put into the cache, and tells the drafter.

        Args:
            chunks: Of the pass.
            features: (M, F, D) of their tokens, or None without taps.
            seconds: Of the whole pass.
            num_decoding: Its tokens that belong to sequences that are decoding.
        """
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        self.budget.learn(seconds, num_decoding=num_decoding, num_prompt=num_tokens)
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
            chunk.sequence.num_cached = chunk.start + len(chunk.tokens)
            share = chunk.num_prompt / (num_tokens + num_decoding)
            chunk.sequence.metrics.prefill_seconds += seconds * share


def _num_unread(sequence: Sequence) -> int:
    """Tokens that chunks still take; where the logits of all of them are prompt scores, the root has its own pass."""
    return len(sequence.tokens) - sequence.num_cached - sequence.wants_prompt_scores
