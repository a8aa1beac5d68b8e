"""Token recycling: drafts the tokens that the target found most probable when the same token occurred before.

A matrix holds these successors for every token of the vocabulary; every verified node overwrites its token's row. A
draft is a tree of ranks: each node holds the successor of that rank of its parent's token. The paper has one tree of 80
nodes for all texts. This drafter takes the nodes with the greatest product of the ranks' recent acceptance rates. The
products are the tree's `scores`.

All requests without a `cache_salt` share one matrix; requests with the same salt share another one.

Source: Luo et al. 2024, "Token Recycling" (arXiv 2408.08696).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from pydantic import model_validator

from foretoken.core.errors import ConfigError
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.drafters.base import LookupOptions, TargetReads, TreeOption, by_depth
from foretoken.trees.choices import TreeShape, best_nodes
from foretoken.trees.merge import pruned

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from foretoken.drafters.base import Committed, DraftContext, Drafter, DraftRequest, TargetHandle


class SuccessorMatrix:
    """(V, W) token ids, most probable first. Takes at most V * W * 4 bytes; pages never written take none."""

    def __init__(self, vocab_size: int, width: int) -> None:
        # Ids and row indices are stored plus 1: 0 is an unknown token, and row 0 holds no successors.
        self._rows: NDArray[np.int32] = np.zeros((vocab_size + 1, width), dtype=np.int32)

    def update(self, tokens: NDArray[np.int64], successors: NDArray[np.int64]) -> None:
        """Replaces the successors of (M,) tokens by (M, at most W), best first; the last entry of a token counts."""
        self._rows[tokens + 1, : successors.shape[1]] = successors + 1

    def of(self, token: int) -> list[int]:
        """Returns the W successors of a token, -1 for unknown ones."""
        ids: list[int] = (self._rows[token + 1] - 1).tolist()
        return ids

    def fill(
        self, root: int, parents: NDArray[np.int64], ranks: NDArray[np.int64], levels: Sequence[slice]
    ) -> NDArray[np.int64]:
        """Returns the (N,) tokens of a tree below a root token; -1 for unknown successors and below them.

        Each node holds the successor of its parent's token that has the node's rank, below W. `parents` are in level
        order; `levels` are the nodes of each depth below the root.
        """
        ids = np.empty(len(parents), dtype=np.int64)
        ids[0] = root + 1
        for level in levels:
            ids[level] = self._rows[ids[parents[level]], ranks[level]]
        return ids - 1


_NUM_SUCCESSORS = 8  # per token, as in the paper; more for static trees with higher ranks
_MOST_SUCCESSORS = 32
_MOST_SALTS = 16  # salts with a matrix; the salt that was requested longest ago is dropped first
_PRIOR = 32.0  # tokens that the first estimate of a rank's acceptance is worth
_FADE = 0.5 ** (1 / 500)  # decay per token
_REFRESH = 64  # iterations between two choices of the best tree


class Options(LookupOptions):
    """Options of token recycling: those of every method, with trees as the default."""

    prunable_by: ClassVar[frozenset[str]] = frozenset({"token_probability", "path_probability"})

    tree: TreeOption = "tree"

    @model_validator(mode="after")
    def _ranks(self) -> Options:
        if self.num_successors > _MOST_SUCCESSORS:
            raise ConfigError(
                f"the tree has a node of rank {self.num_successors - 1}. Expected ranks below {_MOST_SUCCESSORS}: "
                "method 'recycling' keeps no more successors of a token."
            )
        return self

    @property
    def fixed_shape(self) -> TreeShape | None:
        """The shape of chains and static trees, at most as large as allowed; None for the best tree."""
        return None if self.tree == "tree" else TreeShape(self.shape(_no_branching).choices[: self.max_nodes - 1])

    @property
    def num_successors(self) -> int:
        """W, successors kept of each token."""
        shape = self.fixed_shape
        return max(_NUM_SUCCESSORS, 1 + max(shape.ranks) if shape else 0)


def _no_branching() -> TreeShape:
    raise RuntimeError("the best tree has no fixed shape")


class RankRates:
    """How often the target's token was the successor of each rank, if successors were known; older tokens fade."""

    def __init__(self, num_ranks: int) -> None:
        self._start = 0.35 * np.arange(1, num_ranks + 1) ** -1.3
        self._hits, self._seen = np.zeros(num_ranks), 0.0

    def learn_successor(self, successors: Sequence[int], token: int) -> None:
        """Counts a token that followed; successors: those known of the token before it, -1 for none."""
        if successors[0] < 0:
            return
        self._hits *= _FADE
        self._seen = self._seen * _FADE + 1
        if token in successors:
            self._hits[successors.index(token)] += 1

    def estimates(self) -> list[float]:
        """P(the next token has this rank) of every rank; above 0, their sum at most 1."""
        rates: list[float] = ((self._hits + _PRIOR * self._start) / (self._seen + _PRIOR)).tolist()
        return rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A tree of ranks in level order, N nodes, root included.

    Attributes:
        parents: (N,) int64, -1 at the root.
        ranks: (N,) int64.
        scores: N, log-probability that the whole path is accepted.
        ends: Numbers of nodes at most 0, 1, 2, … deep.
    """

    parents: NDArray[np.int64]
    ranks: NDArray[np.int64]
    scores: Sequence[float]
    ends: Sequence[int]

    @classmethod
    def of(cls, shape: TreeShape, rates: Sequence[float]) -> Template:
        """Returns a shape with scores from the acceptance rates of its ranks."""
        logs, scores = np.log(rates).tolist(), [0.0]
        for parent, rank in zip(shape.parents[1:], shape.ranks[1:], strict=True):
            scores.append(scores[parent] + logs[rank])
        ends = np.searchsorted(shape.depths, np.arange(shape.depth + 1), side="right").tolist()
        return cls(parents=np.array(shape.parents), ranks=np.array(shape.ranks), scores=scores, ends=ends)

    def fill(
        self, matrix: SuccessorMatrix, root: int, max_depth: int, max_nodes: int
    ) -> tuple[TreeRow, Sequence[float]]:
        """Returns a sequence's tree of the known successors, and the scores of its nodes."""
        depth = min(max_depth, len(self.ends) - 1)
        count = min(self.ends[depth], max_nodes)
        levels = [slice(begin, min(end, count)) for begin, end in zip(self.ends[:depth], self.ends[1:], strict=False)]
        tokens = matrix.fill(root, self.parents[:count], self.ranks[:count], levels)
        parents, scores, is_known = self.parents[:count], self.scores[:count], tokens >= 0
        if not is_known.all():
            index = np.append(is_known.cumsum() - 1, -1)  # of each node among the known ones; the root has parent -1
            tokens, parents = tokens[is_known], index[parents[is_known]]
            scores = list(compress(scores, is_known))
        return TreeRow(tokens.tolist(), parents.tolist()), scores


