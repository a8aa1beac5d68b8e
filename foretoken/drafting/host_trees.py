"""Trees on the host, as controllers read, merge and cut them.

A tree is a few lists: for a few dozen nodes a call of an array library takes longer than what it computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp, log
from typing import TYPE_CHECKING, NamedTuple

import torch

from foretoken.core.backend import floats_on, integers_on
from foretoken.core.token_tree import PROBE, TokenTree, TreeRow
from foretoken.drafting.base import Continue, Leaf
from foretoken.trees.merge import Continuation

if TYPE_CHECKING:
    from foretoken.core.records import SequenceStep
    from foretoken.drafting.acceptance import NodeAcceptance


class HostRow(NamedTuple):
    """One sequence's tree. Every list has an entry per node, the root first, parents before children.

    Attributes:
        tokens: See `TokenTree`, as for the next three.
        parents: -1 also for padding and for nodes that were cut off.
        depths: Of each node.
        sources: 0 if there are none.
        values: Probability that the node is accepted with its path; 1 for the root.
        odds: See `log_odds`; None without scores.
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    sources: list[int]
    values: list[float]
    odds: list[float] | None = None

    def drafted(self) -> list[int]:
        """Returns the nodes that are neither root, padding, cut off nor a probe."""
        sources = self.sources
        return [i for i, parent in enumerate(self.parents) if parent >= 0 and not sources[i] & PROBE]

    def add(self, token: int, parent: int, source: int, value: float) -> int:
        """Adds a node below another one; returns its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.sources.append(source)
        self.values.append(value)
        return len(self.tokens) - 1


def read_rows(tree: TokenTree, acceptance: NodeAcceptance | None) -> list[HostRow]:
    """Copies trees to the host. Synchronises, if the host does not know the nodes.

    `acceptance` judges the nodes of one drafter; None if the scores are calibrated.
    """
    facts = tree.host_facts
    if facts is not None and facts.nodes is not None:
        tokens, parents, depths = facts.nodes.tolist()
    else:
        tokens, parents, depths = torch.stack([tree.tokens, tree.parents, tree.depths]).tolist()
    sources = [[0] * tree.width] * tree.batch_size if tree.source is None else tree.source.tolist()
    scores = [None] * tree.batch_size if tree.scores is None else tree.scores.tolist()
    rows: list[HostRow] = []
    for b, each in enumerate(scores):
        if acceptance is None:
            rows.append(HostRow(tokens[b], parents[b], depths[b], sources[b], list(map(exp, each))))
        else:
            odds = None if each is None else log_odds(parents[b], each)
            values = acceptance.path_values(parents[b], depths[b], odds)
            rows.append(HostRow(tokens[b], parents[b], depths[b], sources[b], values, odds))
    return rows


_NEAREST, _FARTHEST = log(1 + exp(-9.0)), 9.0  # -log(q) of log-odds of 9 and about -9, the most that count


def log_odds(parents: Sequence[int], scores: Sequence[float]) -> list[float]:
    """Returns the log-odds of each node after its parent, from log-probabilities of paths, which may be NaN."""
    paths = [score if score > -99.0 else -99.0 for score in scores]
    paths[0] = 0.0
    below = [paths[max(parent, 0)] - path for parent, path in zip(parents, paths, strict=True)]  # -log(q)
    return [-log(exp(min(max(each, _NEAREST), _FARTHEST)) - 1) for each in below]


def scored(tree: TokenTree, rows: Sequence[HostRow]) -> TokenTree:
    """Returns a tree whose scores are the logarithms of the values of its rows."""
    return replace(tree, scores=floats_on([_logarithms(row.values) for row in rows], tree.tokens.device))


def _logarithms(values: Sequence[float]) -> list[float]:
    return [log(max(value, 1e-30)) for value in values]


def kept_tree(
    rows: Sequence[HostRow], kept: Sequence[Sequence[bool]], device: torch.device, *, has_sources: bool
) -> TokenTree:
    """Returns the roots and some nodes of trees; kept: by sequence and node, with every node's parent."""
    some = [[0, *(node for node in range(1, len(row.tokens)) if flags[node])]
            for row, flags in zip(rows, kept, strict=True)]  # fmt: skip
    made: list[TreeRow] = []
    for row, nodes in zip(rows, some, strict=True):
        places = dict(zip(nodes, range(len(nodes)), strict=True)) | {-1: -1}
        made.append(TreeRow([row.tokens[i] for i in nodes], [places[row.parents[i]] for i in nodes]))
    scores = [_logarithms([row.values[i] for i in nodes]) for row, nodes in zip(rows, some, strict=True)]
    tree = TokenTree.from_rows(made, scores=scores, device=device)
    if not has_sources:
        return tree
    padded = [
        [*(row.sources[i] for i in nodes), *[0] * (tree.width - len(nodes))]
        for row, nodes in zip(rows, some, strict=True)
    ]  # fmt: skip
    return replace(tree, source=integers_on(padded, device))


