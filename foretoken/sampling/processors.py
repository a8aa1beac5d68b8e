"""Processors change logits by the tokens before them: penalties, forbidden and allowed tokens, and grammars.

A grammar says which tokens may follow a text, where the text may end, and which tokens are forced. If only one
continuation is possible, its tokens are those of the tokenizer's split. A state belongs to one text and never changes;
one more token gives another state. The nodes of a tree thus share the states of the paths that they share, however
often acceptance, drafts and traces ask for a state. A matcher of llguidance parses; llguidance is not imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.core.sampling_params import SamplingParams
    from foretoken.sampling.batch import SamplingRequest


class Counts(NamedTuple):
    """Which tokens occurred in the prompt, (B, V) bool, and how often in the output, (B, V) int32."""

    in_prompt: Tensor
    in_output: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The tokens of B sequences as processors see them.

    Attributes:
        prompt_seen: (B, V) bool, tokens of the prompt; None if no processor reads counts.
        output_counts: (B, V) int32, occurrences in the output; None if no processor reads counts.
        tail: (B, L) int64, the last L tokens, -1 before the beginning.
        num_output: (B,) int64, output tokens so far.
    """

    prompt_seen: Tensor | None
    output_counts: Tensor | None
    tail: Tensor
    num_output: Tensor

    @property
    def counts(self) -> Counts:
        """Occurrences of every token, for processors that read counts."""
        if self.prompt_seen is None or self.output_counts is None:
            raise ValueError("a processor reads counts of a sequence that was started without them")
        return Counts(self.prompt_seen, self.output_counts)

    def last_tokens(self, count: int) -> Tensor:
        """(B, count) int64, the last tokens, -1 before the beginning; count: at most the tail's length."""
        return self.tail[:, self.tail.shape[1] - count :]

    def select(self, rows: Tensor) -> History:
        """Returns the histories of some sequences; rows: (R,) int64."""
        return History(
            prompt_seen=None if self.prompt_seen is None else self.prompt_seen[rows],
            output_counts=None if self.output_counts is None else self.output_counts[rows],
            tail=self.tail[rows],
            num_output=self.num_output[rows],
        )

    def extended(self, path: Tensor) -> History:
        """Returns a new history with the tokens along a path appended; path: (B, D) int64 in order, -1 past the end."""
        if path.shape[1] == 0:
            return self
        on_path = path >= 0
        counts = self.output_counts
        if counts is not None:
            counts = counts.scatter_add(1, path.clamp_min(0), on_path.to(counts.dtype))
        lengths = on_path.sum(1)
        joined = torch.cat([self.tail, path], dim=1)
        # The tail ends where the path ends: entry i of the new tail is entry i + length of the joined tokens.
        index = torch.arange(self.tail.shape[1], device=path.device) + lengths.unsqueeze(1)
        return History(
            prompt_seen=self.prompt_seen,
            output_counts=counts,
            tail=joined.gather(1, index),
            num_output=self.num_output + lengths,
        )


class NodeView(NamedTuple):
    """The tokens before R nodes of trees, as processors see them.

    Attributes:
        history: Committed tokens and the drafted path down to each node.
        path: (R, D) int64, the drafted part alone, -1 past the end.
    """

    history: History
    path: Tensor