class RecyclingDrafter:
    """Drafts what the target found probable after the same tokens earlier."""

    name = "recycling"

    def __init__(self, options: Options) -> None:
        self._options, self._num_ranks = options, options.num_successors
        self._shape = options.fixed_shape
        self.reads = TargetReads(top_k=self._num_ranks)
        self.nodes_by_depth = options.nodes_by_depth
        if self._shape is not None:
            self.nodes_by_depth = [shape.num_nodes for shape in by_depth(self._shape)]
        self._rates = RankRates(self._num_ranks)
        self._num_commits = 0
        self._template = self._best_template()
        self._salted: OrderedDict[str, SuccessorMatrix] = OrderedDict()
        self._matrices: dict[int, SuccessorMatrix] = {}  # by slot
        self._known: dict[int, list[int]] = {}  # by slot: earlier successors of its last committed token

    def attach(self, target: TargetHandle) -> None:
        """Allocates the matrix that requests without a salt share."""
        self._device, self._vocab_size = target.device, target.vocab_size
        self._shared = self._new_matrix()

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Finds the matrix of the request's salt."""
        self._known.pop(slot, None)
        self._matrices[slot] = self._shared if request.cache_salt is None else self._matrix_of(request.cache_salt)

    def propose(self, context: DraftContext) -> TokenTree:
        """Returns the tree with the greatest acceptance by rank, filled with the successors of each root."""
        each = zip(context.slots, context.roots, context.max_depth, context.max_nodes, strict=True)
        filled = [
            self._template.fill(self._matrices[slot], root, max(depth, 0), min(nodes, self.nodes_by_depth[-1]))
            for slot, root, depth, nodes in each
        ]
        rows, scores = zip(*filled, strict=True)
        tree = TokenTree.from_rows(rows, scores=scores, device=self._device)
        return tree if self._options.pruning is None else pruned(tree, self._options.pruning)

    def continue_from(self, slot: int, tokens: Sequence[int], path: Sequence[int], depth: int) -> list[int]:
        """See `Lookup`: follows the most probable successor of each token."""
        del tokens
        matrix, token, found = self._matrices[slot], path[-1], list[int]()
        while len(found) < depth and (token := matrix.of(token)[0]) >= 0:
            found.append(token)
        return found

    def commit(self, committed: Committed) -> None:
        """Learns the ranks of accepted tokens, and writes the successors of every verified node. Synchronises.

        If a token stands at several nodes, the last one of the accepted text counts, or else the last of all.
        """
        verified = committed.verified
        if verified is None or verified.top_ids is None:
            return
        for slot, text in zip(committed.slots, committed.tokens, strict=True):
            self._count(slot, text)
        ids = verified.top_ids[:, : self._num_ranks].cpu().numpy()  # other drafters may have asked for more
        tokens, parents = torch.stack([verified.tree.tokens, verified.tree.parents]).cpu().numpy()
        for row, (slot, path) in enumerate(zip(committed.slots, verified.paths, strict=True)):
            start, end = verified.offsets[row : row + 2]
            drafted = np.flatnonzero(parents[row, : end - start] >= 0)  # neither root nor cut off
            nodes = np.concatenate([drafted, np.array([0, *path], dtype=np.int64)])
            self._matrices[slot].update(tokens[row, nodes], ids[start + nodes])
        self._num_commits += 1
        if self._num_commits % _REFRESH == 0:
            self._template = self._best_template()

    def release(self, slot: int) -> None:
        """Forgets which matrix the slot used; the matrix stays."""
        self._matrices.pop(slot, None)
        self._known.pop(slot, None)

    def _count(self, slot: int, text: Sequence[int]) -> None:
        matrix, known = self._matrices[slot], self._known.get(slot)
        for token in text:
            if known is not None:
                self._rates.learn_successor(known, token)
            known = matrix.of(token)
        if known is not None:
            self._known[slot] = known

    def _best_template(self) -> Template:
        rates, options = self._rates.estimates(), self._options
        if self._shape is not None:
            return Template.of(self._shape, rates)
        selected = best_nodes([rates] * options.chain_len, options.max_nodes)
        return Template.of(TreeShape.from_choices(choice for choice, _ in selected), rates)

    def _new_matrix(self) -> SuccessorMatrix:
        return SuccessorMatrix(self._vocab_size, self._num_ranks)

    def _matrix_of(self, salt: str) -> SuccessorMatrix:
        matrix = self._salted.pop(salt, None) or self._new_matrix()
        self._salted[salt] = matrix
        if len(self._salted) > _MOST_SALTS:
            self._salted.popitem(last=False)
        return matrix


create: Callable[[Options], Drafter] = RecyclingDrafter  # see `foretoken.drafters.registry`
