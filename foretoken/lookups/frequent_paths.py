"""The most frequent beginnings of many continuations, as a tree.

Letters: R continuations, D tokens of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class FrequentPaths(NamedTuple):
    """Nodes of a tree without its root, in an order in which every node comes after its parent.

    Attributes:
        tokens: Token of each node.
        parents: Index of its parent among the nodes; -1 for the children of the root.
        counts: Continuations that begin with the path down to it.
    """

    tokens: list[int]
    parents: list[int]
    counts: list[int]


class _Prefixes(NamedTuple):
    """All beginnings of continuations, by length and then in ascending order.

    Attributes:
        places: (P,) int64, R times its length less one, and its first row.
        counts: (P,) int64, rows that begin with it.
        number: (D * R,) int64, which beginning stands at each place.
    """

    places: NDArray[np.int64]
    counts: NDArray[np.int64]
    number: NDArray[np.int64]


def most_frequent(rows: NDArray[np.int64], most: int) -> FrequentPaths:
    """The most frequent beginnings, of equally frequent ones the shorter, then the first in ascending order.

    Args:
        rows: (R, D) token ids, equal beginnings together; -1 from where a continuation ends.
        most: Nodes at most.
    """
    num_rows, depth = rows.shape
    if not (num_rows and depth and most > 0):
        return FrequentPaths([], [], [])
    places, counts, number = _prefixes(rows)
    tokens = rows.T.reshape(-1)[places]
    chosen = np.argsort(-counts, kind="stable")
    chosen = chosen[tokens[chosen] >= 0][:most]
    # No beginning is more frequent than a shorter one of its own, which stands before it among equally frequent ones.
    at = places[chosen]
    parents = number[np.maximum(at - num_rows, 0)]
    node_of = np.full(len(places), -1)
    node_of[chosen] = np.arange(len(chosen))
    nodes = np.where(at < num_rows, -1, node_of[parents])
    return FrequentPaths(tokens[chosen].tolist(), nodes.tolist(), counts[chosen].tolist())


def likeliest_path(rows: NDArray[np.int64]) -> FrequentPaths:
    """The path that goes on, from the root, with the most frequent next token each time; see `most_frequent`."""
    num_rows, depth = rows.shape
    if not (num_rows and depth):
        return FrequentPaths([], [], [])
    places, counts, _ = _prefixes(rows)
    next_tokens = rows.T.reshape(-1)[places]
    counts[next_tokens < 0] = 0  # an end is never gone on with, however frequent
    tokens: list[int] = []
    path_counts: list[int] = []
    first, count = 0, num_rows
    for level in range(depth):
        if count == 1:
            rest = [token for token in rows[first, level:].tolist() if token >= 0]
            tokens += rest
            path_counts += [1] * len(rest)
            break
        begin, end = places.searchsorted((level * num_rows + first, level * num_rows + first + count)).tolist()
        best = begin + int(counts[begin:end].argmax())
        first, count = int(places[best]) - level * num_rows, int(counts[best])
        if not count:
            break
        tokens.append(int(next_tokens[best]))
        path_counts.append(count)
    return FrequentPaths(tokens, list(range(-1, len(tokens) - 1)), path_counts)


def _prefixes(rows: NDArray[np.int64]) -> _Prefixes:
    """All beginnings of rows in which equal beginnings stand together."""
    num_rows, depth = rows.shape
    is_new = np.ones((depth, num_rows), dtype=bool)  # whether a row begins otherwise than the one before, by length
    np.logical_or.accumulate((rows[1:] != rows[:-1]).T, axis=0, out=is_new[:, 1:])
    flat = is_new.reshape(-1)
    places = flat.nonzero()[0]
    counts = np.empty_like(places)
    counts[:-1] = places[1:] - places[:-1]
    counts[-1] = len(flat) - places[-1]
    return _Prefixes(places, counts, flat.cumsum() - 1)
