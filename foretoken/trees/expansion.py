"""Expands draft trees level by level, for drafters that look at each node before they choose its children.

One loop expands static trees (`TreeExpansion`) and dynamic trees (`foretoken.trees.dynamic`): for each depth of
`levels()`, a drafter evaluates the nodes of `frontier(depth)` and passes their logits to `grow(depth, logits)`. A
drafter with logits that do not depend on the nodes passes the logits of all levels at once to `grow_levels(logits)`.

Pruned nodes (`foretoken.trees.merge`), and nodes that a stop rule ends (`foretoken.trees.stopping`), are in no later
frontier. The loop ends when no node is left; where the host does not read the device freely, after all levels.

The children of a whole level are chosen in a fixed number of tensor operations; only the noise of sampled requests is
made node by node, see `DraftDraws.keys`.

Letters: B sequences, N nodes of the shape, P nodes of one frontier, C children of theirs, V vocabulary.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from foretoken.core.backend import integers_on, reads_are_free
from foretoken.core.token_tree import DraftDistributions, DrawKind, HostFacts, TokenTree
from foretoken.sampling.draft_draws import DraftDraws, stated_probs
from foretoken.trees.choices import Level, TreeShape, relations_of, whole_places
from foretoken.trees.merge import compacted, normalised_entropy


class Frontier(NamedTuple):
    """The nodes of one level that get children next.

    Attributes:
        tokens: (B, P) int64.
        origins: (B, P) or (1, P) int64, index of each node's parent in the frontier above. None at the root, and if
            node i descends from node i of a frontier above that also has P nodes.
    """

    tokens: Tensor
    origins: Tensor | None

    def inherited(self, values: Tensor) -> Tensor:
        """Returns (B, P, ...), each node's value from its parent; `values` are (B, P', ...), of the frontier above."""
        if self.origins is None:
            return values
        if len(self.origins) == 1:
            return values[:, self.origins[0]]
        rows = torch.arange(len(self.origins), device=values.device)
        return values[rows.unsqueeze(1), self.origins]


class Expansion(Protocol):
    """Draft trees under construction, as a drafter that drafts level by level sees them."""

    @property
    def depth(self) -> int:
        """Number of levels that are expanded; upper bound of the depth of a node."""

    def levels(self) -> Iterator[int]:
        """Yields the depths to choose children at; `grow` must be called for each depth before the next.

        Yields all depths below `depth`, or fewer if pruning leaves nothing to expand and the host reads the device
        freely.
        """

    def frontier(self, depth: int) -> Frontier:
        """Returns the nodes of one depth that `grow` chooses children for; the roots at depth 0.

        Valid after `grow` was called for all depths above.
        """

    def grow(self, depth: int, logits: Tensor) -> None:
        """Chooses the children of a frontier in place; logits: (B, P, V) float32 after nodes, (B, 1, V) for all."""

    def grow_levels(self, logits: Tensor) -> None:
        """Chooses all nodes at once in place; row d of (B, D, V) float32 logits serves all nodes of depth d."""

    def finish(self, rows: Sequence[int], room: Sequence[int], roots: Sequence[int]) -> TokenTree:
        """Returns the trees of a whole batch in which only some sequences were drafted for.

        Args:
            rows: Index of each of the B sequences in the whole batch.
            room: Deepest node allowed in every sequence of the whole batch; 0 or less for the root alone.
            roots: Root tokens of the whole batch.
        """


class TreeTensors(NamedTuple):
    """Tensors of trees of one shape that kernels read and fill, all levels at once; the roots are filled.

    For dynamic trees the nodes are the expanded nodes, see `Draft` in `kernels/interface.h`.

    Attributes:
        parents: (N,) int64, of the shape.
        ranks: (N,) int64, of every node among the candidates after its parent.
        num_candidates: Candidates needed after a node: the largest rank plus 1.
        tokens: (B, N) int64.
        scores: (B, N) float32.
        kinds: (B, N) int64, for sampled drafts; else None.
        row_of: (B, N) int64, for sampled drafts; else None.
        rows: (B, R, V) float32, uninitialised, for sampled drafts; else None. One row per node with children, in order,
            or one per level.
        node_parents: (B, N) int64, for dynamic trees; else None, as are the fields below.
        node_numbers: (B, N) int64, index of each node among the candidates.
        candidates: (B, C) int64, tokens of all candidates, the root first.
        path_scores: (B, C) float32.
        candidate_parents: (B, C) int64, among the candidates.
        lengths: (B,) int64, of chains that end early; else None.
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
    lengths: Tensor | None = None


