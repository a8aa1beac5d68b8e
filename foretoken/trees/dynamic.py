"""Dynamic draft trees: expanded along the most probable paths, and cut to their best nodes.

Expansion: at each level the `top_k` best nodes get `top_k` candidates each. The score of a path is the sum of its draft
log-probabilities. Reranking: the best `max_nodes` - 1 candidates of all levels become the tree. A child never scores
above its parent. Among equals the shallower and earlier candidate comes first. The best candidates are thus connected.

The parameters of other programs, for trees of N nodes (root included) and D levels:

=====================  ==========================  ====================  =========
here                   EAGLE's code                SGLang                usual
=====================  ==========================  ====================  =========
`max_nodes` (N)        `total_token` = N           `num_draft_tokens` N  60
`depth` (D)            `depth` = D - 1             `num_steps` = D       6 to 8
`top_k`                `top_k`                     `eagle_topk`          10
=====================  ==========================  ====================  =========

Candidates are chosen by score, not drawn, so no node has a draft distribution. This is lossless for any choice. A
request without a seed draws the target's own token after each node, and continues where a child holds that token. Its
candidates are the most probable tokens of its warped distribution; EAGLE uses the distribution of temperature 1. The
noise of a coupled request is known. Its candidates are scored by the log-probability that they are the target's choice
given that noise, by the draft distribution: `log_softmax` of log-probabilities plus noise.

Drafters that know all levels at once get the most probable of all paths through their candidates (`DraftLattice`), not
only paths that begin with the `top_k` best of each level.

Pruned nodes (`foretoken.trees.merge`) count as impossible, by the distribution of their scores. They are never
expanded. GPUs still expand `top_k` nodes per level, because only the device knows how many are left; `finish`
synchronises once to cut the pruned nodes off.

Source: Li et al. 2024 (arXiv 2406.16858), section 4.

Letters: B sequences, P nodes of one frontier, K candidates of each, C = P * K, T candidates of all levels and the root,
N nodes of the tree, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from foretoken.core.backend import integers_on, reads_are_free
from foretoken.core.token_tree import HostFacts, TokenTree
from foretoken.trees.choices import TreeShape
from foretoken.trees.expansion import Frontier, TreeExpansion, TreeTensors
from foretoken.trees.merge import normalised_entropy

if TYPE_CHECKING:
    from foretoken.sampling.draft_draws import DraftDraws


class LatticeLevel(NamedTuple):
    """The most probable nodes of one depth, best first.

    Attributes:
        tokens: (B, P) int64.
        scores: (B, P) float32, log-probabilities of paths.
        parents: (B, P) int64, indices among the nodes of the depth above; 0 at the first depth.
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftLattice:
    """Candidates of every depth below the roots, for drafters that know all depths at once.

    The probability of a path is a product, so no node is more probable than its parent. The N most probable nodes of
    all are therefore connected. All of them lie among the N most probable of their depth, and their parents among the N
    most probable of the depth above. A search that keeps N nodes per depth is thus exact. It finds the trees of Ringel
    and Romano 2026 (arXiv 2604.12989), who take nodes from a heap one by one.

    Letters: D depths, K candidates of each, P nodes of one depth.

    Attributes:
        ids: (B, D, K) int64.
        log_probs: (B, D, K) float32, at most 0 and never NaN; -inf for impossible candidates.
        pair_log_probs: (B, D, K, K) float32, at most 0 and never NaN. Entry (b, d, i, j) is the log-probability of
            candidate j of depth d after candidate i of depth d - 1; it replaces `log_probs[b, d, j]`. Entries of depth
            0 are not read. None if candidates are independent.
    """

    ids: Tensor
    log_probs: Tensor
    pair_log_probs: Tensor | None = None

    def best_nodes(self, count: int) -> list[LatticeLevel]:
        """Returns the most probable nodes of each depth; together they hold the `count` best. No synchronisation.

        `count`: at least 1. A depth has fewer nodes if there are fewer paths.
        """
        num_candidates = self.ids.shape[2]
        scores, ranks = self.log_probs.new_zeros(len(self.ids), 1), None
        levels = []
        for depth in range(self.ids.shape[1]):
            gains = self.log_probs[:, depth].unsqueeze(1)
            if self.pair_log_probs is not None and ranks is not None:
                gains = self.pair_log_probs[:, depth].gather(1, ranks.unsqueeze(2).expand(-1, -1, num_candidates))
            paths = (scores.unsqueeze(2) + gains).flatten(1)
            scores, order = paths.topk(min(count, paths.shape[1]), dim=1)
            ranks = order % num_candidates
            levels.append(LatticeLevel(self.ids[:, depth].gather(1, ranks), scores, order // num_candidates))
        return levels


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicShape:
    """The bounds of dynamic trees: candidates of a node and expanded nodes of a level (`top_k`), depth, and nodes."""

    top_k: int
    depth: int
    max_nodes: int

    @property
    def num_nodes(self) -> int:
        """Nodes, root included, if the vocabulary has at least `top_k` tokens."""
        if not self.depth:
            return 1
        return min(self.max_nodes, 1 + self.top_k + (self.depth - 1) * self.top_k**2)

    @property
    def num_expanded(self) -> int:
        """Most nodes with children, the root included."""
        return 1 + max(self.depth - 1, 0) * self.top_k

    def truncated(self, max_depth: int) -> DynamicShape:
        """Returns the shape with at most `max_depth` levels."""
        return DynamicShape(top_k=self.top_k, depth=min(self.depth, max_depth), max_nodes=self.max_nodes)


AnyShape = TreeShape | DynamicShape


def begin_expansion(shape: AnyShape, roots: Tensor, draws: DraftDraws) -> ShapedExpansion:
    """Returns an expansion that holds the (B,) int64 roots alone."""
    if isinstance(shape, DynamicShape):
        return DynamicExpansion(shape, roots, draws)
    return TreeExpansion(shape, roots, draws)


class _Candidates(NamedTuple):
    """Nodes that the tree is chosen from, numbered through all levels; the root is 0.

    Attributes:
        tokens: (B, C) int64.
        scores: (B, C) float32, log-probabilities of paths; never NaN.
        parents: (B, C) int64, numbers of the parents; the root's is 0.
        depths: (C,) int64.
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor
    depths: Tensor


class DynamicExpansion:
    """Dynamic trees under construction. Only `finish` may synchronise; on GPUs without pruning nothing does.

    Nodes stand in level order, siblings by rank. A tree has N nodes if there are enough candidates. If the host
    reads the device's tensors freely, candidates that the draft distribution excludes are left out.

    `roots`: (B,) int64.
    """

    def __init__(self, shape: DynamicShape, roots: Tensor, draws: DraftDraws) -> None:
        self.shape, self.draws, self.roots = shape, draws, roots
        device, start = roots.device, torch.zeros(len(roots), 1, dtype=torch.int64, device=roots.device)
        self._frontiers = [Frontier(roots.unsqueeze(1), None)]
        self._numbers = start  # (B, P), of the last frontier's nodes among the candidates
        self._candidates = [
            _Candidates(
                tokens=roots.unsqueeze(1),
                scores=torch.zeros(len(roots), 1, dtype=torch.float32, device=device),
                parents=start,
                depths=torch.zeros(1, dtype=torch.int64, device=device),
            )
        ]
        self._scores = self._candidates[0].scores  # (B, P), of the last frontier's nodes
        self._ends = [1]  # candidates down to each depth, the root included
        self._num_tokens = 0
        self._best: TokenTree | None = None  # trees of the full depth, for captured graphs of this expansion
        # Whether impossible candidates are left out: only the device then knows the number of nodes.
        self._is_exact = reads_are_free(device) or draws.pruning is not None

    @property
    def depth(self) -> int:
        """See `Expansion`."""
        return self.shape.depth

    @property
    def num_candidates(self) -> int:
        """Candidates needed after a node."""
        return self.shape.top_k

    @property
    def widest_level(self) -> int:
        """Most nodes of one depth that are expanded."""
        return self.shape.top_k if self.depth > 1 else 1

    def frontier(self, depth: int) -> Frontier:
        """See `Expansion`."""
        return self._frontiers[depth]

    @property
    def num_fed(self) -> int:
        """See `TreeExpansion`: all expanded nodes, possibly more than the nodes of the tree."""
        return self.shape.num_expanded - 1

    def fed_nodes(self) -> tuple[Tensor, Tensor]:
        """See `TreeExpansion`; (B, W) both, after a kernel has filled `tensors`."""
        nodes = slice(1, self.shape.num_expanded)
        return self._expanded[0][:, nodes], self._expanded[1][:, nodes] - 1

    def tensors(self, vocab_size: int, *, is_shared: bool = False) -> TreeTensors:
        """Returns the tensors that a kernel fills instead of `grow`: all levels at once, each `top_k` wide.

        `vocab_size`: one past the greatest token that the kernel may choose; at least `top_k` tokens must remain.
        """
        assert not is_shared, "each node has a row of its own"
        parents, ranks, depths = _whole_levels(self.shape.top_k, self.depth, self.roots.device)
        batch, whole = len(self.roots), self._candidates[0]
        nodes, candidates = (batch, len(parents)), (batch, len(depths))
        tokens, node_parents = (self.roots.new_zeros(nodes) for _ in range(2))
        filled = _Candidates(
            tokens=self.roots.new_zeros(candidates),
            scores=whole.scores.new_zeros(candidates),
            parents=self.roots.new_zeros(candidates),
            depths=depths,
        )
        tokens[:, 0] = filled.tokens[:, 0] = self.roots
        node_parents[:, 0] = -1
        self._expanded, self._candidates, self._num_tokens = (tokens, node_parents), [filled], vocab_size
        self._ends = [1, *range(1 + self.shape.top_k, len(depths) + 1, self.shape.top_k**2)]
        return TreeTensors(
            parents=parents,
            ranks=ranks,
            num_candidates=self.shape.top_k,
            tokens=tokens,
            scores=whole.scores.new_zeros(nodes),
            kinds=None,
            row_of=None,
            rows=None,
            node_parents=node_parents,
            node_numbers=self.roots.new_zeros(nodes),
            candidates=filled.tokens,
            path_scores=filled.scores,
            candidate_parents=filled.parents,
        )

    def levels(self) -> Iterator[int]:
        """See `Expansion`."""
        for depth in range(self.depth):
            if self._frontiers[depth].tokens.shape[1] == 0:
                return
            yield depth

    def grow(self, depth: int, logits: Tensor) -> None:
        """See `Expansion`; the best candidates become the next frontier. `torch.topk` decides among equal keys."""
        tokens, gains = self._best_children(depth, logits)
        scores = self._scores.unsqueeze(2) + gains
        level = _Candidates(
            tokens=tokens.expand_as(scores).flatten(1),
            scores=self._above_path_threshold(scores.flatten(1)),
            parents=self._numbers.repeat_interleave(scores.shape[2], dim=1),
            depths=torch.full((scores[0].numel(),), depth + 1, dtype=torch.int64, device=logits.device),
        )
        if depth + 1 < self.depth:
            self._advance(level, num_siblings=scores.shape[2])
        self._add(level, is_last=depth + 1 == self.depth)

    def grow_levels(self, logits: Tensor) -> None:
        """See `Expansion`; takes the most probable of all paths through the candidates."""
        each = [self._best_children(depth, logits[:, depth : depth + 1]) for depth in range(self.depth)]
        lattice = DraftLattice(
            ids=torch.cat([tokens for tokens, _ in each], dim=1),
            log_probs=torch.cat([gains for _, gains in each], dim=1),
        )
        begin = 0  # number of the first node of the level above
        for depth, best in enumerate(lattice.best_nodes(self.shape.max_nodes - 1), start=1):
            end = self._ends[-1]
            level = _Candidates(
                tokens=best.tokens,
                scores=self._above_path_threshold(best.scores),
                parents=best.parents + begin,
                depths=torch.full((best.tokens.shape[1],), depth, dtype=torch.int64, device=logits.device),
            )
            self._add(level, is_last=depth == self.depth)
            begin = end

    def finish(self, rows: Sequence[int], room: Sequence[int], roots: Sequence[int]) -> TokenTree:
        """See `Expansion`; a sequence with less room gets the best nodes of the levels within its room."""
        total = len(room)
        deepest = [min(max(depth, 0), self.depth) for depth in room]
        chosen, limits = self._best, [self._ends[min(deepest[row], len(self._ends) - 1)] for row in rows]
        if chosen is None or min(limits) < self._ends[-1]:
            chosen = self._chosen(integers_on(limits, self._scores.device))
        if self._is_exact:
            counts, depths = torch.stack([chosen.num_nodes, chosen.depths.amax(1)]).tolist()
        else:
            counts = [min(limit, self.shape.max_nodes) for limit in limits]
            depths = [min(deepest[row], count - 1) for row, count in zip(rows, counts, strict=True)]
        width = max(counts)
        if len(rows) < total:
            chosen = _among_roots(chosen, rows, roots)
            of_row = dict(zip(rows, zip(counts, depths, strict=True), strict=True))
            counts, depths = (list(each) for each in zip(*(of_row.get(i, (1, 0)) for i in range(total)), strict=True))
        return replace(
            chosen.mapped(lambda values, _: values[:, :width]),
            max_depth=min(max(deepest), width - 1),
            host_facts=HostFacts(
                roots=roots,
                depths=depths,
                num_nodes=counts,
                num_tokens=max(self._num_tokens, max(roots) + 1),
                are_depths_exact=self._is_exact,
            ),
        )

    def _best_children(self, depth: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the best candidates after each node of a depth, and what they add to the scores of paths.

        logits: (B, P, V) or (B, 1, V) float32. Returns (B, P, K) int64 tokens and (B, P, K) float32 gains, or both (B,
        1, K). Gains are at most 0 and never NaN; -inf for impossible and pruned candidates.
        """
        self._num_tokens = logits.shape[2]
        _, keys = self.draws.guesses(logits, depth)
        best = keys.topk(min(self.shape.top_k, logits.shape[2]), dim=2)
        gains = best.values
        if self.draws.has_coupled:  # the keys of other requests are log-probabilities
            is_coupled = self.draws.is_coupled.view(-1, 1, 1)
            gains = torch.where(is_coupled, gains - keys.logsumexp(2, keepdim=True), gains)
        # Rounding must not lift a child above its parent; candidates with NaN logits are impossible.
        gains = gains.nan_to_num(nan=float("-inf"), posinf=0.0, neginf=float("-inf")).clamp_max(0.0)
        pruning = self.draws.pruning
        if pruning is not None and pruning.looks_at_tokens:
            entropies = None
            if pruning.entropy_weighted is not None:
                entropies = normalised_entropy(self.draws.likelihoods(keys, keys)).unsqueeze(2)
            gains = torch.where(pruning.token_passes(gains, entropies), gains, float("-inf"))
        return best.indices, gains

    def _above_path_threshold(self, scores: Tensor) -> Tensor:
        pruning = self.draws.pruning
        if pruning is None or pruning.path_probability is None:
            return scores
        return torch.where(pruning.path_passes(scores), scores, float("-inf"))

    def _add(self, level: _Candidates, *, is_last: bool) -> None:
        self._candidates.append(level)
        self._ends.append(self._ends[-1] + len(level.depths))
        if is_last:
            self._best = self._chosen(None)

    def _advance(self, level: _Candidates, *, num_siblings: int) -> None:
        values, order = (part[:, : self.shape.top_k] for part in _best_first(level.scores))
        if self.draws.pruning is not None and reads_are_free(values.device):
            order = order[:, : int((values > float("-inf")).sum(1).max())]
        self._frontiers.append(Frontier(level.tokens.gather(1, order), order // num_siblings))
        self._scores, self._numbers = level.scores.gather(1, order), order + self._ends[-1]

    def _chosen(self, limits: Tensor | None) -> TokenTree:
        """Returns the trees of the best nodes; limits: (B,) int64, candidates of each sequence that count, or None."""
        *parts, depth_parts = zip(*self._candidates, strict=True)
        tokens, scores, parents = (torch.cat(part, dim=1) for part in parts)
        depths = torch.cat(depth_parts)
        number = torch.arange(len(depths), device=depths.device)
        if limits is not None:
            scores = torch.where(number < limits.unsqueeze(1), scores, float("-inf"))
        # Impossible candidates come last, candidates past the limit after all others; the order among equals stays.
        values, order = (part[:, : self.shape.max_nodes] for part in _best_first(scores))
        if self._is_exact:
            is_node = values > float("-inf")
        elif limits is None:
            is_node = torch.ones_like(order, dtype=torch.bool)
        else:  # as many as the host knows of
            is_node = number[: order.shape[1]] < limits.unsqueeze(1)
        numbers = torch.where(is_node, order, len(depths)).sort(dim=1).values
        is_node, numbers = numbers < len(depths), numbers.clamp_max(len(depths) - 1)
        places = torch.searchsorted(numbers, parents.gather(1, numbers))
        places[:, 0] = -1
        return TokenTree(
            tokens=torch.where(is_node, tokens.gather(1, numbers), 0),
            parents=torch.where(is_node, places, -1),
            depths=torch.where(is_node, depths[numbers], 0),
            num_nodes=is_node.sum(1),
            max_depth=self.depth,
            scores=torch.where(is_node, scores.gather(1, numbers), 0.0),
        )


ShapedExpansion = TreeExpansion | DynamicExpansion


@lru_cache(maxsize=64)
def _whole_levels(top_k: int, depth: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns parents and ranks of expanded nodes as in `TreeTensors`, and depths of candidates; all levels full."""
    nodes = torch.arange(1 + depth * top_k, device=device)
    parents, ranks = (nodes - top_k).clamp_min(0), (nodes - 1) * (nodes <= top_k)
    parents[0], ranks[0] = -1, 0
    counts = torch.tensor([1, top_k, *[top_k**2] * (depth - 1)], device=device)
    return parents, ranks, torch.arange(depth + 1, device=device).repeat_interleave(counts)


def _best_first(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (B, C) scores in descending order and their indices; the sort is stable."""
    values, order = scores.sort(dim=1, descending=True, stable=True)
    return values, order


def _among_roots(chosen: TokenTree, rows: Sequence[int], roots: Sequence[int]) -> TokenTree:
    index = integers_on(rows, chosen.tokens.device)
    ones = chosen.num_nodes.new_ones(len(roots))
    spread = chosen.mapped(
        lambda values, padding: values.new_full((len(roots), values.shape[1]), padding).index_copy_(0, index, values)
    )
    spread.tokens[:, 0] = integers_on(roots, index.device)
    return replace(spread, num_nodes=ones.index_copy_(0, index, chosen.num_nodes))
