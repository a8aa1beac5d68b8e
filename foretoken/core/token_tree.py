"""The token tree: the value that drafting hands to verification.

A tree holds candidate continuations of a committed sequence. Node 0 is the root, the last committed token. Every other
node is a drafted token with a parent before it. A chain is a tree. A tree does not know its drafter, the scoring of its
tokens, or its KV rows.

Letters: B sequences, N nodes (root included), D greatest depth, R draft distributions, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from foretoken.core.backend import floats_on, integers_on
from foretoken.core.errors import TreeError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_NODES = 512
PROBE = 1 << 62  # bit of `TokenTree.source`: the node is verified only to read the target's answer


class DrawKind(IntEnum):
    """How a drafted token was chosen; acceptance without bias depends on it."""

    ONE_HOT = 0  # chosen by any rule: top-k, lookup, beam, rerank, argmax
    INDEPENDENT = 1  # drawn from its draft distribution, independently of its siblings
    WITHOUT_REPLACEMENT = 2  # drawn from its draft distribution, without the tokens of its earlier siblings


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftDistributions:
    """The exact draft distributions of sampled nodes.

    Attributes:
        kinds: (B, N) int64, a `DrawKind` for each node; the root's is ignored.
        rows: (B, R, V) float32, draft distributions, each summing to 1. A subnormal probability is too coarse to verify
            a draw with: state 0 instead, and the token as one-hot where it was drawn.
        row_of: (B, N) int64, the index in `rows` of the node's distribution; -1 for one-hot nodes.
        max_siblings: Upper bound, known on the host, of sampled children under one parent.
    """

    kinds: Tensor
    rows: Tensor
    row_of: Tensor
    max_siblings: int


class TreeRow(NamedTuple):
    """One sequence's tree as plain lists; the root is entry 0, siblings are in draw order."""

    tokens: Sequence[int]
    parents: Sequence[int]


