"""Logits processors (bias, penalties, forbidden tokens), applied before temperature and truncation.

A processor is a value over its rows, one request each. Everything is float32, row-wise and pure.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.core.sampling_params import SamplingParams
    from foretoken.sampling.batch import SamplingRequest
    from foretoken.sampling.history import NodeView


class Processor(Protocol):
    """Changes logits by the tokens before them."""

    @property
    def reads_counts(self) -> bool:
        """Whether it reads how often tokens occurred."""
        ...

    @property
    def tail_len(self) -> int:
        """How many of the last tokens it reads."""
        ...

    def select(self, rows: Tensor) -> Processor:
        """Returns the processor of some of its rows, which may repeat; rows: (R,) int64."""
        ...

    def apply(self, logits: Tensor, nodes: NodeView) -> Tensor:
        """Returns new logits.

        Args:
            logits: (R, V) float32, one row for each of its rows.
            nodes: The tokens before each row.

        Returns:
            (R, V) float32; -inf for forbidden tokens.
        """
        ...


class _PerRequest:
    """A dataclass of tensors with one row per request."""

    __slots__ = ()

    def select(self, rows: Tensor) -> Self:
        parts: Any = self
        return type(self)(*(getattr(parts, field.name)[rows] for field in fields(parts)))


@dataclass(frozen=True, slots=True)
class MinTokens(_PerRequest):
    """Forbids tokens that end the text until it is long enough.

    Attributes:
        terminators: (R, V) bool, end-of-sequence and stop tokens.
        min_tokens: (R,) int64, output tokens before which they are impossible.
    """

    terminators: Tensor
    min_tokens: Tensor
    reads_counts = False
    tail_len = 0

    def apply(self, logits: Tensor, nodes: NodeView) -> Tensor:
        """Forbids the terminators where fewer than `min_tokens` tokens were generated."""
        is_early = (nodes.history.num_output < self.min_tokens).unsqueeze(1)
        return logits.masked_fill(self.terminators & is_early, -inf)


@dataclass(frozen=True, slots=True)
class AllowedTokens(_PerRequest):
    """Forbids all tokens but some; is_allowed: (R, V) bool."""

    is_allowed: Tensor
    reads_counts = False
    tail_len = 0

    def apply(self, logits: Tensor, nodes: NodeView) -> Tensor:  # noqa: ARG002 - the protocol's
        """See `Processor`."""
        return logits.masked_fill(~self.is_allowed, -inf)


@dataclass(frozen=True, slots=True)
class BadWords(_PerRequest):
    """Forbids the last token of every forbidden sequence when its other tokens were just generated.

    Attributes:
        words: (R, W, L) int64, right-aligned, -1 where a word is shorter and throughout missing words.
    """

    words: Tensor
    reads_counts = False

    @property
    def tail_len(self) -> int:
        """Tokens of the longest word but its last one."""
        return self.words.shape[2] - 1

    def apply(self, logits: Tensor, nodes: NodeView) -> Tensor:
        """See `Processor`."""
        beginnings, last = self.words[:, :, :-1], self.words[:, :, -1]
        tail = nodes.history.last_tokens(self.tail_len)
        matches = ((beginnings == tail.unsqueeze(1)) | (beginnings < 0)).all(2) & (last >= 0)
        forbidden = torch.zeros_like(logits, dtype=torch.int32)
        forbidden.scatter_add_(1, last.clamp_min(0), matches.to(torch.int32))
        return logits.masked_fill(forbidden > 0, -inf)


@dataclass(frozen=True, slots=True)
class LogitBias(_PerRequest):
    """Adds a number to the logits of some tokens; bias: (R, V) float32."""

    bias: Tensor
    reads_counts = False
    tail_len = 0

    def apply(self, logits: Tensor, nodes: NodeView) -> Tensor:  # noqa: ARG002 - the protocol's
        """See `Processor`."""
        return logits + self.bias


@dataclass(frozen=True, slots=True)
class RepetitionPenalty(_PerRequest):
    """Divides positive and multiplies negative logits of tokens seen in prompt or output; penalty: (R, 1) float32."""

    penalty: Tensor
    reads_counts = True
    tail_len = 0

    def apply(self, logits: Tensor, nodes: NodeView) -> Tensor:
        """See `Processor`."""
        scaled = torch.where(logits > 0, logits / self.penalty, logits * self.penalty)
        counts = nodes.history.counts
        return torch.where(counts.in_prompt | (counts.in_output > 0), scaled, logits)


@dataclass(frozen=True, slots=True)
class OutputPenalties(_PerRequest):
    """Subtracts numbers from the logits of tokens of the output.

    Attributes:
        presence: (R, 1) float32, once for each such token.
        frequency: (R, 1) float32, for every occurrence.
    """

    presence: Tensor
    frequency: Tensor
    reads_counts = True
    tail_len = 0

    def apply(self, logits: Tensor, nodes: NodeView) -> Tensor:
        """See `Processor`."""
        counts = nodes.history.counts.in_output
        return logits - self.presence * (counts > 0) - self.frequency * counts


def build_processors(
    requests: Sequence[SamplingRequest], vocab_size: int, device: torch.device | str
) -> tuple[Processor, ...]:
    """Returns the processors that any of some requests uses, in the order in which they apply (vLLM's)."""
    params = [request.params for request in requests]

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)

    found: list[Processor] = []
    if any(p.min_tokens for p in params):
        least = torch.tensor([p.min_tokens for p in params], dtype=torch.int64, device=device)
        found.append(MinTokens(_terminators(requests, vocab_size).to(device), least))
    if any(p.allowed_token_ids is not None for p in params):
        found.append(AllowedTokens(_allowed(params, vocab_size).to(device)))
    if any(request.bad_words for request in requests):
        found.append(BadWords(_bad_words(requests).to(device)))
    if any(p.logit_bias for p in params):
        found.append(LogitBias(_bias(params, vocab_size).to(device)))
    if any(p.repetition_penalty != 1 for p in params):
        found.append(RepetitionPenalty(column([p.repetition_penalty for p in params])))
    if any(p.presence_penalty or p.frequency_penalty for p in params):
        presence, frequency = [p.presence_penalty for p in params], [p.frequency_penalty for p in params]
        found.append(OutputPenalties(column(presence), column(frequency)))
    return tuple(found)


