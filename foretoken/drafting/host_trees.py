"""Trees on the host, as controllers read and merge them.

Letters: B sequences, N nodes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from foretoken.core.token_tree import PROBE, HostFacts, TokenTree
from foretoken.drafting.base import Leaf
from foretoken.trees.merge import Graft

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from foretoken.core.records import SequenceStep
    from foretoken.drafting.acceptance import NodeAcceptance
    from foretoken.drafting.base import Continue


class HostTree(NamedTuple):
    """A batch of trees; all (B, N).

    Attributes:
        tokens: See `TokenTree`.
        parents: See `TokenTree`.
        depths: See `TokenTree`.
        scores: See `TokenTree`; None if the drafter gives none.
        is_drafted: Whether the node is neither root, padding, cut off nor a probe.
        sources: See `TokenTree`; 0 if there are none.
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    depths: NDArray[np.int64]
    scores: NDArray[np.float32] | None
    is_drafted: NDArray[np.bool_]
    sources: NDArray[np.int64]


def on_host(tree: TokenTree) -> HostTree:
    """Copies a tree's values to the host. Synchronises."""
    source = torch.zeros_like(tree.tokens) if tree.source is None else tree.source
    tokens, parents, depths, sources = torch.stack([tree.tokens, tree.parents, tree.depths, source]).cpu().numpy()
    is_drafted = (parents >= 0) & (sources & PROBE == 0)
    scores = None if tree.scores is None else tree.scores.cpu().numpy()
    return HostTree(tokens, parents, depths, scores, is_drafted, sources)


def path_values(host: HostTree, acceptance: NodeAcceptance, odds: NDArray[np.float64] | None) -> NDArray[np.float64]:
    """(B, N), the calibrated probability that each node of one drafter is accepted with its path; 1 for roots.

    Args:
        host: Trees of one drafter.
        acceptance: Of its nodes.
        odds: (B, N), see `log_odds_of`.
    """
    rows = np.arange(len(host.tokens))[:, None]
    above = np.maximum(host.parents, 0)
    logs = np.log(acceptance.probabilities(odds, host.depths))
    logs[:, 0] = 0.0
    for _ in range(int(host.depths.max(initial=0)).bit_length()):  # sums of 2, 4, 8, … nodes of a path
        logs, above = logs + logs[rows, above], above[rows, above]
    values: NDArray[np.float64] = np.exp(logs)
    return values


def valued(host: HostTree, values: NDArray[np.float64]) -> HostTree:
    """Returns trees with (B, N) probabilities of their nodes as scores."""
    return host._replace(scores=_logarithms(values))


def with_values(tree: TokenTree, values: NDArray[np.float64]) -> TokenTree:
    """Returns a tree with (B, N) probabilities as scores, on the tree's device."""
    return replace(tree, scores=torch.from_numpy(_logarithms(values)).to(tree.tokens.device))


