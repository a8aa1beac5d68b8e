"""Merging several drafters' trees into one: the union of their tries, remembering who proposed what."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from foretoken.core.errors import TreeError
from foretoken.core.token_tree import MAX_NODES, TokenTree, TreeRow

if TYPE_CHECKING:
    from collections.abc import Sequence


def merge_trees(trees: Sequence[TokenTree], *, max_nodes: int = MAX_NODES) -> TokenTree:
    """Unites trees over the same roots; equal tokens under one parent become one node.

    Nodes are kept tree by tree in their own order, so when `max_nodes` cuts, earlier trees keep their nodes. Works on
    plain lists: synchronises with the host.

    Args:
        trees: Trees of the same batch, all one-hot: merging is a choice by token, which sampled nodes do not survive.
        max_nodes: Most nodes a merged tree may have, root included.

    Returns:
        A one-hot tree whose `source` holds bit i where tree i proposed the node; the root has every bit.

    Raises:
        TreeError: When roots differ or a tree carries draft distributions.
    """
    if any(tree.distributions is not None for tree in trees):
        raise TreeError("a tree with sampled nodes cannot be merged without bias. Mark its nodes one-hot first.")
    merged, sources = [], []
    for rows in zip(*(tree.rows() for tree in trees), strict=True):
        row, source = _unite(rows, max_nodes)
        merged.append(row)
        sources.append(source)
    tree = TokenTree.from_rows(merged, device=trees[0].tokens.device)
    padded = [source + [0] * (tree.width - len(source)) for source in sources]
    return replace(tree, source=torch.tensor(padded, dtype=torch.int64, device=tree.tokens.device))


def _unite(rows: Sequence[TreeRow], max_nodes: int) -> tuple[TreeRow, list[int]]:
    """The union of several rows and each node's source bits."""
    root = rows[0].tokens[0]
    if any(row.tokens[0] != root for row in rows):
        raise TreeError(f"trees to merge have different roots: {sorted({row.tokens[0] for row in rows})}.")
    union = Trie(root)
    source = [(1 << len(rows)) - 1]
    for bit, row in enumerate(rows):
        index = {0: 0}
        for node in range(1, len(row.tokens)):
            parent = index.get(row.parents[node])
            if parent is None or (len(union.tokens) >= max_nodes and union.child(parent, row.tokens[node]) is None):
                continue
            index[node] = merged = union.add(parent, row.tokens[node])
            source += [0] * (len(union.tokens) - len(source))
            source[merged] |= 1 << bit
    return union.row(), source


@dataclass(slots=True, init=False)
class Trie:
    """A growing token tree in which siblings hold different tokens."""

    tokens: list[int]
    parents: list[int]
    _index: dict[tuple[int, int], int]

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self._index = [root], [-1], {}

    def child(self, parent: int, token: int) -> int | None:
        """The child of a node that holds a token, or None."""
        return self._index.get((parent, token))

    def add(self, parent: int, token: int) -> int:
        """The child of a node that holds a token, made if needed."""
        node = self._index.get((parent, token))
        if node is None:
            node = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self._index[parent, token] = node
        return node

    def add_path(self, tokens: Sequence[int], max_nodes: int = MAX_NODES) -> None:
        """Adds a path from the root, as far as `max_nodes` allows."""
        node = 0
        for token in tokens:
            if len(self.tokens) >= max_nodes and self.child(node, token) is None:
                return
            node = self.add(node, token)

    def row(self) -> TreeRow:
        """The trie as plain lists."""
        return TreeRow(self.tokens, self.parents)
