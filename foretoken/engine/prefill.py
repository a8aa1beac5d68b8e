"""Reads prompts into the KV cache: chooses the chunks of the next pass and commits them."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from foretoken.core.backend import integers_on
from foretoken.core.passes import Pass
from foretoken.drafters.base import Committed
from foretoken.engine.sequence import contained, token_scores

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Seq

    from torch import Tensor

    from foretoken.decoder.base import PassOutput
    from foretoken.drafting.drafting import Drafting
    from foretoken.engine.sequence import Sequence
    from foretoken.runner.runner import Runner

# Longest time of a step with prompt tokens, in steps without; NOTES, "The longest gap between tokens".
_LONGEST_STEP = 2.4
_LEAST = 4  # prompt tokens of a step; a choice: a pass of four tokens takes about as long as one of two
_FIRST = 16  # prompt tokens of the first step beside decoding sequences, before any measurement; a choice
_FADE = 0.8  # weight of earlier steps in the moving average; a choice: about five steps
_LEAST_FACTOR, _GREATEST_FACTOR = 0.75, 1.25  # bounds on the change that one step makes; a choice
# Prompt tokens of one pass with all logits. Other requests wait for the pass: with 512 tokens they took up to 0.74 s,
# see "A server under load" in benchmarks/RESULTS.md. Four passes of 128 tokens take as long as one of 512.
_MOST_SCORED_TOKENS = 128


class PrefillBudget:
    """Number of prompt tokens in each step; `max_num_batched_tokens` caps a pass, None steers by measured times."""

    def __init__(self, max_num_batched_tokens: int | None = None) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self._step_seconds: dict[int, float] = {}  # of steps without prompt tokens, by bit length of decoding tokens
        self._tokens: float | None = None  # the steered budget

    def tokens(self, num_decoding: int, chunk: int, least: int = _LEAST) -> int:
        """Returns the prompt tokens of the next step, 1 to `chunk`, beside `num_decoding` decoding tokens.

        `least`: as many whatever they cost, if `max_num_batched_tokens` allows.
        """
        budget = chunk
        if self.max_num_batched_tokens is not None:
            budget = min(budget, self.max_num_batched_tokens - num_decoding)
        elif num_decoding:
            # At least as many as decoding tokens, so that prompts do not starve beside wide steps.
            budget = min(budget, max(int(self._tokens or _FIRST), num_decoding, least))
        return max(budget, 1)

    def learn_seconds(self, seconds: float, *, num_decoding: int, num_prompt: int) -> None:
        """Steers the budget by the seconds of a pass with so many tokens of decoding sequences and of prompts."""
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
            if factor < 1.0 or num_prompt >= int(tokens):  # a fast short chunk tells nothing about longer ones
                self._tokens = max(min(tokens, num_prompt) * factor if factor < 1.0 else tokens * factor, _LEAST)


class Chunk(NamedTuple):
    """Consecutive prompt tokens of one sequence, from row `start` on; the last chunk ends with the root.

    `ends_prompt`: whether no chunk follows; the root of a scored prompt has a pass of its own.
    """

    sequence: Sequence
    slot: int
    start: int
    tokens: Seq[int]
    is_last: bool
    ends_prompt: bool

    @property
    def num_prompt(self) -> int:
        """Number of its tokens without the root."""
        return len(self.tokens) - self.is_last


class Prefill:
    """Reads prompts, `budget` tokens a pass. A prompt's last token is the first root; the pass gives its logits."""

    def __init__(self, target: Runner, drafting: Drafting, max_num_batched_tokens: int | None = None) -> None:
        self.budget = PrefillBudget(max_num_batched_tokens)
        self._target, self._drafting = target, drafting

    @staticmethod
    def is_over(sequence: Sequence) -> bool:
        """Whether the cache has all tokens of a sequence but the root."""
        return sequence.num_cached == len(sequence.tokens) - 1

    @staticmethod
    def divided(sequences: Seq[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Returns the sequences that decode, and the sequences with unread prompts; leaves out finished ones."""
        decoding: list[Sequence] = []
        unread: list[Sequence] = []
        for sequence in sequences:
            if sequence.finish_reason is None:
                (decoding if sequence.num_cached == len(sequence.tokens) - 1 else unread).append(sequence)
        return decoding, unread

    def next_chunks(self, sequences: Seq[Sequence], num_decoding: int, most: int | None = None) -> list[Chunk]:
        """Returns the prompt chunks of the next pass, first come first served; skips prompts in the cache.

        `num_decoding` tokens of the pass belong to decoding sequences. `most` caps the prompt tokens; None for the
        target's limit. The last chunk of a prompt has all tokens whose attention weights drafters read, if the prompt
        and the cap do.
        """
        if not sequences:
            return []
        most = min(most or self._target.prefill_chunk, self._target.prefill_chunk)
        observed = self._drafting.reads.attention_tokens
        chunks, left = list[Chunk](), self.budget.tokens(num_decoding, most, max(observed, _LEAST))
        observed = min(observed, left)
        for sequence in sequences:
            if self.is_over(sequence) or sequence.slot is None or left == 0:
                continue
            start, unread = sequence.num_cached, _num_unread(sequence)
            count = min(unread, left)
            if 0 < unread - count < observed:
                count = unread - observed
            if count <= 0:  # the rest fits into the next pass as a whole
                continue
            tokens = sequence.tokens[start : start + count]
            is_last = start + count == len(sequence.tokens)
            chunks.append(Chunk(sequence, sequence.slot, start, tokens, is_last, count == unread))
            left -= count
        return chunks

    def num_next_tokens(self, sequences: Seq[Sequence], num_decoding: int) -> int:
        """Returns the number of tokens that `next_chunks` would return for the same arguments."""
        return sum(len(chunk.tokens) for chunk in self.next_chunks(sequences, num_decoding))

    def as_pass(self, chunks: Seq[Chunk]) -> Pass:
        """Returns a pass over some chunks that gives the logits of their roots and the weights that drafters read."""
        work = Pass.of_chains(
            [chunk.tokens for chunk in chunks],
            slots=[chunk.slot for chunk in chunks],
            prefix_lens=[chunk.start for chunk in chunks],
            device=self._target.device,
        )
        spans = list(zip(chunks, pairwise(work.offsets), strict=True))
        if lasts := [end - 1 for chunk, (_, end) in spans if chunk.is_last]:
            work = replace(work, logit_rows=integers_on(lasts, self._target.device))
        most = self._drafting.reads.attention_tokens
        ends = [span for chunk, span in spans if chunk.ends_prompt] if most else []
        if not ends:
            return work
        read = [token for start, end in ends for token in range(max(start, end - most), end)]
        return replace(work, attention_rows=integers_on(read, self._target.device))

    def finish_chunks(self, chunks: Seq[Chunk], output: PassOutput, seconds: float, num_decoding: int) -> None:
        """Records that a pass has filled the rows of chunks, and tells the drafters; output: of the chunks alone."""
        num_tokens = sum(len(chunk.tokens) for chunk in chunks) if chunks else 0
        self.budget.learn_seconds(seconds, num_decoding=num_decoding, num_prompt=num_tokens)
        if not chunks:
            return
        ends = [chunk.start + len(chunk.tokens) if chunk.ends_prompt else 0 for chunk in chunks]
        self._drafting.commit(
            Committed(
                slots=[chunk.slot for chunk in chunks],
                starts=[chunk.start for chunk in chunks],
                tokens=[chunk.tokens for chunk in chunks],
                features=output.features,
                attention=output.attention_over(ends),
            )
        )
        for chunk in chunks:
            chunk.sequence.num_cached = chunk.start + len(chunk.tokens)
            share = chunk.num_prompt / (num_tokens + num_decoding)
            chunk.sequence.metrics.prefill_seconds += seconds * share

    def score_chunk(self, sequence: Sequence, num_decoding: int, exclude: Callable[[Tensor], Tensor]) -> None:
        """Reads and scores the next tokens of a prompt for `prompt_logprobs`.

        `exclude` gets the (R, V) logits and returns them with -inf for tokens that are never generated.
        """
        begin = time.perf_counter()
        chunks = self.next_chunks([sequence], num_decoding, _MOST_SCORED_TOKENS)
        output = contained(sequence, self._scored, chunks, exclude)
        if output is not None:
            self.finish_chunks(chunks, output, time.perf_counter() - begin, num_decoding)

    def _scored(self, sequence: Sequence, chunks: list[Chunk], exclude: Callable[[Tensor], Tensor]) -> PassOutput:
        chunk = chunks[0]
        output = self._target.run(self.as_pass(chunks).with_all_logits())
        following = sequence.tokens[chunk.start + 1 : chunk.start + len(chunk.tokens) + 1]
        scores = token_scores(exclude(output.needed_logits), following, sequence.params.prompt_logprobs or 0)
        sequence.prompt_scores += scores
        return output


def _num_unread(sequence: Sequence) -> int:
    """Returns the tokens left for chunks. If the prompt is scored, the root has a pass of its own."""
    return len(sequence.tokens) - sequence.num_cached - sequence.wants_prompt_scores
