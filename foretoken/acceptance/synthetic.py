"""Synthetic acceptance: accepts as many drafted tokens as given rates say, without a comparison of tokens.

A drafter without trained weights then shows the speed that a drafter with these rates would have. The text is not the
target's. vLLM calls this `rejection_sample_method="synthetic"`.

Rates are *joint*, as in vLLM: rate k is the probability that the first k drafted tokens are all accepted.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate, pairwise
from operator import mul
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.acceptance.rules import ChosenPath, descend
from foretoken.core.checks import check_number, shown
from foretoken.core.errors import ConfigError
from foretoken.core.token_tree import MAX_NODES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.acceptance.decisions import Acceptance
    from foretoken.core.token_tree import TokenTree

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio: multiples spread evenly modulo 2^64
_NUM_STARTS = 1000  # places of the schedule where sequences begin; a choice


def joint_rates(conditional: Sequence[float]) -> list[float]:
    """Returns joint rates, the cumulative products of P(token k is accepted | all tokens before are accepted)."""
    return list(accumulate(conditional, mul))


def rates_of_length(length: float) -> list[float]:
    """Returns the joint rates with a mean acceptance length, the target's own token included.

    Of all such rates these have the least variance: a pass accepts one of two neighbouring numbers of tokens.
    """
    whole = math.floor(length - 1)
    part = length - 1 - whole
    return [1.0] * whole + [part] * (part > 0)


def check_synthetic(rule: str, rates: object, length: object) -> None:
    """Checks joint rates and mean acceptance length of an acceptance rule; None for a missing one.

    Raises:
        ConfigError: When another rule has one of them, the synthetic rule not exactly one, or a value is out of range.
    """
    if rule != "synthetic":
        if rates is not None or length is not None:
            raise ConfigError(
                f"synthetic acceptance came with the acceptance rule '{rule}'. Expected it with "
                "rejection_sample_method 'synthetic' alone, which is lossy."
            )
        return
    if (rates is None) == (length is None):
        raise ConfigError(
            "rejection_sample_method 'synthetic' needs either synthetic_acceptance_rates or "
            "synthetic_acceptance_length. Pass one of them."
        )
    if rates is None:
        check_number("'synthetic_acceptance_length'", length, 1.0, MAX_NODES, error=ConfigError)
        return
    if not isinstance(rates, list | tuple) or not 0 < len(rates) < MAX_NODES:
        raise ConfigError(f"'synthetic_acceptance_rates' is {shown(rates)}. Expected a list of numbers.")
    for before, rate in pairwise([1.0, *rates]):
        check_number("a rate of 'synthetic_acceptance_rates'", rate, 0.0, 1.0, error=ConfigError)
        if rate > before:
            raise ConfigError(
                f"'synthetic_acceptance_rates' rise from {before:g} to {rate:g}. Expected P(the first k drafted tokens "
                "are accepted), which never rises with k."
            )


class LengthSchedule:
    """Numbers of accepted tokens, 0 to K, in an order in which each is as frequent as its probability says.

    Among the first n entries the count of every number differs from n times its probability by less than 1, for all n.
    Among n entries in a row, from any place, the count differs by less than 2.

    Source: Tijdeman 1980, "The chairman assignment problem": with M numbers by at most 1 - 1 / (2 M - 2).
    """

    def __init__(self, rates: Sequence[float]) -> None:
        """Makes the schedule of K joint rates, which do not increase."""
        bounds = pairwise([1.0, *rates, 0.0])
        self._probs = {number: more - fewer for number, (more, fewer) in enumerate(bounds) if more > fewer}
        self._counts = dict.fromkeys(self._probs, 0)
        self._entries: list[int] = []  # made as they are read

    def length(self, seed: int, index: int) -> int:
        """Returns how many tokens the `index`-th draft of a sequence adds, from 0; the seed sets the first entry."""
        at = (seed * _GOLDEN % (1 << 64)) * _NUM_STARTS >> 64
        while len(self._entries) <= at + index:
            self._append()
        return self._entries[at + index]

    def _append(self) -> None:
        n = len(self._entries) + 1
        lag = {number: n * p - self._counts[number] for number, p in self._probs.items()}
        least = 1 / (2 * len(lag) - 2) if len(lag) > 1 else 0.0
        eligible = [number for number in lag if lag[number] >= least - 1e-9]  # lags sum to 1; 1e-9: rounding
        entry = min(eligible, key=lambda number: (1 - least - lag[number]) / self._probs[number])  # earliest deadline
        self._counts[entry] += 1
        self._entries.append(entry)


def accept_synthetic(tree: TokenTree, lengths: Tensor, token_after: Callable[[Tensor, int], Tensor]) -> Acceptance:
    """Accepts a number of tokens along the path of best children, fewer where the path ends.

    The best child has the highest score, or is the first one without scores. The token after the path is the target's
    own. `lossy_tv` is NaN: the distance is unknown for this rule.

    Args:
        tree: Candidates drawn in any way.
        lengths: (B,) int64.
        token_after: (nodes (B,) int64, depth) -> (B,) int64, the target's token after each node.
    """
    scores = torch.zeros(tree.tokens.shape, device=tree.tokens.device) if tree.scores is None else tree.scores
    scores = scores.nan_to_num(nan=torch.finfo(scores.dtype).min)

    def step(node: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        is_child = tree.parents == node.unsqueeze(1)
        best = torch.where(is_child, scores, -math.inf).argmax(1)
        return torch.where(is_child.any(1) & (depth < lengths), best, -1), token_after(node, depth)

    return replace(descend(tree, step), lossy_tv=torch.full(lengths.shape, math.nan, device=lengths.device))


def walk_synthetic(
    tree: TokenTree, chosen: Sequence[int], starts: Sequence[int], lengths: Sequence[int]
) -> list[ChosenPath]:
    """Does `accept_synthetic` on the host, if the host knows the target's token after every node.

    Args:
        tree: (B, N) candidates.
        chosen: The token after each node; those of sequence b begin at `starts[b]`.
        starts: At least B.
        lengths: B.
    """
    scores = [[0.0] * tree.width] * tree.batch_size if tree.scores is None else tree.scores.tolist()
    rows = zip(tree.tokens.tolist(), tree.parents.tolist(), scores, starts, lengths, strict=False)
    paths = []
    for tokens, parents, values, start, length in rows:
        node, path = 0, ChosenPath([], [])
        while len(path.nodes) < length:
            children = [child for child in range(node + 1, len(parents)) if parents[child] == node]
            if not children:
                break
            node = max(children, key=lambda child: -math.inf if math.isnan(values[child]) else values[child])
            path.nodes.append(node)
            path.tokens.append(tokens[node])
        path.tokens.append(chosen[start + node])
        paths.append(path)
    return paths
