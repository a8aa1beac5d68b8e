"""The distribution at a tree node is that of the plain sequence that the node stands for, whatever the request asks."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_processors import (
    VOCAB,
    Situation,
    as_tensors,
    probabilities,
    processed,
    random_logits,
    situations,
    softmax,
    tokens,
)

from foretoken.core.sampling_params import SamplingParams
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.sampling.batch import History, SamplingBatch, SamplingRequest
from foretoken.sampling.node_scores import NodeScores

thorough = settings(max_examples=100)


@st.composite
def tree_rows(draw: st.DrawFn, root: int) -> TreeRow:
    count = draw(st.integers(0, 6))
    parents = [draw(st.integers(0, node)) for node in range(count)]
    return TreeRow([root, *(draw(tokens) for _ in range(count))], [-1, *parents])


def path_to(row: TreeRow, node: int) -> list[int]:
    """Tokens from below the root down to a node."""
    path: list[int] = []
    while node:
        path.insert(0, row.tokens[node])
        node = row.parents[node]
    return path


def scores_of(batch: list[Situation], rows: list[TreeRow], seed: int) -> NodeScores:
    params, history = as_tensors(batch)
    tree = TokenTree.from_rows(rows)
    counts = [len(row.tokens) for row in rows]
    return NodeScores(
        tree=tree,
        logits=random_logits(seed, sum(counts), VOCAB),
        starts=torch.tensor([0, *accumulate(counts)][:-1]),
        batch=params,
        history=history,
    )


@thorough
@given(batch=st.lists(situations(), min_size=1, max_size=4), seed=st.integers(0, 10**6), data=st.data())
def test_every_node_is_the_plain_sequence(batch: list[Situation], seed: int, data: st.DataObject) -> None:
    """Row v predicts the token after v, so v itself is part of the history."""
    rows = [data.draw(tree_rows([*now.prompt, *now.output][-1])) for now in batch]
    scores = scores_of(batch, rows, seed)
    for node in range(scores.tree.width):
        nodes = torch.tensor([min(node, len(row.tokens) - 1) for row in rows])
        distribution, raw, best = (
            scores.log_probs(nodes).exp(),
            scores.unwarped_log_probs(nodes).exp(),
            scores.argmax(nodes),
        )
        for index, (now, row) in enumerate(zip(batch, rows, strict=True)):
            at = int(nodes[index])
            there = replace(now, output=[*now.output, *path_to(row, at)])
            z = processed(scores.logits[int(scores.starts[index]) + at].tolist(), there)
            expected = torch.tensor(probabilities(z, now.request.params))
            # The tolerances of test_processors.py.
            assert torch.equal(distribution[index] > 1e-20, expected > 1e-20)
            torch.testing.assert_close(distribution[index], expected, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(raw[index], torch.tensor(softmax(z)), rtol=1e-4, atol=1e-6)
            # Equal but for rounding: the tensor code may add in float32 what Python adds in float64.
            assert z[int(best[index])] >= max(z) - 1e-4


@thorough
@given(batch=st.lists(situations(), min_size=2, max_size=4), seed=st.integers(0, 10**6), data=st.data())
def test_selected_rows_are_the_rows(batch: list[Situation], seed: int, data: st.DataObject) -> None:
    rows = [data.draw(tree_rows([*now.prompt, *now.output][-1])) for now in batch]
    scores = scores_of(batch, rows, seed)
    nodes = torch.tensor([len(row.tokens) - 1 for row in rows])
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, len(batch) - 1), min_size=1, max_size=4)))
    torch.testing.assert_close(
        scores.select(chosen).log_probs(nodes[chosen]), scores.log_probs(nodes)[chosen], rtol=1e-6, atol=1e-6
    )


def test_rows_of_other_sequences_are_told_apart() -> None:
    """Two sequences of a ragged batch, whose padded trees happen to have as many nodes as the whole batch has rows."""
    rows = [TreeRow([1], [-1]), TreeRow([1, 2, 3], [-1, 0, 0]), TreeRow([1, 2], [-1, 0])]
    requests = [SamplingRequest(params=SamplingParams(temperature=0.0), seed=0)] * 3
    scores = NodeScores(
        tree=TokenTree.from_rows(rows),
        logits=torch.eye(VOCAB)[:6],
        starts=torch.tensor([0, 1, 4]),
        batch=SamplingBatch.build(requests, VOCAB),
        history=None,
    )
    for selected in (scores, scores.select(torch.tensor([1, 2]))):
        answers = selected.argmax_everywhere()
        assert answers is not None
        assert answers[-2].tolist() == [1, 2, 3]
        assert answers[-1, :2].tolist() == [4, 5]


def one(params: SamplingParams, row: TreeRow, logits: list[list[float]], **request: object) -> NodeScores:
    """A tree of one request whose prompt is the root alone."""
    now = Situation(SamplingRequest(params=params, seed=0, **request), [row.tokens[0]], [])
    batch, history = as_tensors([now])
    full = [[*values, *[-50.0] * (VOCAB - len(values))] for values in logits]
    return NodeScores(
        tree=TokenTree.from_rows([row]),
        logits=torch.tensor(full),
        starts=torch.tensor([0]),
        batch=batch,
        history=history,
    )


def test_greedy_rows_are_one_hot_at_the_lowest_of_equals() -> None:
    scores = one(SamplingParams(temperature=0.0), TreeRow([0, 1], [-1, 0]), [[2.0, 5.0, 5.0], [1.0, 1.0, 0.0]])
    for node, best in ((0, 1), (1, 0)):
        nodes = torch.tensor([node])
        assert scores.argmax(nodes).tolist() == [best]
        assert scores.log_probs(nodes).exp()[0].tolist() == [float(token == best) for token in range(VOCAB)]


def test_bad_word_across_history_and_path() -> None:
    """The word (0, 1, 2): 0 is the root, 1 a node, so 2 is impossible after that node and nowhere else."""
    scores = one(SamplingParams(), TreeRow([0, 1, 2, 1], [-1, 0, 0, 2]), [[0.0] * 3] * 4, bad_words=[[0, 1, 2]])
    impossible = [bool(scores.processed(torch.tensor([node]))[0, 2].isinf()) for node in range(4)]
    assert impossible == [False, True, False, False]


def test_min_tokens_ends_within_the_tree() -> None:
    scores = one(SamplingParams(min_tokens=2), TreeRow([0, 1, 1, 1], [-1, 0, 1, 2]), [[0.0] * 3] * 4, terminators=[2])
    held_back = [bool(scores.processed(torch.tensor([node]))[0, 2].isinf()) for node in range(4)]
    assert held_back == [True, True, False, False]


def test_penalties_count_the_path_and_not_the_siblings() -> None:
    scores = one(SamplingParams(frequency_penalty=1.0), TreeRow([0, 1, 2, 1], [-1, 0, 0, 1]), [[0.0] * 3] * 4)
    processed_rows = [scores.processed(torch.tensor([node]))[0, :3].tolist() for node in range(4)]
    assert processed_rows == [[0, 0, 0], [0, -1, 0], [0, 0, -1], [0, -2, 0]]


def test_history_may_be_absent_when_nothing_reads_it() -> None:
    scores = one(SamplingParams(temperature=0.7, top_p=0.9), TreeRow([0], [-1]), [[1.0, 2.0, 3.0]])
    nodes = torch.tensor([0])
    assert torch.equal(replace(scores, history=None).log_probs(nodes), scores.log_probs(nodes))
    assert replace(scores, history=None).select(nodes).history is None


@pytest.mark.parametrize("mutation", ["root only", "one token late"])
def test_broken_histories_are_seen(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The property above fails when a node's own path, or its last token, is left out."""
    extended = History.extended

    def root_only(self: History, path: torch.Tensor) -> History:
        return self

    def late(self: History, path: torch.Tensor) -> History:
        is_last = torch.arange(path.shape[1]) == (path >= 0).sum(1, keepdim=True) - 1
        return extended(self, path.masked_fill(is_last, -1))

    monkeypatch.setattr(History, "extended", root_only if mutation == "root only" else late)
    with pytest.raises(AssertionError):
        test_penalties_count_the_path_and_not_the_siblings()
    with pytest.raises(AssertionError):
        test_bad_word_across_history_and_path()
    with pytest.raises(AssertionError):
        test_min_tokens_ends_within_the_tree()


def test_greedy_rows_have_no_inverse_temperature() -> None:
    params = [SamplingParams(temperature=each) for each in (0.0, 1e-6, 0.5, 4.0)]
    batch = SamplingBatch.build([SamplingRequest(params=each, seed=0) for each in params], VOCAB)
    assert [each.inverse_temperature for each in params] == [0.0, 0.0, 2.0, 0.25]
    assert batch.inverse_temperature.tolist() == [0.0, 0.0, 2.0, 0.25]