def _logarithms(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Finite even for 0."""
    return np.log(np.maximum(values, 1e-30)).astype(np.float32)


def kept_nodes(host: HostTree, kept: NDArray[np.bool_], device: torch.device, *, has_sources: bool) -> TokenTree:
    """Returns the roots and some nodes of trees that are wholly on the host; kept: (B, N), with every node's parent."""
    assert host.scores is not None, "the trees are valued"
    kept = kept | (np.arange(kept.shape[1]) == 0)
    counts, rows = kept.sum(1), np.arange(len(kept))[:, None]
    order = np.argsort(~kept, axis=1, kind="stable")[:, : counts.max()]
    places = kept.cumsum(1) - 1
    parents = np.where(host.parents >= 0, places[rows, np.maximum(host.parents, 0)], -1)
    is_node = np.arange(order.shape[1]) < counts[:, None]
    parts = np.stack([host.tokens, parents, host.depths, host.sources])[:, rows, order]
    parts = np.where(is_node, parts, np.array([0, -1, 0, 0])[:, None, None])
    tokens, new_parents, depths, sources = torch.from_numpy(parts).to(device)
    scores = torch.from_numpy(np.where(is_node, host.scores[rows, order], np.float32(0.0))).to(device)
    deepest, sizes = parts[2].max(1).tolist(), counts.tolist()
    return TokenTree(
        tokens=tokens,
        parents=new_parents,
        depths=depths,
        num_nodes=torch.from_numpy(counts).to(device),
        max_depth=max(deepest),
        scores=scores,
        source=sources if has_sources else None,
        host_facts=HostFacts(
            roots=parts[0, :, 0].tolist(), depths=deepest, num_nodes=sizes, num_tokens=int(parts[0].max()) + 1
        ),
    )


def with_ancestors(nodes: NDArray[np.bool_], host: HostTree) -> NDArray[np.bool_]:
    """(B, N), some nodes and all their ancestors, without the roots."""
    result = nodes.copy()
    for row, node in zip(*np.nonzero(nodes), strict=True):
        above = host.parents[row, node]
        while above > 0 and not result[row, above]:
            result[row, above] = True
            above = host.parents[row, above]
    return result


def learn_followed(
    host: HostTree, acceptance: NodeAcceptance, odds: NDArray[np.float64] | None, steps: Sequence[SequenceStep]
) -> list[int]:
    """Tells an acceptance model which nodes the generated tokens followed; returns the followed depth of each tree.

    Only children of followed nodes have a label: of others nothing is known after their parent.

    Args:
        host: Trees of one drafter.
        acceptance: Of its nodes.
        odds: (B, N), see `log_odds_of`.
        steps: What was generated after each root.
    """
    deepest, rows, nodes, accepted = [0] * len(steps), [], [], []
    for row, (step, ids, parents, depths, is_drafted) in enumerate(
        zip(steps, *(part.tolist() for part in (host.tokens, host.parents, host.depths, host.is_drafted)), strict=True)
    ):
        follows, tokens = {0}, step.tokens
        for node, (parent, depth) in enumerate(zip(parents, depths, strict=True)):
            if parent not in follows or depth > len(tokens):
                continue
            if is_right := ids[node] == tokens[depth - 1]:
                follows.add(node)
            if is_drafted[node]:
                rows.append(row)
                nodes.append(node)
                accepted.append(is_right)
                deepest[row] = max(deepest[row], depth * is_right)
    if nodes:
        known = None if odds is None else odds[rows, nodes]
        acceptance.learn(known, host.depths[rows, nodes], np.array(accepted))
    return deepest


class _Row(NamedTuple):
    """One sequence's tree, one entry per node; see `TokenTree`."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    scores: list[float]
    sources: list[int]

    def add(self, token: int, parent: int, depth: int, score: float, source: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(depth)
        self.scores.append(score)
        self.sources.append(source)
        return len(self.tokens) - 1


class HostMerge:
    """The union of several drafters' trees, see `merge_trees`."""

    def __init__(self, trees: Sequence[HostTree], drafters: Sequence[int], *, max_nodes: int) -> None:
        """Unites trees over the same roots, in their order.

        Args:
            trees: At least one, with scores.
            drafters: Index of the drafter of each tree.
            max_nodes: Most nodes of a merged tree, root included. Later nodes are left out.
        """
        everyone = sum(1 << drafter for drafter in drafters)
        self._max_nodes = max_nodes
        self._rows = [_Row([root], [-1], [0], [0.0], [everyone]) for root in trees[0].tokens[:, 0].tolist()]
        self._children: list[dict[tuple[int, int], int]] = [{} for _ in self._rows]  # first child by parent and token
        for tree, drafter in zip(trees, drafters, strict=True):
            self._unite(tree, 1 << drafter)

    def _unite(self, tree: HostTree, bit: int) -> None:
        assert tree.scores is not None, "the trees are valued"
        parts = [part.tolist() for part in (tree.tokens, tree.parents, tree.scores, tree.sources)]
        for row, children, tokens, parents, scores, sources in zip(self._rows, self._children, *parts, strict=True):
            new: dict[tuple[int, int], int] = {}
            places = [0] * len(tokens)  # index in the union; -1 for nodes left out
            for node in range(1, len(tokens)):
                parent = places[parents[node]] if parents[node] >= 0 else -1
                probe = sources[node] & PROBE
                found = children.get((parent, tokens[node]))
                if found is not None:
                    row.scores[found] = max(row.scores[found], scores[node])
                    row.sources[found] = (row.sources[found] | bit) & ~(0 if probe else PROBE)
                elif parent >= 0 and len(row.tokens) < self._max_nodes:
                    found = row.add(tokens[node], parent, row.depths[parent] + 1, scores[node], bit | probe)
                    new.setdefault((parent, tokens[node]), found)
                places[node] = -1 if found is None else found
            children.update(new)

    def graft(self, graft: Graft) -> None:
        """Adds a chain below a node while there is room."""
        row, node, depth = self._rows[graft.row], graft.node, graft.depth
        for token, score in zip(graft.tokens, graft.scores, strict=True):
            if len(row.tokens) >= self._max_nodes:
                return
            depth += 1
            node = row.add(token, node, depth, score, graft.source)

    def tree(self) -> HostTree:
        """Returns the union as one batch of trees."""
        width = max(len(row.tokens) for row in self._rows)
        integers: list[list[list[int]]] = []
        floats: list[list[float]] = []
        for row in self._rows:
            less = width - len(row.tokens)
            integers.append([
                [*row.tokens, *[0] * less], [*row.parents, *[-1] * less],
                [*row.depths, *[0] * less], [*row.sources, *[0] * less],
            ])  # fmt: skip
            floats.append([*row.scores, *[0.0] * less])
        tokens, parents, depths, sources = np.array(integers).swapaxes(0, 1)
        scores = np.array(floats, dtype=np.float32)
        is_drafted = (parents >= 0) & (sources & PROBE == 0)
        return HostTree(tokens, parents, depths, scores, is_drafted, sources)


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
    host: HostTree, continued: Continue, acceptances: Sequence[NodeAcceptance]
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
            probabilities = [_probabilities(each, acceptances[each.drafter]) for each in answers]
            best, values_of_best = max(
                zip(answers, probabilities, strict=True), key=lambda pair: float(pair[1].sum())
            )  # fmt: skip
            scores = (values[place] + np.log(values_of_best)).tolist()
            grafts.append(Graft(row, node, len(leaf.path), best.tokens, scores, 1 << best.drafter))
    return chains, grafts


def learn_chain(acceptance: NodeAcceptance, chain: LookupChain, tokens: Sequence[int]) -> None:
    """Counts which tokens of a chain were generated; tokens: generated for its sequence."""
    above = len(chain.leaf.path)
    if list(tokens[:above]) != list(chain.leaf.path) or len(tokens) <= above:
        return
    right = [mine == written for mine, written in zip(chain.tokens, tokens[above:], strict=False)]
    depths = np.arange(1, (right.index(False) if False in right else len(right) - 1) + 2)
    acceptance.learn(None, depths, np.array(right[: len(depths)]))


def _probabilities(chain: LookupChain, acceptance: NodeAcceptance) -> NDArray[np.float64]:
    depths = np.arange(len(chain.tokens)) + 1
    values: NDArray[np.float64] = acceptance.probabilities(None, depths).cumprod()
    return values


def _path(host: HostTree, row: int, node: int) -> list[int]:
    path: list[int] = []
    while node > 0:
        path.append(int(host.tokens[row, node]))
        node = int(host.parents[row, node])
    return path[::-1]
