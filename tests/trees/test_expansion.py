"""Growing trees: every kind of request gets children chosen as its verification supposes, also in shapes with gaps."""

import pytest
import torch
from chi_square import chi_square_p_value
from torch import Tensor

from foretoken.core.sampling_params import SamplingParams
from foretoken.core.token_tree import DrawKind, TokenTree
from foretoken.sampling.batch import SamplingBatch, SamplingRequest, warp
from foretoken.sampling.draft_draws import DraftDraws
from foretoken.sampling.noise import Purpose
from foretoken.trees.choices import TreeShape
from foretoken.trees.expansion import TreeExpansion
from tests.tree_checks import check_tree

VOCAB, POSITION = 4, 9
DISTRIBUTION = torch.tensor([0.4, 0.3, 0.2, 0.1])
GAPS = TreeShape.from_choices([[0], [2], [0, 1]])  # no rank 1 after the root, no rank 0 below it


def expanded(shape: TreeShape, many: int, temperature: float, *, is_coupled: bool) -> tuple[TokenTree, SamplingBatch]:
    """Trees whose draft distribution is DISTRIBUTION everywhere, one seed a row."""
    params = SamplingParams(temperature=temperature)
    batch = SamplingBatch.build([SamplingRequest(params=params, seed=seed) for seed in range(many)], VOCAB)
    positions = torch.full((many,), POSITION)
    expansion = TreeExpansion(shape, torch.full((many,), 7), DraftDraws.build(batch, [is_coupled] * many, positions))
    for depth in range(shape.depth):
        expansion.grow(depth, DISTRIBUTION.log().expand(many, expansion.frontier(depth).tokens.shape[1], VOCAB))
    return expansion.finish(range(many), [shape.depth] * many, [7] * many), batch


def assert_is_distribution(counts: Tensor, distribution: Tensor) -> None:
    assert chi_square_p_value(counts, distribution) > 1e-6


@pytest.mark.parametrize("shape", [TreeShape.cartesian((2, 1)), GAPS], ids=["dense", "gaps"])
def test_sampled_children_have_the_distribution_they_are_said_to_have(shape: TreeShape) -> None:
    """The first from DISTRIBUTION, the second from it without the first, an only child from it, whatever the ranks."""
    tree, _ = expanded(shape, 20_000, 1.0, is_coupled=False)
    check_tree(tree)
    assert tree.distributions is not None
    first, second, below = tree.tokens[:, 1], tree.tokens[:, 2], tree.tokens[:, 3]
    assert (tree.distributions.kinds[:, 1:3] == DrawKind.WITHOUT_REPLACEMENT).all()
    assert (tree.distributions.kinds[:, 3] == DrawKind.INDEPENDENT).all()
    torch.testing.assert_close(tree.distributions.rows[0], DISTRIBUTION.expand_as(tree.distributions.rows[0]))
    ordered = DISTRIBUTION[:, None] * DISTRIBUTION / (1 - DISTRIBUTION[:, None])
    is_pair = ~torch.eye(VOCAB, dtype=torch.bool)
    assert_is_distribution((first * VOCAB + second).bincount(minlength=16)[is_pair.flatten()], ordered[is_pair])
    assert_is_distribution(below.bincount(minlength=VOCAB), DISTRIBUTION)
    assert_is_distribution(
        (first * VOCAB + below).bincount(minlength=16), (DISTRIBUTION[:, None] * DISTRIBUTION).flatten()
    )


def test_coupled_children_are_the_targets_best_guesses() -> None:
    """Rank by log q plus the target's own noise at that position; nothing is said to be drawn."""
    tree, batch = expanded(GAPS, 200, 1.0, is_coupled=True)
    for node, depth, rank in ((1, 0, 0), (2, 0, 2), (3, 1, 1)):
        positions = torch.full((200,), POSITION + depth + 1)
        keys = DISTRIBUTION.log() + batch.noise.gumbel(positions, Purpose.TARGET, VOCAB)
        assert torch.equal(tree.tokens[:, node], keys.argsort(dim=1, descending=True)[:, rank])
    assert tree.distributions is None


def test_greedy_children_are_the_most_probable() -> None:
    tree, _ = expanded(GAPS, 2, 0.0, is_coupled=False)
    assert tree.tokens.tolist() == [[7, 0, 2, 1]] * 2
    assert tree.distributions is None


