"""Growing trees: every kind of request gets children chosen as its verification supposes, also in shapes with gaps."""

import pytest
import torch
from torch import Tensor

from foretoken.core.sampling_params import SamplingParams
from foretoken.core.token_tree import DrawKind, TokenTree
from foretoken.sampling.batch import SamplingBatch, SamplingRequest
from foretoken.sampling.draft_draws import DraftDraws
from foretoken.sampling.noise import Purpose
from foretoken.trees.choices import TreeShape
from foretoken.trees.growth import TreeGrowth

VOCAB, POSITION = 4, 9
LAW = torch.tensor([0.4, 0.3, 0.2, 0.1])
GAPS = TreeShape.from_choices([[0], [2], [0, 1]])  # no rank 1 after the root, no rank 0 below it


def grow(shape: TreeShape, many: int, temperature: float, *, is_coupled: bool) -> tuple[TokenTree, SamplingBatch]:
    """Trees whose draft distribution is LAW everywhere, one seed a row."""
    params = SamplingParams(temperature=temperature)
    batch = SamplingBatch.build([SamplingRequest(params=params, seed=seed) for seed in range(many)], VOCAB)
    positions = torch.full((many,), POSITION)
    growth = TreeGrowth(shape, torch.full((many,), 7), DraftDraws.build(batch, [is_coupled] * many, positions))
    for node in range(shape.num_nodes):
        growth.expand(node, LAW.log().expand(many, VOCAB))
    return growth.finish(range(many), [shape.depth] * many, [7] * many), batch


def assert_is_law(counts: Tensor, law: Tensor) -> None:
    """Chi-square at level 1e-6, for fixed seeds."""
    expected = law.double() * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    degrees = torch.tensor((len(law) - 1) / 2, dtype=torch.float64)
    assert torch.special.gammaincc(degrees, statistic / 2) > 1e-6


@pytest.mark.parametrize("shape", [TreeShape.cartesian((2, 1)), GAPS], ids=["dense", "gaps"])
def test_sampled_children_have_the_law_they_are_said_to_have(shape: TreeShape) -> None:
    """The first from LAW, the second from LAW without it, an only child from LAW, whatever their ranks."""
    tree, _ = grow(shape, 20_000, 1.0, is_coupled=False)
    tree.validate()
    assert tree.law is not None
    first, second, below = tree.tokens[:, 1], tree.tokens[:, 2], tree.tokens[:, 3]
    assert (tree.law.kinds[:, 1:3] == DrawKind.WITHOUT_REPLACEMENT).all()
    assert (tree.law.kinds[:, 3] == DrawKind.INDEPENDENT).all()
    torch.testing.assert_close(tree.law.rows[0], LAW.expand_as(tree.law.rows[0]))
    ordered = LAW[:, None] * LAW / (1 - LAW[:, None])
    is_pair = ~torch.eye(VOCAB, dtype=torch.bool)
    assert_is_law((first * VOCAB + second).bincount(minlength=16)[is_pair.flatten()], ordered[is_pair])
    assert_is_law(below.bincount(minlength=VOCAB), LAW)
    assert_is_law((first * VOCAB + below).bincount(minlength=16), (LAW[:, None] * LAW).flatten())


def test_coupled_children_are_the_targets_best_guesses() -> None:
    """Rank by log q plus the target's own noise at that position; nothing is said to be drawn."""
    tree, batch = grow(GAPS, 200, 1.0, is_coupled=True)
    for node, depth, rank in ((1, 0, 0), (2, 0, 2), (3, 1, 1)):
        positions = torch.full((200,), POSITION + depth + 1)
        keys = LAW.log() + batch.noise.gumbel(positions, Purpose.TARGET, VOCAB)
        assert torch.equal(tree.tokens[:, node], keys.argsort(dim=1, descending=True)[:, rank])
    assert tree.law is None


def test_greedy_children_are_the_most_probable() -> None:
    tree, _ = grow(GAPS, 2, 0.0, is_coupled=False)
    assert tree.tokens.tolist() == [[7, 0, 2, 1]] * 2
    assert tree.law is None


def test_tokens_past_the_support_are_not_said_to_be_drawn() -> None:
    params = SamplingParams(top_k=1)
    batch = SamplingBatch.build([SamplingRequest(params=params, seed=1)], VOCAB)
    growth = TreeGrowth(
        TreeShape.cartesian((3,)), torch.tensor([7]), DraftDraws.build(batch, [False], torch.tensor([3]))
    )
    growth.expand(0, LAW.log().unsqueeze(0))
    tree = growth.finish([0], [1], [7])
    tree.validate()
    assert tree.law is not None
    assert tree.law.kinds[0].tolist() == [0, 2, 0, 0]


def test_sequences_without_room_keep_their_root() -> None:
    batch = SamplingBatch.build([SamplingRequest(params=SamplingParams(), seed=seed) for seed in range(2)], VOCAB)
    shape = TreeShape.chain(2)
    growth = TreeGrowth(shape, torch.tensor([7, 8]), DraftDraws.build(batch, [False] * 2, torch.tensor([3, 4])))
    for node in range(3):
        growth.expand(node, LAW.log().expand(2, VOCAB))
    tree = growth.finish([0, 2], [2, 0, 1], [7, 9, 8])
    tree.validate()
    assert tree.num_nodes.tolist() == [3, 1, 2]
    assert tree.tokens[:, 0].tolist() == [7, 9, 8]
    assert tree.parents.tolist() == [[-1, 0, 1], [-1, -1, -1], [-1, 0, -1]]
    assert tree.law is not None
    assert tree.law.row_of.tolist() == [[-1, 0, 1], [-1, -1, -1], [-1, 0, -1]]


def test_levels_and_what_they_see() -> None:
    batch = SamplingBatch.build([SamplingRequest(params=SamplingParams(), seed=0)], VOCAB)
    draws = DraftDraws.build(batch, [False], torch.tensor([3]))
    growth = TreeGrowth(TreeShape.cartesian((2, 2)), torch.tensor([7]), draws)
    assert [growth.level(depth) for depth in range(3)] == [[0], [1, 2], [3, 4, 5, 6]]
    assert growth.parents_of([3, 4, 5, 6]) == [1, 1, 2, 2]
    assert growth.visible([1, 2])[0].int().tolist() == [[1, 0], [0, 1]]
    assert growth.visible([4, 5])[0].int().tolist() == [[1, 0, 0, 1, 0], [0, 1, 0, 0, 1]]
