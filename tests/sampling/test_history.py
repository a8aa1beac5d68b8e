"""Histories: counts by slot, tails, and what a path adds to them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.sampling.batch import History, HistoryTable

VOCAB = 6
tokens = st.integers(0, VOCAB - 1)
quick = settings(max_examples=60)


def view(table: HistoryTable, texts: dict[int, tuple[list[int], list[int]]], tail_len: int) -> History:
    """The table's view of slots whose prompt and output are `texts`."""
    return table.view(
        list(texts),
        [prompt + output for prompt, output in texts.values()],
        [len(p) for p, _ in texts.values()],
        tail_len,
    )


def assert_history_is(history: History, row: int, prompt: list[int], output: list[int], tail_len: int) -> None:
    text = prompt + output
    assert history.prompt_seen is not None
    assert history.output_counts is not None
    assert history.prompt_seen[row].nonzero()[:, 0].tolist() == sorted(set(prompt))
    assert history.output_counts[row].tolist() == [output.count(token) for token in range(VOCAB)]
    assert history.tail[row].tolist() == ([-1] * tail_len + text)[len(text) :]
    assert history.num_output[row] == len(output)


@quick
@given(
    texts=st.lists(st.tuples(st.lists(tokens, min_size=1), st.lists(st.lists(tokens), max_size=4)), min_size=1),
    tail_len=st.integers(0, 5),
    data=st.data(),
)
def test_view_and_extension(texts: list[tuple[list[int], list[list[int]]]], tail_len: int, data: st.DataObject) -> None:
    """Counted step by step, then extended by paths of different lengths: equal to counting the whole text."""
    slots = data.draw(st.permutations(range(len(texts))))
    table, plain = HistoryTable(len(texts), VOCAB), {}
    for slot, (prompt, steps) in zip(slots, texts, strict=True):
        table.start(slot, prompt, needs_counts=True)
        for step in steps:
            table.append(slot, step)
        plain[slot] = (prompt, [token for step in steps for token in step])
    history = view(table, plain, tail_len)
    paths = [data.draw(st.lists(tokens, max_size=3)) for _ in texts]
    depth = max(len(path) for path in paths)
    padded = torch.tensor([path + [-1] * (depth - len(path)) for path in paths], dtype=torch.int64).view(
        len(paths), depth
    )
    extended = history.extended(padded)
    for row, ((prompt, output), path) in enumerate(zip(plain.values(), paths, strict=True)):
        assert_history_is(extended, row, prompt, output + path, tail_len)
        assert_history_is(history, row, prompt, output, tail_len)  # extending is not appending
    rows = torch.tensor([len(texts) - 1, 0])
    chosen = history.select(rows)
    for row, source in enumerate(rows.tolist()):
        assert_history_is(chosen, row, *list(plain.values())[source], tail_len)


def test_a_slot_forgets_its_former_sequence() -> None:
    table = HistoryTable(2, VOCAB)
    table.start(1, [1, 2], needs_counts=True)
    table.append(1, [3, 3])
    table.start(1, [4], needs_counts=True)
    assert_history_is(view(table, {1: ([4], [])}, 2), 0, [4], [], 2)
    table.start(1, [5], needs_counts=False)
    assert view(table, {1: ([5], [])}, 0).output_counts is None


def test_counts_exist_only_where_they_are_needed() -> None:
    table = HistoryTable(2, VOCAB)
    table.start(0, [1], needs_counts=False)
    table.append(0, [2])
    assert view(table, {0: ([1], [2])}, 0).prompt_seen is None
    table.start(1, [3], needs_counts=True)
    mixed = view(table, {0: ([1], [2]), 1: ([3], [])}, 0)
    assert mixed.output_counts is not None
    assert mixed.output_counts[0].sum() == 0, "the sequence that needs none has none"
    assert_history_is(mixed, 1, [3], [], 0)


@pytest.mark.parametrize("depth", [0, 2])
def test_without_counts_only_tail_and_length_move(depth: int) -> None:
    table = HistoryTable(1, VOCAB)
    table.start(0, [1], needs_counts=False)
    history = view(table, {0: ([1], [])}, 2).extended(torch.tensor([[4, 5][:depth]], dtype=torch.int64))
    assert history.output_counts is None
    assert history.tail.tolist() == ([[4, 5]] if depth else [[-1, 1]])
    assert history.num_output.tolist() == [depth]
