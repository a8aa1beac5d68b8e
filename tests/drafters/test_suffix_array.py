"""Sorted suffixes against Python's own sorting of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.drafters.datastore import sorted_suffixes


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=60), depth=st.integers(1, 40),
    largest=st.sampled_from([2, 500, 65535]),
)  # fmt: skip
def test_order_is_that_of_sorting(tokens: list[int], depth: int, largest: int) -> None:
    """Of all tokens, or of the first ones and then the place; tokens of few and of many bits."""
    tokens = [*tokens, largest]
    order = sorted_suffixes(np.array(tokens, dtype=np.uint16), depth).tolist()
    assert sorted(order) == list(range(len(tokens)))
    beginnings = [tokens[begin : begin + depth] for begin in order]
    assert beginnings == sorted(beginnings)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int64])
def test_runs_that_repeat(dtype: Any) -> None:
    tokens, depths = np.array([5, 6] * 50, dtype=dtype), []
    order = sorted_suffixes(tokens, 64, on_round=depths.append)
    assert order.dtype == np.uint32
    assert depths == [depths[0] * 2**i for i in range(len(depths))]
    assert depths[-2] < 64 <= depths[-1]
    text = tokens.tolist()
    assert order.tolist() == sorted(range(100), key=lambda begin: (text[begin : begin + depths[-1]], begin))
    assert tokens.tolist() == text


def test_the_largest_ids_and_one_token() -> None:
    assert sorted_suffixes(np.array([7], dtype=np.uint32), 64).tolist() == [0]
    tokens = np.array([2**32 - 1, 0, 2**32 - 1, 0], dtype=np.uint32)
    assert sorted_suffixes(tokens, 64).tolist() == [3, 1, 2, 0]
