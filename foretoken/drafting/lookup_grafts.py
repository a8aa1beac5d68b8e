"""Chains of lookups below drafted leaves: which leaves are asked about, which chains are grafted, what is learned."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from foretoken.drafting.base import Leaf
from foretoken.trees.merge import Graft

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from foretoken.drafting.base import Continue
    from foretoken.drafting.calibration import Calibration
    from foretoken.drafting.host_trees import HostTree

_LEAVES, _LEAST_VALUE = 4, 0.1  # most leaves, at most one a sequence; least probability of a leaf


class LookupChain(NamedTuple):
    """A chain that a lookup proposed after a drafted path.

    Attributes:
        drafter: Index of the lookup.
        leaf: End of the path.
        tokens: Of the chain.
    """

    drafter: int
    leaf: Leaf
    tokens: Sequence[int]


def grafts_on(
    host: HostTree, continued: Continue, calibrations: Sequence[Calibration]
) -> tuple[list[LookupChain], list[Graft]]:
    """Asks lookups to continue the best leaves of merged trees that they did not propose themselves.

    Returns:
        All answers, which are learned from, and one graft per leaf: the answer with the most expected tokens.
    """
    assert host.scores is not None, "the trees are valued"
    batch_size, width = host.tokens.shape
    rows = np.arange(batch_size)[:, None]
    is_parent = np.zeros_like(host.is_drafted)
    is_parent[rows, np.maximum(host.parents, 0)] = True
    is_leaf = host.is_drafted & ~is_parent & (host.scores >= np.log(_LEAST_VALUE))
    values = np.where(is_leaf, host.scores, -np.inf).ravel()
    chains: list[LookupChain] = []
    grafts: list[Graft] = []
    for place in np.argsort(-values, kind="stable")[: max(_LEAVES, batch_size)]:
        if values[place] == -np.inf:
            break
        row, node = divmod(int(place), width)
        leaf = Leaf(row, _path(host, row, node))
        answers = [
            LookupChain(drafter, leaf, tokens)
            for drafter, tokens in continued(leaf)
            if not host.sources[row, node] >> drafter & 1  # else the lookup has already proposed what follows
        ]
        if answers:
            chains += answers
            probabilities = [_probabilities(each, calibrations[each.drafter]) for each in answers]
            best, values_of_best = max(
                zip(answers, probabilities, strict=True), key=lambda pair: float(pair[1].sum())
            )  # fmt: skip
            scores = (values[place] + np.log(values_of_best)).tolist()
            grafts.append(Graft(row, node, len(leaf.path), best.tokens, scores, 1 << best.drafter))
    return chains, grafts


def learn_chain(calibration: Calibration, chain: LookupChain, tokens: Sequence[int]) -> None:
    """Counts which tokens of a chain were generated; tokens: generated for its sequence."""
    above = len(chain.leaf.path)
    if list(tokens[:above]) != list(chain.leaf.path) or len(tokens) <= above:
        return
    following = list(tokens[above:])
    agreeing = next(
        (k for k, pair in enumerate(zip(chain.tokens, following, strict=False)) if pair[0] != pair[1]), None
    )  # fmt: skip
    known = min(len(following), len(chain.tokens)) if agreeing is None else len(chain.tokens)
    accepted = [agreeing is None or k < agreeing for k in range(known)]
    calibration.learn_nodes(list(range(1, known + 1)), None, accepted)


def _probabilities(chain: LookupChain, calibration: Calibration) -> NDArray[np.float64]:
    depths = np.arange(len(chain.tokens)) + 1
    values: NDArray[np.float64] = np.minimum.accumulate(calibration.probabilities(depths, None))
    return values


def _path(host: HostTree, row: int, node: int) -> list[int]:
    path: list[int] = []
    while node > 0:
        path.append(int(host.tokens[row, node]))
        node = int(host.parents[row, node])
    return path[::-1]
