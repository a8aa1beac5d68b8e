"""Changes whole trees: merges several drafters' trees, adds chains below nodes, and removes improbable nodes.

`Pruning` removes a node if

- its own probability after its parent is below `token_probability`;
- the product of these probabilities along its path is below `path_probability`;
- its own probability is below `entropy_weighted` * (1 - h). h is the entropy of the distribution after its parent
  divided by the greatest possible, ln V. The less certain the drafter is, the more candidates it keeps.

Each threshold that is set counts. Nothing is drafted below a pruned node. The probabilities are those of the draft
distribution. The noise of coupled requests is known: for them they are the probabilities that a candidate is the
target's choice given that noise, see `DraftDraws.likelihoods`.

A pruned node is removed if it was chosen. It stays, without descendants, if it was drawn from a draft distribution:
removing a draw because of its token would bias the output. Ending a chain after a draw does not bias the output,
because the decision depends only on that draw and the tokens before it. The root always stays.

Letters: B sequences, N nodes of a tree, M nodes of the tree that is added, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from foretoken.core.backend import integers_on
from foretoken.core.errors import TreeError
from foretoken.core.token_tree import MAX_NODES, PROBE, DraftDistributions, DrawKind, TokenTree, TreeRow


def merge_trees(
    trees: Sequence[TokenTree],
    *,
    max_nodes: int = MAX_NODES,
    drafters: Sequence[int] | None = None,
    most_nodes: Sequence[int] | None = None,
) -> TokenTree:
    """Unites trees over the same roots; equal tokens under one parent become one node. No synchronisation.

    A node that was drawn from a draft distribution stays a trial of its own. A chosen (one-hot) node with its token
    joins it; another drawn node does not. Nodes stand tree by tree in their own order. When `max_nodes` cuts, earlier
    trees keep their nodes. A tree with drawn nodes that does not fit is left out as a whole, because a cut that looks
    at drawn tokens would bias the output.

    Args:
        trees: Trees of the same batch, each with at most `max_nodes` nodes. Trees with drawn nodes come first in the
            result. If a tree was drawn only because of what others drew, it must stand after those: siblings are tested
            in this order, and no earlier test may depend on a later draw.
        max_nodes: Most nodes of a merged tree, root included.
        drafters: Index of the drafter of each tree; 0, 1, … if None.
        most_nodes: Most nodes that each tree could have had, root included, whatever was drawn. Decides whether a tree
            with drawn nodes fits. If None, the trees' own widths, which depend on draws in pruned trees.

    Returns:
        A tree whose `source` holds bit i if drafter i proposed the node, and `PROBE` if all of them meant a probe. The
        root has every bit. `scores` are the greatest of all drafters, 0 without any.

    Raises:
        TreeError: When a tree has more than `max_nodes` nodes or another number of sequences.
    """
    for tree in trees:
        if tree.width > max_nodes or tree.batch_size != trees[0].batch_size:
            raise TreeError(
                f"a tree of {tree.batch_size} sequences and {tree.width} nodes cannot be merged. Expected "
                f"{trees[0].batch_size} sequences and at most {max_nodes} nodes."
            )
    order = sorted(range(len(trees)), key=lambda index: trees[index].distributions is None)
    bits = range(len(trees)) if drafters is None else drafters
    widths = [tree.width for tree in trees] if most_nodes is None else most_nodes
    merged, room = _marked(trees[order[0]], bits[order[0]]), max_nodes - widths[order[0]]
    for index in order[1:]:
        tree = trees[index]
        if tree.distributions is not None and widths[index] - 1 > room:
            continue
        room -= widths[index] - 1
        merged = _united(merged, _marked(tree, bits[index])).first_nodes(max_nodes)
    source = merged.source
    assert source is not None, "every merged tree has one"
    source = source.clone()
    source[:, 0] = sum(1 << bit for bit in bits)
    return replace(merged, source=source)


def _marked(tree: TokenTree, index: int) -> TokenTree:
    """Returns a tree with drafter `index` as the source of all nodes, without `HostFacts`; repeated siblings stay."""
    is_real = torch.arange(tree.width, device=tree.tokens.device) < tree.num_nodes.unsqueeze(1)
    is_probe = 0 if tree.source is None else tree.source & PROBE
    scores = torch.zeros_like(tree.tokens, dtype=torch.float32) if tree.scores is None else tree.scores
    source = torch.where(is_real, (1 << index) | is_probe, 0)
    return replace(tree, source=source, scores=scores, host_facts=None)


def _united(first: TokenTree, second: TokenTree) -> TokenTree:
    """Returns the union of two trees, (B, N + M - 1) with padding at the end."""
    (batch, width), device = first.tokens.shape, first.tokens.device
    index = torch.arange(width + second.width, device=device).expand(batch, -1)
    is_first = index[:, :width] < first.num_nodes.unsqueeze(1)
    is_second = second.parents >= 0  # neither root, padding nor cut off
    may_join = ~_drawn(second)
    place = width + index[:, : second.width]  # of each node of the second tree when both stand side by side
    place = torch.where(index[:, : second.width] == 0, 0, place)
    joins = torch.zeros_like(may_join)
    for depth in range(1, min(first.max_depth, second.max_depth) + 1):
        parents = place.gather(1, second.parents.clamp_min(0))
        is_same = (first.parents.unsqueeze(1) == parents.unsqueeze(2)) & is_first.unsqueeze(1)
        is_same &= first.tokens.unsqueeze(1) == second.tokens.unsqueeze(2)
        found = is_same.any(2) & (second.depths == depth) & is_second & may_join
        place = torch.where(found, is_same.int().argmax(2), place)
        joins |= found
    side_by_side = _side_by_side(first, second, place, joins)
    kept = torch.cat([is_first, is_second & ~joins], dim=1)
    return compacted(side_by_side, kept)


def _side_by_side(first: TokenTree, second: TokenTree, place: Tensor, joins: Tensor) -> TokenTree:
    """Joins two trees of N and M nodes into one; nodes of the second that join the first become padding.

    place: (B, M) int64, where each node of the second goes; joins: (B, M) bool, which are nodes of the first too.
    """
    assert first.source is not None and second.source is not None, "marked before"  # noqa: PT018 - one fact
    assert first.scores is not None and second.scores is not None, "marked before"  # noqa: PT018
    width = first.width
    target = torch.where(joins, place, 0)  # nodes that do not join write to the root
    proposed = torch.where(joins, second.source, 0)
    bits = (second.source & ~PROBE).amax(1, keepdim=True)  # one drafter's bit
    has_bit = torch.zeros_like(first.source).scatter_reduce_(1, target, (proposed & ~PROBE).ne(0).long(), "amax") > 0
    is_draft = torch.zeros_like(first.source).scatter_reduce_(
        1, target, (joins & (second.source & PROBE).eq(0)).long(), "amax"
    )
    source = torch.where(has_bit, first.source | bits, first.source)
    source = torch.where(is_draft > 0, source & ~PROBE, source)
    scores = first.scores.scatter_reduce(1, target, torch.where(joins, second.scores, -torch.inf), "amax")
    parents = torch.where(second.parents >= 0, place.gather(1, second.parents.clamp_min(0)), -1)
    return TokenTree(
        tokens=torch.cat([first.tokens, second.tokens], dim=1),
        parents=torch.cat([first.parents, parents], dim=1),
        depths=torch.cat([first.depths, second.depths], dim=1),
        num_nodes=first.num_nodes,
        max_depth=max(first.max_depth, second.max_depth),
        scores=torch.cat([scores, second.scores], dim=1),
        source=torch.cat([source, second.source], dim=1),
        distributions=_united_distributions(first, second, width),
    )


def _united_distributions(first: TokenTree, second: TokenTree, width: int) -> DraftDistributions | None:
    """Returns the draft distributions of two trees side by side; width: N."""
    ours, theirs = first.distributions, second.distributions
    if ours is None:
        return None  # trees with drawn nodes come first
    kinds = torch.full_like(second.tokens, DrawKind.ONE_HOT.value) if theirs is None else theirs.kinds
    row_of = torch.full_like(second.tokens, -1)
    rows, siblings = ours.rows, ours.max_siblings
    if theirs is not None:
        row_of = torch.where(theirs.row_of >= 0, theirs.row_of + rows.shape[1], -1)
        rows, siblings = torch.cat([rows, theirs.rows], dim=1), siblings + theirs.max_siblings
    return DraftDistributions(
        kinds=torch.cat([ours.kinds[:, :width], kinds], dim=1),
        rows=rows,
        row_of=torch.cat([ours.row_of[:, :width], row_of], dim=1),
        max_siblings=siblings,
    )


def compacted(tree: TokenTree, kept: Tensor) -> TokenTree:
    """Returns the tree of the kept nodes; `kept` is (B, N) bool.

    The root and the parent of every kept node must be kept.
    """
    order = (~kept).int().argsort(dim=1, stable=True)
    width = int(kept.shape[1])
    new_place = torch.empty_like(order).scatter_(1, order, torch.arange(width, device=order.device).expand_as(order))
    parents = torch.where(tree.parents >= 0, new_place.gather(1, tree.parents.clamp_min(0)), -1)

    moved = replace(tree, parents=parents).mapped(lambda part, empty: torch.where(kept, part, empty).gather(1, order))
    return replace(moved, num_nodes=kept.sum(1))


def prune(tree: TokenTree, kept: Tensor) -> TokenTree:
    """Returns a tree without some of its chosen nodes. No synchronisation.

    `kept`, (B, N) bool, says which chosen nodes stay. The root, drawn nodes and their ancestors always stay: `kept` may
    depend on drawn tokens, and leaving out a draw by its token would bias the output. Descendants of a removed node are
    removed too.
    """
    parents = tree.parents.clamp_min(0)
    needed = _drawn(tree)
    for _ in range(tree.max_depth):
        needed = needed | (torch.zeros_like(parents).scatter_add_(1, parents, needed.to(torch.int64)) > 0)
    kept = kept | needed
    kept[:, 0] = True
    kept &= torch.arange(tree.width, device=kept.device) < tree.num_nodes.unsqueeze(1)
    for _ in range(tree.max_depth):
        kept = kept & (kept.gather(1, parents) | (tree.depths == 0))
    return compacted(tree, kept)


def _drawn(tree: TokenTree) -> Tensor:
    """(B, N) bool, the nodes that were drawn from a draft distribution."""
    if tree.distributions is None:
        return torch.zeros_like(tree.tokens, dtype=torch.bool)
    return tree.distributions.kinds != DrawKind.ONE_HOT


@dataclass(slots=True, init=False)
class Trie:
    """A growing token tree in which siblings hold different tokens."""

    tokens: list[int]
    parents: list[int]
    _index: dict[tuple[int, int], int]

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self._index = [root], [-1], {}

    def child(self, parent: int, token: int) -> int | None:
        """Returns the child of a node that holds a token, or None."""
        return self._index.get((parent, token))

    def add(self, parent: int, token: int) -> int:
        """Returns the child of a node that holds a token; makes it if needed."""
        node = self._index.get((parent, token))
        if node is None:
            node = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self._index[parent, token] = node
        return node

    def add_path(self, tokens: Sequence[int], max_nodes: int = MAX_NODES) -> list[int]:
        """Adds a path from the root while there are fewer than `max_nodes` nodes; returns its nodes."""
        path: list[int] = []
        node = 0
        for token in tokens:
            if len(self.tokens) >= max_nodes and self.child(node, token) is None:
                break
            node = self.add(node, token)
            path.append(node)
        return path

    def row(self) -> TreeRow:
        """Returns the trie as plain lists."""
        return TreeRow(self.tokens, self.parents)


class Continuation(NamedTuple):
    """A chain of `tokens` to be added below a node of a tree.

    Attributes:
        row: Index of the tree in the batch.
        node: A node without a child that holds the chain's first token.
        depth: Depth of the node.
        scores: For each token the log-probability that the whole path down to the token is accepted.
        source: Source of the new nodes, see `TokenTree`.
    """

    row: int
    node: int
    depth: int
    tokens: Sequence[int]
    scores: Sequence[float]
    source: int


def with_continuations(tree: TokenTree, continuations: Sequence[Continuation], *, max_nodes: int) -> TokenTree:
    """Returns the tree with chains of chosen (one-hot) nodes behind its nodes. No synchronisation.

    Scores and sources must exist. The continuations come most valuable first, at most one per node. The ends of chains
    beyond `max_nodes` nodes, root included, are left out.
    """
    room = [max_nodes - tree.width] * tree.batch_size
    # (tokens, parents, depths, sources) and scores of each sequence's new nodes
    new: list[list[tuple[int, int, int, int]]] = [[] for _ in room]
    scores: list[list[float]] = [[] for _ in room]
    deepest = tree.max_depth
    for chain in continuations:
        nodes, parent = new[chain.row], chain.node
        for index, (token, score) in enumerate(zip(chain.tokens, chain.scores, strict=True)):
            if len(nodes) >= room[chain.row]:
                break
            depth = chain.depth + index + 1
            nodes.append((token, parent, depth, chain.source))
            scores[chain.row].append(score)
            parent, deepest = tree.width + len(nodes) - 1, max(deepest, depth)
    width, device = max(map(len, new)), tree.tokens.device
    if not width or tree.scores is None or tree.source is None:
        return tree
    padded = [nodes + [(0, -1, 0, 0)] * (width - len(nodes)) for nodes in new]
    tokens, parents, depths, sources = integers_on(padded, device).permute(2, 0, 1)
    more = torch.tensor([each + [0.0] * (width - len(each)) for each in scores], device=device)
    drafts = tree.distributions
    if drafts is not None:
        kinds = torch.full_like(tokens, DrawKind.ONE_HOT.value)
        drafts = replace(
            drafts, kinds=torch.cat([drafts.kinds, kinds], dim=1),
            row_of=torch.cat([drafts.row_of, torch.full_like(tokens, -1)], dim=1),
        )  # fmt: skip
    longer = replace(
        tree,
        tokens=torch.cat([tree.tokens, tokens], dim=1),
        parents=torch.cat([tree.parents, parents], dim=1),
        depths=torch.cat([tree.depths, depths], dim=1),
        max_depth=deepest,
        scores=torch.cat([tree.scores, more], dim=1),
        source=torch.cat([tree.source, sources], dim=1),
        distributions=drafts,
        host_facts=None,
    )
    is_node = (longer.parents >= 0) | (torch.arange(longer.width, device=device) == 0)
    return compacted(longer, is_node)


class Pruning(BaseModel):
    """Thresholds, see the module; None for thresholds that are not set.

    Attributes:
        token_probability: Above 0, at most 1. Hugging Face calls it `assistant_confidence_threshold`.
        path_probability: Above 0, at most 1.
        entropy_weighted: Above 0, at most 1.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    token_probability: float | None = Field(default=None, gt=0.0, le=1.0)
    path_probability: float | None = Field(default=None, gt=0.0, le=1.0)
    entropy_weighted: float | None = Field(default=None, gt=0.0, le=1.0)

    @model_validator(mode="after")
    def _has_threshold(self) -> Self:
        if not self.keys:
            raise ValueError(f"there is no threshold; expected one of {', '.join(type(self).model_fields)}")
        return self

    @property
    def keys(self) -> frozenset[str]:
        """Names of the thresholds that are set."""
        return frozenset(key for key in type(self).model_fields if getattr(self, key) is not None)

    @property
    def looks_at_tokens(self) -> bool:
        """Whether there is a threshold on a node's own probability."""
        return self.token_probability is not None or self.entropy_weighted is not None

    def token_passes(self, own: Tensor, entropies: Tensor | None) -> Tensor:
        """Returns which nodes pass by their own probability; NaN does not pass if `looks_at_tokens`.

        `own` are log-probabilities after the parent, in any shape. `entropies`, see `normalised_entropy`, broadcast to
        it; `entropy_weighted` needs them.
        """
        result = torch.ones_like(own, dtype=torch.bool)
        if self.token_probability is not None:
            result &= own >= math.log(self.token_probability)
        if self.entropy_weighted is not None:
            assert entropies is not None, "options ask for it only where there are draft distributions"
            result &= own.exp() >= self.entropy_weighted * (1.0 - entropies)
        return result

    def path_passes(self, paths: Tensor) -> Tensor:
        """Returns bool, which nodes pass by the log-probabilities of their paths; NaN does not pass a threshold."""
        if self.path_probability is None:
            return torch.ones_like(paths, dtype=torch.bool)
        return paths >= math.log(self.path_probability)


def normalised_entropy(log_probs: Tensor) -> Tensor:
    """Returns (...), 0 to 1, the entropy of (..., V) over the greatest possible; NaN for rows with a NaN."""
    greatest = max(math.log(log_probs.shape[-1]), 1e-9)  # a single token has no entropy
    entropies: Tensor = torch.special.entr(log_probs.exp()).sum(-1) / greatest
    return entropies.clamp(0.0, 1.0)


def pruned(tree: TokenTree, pruning: Pruning) -> TokenTree:
    """Returns a whole tree without pruned nodes, for drafters that do not draft level by level, such as lookups.

    Drawn nodes and their ancestors stay. Synchronises with the host. `entropy_weighted` is not possible: a tree does
    not hold the distributions of chosen nodes. Raises `TreeError` when the tree has no `scores`.
    """
    if tree.scores is None:
        raise TreeError("a tree without scores cannot be pruned by probabilities. Expected scores, see TokenTree.")
    own = tree.scores - tree.scores.gather(1, tree.parents.clamp_min(0))
    # NaN below an impossible node, which is removed with that node
    return prune(tree, pruning.token_passes(own, None) & pruning.path_passes(tree.scores)).narrowed()