class HistoryTable:
    """Histories of the running sequences by slot; counts exist only for sequences that need them."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._seen: list[Tensor | None] = [None] * num_slots
        self._counts: list[Tensor | None] = [None] * num_slots

    def start(self, slot: int, prompt: Sequence[int], *, needs_counts: bool) -> None:
        """Starts a sequence in a slot, and forgets the sequence before."""
        self._seen[slot] = self._counts[slot] = None
        if needs_counts:
            seen = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            seen[torch.tensor(prompt, dtype=torch.int64, device=self._device)] = True
            self._seen[slot] = seen
            self._counts[slot] = torch.zeros(self._vocab_size, dtype=torch.int32, device=self._device)

    def append(self, slot: int, tokens: Sequence[int]) -> None:
        """Counts generated tokens of a slot."""
        counts = self._counts[slot]
        if counts is not None:
            ids = torch.tensor(tokens, dtype=torch.int64, device=self._device)
            counts.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def view(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]], num_prompt: Sequence[int], tail_len: int
    ) -> History:
        """Returns the history of B slots with a tail of L tokens; `tokens` are all committed tokens of each."""
        device = self._device
        has_counts = any(self._counts[slot] is not None for slot in slots)
        empty_seen = torch.zeros(self._vocab_size, dtype=torch.bool, device=device)
        empty_counts = torch.zeros(self._vocab_size, dtype=torch.int32, device=device)
        tails = [([-1] * tail_len + list(ids[-tail_len:]))[-tail_len:] if tail_len else [] for ids in tokens]

        def stack(table: Sequence[Tensor | None], empty: Tensor) -> Tensor:
            rows = [table[slot] for slot in slots]
            return torch.stack([empty if row is None else row for row in rows])

        return History(
            prompt_seen=stack(self._seen, empty_seen) if has_counts else None,
            output_counts=stack(self._counts, empty_counts) if has_counts else None,
            tail=torch.tensor(tails, dtype=torch.int64, device=device).view(len(slots), tail_len),
            num_output=torch.tensor([len(t) - p for t, p in zip(tokens, num_prompt, strict=True)], device=device),
        )


class Processor(Protocol):
    """Changes logits by the tokens before them."""

    @property
    def tail_len(self) -> int:
        """How many of the last tokens it reads."""
        ...

    def select(self, rows: Tensor) -> Processor:
        """Returns the processor of some of its rows, which may repeat; rows: (R,) int64."""
        ...

    def apply(self, logits: Tensor, nodes: NodeView) -> Tensor:
        """Returns new logits, (R, V) float32, -inf for forbidden tokens; `nodes` are the tokens before each row."""
        ...


class _PerRequest:
    """A dataclass of tensors with one row per request, which reads no history unless it says so."""

    __slots__ = ()

    @property
    def tail_len(self) -> int:
        return 0

    def select(self, rows: Tensor) -> Self:
        parts: Any = self
        return type(self)(*(getattr(parts, field.name)[rows] for field in fields(parts)))


@dataclass(frozen=True, slots=True)
class MinTokens(_PerRequest):
    """Forbids (R, V) bool `terminators` until (R,) int64 `min_tokens` output tokens are there."""

    terminators: Tensor
    min_tokens: Tensor

    def apply(self, logits: Tensor, nodes: NodeView) -> Tensor:
        """Forbids the terminators where fewer than `min_tokens` tokens were generated."""
        is_early = (nodes.history.num_output < self.min_tokens).unsqueeze(1)
        return logits.masked_fill(self.terminators & is_early, -inf)


@dataclass(frozen=True, slots=True)
class AllowedTokens(_PerRequest):
    """Forbids all tokens but some; is_allowed: (R, V) bool."""

    is_allowed: Tensor

    def apply(self, logits: Tensor, nodes: NodeView) -> Tensor:  # noqa: ARG002 - the protocol's
        """See `Processor`."""
        return logits.masked_fill(~self.is_allowed, -inf)


@dataclass(frozen=True, slots=True)
class BadWords(_PerRequest):
    """Forbids the last token of each of the (R, W, L) int64 `words` after its other tokens; -1 pads on the left."""

    words: Tensor

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

    def apply(self, logits: Tensor, nodes: NodeView) -> Tensor:  # noqa: ARG002 - the protocol's
        """See `Processor`."""
        return logits + self.bias


@dataclass(frozen=True, slots=True)
class RepetitionPenalty(_PerRequest):
    """Divides positive and multiplies negative logits of tokens seen in prompt or output; penalty: (R, 1) float32."""

    penalty: Tensor

    def apply(self, logits: Tensor, nodes: NodeView) -> Tensor:
        """See `Processor`."""
        scaled = torch.where(logits > 0, logits / self.penalty, logits * self.penalty)
        counts = nodes.history.counts
        return torch.where(counts.in_prompt | (counts.in_output > 0), scaled, logits)


@dataclass(frozen=True, slots=True)
class OutputPenalties(_PerRequest):
    """Subtracts `presence`, (R, 1), from logits of output tokens, and `frequency` for every occurrence."""

    presence: Tensor
    frequency: Tensor

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
        ends = _marks([request.terminators for request in requests], vocab_size)
        found.append(MinTokens(ends.to(device), least))
    if any(p.allowed_token_ids is not None for p in params):
        found.append(AllowedTokens(_marks([p.allowed_token_ids for p in params], vocab_size).to(device)))
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


def _marks(ids: Sequence[Sequence[int] | None], vocab_size: int) -> Tensor:
    """(B, V) bool, true at the ids of each row; true throughout rows without a list."""
    marks = torch.zeros(len(ids), vocab_size, dtype=torch.bool)
    for row, own in enumerate(ids):
        marks[row, slice(None) if own is None else list(own)] = True
    return marks


def _bad_words(requests: Sequence[SamplingRequest]) -> Tensor:
    """(B, W, L) int64 of forbidden sequences, right-aligned."""
    count = max(len(r.bad_words) for r in requests)
    longest = max(len(word) for r in requests for word in r.bad_words)
    words = [[[-1] * (longest - len(word)) + [*word] for word in request.bad_words] for request in requests]
    return torch.tensor([each + [[-1] * longest] * (count - len(each)) for each in words])


class Ends(NamedTuple):
    """Tokens that may end a text; `unwanted` are impossible while the text can continue."""

    token_ids: Sequence[int]
    unwanted: Sequence[int] = ()


class GrammarState:
    """The grammar's state after one text."""

    def __init__(self, matcher: Any, *, vocab_size: int, ends: Ends) -> None:
        """Takes a matcher, which nobody else may advance from now on."""
        self._matcher, self._vocab_size, self._ends = matcher, vocab_size, ends
        self._after: dict[int, GrammarState | None] = {}

    def after(self, token: int) -> GrammarState | None:
        """Returns the state after one more token; None if the token is impossible."""
        if token not in self._after:
            self._after[token] = self._next(token)
        return self._after[token]

    def after_all(self, tokens: Sequence[int]) -> GrammarState | None:
        """Returns the state after some tokens, up to the first negative (padding); None if a token is impossible."""
        state: GrammarState | None = self
        for token in tokens:
            if token < 0 or state is None:
                break
            state = state.after(token)
        return state

    @cached_property
    def allowed(self) -> Tensor:
        """(V,) bool on the CPU, the tokens that may follow."""
        allowed = self._possible.copy()
        if not self.is_over:
            allowed[list(self._ends.unwanted)] = False
        return torch.from_numpy(allowed)

    @cached_property
    def forced(self) -> list[int]:
        """Returns the tokens of the only possible continuation, as the tokenizer splits it."""
        if self.error is not None or self.is_over:
            return []
        # On a copy: work of the matcher counts towards its limits, which may end requests.
        tokens = self._matcher.deep_copy().compute_ff_tokens()
        return [token for token in tokens if token < self._vocab_size]

    @cached_property
    def is_over(self) -> bool:
        """Whether the text is complete and nothing can follow."""
        return self.error is None and not self._goes_on

    @cached_property
    def error(self) -> str | None:
        """Reason why nothing can follow an incomplete text; None in all other states."""
        ends = self._possible[list(self._ends.token_ids)]
        if self._matcher.is_error():
            return str(self._matcher.get_error() or self._matcher.stop_reason())
        return None if self._goes_on or ends.any() else "no token of the vocabulary continues the text"

    @cached_property
    def _possible(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """(V,) the tokens that the grammar allows; none after an error."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        possible = np.zeros(self._vocab_size, dtype=bool)
        if not self._matcher.is_error():
            possible[: len(bits)] = bits[: self._vocab_size]
        return possible

    @cached_property
    def _goes_on(self) -> bool:
        """Whether a token may follow that does not end the text."""
        others = self._possible.copy()
        others[list(self._ends.token_ids)] = False
        return bool(others.any())

    def _next(self, token: int) -> GrammarState | None:
        if not bool(self.allowed[token]):
            return None
        matcher = self._matcher.deep_copy()
        matcher.consume_token(token)  # may reach a limit, which `error` reports
        return GrammarState(matcher, vocab_size=self._vocab_size, ends=self._ends)


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """Forbids tokens by each request's grammar after the path down to a node; states are None without a grammar."""

    states: Sequence[GrammarState | None]
    tail_len = 0

    def select(self, rows: Tensor) -> GrammarMask:
        """Returns the mask of some of its requests, which may repeat; rows: (R,) int64. Synchronises with the host."""
        return GrammarMask([self.states[row] for row in rows.tolist()])

    def apply(self, logits: Tensor, nodes: NodeView) -> Tensor:
        """Forbids all tokens that are not allowed. Synchronises with the host."""
        allowed = torch.ones(logits.shape, dtype=torch.bool)
        for row, (root, path) in enumerate(zip(self.states, nodes.path.tolist(), strict=True)):
            if root is not None:
                state = root.after_all(path)
                allowed[row] = False if state is None else state.allowed
        return logits.masked_fill(~allowed.to(logits.device), -inf)
