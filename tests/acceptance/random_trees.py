"""Random batches of trees, their rows alone, and the same rows amid more padding."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from foretoken.acceptance.rules import LogProbs
from foretoken.core.token_tree import DraftDistributions, DrawKind, TokenTree, TreeRow

VOCAB = 6


@dataclass(frozen=True)
class Batch:
    """What a rule is given.

    Attributes:
        tree: B trees, with a distribution.
        log_probs: (B, N, V) float64, the target distribution after each node.
        unwarped: (B, N, V), the same at temperature 1, for the lenient rule.
        greedy: (B,) bool, for the lenient rule.
        seeds: (B,).
        root_positions: (B,).
    """

    tree: TokenTree
    log_probs: Tensor
    unwarped: Tensor
    greedy: Tensor
    seeds: Tensor
    root_positions: Tensor

    def at(self, table: Tensor) -> LogProbs:
        """One of the tables as a rule asks for it."""
        index = torch.arange(self.tree.batch_size)
        return lambda nodes: table[index, nodes]

    def alone(self, row: int) -> "Batch":
        """One row as it would be built with no other: no padding, its own bounds."""
        tree, distribution = self.tree, self.tree.distributions
        assert distribution is not None
        only, width = slice(row, row + 1), int(tree.num_nodes[row])
        cut = TokenTree.from_rows([tree.rows()[row]])
        own_distribution = DraftDistributions(
            kinds=distribution.kinds[only, :width],
            rows=distribution.rows[only],
            row_of=distribution.row_of[only, :width],
            max_siblings=_most_sampled_siblings(cut, distribution.kinds[only, :width]),
        )
        return Batch(
            replace(cut, distributions=own_distribution),
            self.log_probs[only, :width],
            self.unwarped[only, :width],
            self.greedy[only],
            self.seeds[only],
            self.root_positions[only],
        )

    def padded(self, nodes: int) -> "Batch":
        """The same trees with more padding, whose draft distributions, target rows and bounds are rubbish."""
        tree, distribution = self.tree, self.tree.distributions
        assert distribution is not None

        def wider(tensor: Tensor, value: float) -> Tensor:
            filler = torch.full((tensor.shape[0], nodes, *tensor.shape[2:]), value, dtype=tensor.dtype)
            return torch.cat([tensor, filler], dim=1)

        wide_distribution = replace(
            distribution,
            kinds=wider(distribution.kinds, DrawKind.INDEPENDENT),
            row_of=wider(distribution.row_of, 0),
            max_siblings=distribution.max_siblings + 2,
        )
        wide = replace(
            tree,
            tokens=wider(tree.tokens, 0),
            parents=wider(tree.parents, -1),
            depths=wider(tree.depths, 0),
            max_depth=tree.max_depth + nodes,
            distributions=wide_distribution,
        )
        return replace(
            self, tree=wide, log_probs=wider(self.log_probs, float("nan")), unwarped=wider(self.unwarped, float("nan"))
        )


@st.composite
def batches(draw: st.DrawFn, *, max_rows: int = 5, max_nodes: int = 40) -> Batch:
    """Ragged batches of trees of any form, whose nodes are chosen in all three ways."""
    lengths = draw(st.lists(st.integers(1, max_nodes), min_size=1, max_size=max_rows))
    return trees(lengths, draw(st.integers(0, 2**32)), draw(st.sampled_from([None, DrawKind.INDEPENDENT])))


def trees(lengths: Sequence[int], seed: int, kind: DrawKind | None = None) -> Batch:
    """Trees of given numbers of nodes; one number draws their form, since a draw for every node takes longer."""
    form = random.Random(seed)
    rows = [TreeRow([0] * n, [-1, *(form.randint(max(0, i - 6), i - 1) for i in range(1, n))]) for n in lengths]
    return _filled(rows, seed, kind)


@st.composite
def chains(draw: st.DrawFn, *, max_rows: int = 5, max_nodes: int = 9) -> Batch:
    """Ragged batches of chains of independent draws."""
    lengths = draw(st.lists(st.integers(1, max_nodes), min_size=1, max_size=max_rows))
    rows = [TreeRow([0] * n, list(range(-1, n - 1))) for n in lengths]
    return _filled(rows, draw(st.integers(0, 2**32)), DrawKind.INDEPENDENT)


def _filled(rows: list[TreeRow], seed: int, kind: DrawKind | None) -> Batch:
    """Random tokens, distributions and targets in given trees; `kind` None mixes the kinds."""
    generator = torch.Generator().manual_seed(seed)
    tree = TokenTree.from_rows(rows)
    batch, width = tree.tokens.shape
    shape = (batch, width)

    def random_distribution(count: int) -> Tensor:
        logits = torch.randn(batch, count, VOCAB, dtype=torch.float64, generator=generator) * 1.5
        return logits.log_softmax(-1)

    is_real = torch.arange(width) < tree.num_nodes.unsqueeze(1)
    tokens = torch.randint(VOCAB, shape, generator=generator)
    kinds = torch.randint(3, shape, generator=generator) if kind is None else torch.full(shape, kind.value)
    # Draft rows near the target's, so that accepting and rejecting are both common.
    near = random_distribution(width) * 0.3
    log_probs = random_distribution(width)
    rows_of_parents = (log_probs + near).softmax(-1)
    kinds = torch.where(is_real, kinds, 0)
    distribution = DraftDistributions(
        kinds=kinds,
        rows=rows_of_parents,
        row_of=torch.where(kinds == DrawKind.ONE_HOT, -1, tree.parents),
        max_siblings=_most_sampled_siblings(tree, kinds),
    )
    return Batch(
        replace(tree, tokens=torch.where(is_real, tokens, 0), distributions=distribution),
        log_probs,
        (log_probs * 0.7).log_softmax(-1),
        torch.rand(batch, generator=generator) < 0.3,
        torch.randint(2**62, (batch,), generator=generator),
        torch.randint(100, (batch,), generator=generator),
    )


def _most_sampled_siblings(tree: TokenTree, kinds: Tensor) -> int:
    is_sampled = (kinds != DrawKind.ONE_HOT) & (tree.parents >= 0)
    counts = torch.zeros_like(tree.parents).scatter_add_(1, tree.parents.clamp_min(0), is_sampled.long())
    return int(counts.max())
