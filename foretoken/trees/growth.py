"""Growing a tree level by level, for drafters that look at each node before they choose its children.

Letters: B sequences, N nodes of the shape, P nodes of one level, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.core.token_tree import DraftLaw, DrawKind, TokenTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.sampling.draft_draws import DraftDraws
    from foretoken.trees.choices import TreeShape


class TreeGrowth:
    """One proposal in the making: the same shape for every sequence, filled from the root down.

    Attributes:
        tokens: (B, N) int64; levels above the one that was expanded last are final.
        shape: What is filled.
    """

    def __init__(self, shape: TreeShape, roots: Tensor, draws: DraftDraws) -> None:
        """A tree of roots.

        Args:
            shape: What to fill.
            roots: (B,) int64.
            draws: How tokens are chosen.
        """
        self.shape, self._draws = shape, draws
        self._parents, self._depths, self._ranks = shape.parents, shape.depths, shape.ranks
        self._children: list[list[int]] = [[] for _ in self._parents]  # in order of rank
        self._mask = torch.eye(shape.num_nodes, dtype=torch.bool, device=roots.device)
        for node, parent in enumerate(self._parents):
            if node:
                self._children[parent].append(node)
                self._mask[node] |= self._mask[parent]
        batch = roots.shape[0]
        self.tokens = torch.zeros(batch, shape.num_nodes, dtype=torch.int64, device=roots.device)
        self.tokens[:, 0] = roots
        self._scores = torch.zeros(batch, shape.num_nodes, device=roots.device)
        self._kinds = torch.zeros_like(self.tokens)
        self._row_of = torch.full_like(self.tokens, -1)
        self._rows: list[Tensor] = []

    def level(self, depth: int) -> list[int]:
        """Nodes of one depth, in order."""
        return [node for node, d in enumerate(self._depths) if d == depth]

    def parents_of(self, nodes: Sequence[int]) -> list[int]:
        """The parent of each node."""
        return [self._parents[node] for node in nodes]

    def visible(self, nodes: Sequence[int]) -> Tensor:
        """(B, P, W) bool, which of the W drafted nodes up to the last of `nodes` each of them sees; no root."""
        mask = self._mask[list(nodes), 1 : nodes[-1] + 1]
        return mask.expand(self.tokens.shape[0], -1, -1)

    def expand(self, node: int, logits: Tensor) -> None:
        """Chooses the children of a node; changes this object.

        Args:
            node: Whose children.
            logits: (B, V) float32, the drafter's after the node.
        """
        children = self._children[node]
        if not children:
            return
        ranks = torch.tensor([self._ranks[child] for child in children], device=logits.device)
        # Draws are taken in order: one that follows a draw left out, as a shape with gaps in its ranks would have it,
        # has a law that nobody states.
        in_order = torch.arange(len(children), device=logits.device)
        places = torch.where(self._draws.is_sampled.unsqueeze(1), in_order, ranks)
        log_probs, keys = self._draws.keys(logits, node, self._depths[node])
        best = keys.topk(int(ranks.max()) + 1, dim=1)
        chosen, chosen_keys = best.indices.gather(1, places), best.values.gather(1, places)
        self.tokens[:, children] = chosen
        self._scores[:, children] = self._scores[:, node : node + 1] + log_probs.gather(1, chosen)
        if self._draws.has_sampled:
            kind = DrawKind.INDEPENDENT if len(children) == 1 else DrawKind.WITHOUT_REPLACEMENT
            # Past the support of the draft distribution any token is a choice, not a draw.
            is_drawn = self._draws.is_sampled.unsqueeze(1) & (chosen_keys > float("-inf"))
            self._kinds[:, children] = torch.where(is_drawn, kind.value, DrawKind.ONE_HOT.value)
            self._row_of[:, children] = torch.where(is_drawn, len(self._rows), -1)
            self._rows.append(log_probs.exp())

    def finish(self, rows: Sequence[int], room: Sequence[int], roots: Sequence[int]) -> TokenTree:
        """The trees of a whole batch of which only some sequences were drafted for.

        Args:
            rows: Where each of the B sequences stands in the whole batch.
            room: Deepest node allowed in every sequence of the whole batch; 0 or less leaves the root alone.
            roots: Root tokens of the whole batch.
        """
        total, width, device = len(room), self.shape.num_nodes, self.tokens.device
        index = torch.tensor(list(rows), device=device)
        limit = torch.tensor([max(depth, 0) for depth in room], device=device).unsqueeze(1)
        depths = torch.tensor(self._depths, device=device).expand(total, -1)
        is_kept = depths <= limit

        def spread(part: Tensor, empty: float) -> Tensor:
            whole = torch.full((total, width), empty, dtype=part.dtype, device=device)
            whole[index] = part
            return torch.where(is_kept, whole, empty)

        tokens = spread(self.tokens, 0)
        tokens[:, 0] = torch.tensor(list(roots), device=device)
        law = None
        if self._rows:
            probs = torch.zeros(total, len(self._rows), self._rows[0].shape[1], device=device)
            probs[index] = torch.stack(self._rows, dim=1)
            siblings = max(map(len, self._children))
            law = DraftLaw(
                kinds=spread(self._kinds, 0), rows=probs, row_of=spread(self._row_of, -1), max_siblings=siblings
            )
        return TokenTree(
            tokens=tokens,
            parents=torch.where(is_kept, torch.tensor(self._parents, device=device), -1),
            depths=torch.where(is_kept, depths, 0),
            num_nodes=is_kept.sum(1),
            max_depth=self.shape.depth,
            scores=spread(self._scores, 0.0),
            law=law,
        )
