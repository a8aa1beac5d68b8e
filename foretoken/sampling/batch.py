"""Sampling of a batch: parameters as tensors, the token history, processors, temperature and truncation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from foretoken.core.backend import runs_cpu_kernels
from foretoken.sampling.noise import KeyedNoise

if TYPE_CHECKING:
    from foretoken.core.sampling_params import SamplingParams


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


def warp(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Returns (B, V) float32 log-probabilities after temperature (1 for greedy requests) and truncation (-inf)."""
    logits = logits / batch.temperature
    if batch.top_k is not None:
        largest = logits.topk(batch.largest_top_k, dim=1).values
        logits = logits.masked_fill(logits < largest.gather(1, batch.top_k - 1), -inf)
    if batch.top_p is not None:
        logits = _within_mass(logits, batch.top_p)
    if batch.min_p is not None:
        logits = logits.masked_fill(logits < logits.amax(1, keepdim=True) + batch.min_p.log(), -inf)
    return logits.log_softmax(1)


_NUCLEUS = 1024  # most probable tokens that are sorted first, on CPUs; a choice: text rarely asks for more


def _within_mass(logits: Tensor, top_p: Tensor) -> Tensor:
    """Returns (R, V) logits without the tokens before which others have a probability of `top_p`, (R, 1), together.

    Of equal logits the first tokens stay. Whether all tokens of a row are sorted changes nothing in it.
    """
    total = logits.logsumexp(1, keepdim=True)
    if logits.shape[1] <= 2 * _NUCLEUS or not runs_cpu_kernels(logits.device):
        return _without_tail(logits, total, top_p, *logits.sort(dim=1, descending=True, stable=True))
    tokens = logits.topk(_NUCLEUS, dim=1, sorted=False).indices.sort(dim=1).values
    ranked, order = logits.gather(1, tokens).sort(dim=1, descending=True, stable=True)
    # The first token that is cut stands among these, and no token beyond them is its equal; or others are impossible.
    is_cut, last = _is_cut(ranked, total, top_p), ranked[:, -1:]
    first_cut = ranked.gather(1, is_cut.int().argmax(1, keepdim=True))
    is_known = (is_cut[:, -1:] & (first_cut > last)) | (last == -inf) | (top_p >= 1.0)
    kept = torch.full_like(logits, -inf).scatter(1, tokens.gather(1, order), ranked.masked_fill(is_cut, -inf))
    kept = torch.where(top_p < 1.0, kept, logits)
    if not is_known.all():
        rest = ~is_known[:, 0]
        rows = logits[rest]
        ranked, order = rows.sort(dim=1, descending=True, stable=True)
        kept[rest] = _without_tail(rows, total[rest], top_p[rest], ranked, order)
    return kept


def _without_tail(logits: Tensor, total: Tensor, top_p: Tensor, ranked: Tensor, order: Tensor) -> Tensor:
    is_cut = _is_cut(ranked, total, top_p)
    return logits.masked_fill(torch.zeros_like(is_cut).scatter(1, order, is_cut), -inf)


def _is_cut(ranked: Tensor, total: Tensor, top_p: Tensor) -> Tensor:
    probs = (ranked - total).exp()
    is_cut = (probs.cumsum(1) - probs >= top_p) & (top_p < 1.0)  # mass before the token
    is_cut[:, 0] = False  # also where float32 rounds top_p to 0
    return is_cut


def one_hot_log_probs(logits: Tensor) -> Tensor:
    """Returns (B, V) float32: 0 at the first largest logit, else -inf; -inf throughout without a finite logit."""
    best = best_possible(logits).unsqueeze(1)
    certain = torch.zeros_like(logits[:, :1]).masked_fill(best < 0, -inf)
    return torch.full_like(logits, -inf).scatter(1, best.clamp_min(0), certain)


def best_possible(scores: Tensor) -> Tensor:
    """Returns (B,) int64, the lowest index of the largest score of each row, or -1 if the row has no finite score.

    scores: (B, V) logits or noisy log-probabilities; -inf for impossible tokens. A NaN or +inf anywhere in a row makes
    the whole row impossible.
    """
    best = scores.max(1)
    return torch.where(best.values.isfinite(), best.indices, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """One request's sampling, resolved against its tokenizer.

    Attributes:
        seed: The request's own seed, or a drawn seed; an int64, as `derive_seed` returns.
        terminators: Token ids that `min_tokens` holds back: end-of-sequence and stop token ids.
    """

    params: SamplingParams
    seed: int
    terminators: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """Parameters of B requests; a field is None if no request of the batch uses it.

    Attributes:
        greedy: (B,) bool.
        is_all_greedy: Host copy of `greedy.all()`.
        is_any_greedy: Host copy of `greedy.any()`.
        temperature: (B, 1) float32, 1 for greedy rows.
        top_k: (B, 1) int64, V if unlimited.
        largest_top_k: Upper bound of `top_k`, known on the host.
        top_p: (B, 1) float32.
        min_p: (B, 1) float32.
        processors: Applied before temperature and truncation, in order; each over the B rows.
    """

    noise: KeyedNoise
    vocab_size: int
    greedy: Tensor
    is_all_greedy: bool
    is_any_greedy: bool
    temperature: Tensor
    top_k: Tensor | None
    largest_top_k: int
    top_p: Tensor | None
    min_p: Tensor | None
    processors: tuple[Processor, ...]

    @property
    def inverse_temperature(self) -> Tensor:
        """(B,) float32, as `SamplingParams.inverse_temperature`: 0 for greedy rows."""
        return torch.where(self.greedy, 0.0, self.temperature[:, 0].reciprocal())

    @property
    def is_plain(self) -> bool:
        """Whether temperature alone changes the distributions of all requests."""
        return not self.processors and self.top_k is None and self.top_p is None and self.min_p is None

    @property
    def tail_len(self) -> int:
        """Most last tokens that a processor reads."""
        return max((processor.tail_len for processor in self.processors), default=0)

    def select(self, rows: Tensor) -> SamplingBatch:
        """Returns the parameters of some requests; rows: (R,) int64."""

        def pick(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[rows]

        return replace(
            self,
            noise=self.noise.select(rows),
            greedy=self.greedy[rows],
            temperature=self.temperature[rows],
            top_k=pick(self.top_k),
            top_p=pick(self.top_p),
            min_p=pick(self.min_p),
            processors=tuple(processor.select(rows) for processor in self.processors),
        )

    @classmethod
    def build(
        cls, requests: Sequence[SamplingRequest], vocab_size: int, device: torch.device | str = "cpu"
    ) -> SamplingBatch:
        """Stacks requests into tensors."""
        params = [request.params for request in requests]

        def column(values: Sequence[float], neutral: float, dtype: torch.dtype = torch.float32) -> Tensor | None:
            if all(value == neutral for value in values):
                return None
            return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

        top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
        greedy = [p.is_greedy for p in params]
        temperature = [1.0 if p.is_greedy else p.temperature for p in params]
        return cls(
            noise=KeyedNoise(torch.tensor([r.seed for r in requests], dtype=torch.int64, device=device)),
            vocab_size=vocab_size,
            greedy=torch.tensor(greedy, device=device),
            is_all_greedy=all(greedy),
            is_any_greedy=any(greedy),
            temperature=torch.tensor(temperature, dtype=torch.float32, device=device)[:, None],
            top_k=column(top_k, vocab_size, torch.int64),
            largest_top_k=max(top_k),
            top_p=column([p.top_p for p in params], 1.0),
            min_p=column([p.min_p for p in params], 0.0),
            processors=build_processors(requests, vocab_size, device),
        )
