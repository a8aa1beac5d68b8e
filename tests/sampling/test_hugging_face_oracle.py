"""Hugging Face's own processors as a second opinion, where the two mean the same."""

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from foretoken.core.sampling_params import SamplingParams
from foretoken.sampling import batch as sampling
from foretoken.sampling.batch import HistoryTable, NodeView, SamplingBatch, SamplingRequest, apply_processors, warp

VOCAB, ROWS = 101, 64

NO_PATH = torch.empty(0, 0, dtype=torch.int64)


def logits() -> torch.Tensor:
    return torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(5)) * 3


def ours(values: torch.Tensor, **params: float) -> torch.Tensor:
    request = SamplingRequest(params=SamplingParams(**params), seed=0)
    return warp(values, SamplingBatch.build([request] * ROWS, VOCAB)).exp()


def theirs(values: torch.Tensor, warpers: LogitsProcessorList) -> torch.Tensor:
    return warpers(torch.zeros(ROWS, 1, dtype=torch.int64), values).softmax(1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 7])
@pytest.mark.parametrize("top_p", [1.0, 0.2, 0.9])
@pytest.mark.parametrize("min_p", [0.0, 0.1])
def test_warpers(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """In the order of `generate`; random float32 rows have no ties and no mass exactly at the limit."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    mine = ours(logits(), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = theirs(logits(), warpers)
    assert torch.equal(mine > 0, expected > 0)
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-7)  # two float32 softmaxes


def test_top_k_keeps_ties_as_they_do() -> None:
    coarse = (logits() / 2).round()
    assert torch.equal(ours(coarse, top_k=5) > 0, theirs(coarse, LogitsProcessorList([TopKLogitsWarper(5)])) > 0)


def test_repetition_and_bad_words() -> None:
    text = torch.randint(VOCAB, (ROWS, 12), generator=torch.Generator().manual_seed(6))
    # Words that the random texts end with, so that they bite.
    words = [[50], [51], *([*text[row, -2:].tolist(), 3] for row in range(8)), [int(text[9, -1]), 4]]
    penalty = RepetitionPenaltyLogitsProcessor(1.3)
    expected = penalty(text, NoBadWordsLogitsProcessor(words, eos_token_id=None)(text, logits()))

    request = SamplingRequest(params=SamplingParams(repetition_penalty=1.3), seed=0, bad_words=words)
    batch, table = SamplingBatch.build([request] * ROWS, VOCAB), HistoryTable(ROWS, VOCAB)
    for row in range(ROWS):
        table.start(row, text[row, :5].tolist(), needs_counts=True)
        table.append(row, text[row, 5:].tolist())
    history = table.view(list(range(ROWS)), text.tolist(), [5] * ROWS, batch.tail_len)
    assert expected.isinf().sum() >= 2 * ROWS + 9
    torch.testing.assert_close(apply_processors(batch.processors, logits(), NodeView(history, NO_PATH)), expected)


@pytest.mark.parametrize("num_sorted", [8, 24, 40])
@pytest.mark.parametrize("step", [0.0, 0.5])
def test_how_many_tokens_are_sorted_first_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, num_sorted: int, step: float
) -> None:
    """To the bit, for rows with few and with many probable tokens, equal logits (rounded to `step`), and odd ones."""
    values = logits() * torch.logspace(-1, 1, ROWS).unsqueeze(1)
    if step:
        values = (values / step).round() * step
    values[1], values[2, 5], values[3, 7], values[4, 8:] = -torch.inf, torch.nan, torch.inf, -torch.inf
    requests = [
        SamplingRequest(
            params=SamplingParams(top_p=(0.95, 0.5, 1.0, 1e-9)[i % 4], top_k=30 if i % 8 > 4 else 0), seed=0
        )
        for i in range(ROWS)
    ]
    batch = SamplingBatch.build(requests, VOCAB)
    all_sorted = warp(values, batch)
    monkeypatch.setattr(sampling, "_NUCLEUS", num_sorted)
    some_sorted = warp(values, batch)
    assert torch.equal(some_sorted.nan_to_num(7.0), all_sorted.nan_to_num(7.0))
    alone = [warp(values[i : i + 1], batch.select(torch.tensor([i])))[0].nan_to_num(7.0) for i in range(ROWS)]
    assert torch.equal(torch.stack(alone), all_sorted.nan_to_num(7.0)), "whatever other rows are"
