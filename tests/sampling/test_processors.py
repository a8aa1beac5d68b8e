"""Processors and warpers: random requests against the plain-Python definition, then each one by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_processors import VOCAB, Situation, as_tensors, probabilities, processed, random_logits, situations

from foretoken.core.sampling_params import SamplingParams
from foretoken.sampling.batch import (
    LogitBias,
    NodeView,
    SamplingBatch,
    SamplingRequest,
    apply_processors,
    best_possible,
    one_hot_log_probs,
    warp,
)

NEVER = -math.inf
NO_PATH = torch.empty(0, 0, dtype=torch.int64)  # nothing drafted: processors of today read the history alone
thorough = settings(max_examples=200)


@thorough
@given(batch=st.lists(situations(), min_size=1, max_size=5), seed=st.integers(0, 10**6))
def test_mixed_batches_against_plain_python(batch: list[Situation], seed: int) -> None:
    params, history = as_tensors(batch)
    logits = random_logits(seed, len(batch), VOCAB)
    before = logits.clone()
    z = apply_processors(params.processors, logits, NodeView(history, NO_PATH))
    distribution = warp(z, params)
    distribution = torch.where(params.greedy.unsqueeze(1), one_hot_log_probs(z), distribution).exp()
    for row, now in enumerate(batch):
        expected = processed(logits[row].tolist(), now)
        # Sums of a few numbers up to 100 in float32.
        torch.testing.assert_close(z[row], torch.tensor(expected), rtol=1e-6, atol=2e-5)
        expected_distribution = torch.tensor(probabilities(expected, now.request.params))
        # A bias of -100 leaves 1e-44, which the two may round to 0 or not; all else is above 1e-20 or exactly 0.
        assert torch.equal(distribution[row] > 1e-20, expected_distribution > 1e-20), "another support"
        # The logits' 2e-5 pass through the exponential.
        torch.testing.assert_close(distribution[row], expected_distribution, rtol=1e-4, atol=1e-6)
    assert torch.equal(logits, before), "the target's logits were changed in place"


def warped(logits: list[float], **params: object) -> list[float]:
    """Probabilities of one row, to four digits."""
    batch = SamplingBatch.build([SamplingRequest(params=SamplingParams(**params), seed=0)], len(logits))
    return [round(p, 4) for p in warp(torch.tensor([logits]), batch).exp()[0].tolist()]


def log(*probs: float) -> list[float]:
    return [math.log(p) for p in probs]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.4, 0.1, 0.3, 0.2]),
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"top_k": 2}, [0.5714, 0, 0.4286, 0]),
        ({"top_k": 4}, [0.4, 0.1, 0.3, 0.2]),
        ({"top_k": 50}, [0.4, 0.1, 0.3, 0.2]),
        ({"top_k": -1}, [0.4, 0.1, 0.3, 0.2]),
        ({"top_p": 0.39}, [1, 0, 0, 0]),  # the first reaches it
        ({"top_p": 0.41}, [0.5714, 0, 0.4286, 0]),  # the token that crosses the line stays
        ({"top_p": 0.95}, [0.4, 0.1, 0.3, 0.2]),
        ({"top_p": 0.01}, [1, 0, 0, 0]),  # never empty
        ({"top_p": 1e-60}, [1, 0, 0, 0]),  # found by this test: 0 in float32, which cut every token
        ({"min_p": 0.6}, [0.5714, 0, 0.4286, 0]),
        ({"min_p": 1.0}, [1, 0, 0, 0]),
        ({"min_p": 0.1}, [0.4, 0.1, 0.3, 0.2]),
        ({"temperature": 0.5}, [0.5333, 0.0333, 0.3, 0.1333]),
        ({"temperature": 0.5, "min_p": 0.6}, [1, 0, 0, 0]),  # min-p reads the distribution at the temperature
        ({"temperature": 0.5, "top_p": 0.6}, [0.64, 0, 0.36, 0]),  # and so does top-p
        ({"top_k": 2, "top_p": 0.5}, [1, 0, 0, 0]),  # 0.4 / 0.7 already reaches it
    ],
)
def test_warpers_by_hand(params: dict[str, object], expected: list[float]) -> None:
    assert warped(log(0.4, 0.1, 0.3, 0.2), **params) == expected


def test_unlimited_rows_keep_every_token_beside_limited_ones() -> None:
    """The mass before a rare token rounds to 1 in float32; a request without top-p keeps it all the same."""
    requests = [SamplingRequest(params=SamplingParams(top_p=top_p), seed=0) for top_p in (1.0, 0.5)]
    logits = torch.tensor([[0.0, -30.0, -40.0]]).expand(2, 3)
    distribution = warp(logits, SamplingBatch.build(requests, 3))
    assert distribution.isfinite().tolist() == [[True, True, True], [True, False, False]]


def test_ties() -> None:
    equal = [0.0, 0.0, 0.0, -1e9]
    assert warped(equal, top_k=1) == [0.3333, 0.3333, 0.3333, 0]  # ties with the k-th stay
    assert warped(equal, top_p=0.3) == [1, 0, 0, 0]  # but mass is counted token by token, lowest id first
    assert warped(equal, min_p=1.0) == [0.3333, 0.3333, 0.3333, 0]
    assert one_hot_log_probs(torch.tensor([[1.0, 3.0, 3.0]])).tolist() == [[NEVER, 0.0, NEVER]]


def after(logits: list[float], prompt: list[int], output: list[int], **request: object) -> list[float]:
    """Processed logits of one request."""
    own = {name: request.pop(name) for name in ("terminators", "bad_words") if name in request}
    now = Situation(SamplingRequest(params=SamplingParams(**request), seed=0, **own), prompt, output)
    full = logits + [0.0] * (VOCAB - len(logits))
    params, history = as_tensors([now])
    return apply_processors(params.processors, torch.tensor([full]), NodeView(history, NO_PATH))[
        0, : len(logits)
    ].tolist()


def test_repetition_reads_prompt_and_output() -> None:
    assert after([3.0, -3.0, 3.0, -3.0], [0], [1], repetition_penalty=1.5) == [2.0, -4.5, 3.0, -3.0]


def test_presence_and_frequency_read_the_output_only() -> None:
    assert after([3.0] * 3, [0], [1, 1, 2], presence_penalty=1.0) == [3.0, 2.0, 2.0]
    assert after([3.0] * 3, [0], [1, 1, 2], frequency_penalty=0.5) == [3.0, 2.0, 2.5]


def test_penalties_add_up_in_order() -> None:
    """Bias before repetition, repetition before presence and frequency."""
    z = after([1.0, 1.0], [0], [0, 0], logit_bias={0: 3.0}, repetition_penalty=2.0, presence_penalty=1.0)
    assert z == [(1 + 3) / 2 - 1, 1.0]


def test_a_forbidden_token_stays_forbidden() -> None:
    """No bias, penalty or repetition factor brings it back."""
    z = after(
        [1.0, 1.0, 1.0],
        [0],
        [0],
        bad_words=[[0]],
        terminators=[1],
        min_tokens=5,
        logit_bias={0: 100.0, 1: 100.0},
        repetition_penalty=0.5,
        presence_penalty=-3.0,
    )
    assert z == [NEVER, NEVER, 1.0]


@pytest.mark.parametrize(
    ("prompt", "output", "bad_words", "forbidden"),
    [
        ([0], [], [[3]], [3]),  # a word of one token is never allowed
        ([0], [1], [[1, 2]], [2]),
        ([1], [], [[1, 2]], [2]),  # it may begin in the prompt
        ([1], [0], [[1, 2]], []),
        ([4, 1], [2], [[1, 2, 3], [2, 5], [4, 2, 1]], [3, 5]),
        ([2], [], [[1, 2, 3]], []),  # longer than the text
        ([0], [1, 1], [[1, 1, 1]], [1]),
        ([7], [], [[7, 7], [0]], [0, 7]),
    ],
)
def test_bad_words(prompt: list[int], output: list[int], bad_words: list[list[int]], forbidden: list[int]) -> None:
    z = after([0.0] * VOCAB, prompt, output, bad_words=bad_words)
    assert [token for token, value in enumerate(z) if value == NEVER] == forbidden


@pytest.mark.parametrize("num_output", range(5))
def test_min_tokens_holds_terminators_back(num_output: int) -> None:
    z = after([0.0] * 4, [0], [1] * num_output, min_tokens=3, terminators=[2, 3])
    assert z == ([0.0, 0.0, NEVER, NEVER] if num_output < 3 else [0.0] * 4)


@pytest.mark.parametrize(("presence", "frequency"), [(0.3, 0.0), (0.0, 0.7), (0.3, 0.7), (-1.1, 0.1)])
def test_output_penalties_are_subtracted_one_after_the_other(presence: float, frequency: float) -> None:
    """To the bit, also beside a request that has none: sampled text must not depend on the neighbours."""
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    plain = Situation(SamplingRequest(params=SamplingParams(), seed=0), [0], [1, 1, 2])
    batch, history = as_tensors([plain, Situation(SamplingRequest(params=params, seed=1), [0], [1, 1, 1, 2])])
    logits = random_logits(5, 2, VOCAB)
    logits[:, 5] = NEVER
    counts = torch.bincount(torch.tensor([1, 1, 1, 2]), minlength=VOCAB).to(torch.int32)
    want = logits[1]
    if presence:
        want = want - torch.tensor(presence) * (counts > 0)
    if frequency:
        want = want - torch.tensor(frequency) * counts
    found = apply_processors(batch.processors, logits, NodeView(history, NO_PATH))
    assert torch.equal(found, torch.stack([logits[0], want]))


def test_unused_processors_cost_nothing() -> None:
    params = SamplingBatch.build([SamplingRequest(params=SamplingParams(), seed=0)] * 2, VOCAB)
    assert [params.top_k, params.top_p, params.min_p] == [None] * 3
    assert params.processors == ()
    assert params.tail_len == 0


def test_every_processor_can_be_selected_row_by_row() -> None:
    """Rows chosen, repeated and reordered get what they get in the whole batch."""
    request = SamplingParams(
        min_tokens=2, logit_bias={1: 2.0}, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25
    )
    others = [Situation(SamplingRequest(params=SamplingParams(), seed=i), [0, 1], [2]) for i in range(2)]
    busy = SamplingRequest(params=request, seed=3, terminators=[3], bad_words=[[2, 4], [0]])
    batch, history = as_tensors([others[0], Situation(busy, [0, 1], [1, 2]), others[1]])
    logits, rows = random_logits(5, 3, VOCAB), torch.tensor([1, 2, 1, 0])
    assert len(batch.processors) == len({type(processor) for processor in batch.processors}) == 5
    whole = apply_processors(batch.processors, logits, NodeView(history, NO_PATH))
    picked = apply_processors(batch.select(rows).processors, logits[rows], NodeView(history.select(rows), NO_PATH))
    assert torch.equal(picked, whole[rows])
    assert not torch.equal(whole[1], logits[1])


def test_the_best_possible_token() -> None:
    rows = torch.tensor(
        [[1.0, 3.0, 3.0], [NEVER] * 3, [1.0, math.nan, 2.0], [1.0, math.inf, 2.0], [NEVER, NEVER, -9.0]]
    )
    assert best_possible(rows).tolist() == [1, -1, -1, -1, 2]
    assert torch.isinf(one_hot_log_probs(rows)).all(1).tolist() == [False, True, True, True, False]


def test_rows_of_a_batch_can_be_selected() -> None:
    requests = [
        SamplingRequest(params=SamplingParams(temperature=0.3 * i, top_k=i, logit_bias={i: 1.0}), seed=i)
        for i in range(4)
    ]
    rows = torch.tensor([2, 0])
    chosen = SamplingBatch.build(requests, VOCAB).select(rows)
    assert chosen.temperature[:, 0].tolist() == pytest.approx([0.6, 1.0])  # a greedy row counts as 1
    assert chosen.greedy.tolist() == [False, True]
    assert chosen.top_k is not None
    assert chosen.top_k[:, 0].tolist() == [2, VOCAB]
    (bias,) = chosen.processors
    assert isinstance(bias, LogitBias)
    assert bias.bias.nonzero().tolist() == [[0, 2], [1, 0]]
    assert chosen.noise.seeds.tolist() == [2, 0]
