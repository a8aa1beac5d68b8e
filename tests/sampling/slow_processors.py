"""Sampling parameters applied to one position of one request in plain Python: what the tensor code must agree with.

Written from the definitions (methods/sampling.md, section 6, and the documentation of vLLM's SamplingParams).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from foretoken.core.sampling_params import SamplingParams
from foretoken.sampling.batch import History, HistoryTable, SamplingBatch, SamplingRequest

VOCAB = 8
NEVER = -math.inf


@dataclass(frozen=True)
class Situation:
    """A request somewhere in its decoding."""

    request: SamplingRequest
    prompt: Sequence[int]
    output: Sequence[int]


def processed(logits: Sequence[float], now: Situation) -> list[float]:
    """Logits after everything that reads the history or single tokens."""
    params, text = now.request.params, [*now.prompt, *now.output]
    z = list(logits)
    if len(now.output) < params.min_tokens:
        for token in now.request.terminators:
            z[token] = NEVER
    if params.allowed_token_ids is not None:
        z = [value if token in params.allowed_token_ids else NEVER for token, value in enumerate(z)]
    for *beginning, last in now.request.bad_words:
        if text[len(text) - len(beginning) :] == beginning and len(text) >= len(beginning):
            z[last] = NEVER
    for token, bias in params.logit_bias.items():
        z[token] += bias
    for token in range(len(z)):
        count = list(now.output).count(token)
        if token in text:
            z[token] = z[token] / params.repetition_penalty if z[token] > 0 else z[token] * params.repetition_penalty
        if count:
            z[token] -= params.presence_penalty + count * params.frequency_penalty
    return z


def probabilities(z: Sequence[float], params: SamplingParams) -> list[float]:
    """The distribution after temperature, top-k, top-p and min-p."""
    if params.temperature == 0:
        best = max(range(len(z)), key=lambda token: (z[token], -token))
        return [float(token == best) for token in range(len(z))]
    z = [value / params.temperature for value in z]
    if 0 < params.top_k < len(z):
        smallest = sorted(z, reverse=True)[params.top_k - 1]
        z = [value if value >= smallest else NEVER for value in z]
    distribution = softmax(z)
    mass = 0.0
    for token in sorted(range(len(z)), key=lambda token: -distribution[token]):
        if mass >= params.top_p and mass > 0:
            z[token] = NEVER
        mass += distribution[token]
    distribution = softmax(z)
    return softmax(
        [v if p >= params.min_p * max(distribution) else NEVER for v, p in zip(z, distribution, strict=True)]
    )


def softmax(z: Sequence[float]) -> list[float]:
    weights = [math.exp(value - max(z)) for value in z]
    return [weight / sum(weights) for weight in weights]


def as_tensors(situations: Sequence[Situation], slots: Sequence[int] | None = None) -> tuple[SamplingBatch, History]:
    """The same requests as the engine holds them."""
    slots = slots or list(range(len(situations)))
    batch = SamplingBatch.build([s.request for s in situations], VOCAB)
    table = HistoryTable(max(slots) + 1, VOCAB)
    for slot, now in zip(slots, situations, strict=True):
        table.start(slot, now.prompt, needs_counts=now.request.params.has_penalties)
        for token in now.output:
            table.append(slot, [token])
    tokens = [[*s.prompt, *s.output] for s in situations]
    return batch, table.view(slots, tokens, [len(s.prompt) for s in situations], batch.tail_len)


def random_logits(seed: int, *shape: int) -> Tensor:
    """Multiples of 1/4, so that ties are common and float32 holds them."""
    return torch.randint(-12, 13, shape, generator=torch.Generator().manual_seed(seed)) / 4


tokens = st.integers(0, VOCAB - 1)
texts = st.lists(tokens, min_size=1, max_size=6)


def maybe(values: st.SearchStrategy, neutral: float) -> st.SearchStrategy:
    """Usually not in use, as in real batches."""
    return st.one_of(st.just(neutral), st.just(neutral), values)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Requests that use some processors. Values avoid cut-offs that only rounding could decide."""
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 1.0, 1.7])),
        top_k=draw(maybe(st.integers(-1, VOCAB + 2), 0)),
        top_p=draw(maybe(st.sampled_from([0.013, 0.107, 0.371, 0.623, 0.917, 0.9991]), 1.0)),
        min_p=draw(maybe(st.sampled_from([0.053, 0.217, 1.0]), 0.0)),
        repetition_penalty=draw(maybe(st.sampled_from([0.5, 1.25, 2.0]), 1.0)),
        presence_penalty=draw(maybe(st.sampled_from([-0.5, 0.75, 2.0]), 0.0)),
        frequency_penalty=draw(maybe(st.sampled_from([-0.25, 0.5]), 0.0)),
        logit_bias=draw(maybe(st.dictionaries(tokens, st.sampled_from([-100.0, -1.0, 2.5, 100.0]), max_size=3), {})),
        min_tokens=draw(maybe(st.integers(0, 8), 0)),
        allowed_token_ids=draw(maybe(st.lists(tokens, max_size=5).map(lambda few: [*few, VOCAB - 1]), None)),
    )
    # One token at least stays free, as no sane request forbids them all.
    words = st.lists(st.tuples(st.lists(tokens, max_size=3), st.integers(0, VOCAB - 3)), max_size=4)
    request = SamplingRequest(
        params=params,
        seed=draw(st.integers(0, 99)),
        terminators=draw(st.sampled_from([(), (2,), (VOCAB - 2, 1)])),
        bad_words=[[*beginning, last] for beginning, last in draw(maybe(words, []))],
    )
    return Situation(request, draw(texts), draw(st.lists(tokens, max_size=5)))
