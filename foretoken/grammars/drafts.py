"""Drafts under a grammar: forbidden nodes are removed before the target sees them, forced tokens are drafted.

The output does not change: tokens that a grammar forbids have probability 0, and forced tokens are ordinary drafts.
Tokens that were drawn from a draft distribution stay, because removing them would bias the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from foretoken.core.token_tree import MAX_NODES, PROBE, TokenTree, TreeRow
from foretoken.trees.merge import Continuation, prune, with_continuations

if TYPE_CHECKING:
    from foretoken.sampling.node_scores import GrammarState

FORCED = "grammar"  # drafter of forced tokens in records
_MOST_FORCED = 16  # nodes a tree; a choice: further ones wait for the next pass


class GrammarBounds(NamedTuple):
    """Bounds on the draft of one sequence with a grammar.

    Attributes:
        state: After the root.
        max_depth: Deepest node that the request still needs.
        max_nodes: Most nodes that the cache has room for, root included.
    """

    state: GrammarState
    max_depth: int
    max_nodes: int


class Constrained(NamedTuple):
    """Trees within their grammars, and the number of nodes that only the grammar proposed."""

    tree: TokenTree
    num_forced: int


def constrained_tree(tree: TokenTree, bounds: Sequence[GrammarBounds | None], *, source: int) -> Constrained:
    """Removes forbidden nodes and adds forced ones; the tree itself if nothing changes. Synchronises with the host.

    `bounds` are None for sequences without a grammar. `source` is that of forced nodes, see `TokenTree`.
    """
    rows = tree.rows()
    probes = [[False] * len(row.tokens) for row in rows]
    if tree.source is not None:
        probes = ((tree.source & PROBE) != 0).tolist()
    scores = None if tree.scores is None else tree.scores.tolist()
    continuations: list[Continuation] = []
    kept = [[True] * tree.width for _ in rows]
    for index, (row, bound) in enumerate(zip(rows, bounds, strict=True)):
        if bound is None:
            continue
        states = _states(bound.state, row, probes[index])
        for node in range(len(row.tokens)):
            kept[index][node] = probes[index][node] or states[node] is not None
        continuations += _forced(index, row, states, bound, source, None if scores is None else scores[index])
    if not continuations and all(map(all, kept)):
        return Constrained(tree, 0)
    marked = replace(
        tree,
        source=torch.ones_like(tree.tokens) if tree.source is None else tree.source,
        scores=torch.zeros_like(tree.tokens, dtype=torch.float32) if tree.scores is None else tree.scores,
    )
    if continuations:
        marked = with_continuations(marked, continuations, max_nodes=MAX_NODES)
    stays = torch.ones_like(marked.tokens, dtype=torch.bool)
    stays[:, : tree.width] = torch.tensor(kept, device=stays.device)
    return Constrained(prune(marked, stays).narrowed(), sum(len(continuation.tokens) for continuation in continuations))


def _states(root: GrammarState, row: TreeRow, probes: Sequence[bool]) -> list[GrammarState | None]:
    states: list[GrammarState | None] = [root]
    for node in range(1, len(row.tokens)):
        above = states[row.parents[node]]
        states.append(None if above is None or probes[node] else above.after(row.tokens[node]))
    return states


def _forced(
    index: int,
    row: TreeRow,
    states: Sequence[GrammarState | None],
    bound: GrammarBounds,
    source: int,
    scores: Sequence[float] | None,
) -> list[Continuation]:
    children = set(zip(row.parents, row.tokens, strict=True))
    depths = [0] * len(row.tokens)
    room = min(_MOST_FORCED, bound.max_nodes - len(row.tokens))
    continuations = []
    for node, state in enumerate(states):
        depths[node] = 0 if node == 0 else depths[row.parents[node]] + 1
        longest = min(room, bound.max_depth - depths[node])
        chain = [] if state is None or longest <= 0 else state.forced[:longest]
        if not chain or (node, chain[0]) in children:
            continue
        room -= len(chain)
        score = 0.0 if scores is None else scores[node]
        continuations.append(Continuation(index, node, depths[node], chain, [score] * len(chain), source))
    return continuations
