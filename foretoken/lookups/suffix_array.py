"""Sorting the suffixes of a long text of token ids by their first tokens, by prefix doubling.

Source: Manber and Myers 1993, with rounds made of whole-array operations. Ranks of the first L tokens of all suffixes
give those of the first 2 L: a suffix is known by its own rank and that of the suffix L tokens further on.

Letters: N tokens of the text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

MOST_TOKENS = (1 << 31) - 1  # so that two ranks make one number of 63 bits
BYTES_A_TOKEN = 60  # of memory while sorting; measured: 56 of 16 million


def sorted_suffixes(
    tokens: NDArray[Any], depth: int, *, on_round: Callable[[int], None] | None = None
) -> NDArray[np.uint32]:
    """Where the suffixes of a text begin, in the order of their first tokens.

    Args:
        tokens: (N,) unsigned integers, N from 1 to `MOST_TOKENS`; not modified. Takes `BYTES_A_TOKEN` of memory.
        depth: Tokens that are compared at least; a suffix that ends sooner comes before those that go on.
        on_round: Called with the number of tokens by which suffixes are sorted so far, after every round.

    Returns:
        (N,) uint32, each of 0 … N - 1 once. Suffixes that agree in the tokens compared stand in the order of the text.
    """
    keys, length = _first_keys(tokens, depth)
    while True:
        order = np.argsort(keys, kind="stable")
        if on_round is not None:
            on_round(length)
        if length >= depth:
            break
        ranks, num_ranks = _ranks(keys, order)
        if num_ranks == len(tokens):
            break
        keys = ranks * (num_ranks + 1)
        if length < len(ranks):
            keys[: len(ranks) - length] += ranks[length:]
        length *= 2
    return order.astype(np.uint32)


def _first_keys(tokens: NDArray[Any], depth: int) -> tuple[NDArray[np.int64], int]:
    """Numbers that order suffixes by as many tokens as 63 bits hold, `depth` at most, and how many these are."""
    bits = (int(tokens.max()) + 1).bit_length()
    length = max(1, min(63 // bits, depth))
    keys = np.zeros(len(tokens), dtype=np.int64)
    for ahead in range(length):
        keys <<= bits
        if ahead < len(tokens):
            keys[: len(tokens) - ahead] += tokens[ahead:]
            keys[: len(tokens) - ahead] += 1  # 0 is the end of the text
    return keys, length


def _ranks(keys: NDArray[np.int64], order: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """(N,) ranks of suffixes from 1, equal where their keys are, and the greatest of them."""
    ordered = keys[order]
    is_new = np.ones(len(ordered), dtype=np.int64)
    is_new[1:] = ordered[1:] != ordered[:-1]
    ranks = np.empty_like(ordered)
    ranks[order] = np.cumsum(is_new)
    return ranks, int(is_new.sum())