def apply_processors(processors: Sequence[Processor], logits: Tensor, nodes: NodeView) -> Tensor:
    """Applies processors in order; logits: (R, V) float32, not modified; returns (R, V) float32."""
    for processor in processors:
        logits = processor.apply(logits, nodes)
    return logits


def _bias(params: Sequence[SamplingParams], vocab_size: int) -> Tensor:
    """(B, V) float32 of added logits."""
    bias = torch.zeros(len(params), vocab_size, dtype=torch.float32)
    for row, p in enumerate(params):
        if p.logit_bias:
            bias[row, torch.tensor([*p.logit_bias])] = torch.tensor([*p.logit_bias.values()], dtype=torch.float32)
    return bias


def _allowed(params: Sequence[SamplingParams], vocab_size: int) -> Tensor:
    """(B, V) bool of tokens that may be generated."""
    allowed = torch.ones(len(params), vocab_size, dtype=torch.bool)
    for row, p in enumerate(params):
        if p.allowed_token_ids is not None:
            allowed[row] = False
            allowed[row, torch.tensor([*p.allowed_token_ids], dtype=torch.int64)] = True
    return allowed


def _terminators(requests: Sequence[SamplingRequest], vocab_size: int) -> Tensor:
    """(B, V) bool of tokens that min_tokens holds back."""
    mask = torch.zeros(len(requests), vocab_size, dtype=torch.bool)
    for row, request in enumerate(requests):
        mask[row, list(request.terminators)] = True
    return mask


def _bad_words(requests: Sequence[SamplingRequest]) -> Tensor:
    """(B, W, L) int64 of forbidden sequences, right-aligned."""
    count = max(len(r.bad_words) for r in requests)
    longest = max(len(word) for r in requests for word in r.bad_words)
    words = [[[-1] * (longest - len(word)) + [*word] for word in request.bad_words] for request in requests]
    return torch.tensor([each + [[-1] * longest] * (count - len(each)) for each in words])
