"""The most frequent beginnings of continuations against counting them all."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foretoken.drafters.rest import FrequentPaths, likeliest_path, most_frequent

ROWS = st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=30)


def as_rows(lists: list[list[int]]) -> np.ndarray:
    """Sorted rows, some of which end sooner than others."""
    depth = max(map(len, lists))
    return np.array(sorted(row + [-1] * (depth - len(row)) for row in lists), dtype=np.int64).reshape(len(lists), depth)


def counted(rows: np.ndarray) -> Counter[tuple[int, ...]]:
    """How many rows begin with each path."""
    paths = ([token for token in row if token >= 0] for row in rows.tolist())
    return Counter(tuple(path[:length]) for path in paths for length in range(1, len(path) + 1))


def paths_of(found: FrequentPaths) -> list[tuple[int, ...]]:
    """The path down to each node."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(found.tokens, found.parents, strict=True):
        assert parent < len(paths)
        paths.append((*paths[parent], token) if parent >= 0 else (token,))
    return paths


@given(lists=ROWS, most=st.integers(0, 20))
def test_the_most_frequent_beginnings(lists: list[list[int]], most: int) -> None:
    rows = as_rows(lists)
    counts, found = counted(rows), most_frequent(rows, most)
    paths = paths_of(found)
    assert paths == sorted(counts, key=lambda path: (-counts[path], len(path), path))[:most]
    assert found.counts == [counts[path] for path in paths]


@given(lists=ROWS)
def test_the_likeliest_path(lists: list[list[int]]) -> None:
    """At each token the most frequent one after those so far, the smallest of equals."""
    rows = as_rows(lists)
    counts, path = counted(rows), ()
    wanted = []
    while following := [(*path, token) for token in range(3) if (*path, token) in counts]:
        path = max(following, key=lambda each: (counts[each], -each[-1]))
        wanted.append(path)
    found = likeliest_path(rows)
    assert paths_of(found) == wanted
    assert found.counts == [counts[path] for path in wanted]


def test_rows_in_any_order_give_trees() -> None:
    """As of a damaged datastore: a sibling may come twice, every node comes after its parent."""
    rows = np.array([[1, 2], [0, 1], [1, 2], [1, 0]])
    found = most_frequent(rows, 9)
    assert [path for path in paths_of(found) if path == (1, 2)] == [(1, 2)] * 2
    assert likeliest_path(rows).tokens in ([1, 2], [1, 0])
