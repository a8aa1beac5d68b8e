"""The matrix of successors against a dictionary."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.drafters.recycling import SuccessorMatrix
from foretoken.trees.choices import TreeShape

VOCAB, WIDTH = 5, 3
UPDATES = st.lists(st.tuples(st.integers(0, VOCAB - 1), st.permutations(range(VOCAB))), max_size=20)
SHAPE = TreeShape.from_choices([[0], [2], [0, 0], [0, 1], [2, 1], [0, 1, 2]])


@given(updates=UPDATES, size=st.integers(1, 4), root=st.integers(0, VOCAB - 1))
def test_trees_are_filled_by_rank(updates: list[tuple[int, list[int]]], size: int, root: int) -> None:
    """Whatever is written together: of a token that stands twice, the last entry counts."""
    matrix, model = SuccessorMatrix(VOCAB, WIDTH), {}
    for begin in range(0, len(updates), size):
        part = updates[begin : begin + size]
        matrix.update(np.array([token for token, _ in part]), np.array([ids[:WIDTH] for _, ids in part]))
        model.update({token: ids[:WIDTH] for token, ids in part})

    def token_at(choice: tuple[int, ...]) -> int:
        token = root
        for rank in choice:
            token = model.get(token, [-1] * WIDTH)[rank]
        return token

    assert all(matrix.of(token) == list(model.get(token, [-1] * WIDTH)) for token in range(VOCAB))
    levels = [slice(1, 3), slice(3, 6), slice(6, 7)]
    filled = matrix.fill(root, np.array(SHAPE.parents), np.array(SHAPE.ranks), levels)
    assert filled.tolist() == [root, *map(token_at, SHAPE.choices)]


def test_large_vocabularies() -> None:
    matrix = SuccessorMatrix(152_064, 8)
    assert matrix._rows.nbytes == 152_065 * 8 * 4
    last = 152_063
    matrix.update(np.array([last]), np.array([[last, 0]]))
    assert matrix.of(last)[:3] == [last, 0, -1]
    assert matrix.of(0) == [-1] * 8


@pytest.mark.parametrize("count", [1, 3])
def test_fewer_successors_than_there_is_room_for(count: int) -> None:
    """As where the vocabulary is smaller."""
    matrix = SuccessorMatrix(VOCAB, 4)
    matrix.update(np.array([1]), np.arange(count)[None])
    assert matrix.of(1) == [*range(count), *[-1] * (4 - count)]
