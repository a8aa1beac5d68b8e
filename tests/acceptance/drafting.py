"""Drafters and targets of the exact tests: tables of distributions, and every tree drawn from them.

A proposal says which lists of children a node in a context can get, and how probable each is.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations, product
from typing import NamedTuple

import torch
from enumeration import Drafts
from torch import Tensor

from foretoken.core.token_tree import DraftDistributions, DrawKind, TokenTree, TreeRow
from foretoken.trees.stopping import StopRule
from tests.tree_checks import check_tree


class Child(NamedTuple):
    """A drafted token, how it was chosen, and the distribution it was drawn from (None: one-hot)."""

    token: int
    kind: DrawKind
    distribution: Tensor | None


Proposal = Callable[[int], list[tuple[list[Child], float]]]


def random_table(vocab: int, depth: int, seed: int) -> Tensor:
    """(C, V) float64, a random distribution after every context of at most `depth` tokens, peaked like a model's."""
    generator = torch.Generator().manual_seed(seed)
    contexts = sum(vocab**d for d in range(depth + 1))
    return _normalised(torch.rand(contexts, vocab, dtype=torch.float64, generator=generator) ** 3 + 1e-3)


def tables(case: str, vocab: int, depth: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Target and draft tables of a named special case."""
    p, q = random_table(vocab, depth, seed), random_table(vocab, depth, seed + 1000)
    half = torch.arange(vocab) < vocab // 2
    one_hot = torch.eye(vocab, dtype=torch.float64)
    special = {
        "dense": (p, q),
        "zeros in p": (_largest(p, 2), q),  # as top-k leaves them
        "zeros in q": (p, _largest(q, 2)),
        "equal": (p, p.clone()),
        "disjoint": (_normalised(p * half), _normalised(q * ~half)),
        "one-hot p": (one_hot[p.argmax(1)], q),
        "one-hot q": (p, one_hot[q.argmax(1)]),
    }
    return special[case]


CASES = ("dense", "zeros in p", "zeros in q", "equal", "disjoint", "one-hot p", "one-hot q")


def independent(q: Tensor, count: int) -> Proposal:
    """`count` independent draws, duplicates included."""
    rows = list(q)

    def propose(context: int) -> list[tuple[list[Child], float]]:
        row = rows[context]
        return [
            ([Child(x, DrawKind.INDEPENDENT, row) for x in draw], row[list(draw)].prod().item())
            for draw in product(range(len(row)), repeat=count)
        ]

    return propose


def without_replacement(q: Tensor, count: int) -> Proposal:
    """Up to `count` different tokens in draw order; fewer where q has fewer."""
    rows = list(q)

    def propose(context: int) -> list[tuple[list[Child], float]]:
        row = rows[context]
        ways = []
        for draw in permutations(range(len(row)), min(count, int((row > 0).sum()))):
            prob, left = 1.0, row.tolist()
            for x in draw:
                prob *= left[x] / sum(left) if left[x] > 0 else 0.0
                left[x] = 0.0  # not by subtraction: what is left may be 1e-40
            ways.append(([Child(x, DrawKind.WITHOUT_REPLACEMENT, row) for x in draw], prob))
        return ways

    return propose


def for_all(proposal: Proposal) -> Proposal:
    """What a proposal draws after the root, after every context: one row of logits serves a whole level."""
    return lambda _: proposal(0)


def best(q: Tensor, count: int) -> Proposal:
    """The `count` most probable tokens, one-hot."""
    return lambda context: [([Child(x, DrawKind.ONE_HOT, None) for x in q[context].topk(count).indices.tolist()], 1.0)]


def best_and_one(q: Tensor, count: int) -> Proposal:
    """The `count - 1` most probable tokens, one-hot, and one drawn from the others."""

    def propose(context: int) -> list[tuple[list[Child], float]]:
        fixed = q[context].topk(count - 1).indices.tolist()
        others = q[context].clone()
        others[fixed] = 0.0
        if others.sum() == 0:
            others[[x for x in range(len(others)) if x not in fixed]] = 1.0
        others = _normalised(others)
        ways = independent(others.unsqueeze(0), 1)(0)
        return [([Child(x, DrawKind.ONE_HOT, None) for x in fixed] + draw, prob) for draw, prob in ways]

    return propose


def ending(proposal: Proposal, q: Tensor, threshold: float) -> Proposal:
    """Nothing below a node whose own probability falls short of a threshold, or below its descendants."""

    def propose(context: int) -> list[tuple[list[Child], float]]:
        node = context
        while node:
            node, token = divmod(node - 1, q.shape[1])
            if q[node, token] < threshold:
                return [([], 1.0)]
        return proposal(context)

    return propose


def stopped(proposal: Proposal, q: Tensor, rule: StopRule) -> Proposal:
    """Nothing below a node that ends its draft by a rule, or below its descendants."""
    vocab = q.shape[1]

    def propose(context: int) -> list[tuple[list[Child], float]]:
        path: list[tuple[int, int]] = []  # contexts and tokens, from the last node up
        node = context
        while node:
            node, token = divmod(node - 1, vocab)
            path.append((node, token))
        total = torch.zeros(1, 1)
        for depth, (above, token) in enumerate(reversed(path)):
            log_probs = q[above].float().log().view(1, 1, -1)
            own = rule.log_estimates(log_probs, torch.zeros(1, dtype=torch.int64), log_probs[..., token], depth)
            total = total + own
            if not (rule.thresholds.token_passes(own, None) & rule.thresholds.path_passes(total)).all():
                return [([], 1.0)]
        return proposal(context)

    return propose


def without_improbable(proposal: Proposal, q: Tensor, threshold: float) -> Proposal:
    """Children whose own probability falls short of a threshold are left out, drawn or not."""
    return lambda context: [
        ([child for child in children if q[context, child.token] >= threshold], prob)
        for children, prob in proposal(context)
    ]


def joined(*proposals: Proposal) -> Proposal:
    """The children of several proposals, drawn independently of each other."""

    def propose(context: int) -> list[tuple[list[Child], float]]:
        ways: list[tuple[list[Child], float]] = [([], 1.0)]
        for proposal in proposals:
            ways = [(a + b, p * q) for a, p in ways for b, q in proposal(context)]
        return ways

    return propose


def drafts(levels: Sequence[Proposal], vocab: int) -> Drafts:
    """Every tree whose nodes at depth d get children by `levels[d]`."""
    trees: list[_Growing] = [_Growing()]
    for depth, proposal in enumerate(levels):
        for node in range(max(len(tree.tokens) for tree in trees)):
            grown = []
            for tree in trees:
                if node < len(tree.tokens) and tree.depths[node] == depth:
                    ways = [(c, p) for c, p in proposal(tree.contexts[node]) if p > 0]
                    grown += [tree.with_children(node, children, prob, vocab) for children, prob in ways]
                else:
                    grown.append(tree)
            trees = grown
    return _as_drafts(trees, vocab)


class _Growing:
    """A tree in the making, with what a `TokenTree` does not hold."""

    def __init__(self) -> None:
        self.tokens, self.parents, self.depths, self.contexts = [0], [-1], [0], [0]
        self.kinds, self.row_of = [0], [-1]
        self.rows: list[Tensor] = []
        self.prob = 1.0

    def with_children(self, node: int, children: Sequence[Child], prob: float, vocab: int) -> "_Growing":
        copy = _Growing()
        for name in ("tokens", "parents", "depths", "contexts", "kinds", "row_of", "rows"):
            setattr(copy, name, list(getattr(self, name)))
        copy.prob = self.prob * prob
        for child in children:
            index = -1
            if child.distribution is not None:
                index = next((i for i, row in enumerate(copy.rows) if row is child.distribution), len(copy.rows))
                copy.rows += [child.distribution] if index == len(copy.rows) else []
            copy.tokens.append(child.token)
            copy.parents.append(node)
            copy.depths.append(self.depths[node] + 1)
            copy.contexts.append(self.contexts[node] * vocab + 1 + child.token)
            copy.kinds.append(int(child.kind))
            copy.row_of.append(index)
        return copy


def _as_drafts(trees: Sequence[_Growing], vocab: int) -> Drafts:
    tree = TokenTree.from_rows([TreeRow(t.tokens, t.parents) for t in trees])

    def padded(field: str, filler: int) -> Tensor:
        return torch.tensor([getattr(t, field) + [filler] * (tree.width - len(t.tokens)) for t in trees])

    num_rows = max(len(t.rows) for t in trees)
    if num_rows:
        rows = torch.zeros(len(trees), num_rows, vocab, dtype=torch.float64)
        for index, t in enumerate(trees):
            rows[index, : len(t.rows)] = torch.stack(t.rows) if t.rows else 0.0
        distribution = DraftDistributions(
            kinds=padded("kinds", 0), rows=rows, row_of=padded("row_of", -1), max_siblings=_siblings(trees)
        )
        tree = replace(tree, distributions=distribution)
    check_tree(tree)
    probs = torch.tensor([t.prob for t in trees], dtype=torch.float64)
    assert abs(probs.sum().item() - 1) < 1e-12, "the proposals' probabilities do not sum to 1"
    return Drafts(tree=tree, contexts=padded("contexts", 0), probs=probs)


def _siblings(trees: Sequence[_Growing]) -> int:
    """Most sampled children of one node."""
    sampled = [[p for p, kind in zip(t.parents, t.kinds, strict=True) if kind] for t in trees]
    return max((parents.count(p) for parents in sampled for p in set(parents)), default=0)


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def _largest(table: Tensor, count: int) -> Tensor:
    """The table with all but the `count` largest of each row set to 0."""
    return _normalised(torch.where(table >= table.topk(count).values[:, -1:], table, 0.0))