class TreeExpansion:
    """A draft tree under construction: the same shape for every sequence, filled from the root down.

    `tokens`: (B, N) int64; levels above the one that was expanded last are final.
    """

    def __init__(self, shape: TreeShape, roots: Tensor, draws: DraftDraws) -> None:
        self.shape, self.draws = shape, draws
        self._relations = relations_of(shape, roots.device)
        self.depth = self._relations.depths[-1]
        batch, num_nodes = roots.shape[0], len(self._relations.depths)
        self.tokens = torch.zeros(batch, num_nodes, dtype=torch.int64, device=roots.device)
        self.tokens.select(1, 0).copy_(roots)
        self._scores = torch.zeros(batch, num_nodes, dtype=torch.float32, device=roots.device)
        self._rows: list[Tensor] = []  # (B, rows of one level, V), of sampled drafts
        if draws.has_sampled:
            self._kinds = torch.zeros_like(self.tokens)
            self._row_of = torch.full_like(self.tokens, -1)
        self._num_tokens = 0
        self._lengths: Tensor | None = None  # (B,) int64, of chains that end early
        if draws.floors is not None:
            assert shape.is_comb, "floors are those of one path"
            self._lengths = torch.full_like(roots, self.depth)
            self._path = torch.zeros_like(self._scores[:, 0])  # log-probability of the estimate
        self._stop = draws.stop
        self._pruning = draws.pruning if draws.stop is None else draws.stop.thresholds
        if self._pruning is not None:
            is_root = torch.arange(num_nodes, device=roots.device) == 0
            self._is_kept, self._goes_on = is_root.repeat(batch, 1), is_root.repeat(batch, 1)
            self._paths = torch.zeros_like(self._scores)  # sums of `DraftDraws.likelihoods`, or of a rule's estimates
            self._narrowed: list[tuple[Tensor, Level]] = []  # by depth: indices of expanded nodes, their level

    @property
    def roots(self) -> Tensor:
        """(B,) int64."""
        return self.tokens[:, 0]

    @property
    def num_candidates(self) -> int:
        """Candidates needed after a node: the largest rank plus 1."""
        return self._relations.num_candidates

    @property
    def widest_level(self) -> int:
        """Most nodes of one depth that have children."""
        return self._relations.widest_level

    def levels(self) -> Iterator[int]:
        """See `Expansion`."""
        for depth in range(self.depth):
            if not self._level(depth).indices or (self._lengths is not None and depth >= self._num_levels):
                return
            yield depth

    @property
    def _num_levels(self) -> int:
        """Levels that were chosen, or are to be; synchronises for chains that end early."""
        return self.depth if self._lengths is None else int(self._lengths.max())

    def frontier(self, depth: int) -> Frontier:
        """See `Expansion`."""
        level = self._level(depth)
        return Frontier(self.tokens[:, level.nodes], level.origins)

    @property
    def num_fed(self) -> int:
        """Most nodes below the root that a kernel feeds if it drafts the whole tree: all that may keep KV rows."""
        return len(self._relations.depths) - 1

    def fed_nodes(self) -> tuple[Tensor, Tensor]:
        """Returns the nodes that a whole draft feeds: below the roots, of every level but the last.

        They are (B, W) int64 tokens, and (1, W) int64 parents among these tokens, -1 below the root.
        """
        nodes = slice(1, bisect_right(self._relations.depths, self._num_levels - 1))
        return self.tokens[:, nodes], self._relations.places[:1, nodes] - 1

    def tensors(self, vocab_size: int, *, is_shared: bool = False) -> TreeTensors:
        """Returns tensors that a kernel fills instead of `grow`; `is_shared`: one row of logits serves a level."""
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
            lengths=self._lengths,
        )

    def grow(self, depth: int, logits: Tensor) -> None:
        """See `Expansion`. The choice among equal keys may depend on the level's largest rank."""
        level = self._level(depth)
        self._num_tokens = max(self._num_tokens, logits.shape[2])
        log_probs, keys = self.draws.keys(logits, level.indices, depth)
        best = keys.topk(level.num_candidates, dim=2).indices
        if self.draws.has_sampled:
            # Draws are taken in order, without the gaps in a shape's ranks: a draw after a skipped draw has a
            # distribution that no row holds.
            candidate = torch.where(self.draws.is_sampled.unsqueeze(1), level.order, level.rank)
        else:
            candidate = level.rank.expand(logits.shape[0], -1)
        chosen = _entries(best, level.place, candidate)
        children = level.children
        self.tokens[:, children] = chosen
        gains = _entries(log_probs, level.place, chosen)
        self._scores[:, children] = self._scores[:, level.parents] + gains
        if self._lengths is not None and self.draws.floors is not None:
            floors, goes_on = self.draws.floors, self._lengths > depth
            self._path += floors.log_estimates(gains[:, 0], depth + 1)
            ends = goes_on & ~(self._path >= floors.floors[depth])
            self._lengths[ends] = depth + 1
        if self._pruning is not None:
            self._prune(level, self.draws.likelihoods(log_probs, keys), chosen, depth)
        if self.draws.has_sampled:
            # A token with probability 0 is a choice, not a draw. That happens past the support, where a probability
            # underflows, and where logits are NaN.
            probs = stated_probs(log_probs)
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
        """See `Expansion`; cuts off nodes deeper than a sequence has room for. With pruning, synchronises once."""
        if self._lengths is not None:
            return self._shortened(rows, room, roots)
        tree = self._unpruned(rows, room, roots)
        if self._pruning is None:
            return tree
        kept = torch.zeros_like(tree.tokens, dtype=torch.bool)
        kept[integers_on(rows, kept.device)] = self._is_kept
        kept &= tree.parents >= 0  # neither padding nor cut off
        kept[:, 0] = True
        return compacted(tree, kept).narrowed()

    def _shortened(self, rows: Sequence[int], room: Sequence[int], roots: Sequence[int]) -> TokenTree:
        assert self._lengths is not None, "asked before"
        within = list(room)
        for row, length in zip(rows, self._lengths.tolist(), strict=True):
            within[row] = min(within[row], length)
        depth = max(within[row] for row in rows)
        made = TreeExpansion(self.shape.truncated(depth), self.roots, replace(self.draws, floors=None))
        num_nodes = made.shape.num_nodes
        made.tokens, made._scores = self.tokens[:, :num_nodes], self._scores[:, :num_nodes]
        made._num_tokens = self._num_tokens
        if self.draws.has_sampled:
            made._kinds, made._row_of = self._kinds[:, :num_nodes], self._row_of[:, :num_nodes]
            made._rows = [torch.cat(self._rows, dim=1)[:, :depth]]
        return made._unpruned(rows, within, roots)

    def _unpruned(self, rows: Sequence[int], room: Sequence[int], roots: Sequence[int]) -> TokenTree:
        total, device, places = len(room), self.tokens.device, self._relations.places
        deepest: list[int] = []
        num_nodes: list[int] = []
        for depth in room:
            deepest.append(min(max(depth, 0), self.depth))
            num_nodes.append(bisect_right(self._relations.depths, deepest[-1]))
        # The shape is a tree, and whole levels are cut off.
        num_tokens = max(self._num_tokens, max(roots) + 1)
        facts = HostFacts(roots=roots, depths=deepest, num_nodes=num_nodes, num_tokens=num_tokens)
        whole = self._whole(facts)
        if len(rows) == total and min(deepest) == self.depth:
            return whole
        index = torch.tensor(list(rows), device=device)
        is_kept = places[1] <= torch.tensor(deepest, device=device).unsqueeze(1)

        def spread(part: Tensor, empty: int) -> Tensor:
            among = torch.full(is_kept.shape, empty, dtype=part.dtype, device=device)
            among[index] = part
            return torch.where(is_kept, among, empty)

        tree = whole.mapped(spread)
        tree.tokens[:, 0] = torch.tensor(list(roots), device=device)
        drafts = tree.distributions
        if drafts is not None:
            probs = torch.zeros(total, *drafts.rows.shape[1:], dtype=drafts.rows.dtype, device=device)
            probs[index] = drafts.rows
            drafts = replace(drafts, rows=probs)
        return replace(tree, num_nodes=is_kept.sum(1), distributions=drafts, host_facts=facts)

    def _level(self, depth: int) -> Level:
        """Returns the nodes of one depth that get children next; levels above are final."""
        level = self._relations.levels[depth]
        if self._pruning is None or not reads_are_free(self.tokens.device):
            return level
        if depth == len(self._narrowed):
            places = self._goes_on[:, level.nodes].any(0).nonzero()[:, 0]
            above, level_above = self._narrowed[-1] if depth else (None, None)
            is_above_whole = depth == 0 or level_above is self._relations.levels[depth - 1]
            is_whole = is_above_whole and len(places) == len(level.indices)
            self._narrowed.append((places, level if is_whole else level.narrowed(places, above)))
        return self._narrowed[depth][1]

    def _prune(self, level: Level, likelihoods: Tensor, chosen: Tensor, depth: int) -> None:
        """Marks which children of a level stay if they are chosen (not drawn), and which of them are expanded.

        likelihoods: (B, P, V) or (B, 1, V), see `DraftDraws.likelihoods`; chosen: (B, C) int64, the children's tokens.
        """
        pruning, children = self._pruning, level.children
        assert pruning is not None, "asked before"
        entropies = None
        if pruning.entropy_weighted is not None:
            by_parent = normalised_entropy(likelihoods)
            entropies = by_parent if by_parent.shape[1] == 1 else by_parent[:, level.place]
        own = _entries(likelihoods, level.place, chosen)
        if self._stop is not None:
            own = self._stop.log_estimates(likelihoods, level.place, own, depth)
        self._paths[:, children] = self._paths[:, level.parents] + own
        passes = pruning.token_passes(own, entropies) & pruning.path_passes(self._paths[:, children])
        is_grown = self._goes_on[:, level.parents]
        self._goes_on[:, children] = is_grown & passes
        # The token that ends a draft by a stop rule is verified.
        self._is_kept[:, children] = is_grown if self._stop is not None else is_grown & passes

    def _keep_drawn(self, level: Level, is_drawn: Tensor) -> None:
        """Keeps drawn nodes at any probability, see `Pruning`; is_drawn: (B, C) bool."""
        if self._pruning is not None:
            self._is_kept[:, level.children] |= is_drawn & self._goes_on[:, level.parents]

    def _whole(self, facts: HostFacts) -> TokenTree:
        parents, depths, num_nodes = whole_places(self._relations, len(self.tokens))
        distributions = None
        if self._rows:
            distributions = DraftDistributions(
                kinds=self._kinds,
                rows=self._rows[0] if len(self._rows) == 1 else torch.cat(self._rows, dim=1),
                row_of=self._row_of,
                max_siblings=self._relations.max_siblings,
            )
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
    """Returns (B, C), one entry per child from its parent's row of `table`, (B, P, W) or (B, 1, W).

    place: (C,) int64, the parents; column: (B, C) int64, below W.
    """
    if table.shape[1] == 1:
        return table[:, 0].gather(1, column)
    return table.flatten(1).gather(1, place * table.shape[2] + column)