def learn_followed(rows: Sequence[HostRow], acceptance: NodeAcceptance, steps: Sequence[SequenceStep]) -> list[int]:
    """Tells an acceptance model which nodes the generated tokens followed; returns the followed depth of each tree.

    Only children of followed nodes have a label: of others nothing is known after their parent. `rows` are the trees of
    one drafter.
    """
    deepest, labels = [0] * len(steps), list[tuple[float | None, int, bool]]()
    for index, (row, step) in enumerate(zip(rows, steps, strict=True)):
        follows, tokens, ids, depths = {0}, step.tokens, row.tokens, row.depths
        for node, parent in enumerate(row.parents):
            if parent not in follows or depths[node] > len(tokens):
                continue
            depth = depths[node]
            if is_right := ids[node] == tokens[depth - 1]:
                follows.add(node)
            if not row.sources[node] & PROBE:
                labels.append((None if row.odds is None else row.odds[node], depth, is_right))
                deepest[index] = max(deepest[index], depth * is_right)
    if labels:
        acceptance.learn(labels)
    return deepest


class HostMerge:
    """The union of several drafters' trees over the same roots, see `merge_trees`.

    Attributes:
        rows: The trees; values are those of the drafter that is surest.
    """

    def __init__(self, roots: Sequence[int], max_nodes: int) -> None:
        """Starts from the roots; max_nodes: of a tree, root included. Later nodes are left out."""
        self._max_nodes = max_nodes
        self.rows = [HostRow([root], [-1], [0], [0], [1.0]) for root in roots]
        self._children: list[dict[tuple[int, int], int]] = [{} for _ in roots]  # first child by parent and token

    def unite(self, trees: Sequence[HostRow], drafter: int) -> None:
        """Adds the tree of a drafter to each tree."""
        bit = 1 << drafter
        for row, children, tree in zip(self.rows, self._children, trees, strict=True):
            new: dict[tuple[int, int], int] = {}
            places = [0] * len(tree.tokens)  # index in the union; -1 for nodes left out
            row.sources[0] |= bit
            for node in range(1, len(places)):
                token, parent, value = tree.tokens[node], tree.parents[node], tree.values[node]
                parent, probe = places[parent] if parent >= 0 else -1, tree.sources[node] & PROBE
                found = children.get((parent, token))
                if found is not None:
                    row.values[found] = max(row.values[found], value)
                    row.sources[found] = (row.sources[found] | bit) & ~(0 if probe else PROBE)
                elif parent >= 0 and len(row.tokens) < self._max_nodes:
                    found = row.add(token, parent, bit | probe, value)
                    new.setdefault((parent, token), found)
                places[node] = -1 if found is None else found
            children.update(new)

    def extend(self, chain: Continuation) -> None:
        """Adds a chain below a node while there is room."""
        row, node = self.rows[chain.row], chain.node
        for token, score in zip(chain.tokens, chain.scores, strict=True):
            if len(row.tokens) < self._max_nodes:
                node = row.add(token, node, chain.source, exp(score))


_LEAVES, _LEAST_VALUE = 4, 0.1  # most leaves, at most one a sequence; least probability of a leaf


class LookupChain(NamedTuple):
    """A chain that a lookup proposed below a leaf; `drafter` is the index of the lookup."""

    drafter: int
    leaf: Leaf
    tokens: Sequence[int]


def continuations_of(
    rows: Sequence[HostRow], continued: Continue, acceptances: Sequence[NodeAcceptance]
) -> tuple[list[LookupChain], list[Continuation]]:
    """Asks lookups to continue the best leaves of merged trees that they did not propose themselves.

    Returns:
        All answers, which are learned from, and one continuation per leaf: the answer with the most expected tokens.
    """
    leaves = [
        (row.values[node], b, node)
        for b, row in enumerate(rows)
        for node in set(row.drafted()).difference(row.parents)
        if row.values[node] >= _LEAST_VALUE
    ]  # fmt: skip
    chains: list[LookupChain] = []
    continuations: list[Continuation] = []
    for value, b, node in sorted(leaves, key=lambda each: (-each[0], *each[1:]))[: max(_LEAVES, len(rows))]:
        row, leaf = rows[b], Leaf(b, _path(rows[b], node))
        answers = [
            LookupChain(drafter, leaf, tokens)
            for drafter, tokens in continued(leaf)
            if not row.sources[node] >> drafter & 1  # else the lookup has already proposed what follows
        ]
        if answers:
            chains += answers
            judged = [acceptances[each.drafter].chain_values(len(each.tokens)) for each in answers]
            best = max(range(len(answers)), key=lambda i: sum(judged[i]))
            scores, drafter = [log(value * each) for each in judged[best]], answers[best].drafter
            continuations.append(Continuation(b, node, row.depths[node], answers[best].tokens, scores, 1 << drafter))
    return chains, continuations


def learn_chain(acceptance: NodeAcceptance, chain: LookupChain, tokens: Sequence[int]) -> None:
    """Counts which tokens of a chain were generated; tokens: generated for its sequence."""
    above = len(chain.leaf.path)
    if list(tokens[:above]) != list(chain.leaf.path) or len(tokens) <= above:
        return
    labels: list[tuple[None, int, bool]] = []
    for mine, written in zip(chain.tokens, tokens[above:], strict=False):
        labels.append((None, len(labels) + 1, mine == written))
        if mine != written:
            break
    acceptance.learn(labels)


def _path(row: HostRow, node: int) -> list[int]:
    path: list[int] = []
    while node > 0:
        path.append(row.tokens[node])
        node = row.parents[node]
    return path[::-1]