class HostFacts(NamedTuple):
    """Facts about a batch of trees that its producer guarantees, so that nobody reads the tensors on the host.

    The producer also guarantees that the trees are valid, and that sampled nodes come from `distributions`.

    Attributes:
        roots: Root token of each sequence.
        depths: Greatest depth of each tree, or an upper bound, see `are_depths_exact`.
        num_nodes: Nodes of each tree, root included.
        num_tokens: All tokens are at least 0 and below this number.
        are_depths_exact: Whether `depths` are the greatest depths. Only the device knows the nodes of a dynamic tree.
        nodes: (3, B, N) int64, tokens, parents and depths of the nodes; None if only the device knows them.
    """

    roots: Sequence[int]
    depths: Sequence[int]
    num_nodes: Sequence[int]
    num_tokens: int
    are_depths_exact: bool = True
    nodes: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTree:
    """A batch of token trees, padded to the widest and topologically sorted.

    Padding nodes have parent -1, depth 0 and token 0. They have no children and never influence a result. Siblings are
    in draw order. All tensors are on one device; no method modifies them in place.

    Attributes:
        tokens: (B, N) int64.
        parents: (B, N) int64, `parents[:, 0] == -1` and `parents[:, i] < i`.
        depths: (B, N) int64, 0 at the root and at padding.
        num_nodes: (B,) int64, real nodes including the root, at least 1.
        max_depth: Upper bound of `depths`, known on the host so that loops over depth need no synchronisation.
        scores: (B, N) float32 or None, the drafter's estimate of the log-probability that the whole path down to the
            node is accepted. Controllers calibrate it by acceptance.
        source: (B, N) int64, a bit set of the drafters that proposed the node, bit i for drafter i; None with one
            drafter. `PROBE` marks nodes that are verified only to read the target's answer
            (`foretoken.drafters.base.Verified.top_ids`). Probes and the nodes below them are never accepted.
        distributions: The draft distributions; None if all nodes are one-hot.
        host_facts: The producer's guarantees; None without any. `dataclasses.replace` keeps them: pass new ones, or
            None, along with changed tensors.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    num_nodes: Tensor
    max_depth: int
    scores: Tensor | None = None
    source: Tensor | None = None
    distributions: DraftDistributions | None = None
    host_facts: HostFacts | None = None

    @property
    def batch_size(self) -> int:
        """Number of sequences B."""
        return self.tokens.shape[0]

    @property
    def width(self) -> int:
        """N, the padded number of nodes."""
        return self.tokens.shape[1]

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[TreeRow],
        *,
        scores: Sequence[Sequence[float]] | None = None,
        device: torch.device | str = "cpu",
    ) -> TokenTree:
        """Pads plain lists into a batch and computes depths.

        Args:
            rows: One `TreeRow` for each sequence; `parents[0]` is -1.
            scores: Log-probability of each node of each row, see the attribute; None for unknown ones.

        Raises:
            TreeError: When a row is invalid; names row and node.
        """
        for index, row in enumerate(rows):
            _check_row(index, row)
        width = max(len(row.tokens) for row in rows)
        if width == 1:  # what a lookup returns most often
            return cls.roots([row.tokens[0] for row in rows], device=device, has_scores=scores is not None)
        tokens, parents, depths = [], [], []
        roots: list[int] = []
        counts: list[int] = []
        padded: list[list[float]] = []
        for index, row in enumerate(rows):
            row_depths = [0] * len(row.parents)
            for node, parent in enumerate(row.parents):
                if node:
                    row_depths[node] = row_depths[parent] + 1
            padding = width - len(row.tokens)
            tokens.append([*row.tokens, *([0] * padding)])
            parents.append([*row.parents, *([-1] * padding)])
            depths.append([*row_depths, *([0] * padding)])
            roots.append(row.tokens[0])
            counts.append(len(row.tokens))
            if scores is not None:
                padded.append([*scores[index], *[0.0] * (width - len(scores[index]))])
        device = torch.device(device)
        nodes, deepest, facts = np.array([tokens, parents, depths], dtype=np.int64), list(map(max, depths)), None
        if min(map(min, tokens)) >= 0:
            num_tokens = max(map(max, tokens)) + 1
            facts = HostFacts(roots=roots, depths=deepest, num_nodes=counts, num_tokens=num_tokens, nodes=nodes)
        return cls._of_nodes(
            nodes, counts, device, max_depth=max(deepest),
            scores=None if scores is None else floats_on(padded, device), host_facts=facts,
        )  # fmt: skip

    @classmethod
    def roots(cls, tokens: Sequence[int], *, device: torch.device | str = "cpu", has_scores: bool = False) -> TokenTree:
        """Returns a batch of trees with the root alone, for a plain decoding step; the batch may be empty."""
        roots, zeros, ones = list(tokens), [0] * len(tokens), [1] * len(tokens)
        nodes = np.array([roots, [-1] * len(roots), zeros], dtype=np.int64)[:, :, None]
        facts = HostFacts(roots=roots, depths=zeros, num_nodes=ones, num_tokens=max(roots, default=-1) + 1, nodes=nodes)
        return cls._of_nodes(
            nodes, ones, torch.device(device), max_depth=0,
            scores=torch.zeros(len(roots), 1, device=device) if has_scores else None,
            host_facts=facts if min(roots, default=0) >= 0 else None,
        )  # fmt: skip

    @classmethod
    def _of_nodes(
        cls, nodes: NDArray[np.int64], counts: Sequence[int], device: torch.device, **others: Any
    ) -> TokenTree:  # fmt: skip
        """Returns trees from `HostFacts.nodes` and the number of nodes of each, in one transfer to the device."""
        packed = integers_on(np.concatenate([nodes.ravel(), np.array(counts, dtype=np.int64)]), device)
        tokens, parents, depths = packed[: nodes.size].view(nodes.shape).unbind()
        return cls(tokens=tokens, parents=parents, depths=depths, num_nodes=packed[nodes.size :], **others)

    def mapped(self, change: Callable[[Tensor, int], Tensor]) -> TokenTree:
        """Returns the trees with `change(values, padding)` in place of every (B, N) tensor, without `host_facts`."""
        drafts = self.distributions
        return replace(
            self,
            tokens=change(self.tokens, 0),
            parents=change(self.parents, -1),
            depths=change(self.depths, 0),
            scores=None if self.scores is None else change(self.scores, 0),
            source=None if self.source is None else change(self.source, 0),
            distributions=drafts
            and replace(drafts, kinds=change(drafts.kinds, DrawKind.ONE_HOT.value), row_of=change(drafts.row_of, -1)),
            host_facts=None,
        )

    def with_roots(self, tokens: Sequence[int]) -> TokenTree:
        """Returns this batch, followed by a tree with the root alone for each token."""
        if not tokens:
            return self
        roots, facts = TokenTree.roots(tokens, device=self.tokens.device), self.host_facts
        if facts is not None and roots.host_facts is not None:
            facts = HostFacts(
                roots=[*facts.roots, *tokens],
                depths=[*facts.depths, *roots.host_facts.depths],
                num_nodes=[*facts.num_nodes, *roots.host_facts.num_nodes],
                num_tokens=max(facts.num_tokens, roots.host_facts.num_tokens),
                are_depths_exact=facts.are_depths_exact,
            )
        longer = self.mapped(lambda values, padding: pad(values, (0, 0, 0, len(tokens)), value=padding))
        drafts = longer.distributions
        return replace(
            longer,
            tokens=torch.cat([self.tokens, pad(roots.tokens, (0, self.width - 1))]),
            num_nodes=torch.cat([self.num_nodes, roots.num_nodes]),
            distributions=drafts and replace(drafts, rows=pad(drafts.rows, (0, 0, 0, 0, 0, len(tokens)))),
            host_facts=None if roots.host_facts is None else facts,
        )

    def node_counts(self) -> list[int]:
        """Returns the number of nodes of each tree, root included. Synchronises with the host without `host_facts`."""
        return self.num_nodes.tolist() if self.host_facts is None else list(self.host_facts.num_nodes)

    def rows(self) -> list[TreeRow]:
        """Returns the batch as plain lists, without padding. Synchronises with the host."""
        tokens, parents, counts = self.tokens.tolist(), self.parents.tolist(), self.num_nodes.tolist()
        return [TreeRow(t[:n], p[:n]) for t, p, n in zip(tokens, parents, counts, strict=True)]

    def select(self, rows: Tensor) -> TokenTree:
        """Returns the trees of the sequences at `rows`, (R,) int64 indices into the batch."""
        some = self.mapped(lambda values, _: values[rows])
        drafts = some.distributions
        return replace(
            some,
            num_nodes=self.num_nodes[rows],
            distributions=drafts and replace(drafts, rows=drafts.rows[rows]),
        )

    def narrowed(self) -> TokenTree:
        """Returns valid trees without columns that are all padding, with `host_facts`. Synchronises once."""
        is_node = self.parents >= 0
        values = torch.stack([
            self.num_nodes, (self.depths * is_node).amax(1), self.tokens[:, 0], self.tokens.amax(1),
        ]).tolist()  # fmt: skip
        counts, depths, roots, largest = values
        facts = HostFacts(roots=roots, depths=depths, num_nodes=counts, num_tokens=max(largest) + 1)
        return replace(self.first_nodes(max(counts)), max_depth=max(depths), host_facts=facts)

    def first_nodes(self, most: int) -> TokenTree:
        """Returns the trees of the first `most` nodes, without `host_facts`."""
        return replace(self.mapped(lambda values, _: values[:, :most]), num_nodes=self.num_nodes.clamp_max(most))

    def without_probes(self) -> TokenTree:
        """Returns the tree for acceptance: probes lose their parent, so no path reaches them. No synchronisation."""
        if self.source is None:
            return self
        facts = self.host_facts and self.host_facts._replace(nodes=None)
        return replace(self, parents=torch.where((self.source & PROBE) != 0, -1, self.parents), host_facts=facts)

    def path_nodes(self, nodes: Tensor) -> Tensor:
        """Returns the paths from below the root down to `nodes`, (B,) int64, one of each sequence.

        The result is (B, D) int64: entry d is the node at depth d + 1, -1 past the end of the path.
        """
        path = self.parents.new_full((self.batch_size, self.max_depth + 1), -1)
        node = nodes.unsqueeze(1)
        for _ in range(self.max_depth):
            path.scatter_(1, self.depths.gather(1, node), node)
            node = self.parents.gather(1, node).clamp_min(0)
        return path[:, 1:]

    def path_tokens(self, nodes: Tensor) -> Tensor:
        """Returns the tokens along `path_nodes`: (B, D) int64, -1 past the end."""
        path = self.path_nodes(nodes)
        return torch.where(path >= 0, self.tokens.gather(1, path.clamp_min(0)), -1)

    def format(self, row: int = 0, decode: Callable[[int], str] | None = None) -> str:
        """Draws one tree as indented text. Synchronises with the host.

        >>> print(TokenTree.from_rows([TreeRow([7, 1, 2, 3], [-1, 0, 0, 1])]).format())
        7
        ├─ 1
        │  └─ 3
        └─ 2
        """
        tokens, parents = self.rows()[row]
        children: list[list[int]] = [[] for _ in tokens]
        for node, parent in enumerate(parents):
            if node:
                children[parent].append(node)
        label = (lambda token: repr(decode(token))) if decode else str
        lines = [label(tokens[0])]
        stack = [(child, "", child == children[0][-1]) for child in reversed(children[0])]
        while stack:
            node, indent, is_last = stack.pop()
            lines.append(f"{indent}{'└─' if is_last else '├─'} {label(tokens[node])}")
            below = indent + ("   " if is_last else "│  ")
            stack.extend((child, below, child == children[node][-1]) for child in reversed(children[node]))
        return "\n".join(lines)


def common_prefix_len(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the length of the common prefix of two texts."""
    # Bisection: a dozen comparisons of slices in C are faster than a Python loop over thousands of tokens.
    most = min(len(first), len(second))
    return bisect_left(range(most), True, key=lambda at: first[: at + 1] != second[: at + 1])