def test_tokens_past_the_support_are_not_said_to_be_drawn() -> None:
    params = SamplingParams(top_k=1)
    batch = SamplingBatch.build([SamplingRequest(params=params, seed=1)], VOCAB)
    expansion = TreeExpansion(
        TreeShape.cartesian((3,)), torch.tensor([7]), DraftDraws.build(batch, [False], torch.tensor([3]))
    )
    expansion.grow(0, DISTRIBUTION.log().view(1, 1, VOCAB))
    tree = expansion.finish([0], [1], [7])
    check_tree(tree)
    assert tree.distributions is not None
    assert tree.distributions.kinds[0].tolist() == [0, 2, 0, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_draw_nothing(value: float) -> None:
    """Their children count as one-hot, which is true of any token; those of other nodes are drawn as ever."""
    batch = SamplingBatch.build([SamplingRequest(params=SamplingParams(), seed=1)], VOCAB)
    draws = DraftDraws.build(batch, [False], torch.tensor([3]))
    expansion = TreeExpansion(TreeShape.cartesian((2, 2)), torch.tensor([7]), draws)
    expansion.grow(0, DISTRIBUTION.log().view(1, 1, VOCAB))
    logits = DISTRIBUTION.log().repeat(1, 2, 1)
    logits[0, 1, 2] = value
    expansion.grow(1, logits)
    tree = expansion.finish([0], [2], [7])
    assert tree.distributions is not None
    assert tree.distributions.kinds[0].tolist() == [0, 2, 2, 2, 2, 0, 0]
    assert tree.distributions.row_of[0].tolist() == [-1, 0, 0, 1, 1, -1, -1]
    assert ((tree.tokens >= 0) & (tree.tokens < 8)).all()


def test_probabilities_that_underflow_are_not_said_to_be_drawn() -> None:
    """After a token with all of the probability that float32 can tell, a second one has none."""
    batch = SamplingBatch.build([SamplingRequest(params=SamplingParams(temperature=0.1), seed=1)], VOCAB)
    draws = DraftDraws.build(batch, [False], torch.tensor([3]))
    expansion = TreeExpansion(TreeShape.cartesian((2,)), torch.tensor([7]), draws)
    expansion.grow(0, torch.tensor([0.0, 30.0, 0.0, 0.0]).view(1, 1, VOCAB))
    tree = expansion.finish([0], [1], [7])
    check_tree(tree)
    assert tree.distributions is not None
    assert tree.tokens[0, 1] == 1
    assert tree.distributions.kinds[0].tolist() == [0, 2, 0]


def test_sequences_without_room_keep_their_root() -> None:
    batch = SamplingBatch.build([SamplingRequest(params=SamplingParams(), seed=seed) for seed in range(2)], VOCAB)
    shape = TreeShape.chain(2)
    expansion = TreeExpansion(shape, torch.tensor([7, 8]), DraftDraws.build(batch, [False] * 2, torch.tensor([3, 4])))
    for depth in range(2):
        expansion.grow(depth, DISTRIBUTION.log().expand(2, 1, VOCAB))
    tree = expansion.finish([0, 2], [2, 0, 1], [7, 9, 8])
    check_tree(tree)
    assert tree.num_nodes.tolist() == [3, 1, 2]
    assert tree.tokens[:, 0].tolist() == [7, 9, 8]
    assert tree.parents.tolist() == [[-1, 0, 1], [-1, -1, -1], [-1, 0, -1]]
    assert tree.distributions is not None
    assert tree.distributions.row_of.tolist() == [[-1, 0, 1], [-1, -1, -1], [-1, 0, -1]]


# Requests side by side: sampled, truncated in every way, coupled with and without truncation, greedy.
MIXED = [
    (SamplingParams(temperature=0.7, seed=1), False),
    (SamplingParams(temperature=1.4, seed=2, top_p=0.8, min_p=0.02), False),
    (SamplingParams(temperature=0.9, seed=3), True),
]
REQUESTS = {
    "greedy": [(SamplingParams(temperature=0.0, seed=seed), seed == 1) for seed in range(3)],
    "coupled": [(SamplingParams(temperature=0.5 + seed, seed=seed, top_k=20), True) for seed in range(3)],
    "sampled": [(SamplingParams(temperature=0.5 + seed, seed=seed), False) for seed in range(3)],
    "mixed": MIXED,
    "mixed with greedy": [*MIXED[:2], (SamplingParams(temperature=0.0), False)],
    "penalised": [(SamplingParams(seed=seed, logit_bias={3: 5.0}, top_k=25 + seed), seed == 2) for seed in range(3)],
}
WIDE = 37
SHAPES = {
    "widths": TreeShape.cartesian((3, 2, 2)),
    "chain": TreeShape.chain(3),
    "leaves at inner levels": TreeShape.from_choices([
        [0], [1], [2], [4], [0, 0], [0, 1], [0, 3], [2, 1], [2, 5], [0, 0, 0], [0, 3, 2], [2, 5, 0],
    ]),
    "gaps": TreeShape.from_choices([[1], [3], [6], [1, 0], [1, 2], [6, 4], [1, 2, 1], [6, 4, 4]]),
}  # fmt: skip


def obvious(
    shape: TreeShape, requests: list[tuple[SamplingParams, bool]], logits: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Tokens, scores, kinds, rows' indices and rows: one request and one node at a time.

    Past the support of the draft distribution any token will do: it is -1 here.

    Args:
        shape: To fill.
        requests: Parameters, and whether the request is coupled; the one at i has its root at POSITION + i.
        logits: (B, N, V) after every node.
    """
    batch = SamplingBatch.build([SamplingRequest(params=p, seed=p.seed or 0) for p, _ in requests], WIDE)
    count, size = len(requests), shape.num_nodes
    tokens, kinds = (torch.zeros(count, size, dtype=torch.int64) for _ in range(2))
    tokens[:, 0] = 7
    scores, row_of = torch.zeros(count, size), torch.full((count, size), -1)
    families = [[c for c, parent in enumerate(shape.parents) if parent == node] for node in range(size)]
    inner = [node for node in range(size) if families[node]]
    distributions = torch.zeros(count, len(inner), WIDE)
    for row, (params, is_coupled) in enumerate(requests):
        only = batch.select(torch.tensor([row]))
        for index, node in enumerate(inner):
            is_sampled = not params.is_greedy and not is_coupled
            raw = logits[row, node].unsqueeze(0)
            log_q = raw.log_softmax(1) if params.is_greedy else warp(raw, only)
            keys, root = log_q[0], torch.tensor([POSITION + row])
            if is_sampled:
                keys = keys + only.noise.gumbel(root, Purpose.DRAFT, WIDE, lane=node)[0]
            elif not params.is_greedy:
                keys = keys + only.noise.gumbel(root + shape.depths[node] + 1, Purpose.TARGET, WIDE)[0]
            order = keys.argsort(descending=True)
            distributions[row, index] = log_q[0].exp()
            for place, child in enumerate(families[node]):
                token = order[place if is_sampled else shape.ranks[child]]
                has_support = bool(keys[token] > float("-inf"))
                tokens[row, child] = token if has_support else -1
                scores[row, child] = scores[row, node] + log_q[0, token]
                if is_sampled and has_support:
                    is_only = len(families[node]) == 1
                    kinds[row, child] = DrawKind.INDEPENDENT if is_only else DrawKind.WITHOUT_REPLACEMENT
                    row_of[row, child] = index
    has_distribution = any(not params.is_greedy and not is_coupled for params, is_coupled in requests)
    return tokens, scores, kinds, row_of, distributions if has_distribution else None


def assert_is_obvious(tree: TokenTree, expected: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]) -> None:
    """Equal bit for bit."""
    check_tree(tree)
    tokens, scores, kinds, row_of, distributions = expected
    assert tree.scores is not None
    assert torch.equal(torch.where(tokens < 0, -1, tree.tokens), tokens)
    assert torch.equal(tree.scores, scores)
    assert (tree.distributions is None) == (distributions is None)
    if tree.distributions is not None and distributions is not None:
        assert torch.equal(tree.distributions.kinds, kinds)
        assert torch.equal(tree.distributions.row_of, row_of)
        assert torch.equal(tree.distributions.rows, distributions)


def inner_nodes(shape: TreeShape, depth: int) -> list[int]:
    """Nodes of a depth that have children."""
    return sorted({parent for parent in shape.parents if parent >= 0 and shape.depths[parent] == depth})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", REQUESTS)
def test_a_level_at_once_is_its_nodes_one_by_one(kind: str, shape: str) -> None:
    """Frontiers are the nodes with children, each knows its parent, and the tree is that of one node at a time."""
    filled, requests = SHAPES[shape], REQUESTS[kind]
    logits = 3 * torch.randn(3, filled.num_nodes, WIDE, generator=torch.Generator().manual_seed(5))
    batch = SamplingBatch.build([SamplingRequest(params=p, seed=p.seed or 0) for p, _ in requests], WIDE)
    draws = DraftDraws.build(batch, [is_coupled for _, is_coupled in requests], POSITION + torch.arange(3))
    expansion = TreeExpansion(filled, torch.full((3,), 7), draws)
    above = None
    for depth in range(filled.depth):
        nodes, frontier = inner_nodes(filled, depth), expansion.frontier(depth)
        assert torch.equal(frontier.tokens, expansion.tokens[:, nodes])
        if above is not None:
            assert torch.equal(
                frontier.inherited(above)[:, :, 0], torch.tensor([[filled.parents[n] for n in nodes]] * 3)
            )
        expansion.grow(depth, logits[:, nodes])
        above = torch.tensor(nodes).view(1, -1, 1).expand(3, -1, 2)
    assert_is_obvious(expansion.finish(range(3), [9] * 3, [7] * 3), obvious(filled, requests, logits))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", REQUESTS)
def test_one_row_of_logits_serves_a_level(kind: str, shape: str) -> None:
    """The tree is that of the same logits after each node; the distribution of a level is stated once."""
    filled, requests = SHAPES[shape], REQUESTS[kind]
    by_depth = 3 * torch.randn(3, filled.depth, WIDE, generator=torch.Generator().manual_seed(6))
    batch = SamplingBatch.build([SamplingRequest(params=p, seed=p.seed or 0) for p, _ in requests], WIDE)
    draws = DraftDraws.build(batch, [is_coupled for _, is_coupled in requests], POSITION + torch.arange(3))
    expansion = TreeExpansion(filled, torch.full((3,), 7), draws)
    for depth in range(filled.depth):
        expansion.grow(depth, by_depth[:, depth : depth + 1])
    tree = expansion.finish(range(3), [9] * 3, [7] * 3)
    everywhere = by_depth[:, [min(depth, filled.depth - 1) for depth in filled.depths]]
    tokens, scores, kinds, row_of, distributions = obvious(filled, requests, everywhere)
    if distributions is not None:
        inner = sorted(set(filled.parents) - {-1})
        depth_of = torch.tensor([filled.depths[node] for node in inner])
        distributions = torch.stack(
            [distributions[:, (depth_of == depth).nonzero()[0, 0]] for depth in range(filled.depth)], dim=1
        )
        row_of = torch.where(row_of < 0, -1, depth_of[row_of.clamp_min(0)])
    assert_is_obvious(tree, (tokens, scores, kinds, row_of, distributions))


def test_children_past_the_support_in_a_level() -> None:
    """Below a node with two possible tokens the third child is a choice; its neighbours' children are draws."""
    batch = SamplingBatch.build([SamplingRequest(params=SamplingParams(), seed=4)], VOCAB)
    expansion = TreeExpansion(
        TreeShape.cartesian((2, 3)), torch.tensor([7]), DraftDraws.build(batch, [False], torch.tensor([3]))
    )
    expansion.grow(0, DISTRIBUTION.log().view(1, 1, VOCAB))
    narrow = torch.tensor([0.0, 0.5, 0.5, 0.0]).log()
    expansion.grow(1, torch.stack([DISTRIBUTION.log(), narrow]).unsqueeze(0))
    tree = expansion.finish([0], [2], [7])
    check_tree(tree)
    assert tree.distributions is not None
    assert tree.distributions.kinds[0, 3:].tolist() == [2, 2, 2, 2, 2, 0]
    assert tree.distributions.row_of[0, 3:].tolist() == [1, 1, 1, 2, 2, -1]
    assert sorted(tree.tokens[0, 6:8].tolist()) == [1, 2]
    assert len(set(tree.tokens[0, 6:].tolist())) == 3


def test_frontiers() -> None:
    batch = SamplingBatch.build([SamplingRequest(params=SamplingParams(temperature=0.0), seed=0)], VOCAB)
    draws = DraftDraws.build(batch, [False], torch.tensor([3]))
    expansion = TreeExpansion(TreeShape.from_choices([[0], [1], [2], [1, 0], [2, 3]]), torch.tensor([7]), draws)
    expansion.grow(0, DISTRIBUTION.log().view(1, 1, VOCAB))
    assert expansion.frontier(1).tokens.tolist() == [[1, 2]], "a node without children costs nothing"
    origins = [[0], [2], [0, 0], [2, 1], [2, 0], [0, 0, 0], [2, 0, 0], [2, 1, 0]]
    expansion = TreeExpansion(TreeShape.from_choices(origins), torch.tensor([7]), draws)
    found = [expansion.frontier(depth).origins for depth in range(3)]
    assert [None if each is None else each.tolist() for each in found] == [None, [[0, 0]], [[0, 1, 1]]]
    expansion = TreeExpansion(TreeShape.from_choices([[0], [1], [0, 0], [1, 0], [0, 0, 0]]), torch.tensor([7]), draws)
    found = [expansion.frontier(depth).origins for depth in range(3)]
    assert [None if each is None else each.tolist() for each in found] == [None, [[0, 0]], [[0]]], "fewer than above"
