"""Expands draft trees level by level, for drafters that look at each node before they choose its children.

Static trees (`TreeExpansion`) and dynamic ones (`foretoken.trees.dynamic`) are expanded by one loop: for each depth of
`levels()`, a drafter evaluates the nodes of `frontier(depth)` and hands their logits to `grow(depth, logits)`. Drafters
whose logits do not depend on the nodes hand over those of all levels at once, `grow_levels(logits)`.

Where trees are pruned (`foretoken.trees.pruning`), nodes that fall short are in no later frontier, and the loop ends
when none is left.

The children of a whole level are chosen in a fixed number of tensor operations; only the noise of sampled requests is
made node by node, see `DraftDraws.keys`.

Letters: B sequences, N nodes of the shape, P nodes of one frontier, C children of theirs, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from foretoken.core.backend import integers_on, reads_are_free
from foretoken.core.token_tree import DraftDistributions, DrawKind, HostFacts, TokenTree
from foretoken.trees.merge import compacted
from foretoken.trees.pruning import normalised_entropy
from foretoken.trees.shape_levels import Level, relations_of, whole_places

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from foretoken.sampling.draft_draws import DraftDraws
    from foretoken.trees.choices import TreeShape


class Frontier(NamedTuple):
    """The nodes of one level whose children are to be chosen.

    Attributes:
        tokens: (B, P) int64.
        origins: (B, P) or (1, P) int64, where the parent of each stands in the frontier of the level above; None at the
            root, and where that has P nodes too and node i descends from node i there.
    """

    tokens: Tensor
    origins: Tensor | None

    def inherited(self, values: Tensor) -> Tensor:
        """What each node takes over from its parent.

        Args:
            values: (B, P', ...), of the nodes of the frontier above.

        Returns:
            (B, P, ...).
        """
        if self.origins is None:
            return values
        if len(self.origins) == 1:
            return values[:, self.origins[0]]
        rows = torch.arange(len(self.origins), device=values.device)
        return values[rows.unsqueeze(1), self.origins]


class Expansion(Protocol):
    """Draft trees under construction: what a drafter that drafts level by level sees of them."""

    @property
    def depth(self) -> int:
        """Number of levels that are expanded; the deepest node may lie as deep as that."""

    def levels(self) -> Iterator[int]:
        """Depths to choose children at, each once `grow` was called for those above.

        All below `depth`; fewer where pruning leaves nothing to expand and the host reads the device freely.
        """

    def frontier(self, depth: int) -> Frontier:
        """The nodes of one depth whose children `grow` chooses; the roots at depth 0.

        Valid once `grow` was called for all depths above.
        """

    def grow(self, depth: int, logits: Tensor) -> None:
        """Chooses the children of a frontier; changes this object.

        Args:
            depth: Of the frontier.
            logits: (B, P, V) float32, the drafter's after each node; or (B, 1, V), which then serves them all.
        """

    def grow_levels(self, logits: Tensor) -> None:
        """Chooses all nodes at once; changes this object.

        Args:
            logits: (B, D, V) float32 with D = `depth`, those of each depth after all nodes of it.
        """

    def finish(self, rows: Sequence[int], room: Sequence[int], roots: Sequence[int]) -> TokenTree:
        """The trees of a whole batch of which only some sequences were drafted for.

        Args:
            rows: Where each of the B sequences stands in the whole batch.
            room: Deepest node allowed in every sequence of the whole batch; 0 or less leaves the root alone.
            roots: Root tokens of the whole batch.
        """


class TreeTensors(NamedTuple):
    """Trees of one shape as kernels read and fill them, all levels of them; what the roots have is there.

    Of dynamic trees the nodes are those that are expanded, see `Draft` in `kernels/interface.h`.

    Attributes:
        parents: (N,) int64, of the shape.
        ranks: (N,) int64, of every node among the candidates after its parent.
        num_candidates: Candidates after a node that have to be known: the largest rank and one.
        tokens: (B, N) int64.
        scores: (B, N) float32.
        kinds: (B, N) int64, of sampled drafts; else None.
        row_of: (B, N) int64, likewise.
        rows: (B, R, V) float32, likewise, of no content: a row for each node that has children, in order, or for each
            level.
        node_parents: (B, N) int64, of dynamic trees; else None.
        node_numbers: (B, N) int64, likewise: which of the candidates each node is.
        candidates: (B, C) int64, likewise: the tokens of all candidates, the root first.
        path_scores: (B, C) float32, likewise.
        candidate_parents: (B, C) int64, likewise, among the candidates.
    """

    parents: Tensor
    ranks: Tensor
    num_candidates: int
    tokens: Tensor
    scores: Tensor
    kinds: Tensor | None
    row_of: Tensor | None
    rows: Tensor | None
    node_parents: Tensor | None = None
    node_numbers: Tensor | None = None
    candidates: Tensor | None = None
    path_scores: Tensor | None = None
    candidate_parents: Tensor | None = None


class TreeExpansion:
    """A draft tree under construction: the same shape for every sequence, filled from the root down.

    Attributes:
        tokens: (B, N) int64; levels above the one that was expanded last are final.
        shape: What is filled.
        draws: How tokens are chosen.
    """

    def __init__(self, shape: TreeShape, roots: Tensor, draws: DraftDraws) -> None:
        """A tree of roots.

        Args:
            shape: What to fill.
            roots: (B,) int64.
            draws: How tokens are chosen.
        """
        self.shape, self.draws = shape, draws
        self._relations = relations_of(shape, roots.device)
        batch = roots.shape[0]
        self.tokens = torch.zeros(batch, shape.num_nodes, dtype=torch.int64, device=roots.device)
        self.tokens.select(1, 0).copy_(roots)
        self._scores = torch.zeros(batch, shape.num_nodes, dtype=torch.float32, device=roots.device)
        self._rows: list[Tensor] = []  # (B, rows of one level, V), of sampled drafts
        if draws.has_sampled:
            self._kinds = torch.zeros_like(self.tokens)
            self._row_of = torch.full_like(self.tokens, -1)
        self._num_tokens = 0
        self._pruning = draws.pruning
        if draws.pruning is not None:
            is_root = torch.arange(shape.num_nodes, device=roots.device) == 0
            self._is_kept, self._goes_on = is_root.repeat(batch, 1), is_root.repeat(batch, 1)
            self._paths = torch.zeros_like(self._scores)  # sums of `DraftDraws.likelihoods`
            self._narrowed: list[tuple[Tensor, Level]] = []  # of each depth, which nodes of the level go on, and these

    @property
    def roots(self) -> Tensor:
        """(B,) int64."""
        return self.tokens[:, 0]

    @property
    def depth(self) -> int:
        """Greatest depth."""
        return self._relations.depths[-1]

    @property
    def num_candidates(self) -> int:
        """Candidates after a node that have to be known: the largest rank and one."""
        return self._relations.num_candidates

    @property
    def widest_level(self) -> int:
        """Most nodes of one depth that have children."""
        return self._relations.widest_level

    def levels(self) -> Iterator[int]:
        """See `Expansion`."""
        for depth in range(self.depth):
            if not self._level(depth).indices:
                return
            yield depth

    def frontier(self, depth: int) -> Frontier:
        """See `Expansion`."""
        level = self._level(depth)
        return Frontier(self.tokens[:, level.nodes], level.origins)

    @property
    def num_fed(self) -> int:
        """Nodes below the root that a kernel which drafts the whole tree feeds at most: all whose rows may be kept."""
        return self.shape.num_nodes - 1

    def fed_nodes(self) -> tuple[Tensor, Tensor]:
        """What whoever feeds every level but the last has fed below the roots: W nodes of a tree in order.

        Returns:
            (B, W) int64 tokens, and (1, W) int64 parents among these, -1 below the root.
        """
        nodes = slice(1, bisect_right(self._relations.depths, self.depth - 1))
        return self.tokens[:, nodes], self._relations.places[:1, nodes] - 1

    def tensors(self, vocab_size: int, *, is_shared: bool = False) -> TreeTensors:
        """What a kernel fills in the place of `grow`, level by level or all at once.

        Args:
            vocab_size: V, one past the greatest token that it may choose.
            is_shared: Whether one row of logits serves all nodes of a level.
        """
        relations, draws = self._relations, self.draws
        rows = None
        if draws.has_sampled:
            num_rows = relations.depths[-1] if is_shared else relations.num_inner
            rows = self.tokens.new_empty((len(self.tokens), num_rows, vocab_size), dtype=torch.float32)
            self._rows = [rows]
        self._num_tokens = vocab_size
        return TreeTensors(
            parents=relations.places[0],
            ranks=relations.places[2],
            num_candidates=relations.num_candidates,
            tokens=self.tokens,
            scores=self._scores,
            kinds=self._kinds if draws.has_sampled else None,
            row_of=self._row_of if draws.has_sampled else None,
            rows=rows,
        )

    def grow(self, depth: int, logits: Tensor) -> None:
        """See `Expansion`.

        Among equal keys, which of them are taken may depend on how many candidates the level's largest rank asks for.
        """
        level = self._level(depth)
        self._num_tokens = max(self._num_tokens, logits.shape[2])
        log_probs, keys = self.draws.keys(logits, level.indices, depth)
        best = keys.topk(level.num_candidates, dim=2)
        if self.draws.has_sampled:
            # Draws are taken in order: one that follows a draw left out, as a shape with gaps in its ranks would have
            # it, has a distribution that nobody states.
            candidate = torch.where(self.draws.is_sampled.unsqueeze(1), level.order, level.rank)
        else:
            candidate = level.rank.expand(logits.shape[0], -1)
        chosen = _entries(best.indices, level.place, candidate)
        children = level.children
        self.tokens[:, children] = chosen
        gains = _entries(log_probs, level.place, chosen)
        self._scores[:, children] = self._scores[:, level.parents] + gains
        if self._pruning is not None:
            self._prune(level, self.draws.likelihoods(log_probs, keys), chosen)
        if self.draws.has_sampled:
            # A token without a chance in the stated distribution is a choice, not a draw: past the support, where a
            # probability underflows, and where the drafter's logits are no numbers.
            probs = log_probs.exp()
            is_drawn = self.draws.is_sampled.unsqueeze(1) & (_entries(probs, level.place, chosen) > 0)
            row = sum(rows.shape[1] for rows in self._rows) + (level.place if log_probs.shape[1] > 1 else 0)
            self._kinds[:, children] = torch.where(is_drawn, level.kind, DrawKind.ONE_HOT.value)
            self._row_of[:, children] = torch.where(is_drawn, row, -1)
            self._rows.append(probs)
            self._keep_drawn(level, is_drawn)

    def grow_levels(self, logits: Tensor) -> None:
        """See `Expansion`."""
        for depth in self.levels():
            self.grow(depth, logits[:, depth : depth + 1])

    def finish(self, rows: Sequence[int], room: Sequence[int], roots: Sequence[int]) -> TokenTree:
        """See `Expansion`; deeper nodes than a sequence has room for are cut off. With pruning, synchronises once."""
        tree = self._unpruned(rows, room, roots)
        if self._pruning is None:
            return tree
        kept = torch.zeros_like(tree.tokens, dtype=torch.bool)
        kept[integers_on(rows, kept.device)] = self._is_kept
        kept &= tree.parents >= 0  # neither padding nor what was cut off
        kept[:, 0] = True
        return compacted(tree, kept).narrowed()

    def _unpruned(self, rows: Sequence[int], room: Sequence[int], roots: Sequence[int]) -> TokenTree:
        """The trees with all nodes that there is room for, whatever was pruned."""
        total, width, device = len(room), self.shape.num_nodes, self.tokens.device
        most = self.depth
        deepest = [min(max(depth, 0), most) for depth in room]
        bound = max(self._num_tokens, max(roots) + 1)
        if len(rows) == total and min(deepest) == most:
            counts = [self.shape.num_nodes] * total
            return self._whole(HostFacts(roots=roots, depths=deepest, num_nodes=counts, num_tokens=bound))
        index = torch.tensor(list(rows), device=device)
        depths = self._relations.places[1].expand(total, -1)
        is_kept = depths <= torch.tensor(deepest, device=device).unsqueeze(1)

        def spread(part: Tensor, empty: float) -> Tensor:
            whole = torch.full((total, width), empty, dtype=part.dtype, device=device)
            whole[index] = part
            return torch.where(is_kept, whole, empty)

        tokens = spread(self.tokens, 0)
        tokens[:, 0] = torch.tensor(list(roots), device=device)
        distributions = None
        if self._rows:
            stated = self._stated()
            probs = torch.zeros(total, *stated.shape[1:], dtype=stated.dtype, device=device)
            probs[index] = stated
            distributions = DraftDistributions(
                kinds=spread(self._kinds, 0), rows=probs, row_of=spread(self._row_of, -1),
                max_siblings=self._relations.max_siblings,
            )  # fmt: skip
        # The shape is a tree, and what is cut off are whole levels.
        counts = [bisect_right(self._relations.depths, depth) for depth in deepest]
        return TokenTree(
            tokens=tokens,
            parents=torch.where(is_kept, self._relations.places[0], -1),
            depths=torch.where(is_kept, depths, 0),
            num_nodes=is_kept.sum(1),
            max_depth=self.depth,
            scores=spread(self._scores, 0.0),
            distributions=distributions,
            host_facts=HostFacts(roots=roots, depths=deepest, num_nodes=counts, num_tokens=bound),
        )

    def _level(self, depth: int) -> Level:
        """The nodes of one depth whose children are chosen; those above are final."""
        level = self._relations.levels[depth]
        if self._pruning is None or not reads_are_free(self.tokens.device):
            return level
        if depth == len(self._narrowed):
            places = self._goes_on[:, level.nodes].any(0).nonzero()[:, 0]
            above = self._narrowed[-1][0] if depth else None
            self._narrowed.append((places, level.narrowed(places, above)))
        return self._narrowed[depth][1]

    def _prune(self, level: Level, likelihoods: Tensor, chosen: Tensor) -> None:
        """Tells which children of a level stay, as long as they are chosen, and which of them go on.

        Args:
            level: That was expanded.
            likelihoods: (B, P, V) or (B, 1, V), see `DraftDraws.likelihoods`.
            chosen: (B, C) int64, the children's tokens.
        """
        pruning, children = self._pruning, level.children
        assert pruning is not None, "asked before"
        entropies = None
        if pruning.entropy_weighted is not None:
            by_parent = normalised_entropy(likelihoods)
            entropies = by_parent if by_parent.shape[1] == 1 else by_parent[:, level.place]
        own = _entries(likelihoods, level.place, chosen)
        self._paths[:, children] = self._paths[:, level.parents] + own
        passes = pruning.token_passes(own, entropies) & pruning.path_passes(self._paths[:, children])
        self._is_kept[:, children] = self._goes_on[:, children] = self._goes_on[:, level.parents] & passes

    def _keep_drawn(self, level: Level, is_drawn: Tensor) -> None:
        """Keeps the draws of a level, (B, C) bool, whatever their probability: see `foretoken.trees.pruning`."""
        if self._pruning is not None:
            self._is_kept[:, level.children] |= is_drawn & self._goes_on[:, level.parents]

    def _stated(self) -> Tensor:
        """(B, R, V), the distributions of all levels."""
        return self._rows[0] if len(self._rows) == 1 else torch.cat(self._rows, dim=1)

    def _whole(self, facts: HostFacts) -> TokenTree:
        """The trees as they are, where every sequence has one."""
        parents, depths, num_nodes = whole_places(self._relations, len(self.tokens))
        distributions = None
        if self._rows:
            distributions = DraftDistributions(
                kinds=self._kinds, rows=self._stated(), row_of=self._row_of,
                max_siblings=self._relations.max_siblings,
            )  # fmt: skip
        return TokenTree(
            tokens=self.tokens,
            parents=parents,
            depths=depths,
            num_nodes=num_nodes,
            max_depth=self.depth,
            scores=self._scores,
            distributions=distributions,
            host_facts=facts,
        )


def _entries(table: Tensor, place: Tensor, column: Tensor) -> Tensor:
    """One entry a child out of the row of its parent.

    Args:
        table: (B, P, W), a row a parent; or (B, 1, W), one row for all of them.
        place: (C,) int64, the parent.
        column: (B, C) int64, below W.

    Returns:
        (B, C).
    """
    if table.shape[1] == 1:
        return table[:, 0].gather(1, column)
    return table.flatten(1).gather(1, place * table.shape[2] + column)