def ancestor_mask(parents: Tensor) -> Tensor:
    """Returns which nodes each node sees inside a tree: its ancestors and itself.

    For the tree 0-(1-(3), 2)::

        1 0 0 0
        1 1 0 0
        1 0 1 0
        1 1 0 1

    Args:
        parents: (B, N) int64; -1 means no parent.

    Returns:
        (B, N, N) bool, entry (b, i, j) is true when j is i or an ancestor of i.
    """
    width = parents.shape[1]
    node = torch.arange(width, device=parents.device)
    words = ancestor_words(parents)
    mask: Tensor = (words[:, :, node // 64] >> (node % 64) & 1).bool()
    return mask


def ancestor_words(parents: Tensor) -> Tensor:
    """Returns `ancestor_mask` as bit sets, for kernels: (B, N, ceil(N / 64)) int64.

    Bit j % 64 of word j // 64 of node i is set when j is i or an ancestor of i.
    """
    batch, width = parents.shape
    node = torch.arange(width, device=parents.device)
    words = torch.zeros(batch, width, -(-width // 64), dtype=torch.int64, device=node.device)
    words.scatter_(2, (node // 64).expand(batch, width).unsqueeze(2), (1 << node % 64).expand(batch, -1).unsqueeze(2))
    # Pointer doubling: each node adds the words of its present ancestor, then jumps to that ancestor's ancestor.
    ancestor = torch.where(parents < 0, node, parents)
    for _ in range((width - 1).bit_length()):
        words = words | words.gather(1, ancestor.unsqueeze(2).expand_as(words))
        ancestor = ancestor.gather(1, ancestor)
    return words


def _check_row(index: int, row: TreeRow) -> None:
    if not row.tokens:
        raise TreeError(f"tree {index} is empty. Expected at least the root.")
    if len(row.tokens) != len(row.parents):
        raise TreeError(f"tree {index} has {len(row.tokens)} tokens and {len(row.parents)} parents. Expected as many.")
    if row.parents[0] != -1:
        raise TreeError(f"tree {index}: the root's parent is {row.parents[0]}. Expected -1.")
    for node, parent in enumerate(row.parents):
        if node and not 0 <= parent < node:
            raise TreeError(f"tree {index}: node {node} has parent {parent}. Expected 0..{node - 1}.")
