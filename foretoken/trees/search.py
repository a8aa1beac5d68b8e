"""Finds the static tree with the most tokens per second, from measured acceptance.

a(d, r) is the probability that candidate r of depth d is right if its parent is right, assumed independent of all else.
The value of a node is the product of these along its path: the probability that the node is accepted. The expected
number of accepted tokens is the sum of all values. No node is worth more than its parent. Buying the most valuable node
below bought nodes, again and again, thus gives the best tree of every size (the search of Medusa, arXiv 2401.10774).

This module does not know how acceptance and seconds were measured. An acceptance table is a sequence of K rows, one per
head. Rows may differ in length and need not fall with the rank.
"""

from __future__ import annotations

import heapq
from itertools import accumulate
from typing import TYPE_CHECKING

from foretoken.core.errors import ConfigError
from foretoken.trees.choices import TreeShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.trees.choices import Choice

    Acceptance = Sequence[Sequence[float]]


def best_nodes(acceptance: Acceptance, max_nodes: int) -> list[tuple[Choice, float]]:
    """Returns choices by falling value; every beginning of the list is the best tree of its size.

    Among equal values the shorter choice comes first, then the lexicographically smaller one.

    Args:
        acceptance: K rows, probability that each candidate of a depth is right if its parent is.
        max_nodes: Most nodes of a tree, root included.

    Returns:
        At most `max_nodes - 1` choices with their values; fewer if the table has fewer.

    Raises:
        ConfigError: When the table is empty or holds anything but probabilities, or `max_nodes` is below 2.
    """
    _check(acceptance)
    if max_nodes < 2:
        raise ConfigError(f"max_nodes is {max_nodes}. Expected at least 2: the root and a drafted node.")
    heap: list[tuple[float, int, Choice]] = []

    def offer_children(choice: Choice, value: float) -> None:
        if len(choice) < len(acceptance):
            for rank, probability in enumerate(acceptance[len(choice)]):
                heapq.heappush(heap, (-value * probability, len(choice) + 1, (*choice, rank)))

    bought: list[tuple[Choice, float]] = []
    offer_children((), 1.0)
    while heap and len(bought) < max_nodes - 1:
        negative, _, choice = heapq.heappop(heap)
        bought.append((choice, -negative))
        offer_children(choice, -negative)
    return bought


def best_shape(
    acceptance: Acceptance,
    pass_seconds: Callable[[int], float],
    *,
    level_seconds: float | Callable[[TreeShape], float] = 0.0,
    max_nodes: int,
) -> TreeShape:
    """Returns the shape with the most expected tokens per second.

    If drafting takes time per level, a shallower tree may pay more than any beginning of `best_nodes`. Every depth is
    therefore tried as the greatest. With a number for `level_seconds` the result is the best of all shapes; with a
    function, the best of the shapes tried. Among equals the shape with the fewest nodes wins. The shape has at least
    one drafted node.

    Args:
        acceptance: K rows, see `best_nodes`.
        pass_seconds: Seconds of a target pass by its nodes, root included.
        level_seconds: Seconds of drafting per level; or a function that returns the seconds for a whole shape.
        max_nodes: Most nodes of a tree, root included.

    Raises:
        ConfigError: See `best_nodes`.
    """
    _check(acceptance)
    rate_of_best, best = float("-inf"), TreeShape(())
    # If depth costs nothing, the deepest search has the best tree of every size.
    for depth in range(1 if level_seconds else len(acceptance), len(acceptance) + 1):
        bought = best_nodes(acceptance[:depth], max_nodes)
        choices = [choice for choice, _ in bought]
        tokens = accumulate((value for _, value in bought), initial=1.0)
        next(tokens)  # of the root alone
        deepest = accumulate(map(len, choices), max)
        for drafted, (expected, levels) in enumerate(zip(tokens, deepest, strict=True), start=1):
            if callable(level_seconds):
                drafting = level_seconds(TreeShape.from_choices(choices[:drafted]))
            else:
                drafting = levels * level_seconds
            rate = expected / (pass_seconds(drafted + 1) + drafting)
            if (rate, -drafted) > (rate_of_best, 1 - best.num_nodes):
                rate_of_best, best = rate, TreeShape.from_choices(choices[:drafted])
    return best


def _check(acceptance: Acceptance) -> None:
    if not acceptance or not all(acceptance):
        widths = [len(row) for row in acceptance]
        raise ConfigError(f"acceptance table with rows of {widths}. Expected at least one entry at every depth.")
    for depth, row in enumerate(acceptance):
        for rank, probability in enumerate(row):
            if not 0.0 <= probability <= 1.0:
                raise ConfigError(
                    f"acceptance of candidate {rank} at depth {depth + 1} is {probability}. Expected a probability: "
                    "hits by the number of times its parent was right."
                )
