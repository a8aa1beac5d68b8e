"""The walk made by a kernel is `accept_chosen`, and requests served by kernels get what the walk node by node gives."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from kernel_device import DEVICE, OnDevice, few, random_parents
from torch import Tensor

from foretoken.acceptance.rules import accept_chosen
from foretoken.acceptance.select import AcceptancePolicy, accept
from foretoken.acceptance.triton_walk import Walk, walk_chosen
from foretoken.core.sampling_params import SamplingParams
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.sampling.batch import SamplingBatch, SamplingRequest
from foretoken.sampling.node_scores import NodeScores

HUGE = 1 << 40  # a token that does not fit in 32 bits


def random_batch(sizes: list[tuple[int, int]], vocab_size: int, seed: int, offset: int = 0) -> tuple[TokenTree, Tensor]:
    """Trees with equal tokens among siblings, and chosen tokens that often match; sizes: (nodes, reach) a sequence."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(*shape: int) -> Tensor:
        return torch.randint(vocab_size, shape, generator=generator) + offset

    tree = TokenTree.from_rows([TreeRow(tokens(n).tolist(), random_parents(n, r, generator)) for n, r in sizes])
    return tree, tokens(tree.batch_size, tree.width)


def walked(tree: TokenTree, chosen: Tensor) -> Walk:
    return walk_chosen(tree.tokens.to(DEVICE), tree.parents.to(DEVICE), chosen.to(DEVICE), tree.max_depth)


def assert_walk(tree: TokenTree, chosen: Tensor, walk: Walk) -> None:
    expected = accept_chosen(tree, chosen)
    assert [t.dtype for t in walk] == [torch.int64] * 3
    assert torch.equal(walk.path.cpu(), expected.path)
    assert torch.equal(walk.num_accepted.cpu(), expected.num_accepted)
    assert torch.equal(walk.next_token.cpu(), expected.next_token)


@pytest.mark.parametrize(
    ("nodes", "reach", "vocab_size"), few([1, 2, 3, 8, 31, 33, 64, 65, 511, 512], [1, 3, 600], [1, 2])
)
def test_random_trees(nodes: int, reach: int, vocab_size: int) -> None:
    tree, chosen = random_batch([(nodes, reach)], vocab_size, seed=nodes * 1000 + reach)
    assert_walk(tree, chosen, walked(tree, chosen))


def test_ragged_batches_with_padding() -> None:
    lengths = set()
    for seed in range(6):
        sizes = [(1, 1), (60, 9), (2, 1), (30, 4), (300, 30), (7, 1), (70, 1), (300, 8)]
        tree, chosen = random_batch(sizes, 2, seed)
        assert_walk(tree, chosen, walked(tree, chosen))
        lengths |= set(accept_chosen(tree, chosen).num_accepted.tolist())
    assert len(lengths) >= 5, "the walks should differ"


def test_a_whole_chain_is_accepted() -> None:
    tree, chosen = random_batch([(512, 1)], 1000, seed=5)
    chosen[0, :-1] = tree.tokens[0, 1:]
    walk = walked(tree, chosen)
    assert_walk(tree, chosen, walk)
    assert walk.num_accepted.tolist() == [511]
    assert walk.path[0].tolist() == list(range(1, 512))


def test_the_first_of_equal_siblings_is_taken() -> None:
    """The second has a child that would match; the walk must not go there."""
    tree = TokenTree.from_rows([TreeRow([9, 4, 5, 5, 6], [-1, 0, 0, 0, 3])])
    walk = walked(tree, torch.tensor([[5, 0, 7, 6, 0]]))
    assert walk.path.tolist() == [[2, -1]]
    assert (walk.num_accepted.tolist(), walk.next_token.tolist()) == ([1], [7])


def test_padding_never_matches() -> None:
    """Padding holds token 0, which is chosen everywhere; roots hold it too."""
    tree = TokenTree.from_rows([TreeRow([0], [-1]), TreeRow([0, 3, 0], [-1, 0, 1])])
    walk = walked(tree, torch.zeros(2, 3, dtype=torch.int64))
    assert walk.num_accepted.tolist() == [0, 0]
    assert walk.path.tolist() == [[-1, -1], [-1, -1]]


@pytest.mark.parametrize("max_depth", [0, 1, 2, 5])
def test_the_bound_of_depth_ends_a_walk(max_depth: int) -> None:
    tree, chosen = random_batch([(12, 1), (5, 1)], 1, seed=3)
    tree, chosen = replace(tree, max_depth=max_depth), torch.arange(24).view(2, 12) * 0
    walk = walked(tree, chosen)
    assert_walk(tree, chosen, walk)
    assert walk.num_accepted.tolist() == [max_depth, min(max_depth, 4)]


def test_tokens_are_compared_whole() -> None:
    """Tokens that differ above bit 31 alone are different tokens."""
    tree, chosen = random_batch([(40, 3), (20, 2)], 2, seed=8, offset=HUGE)
    assert_walk(tree, chosen, walked(tree, chosen))
    assert accept_chosen(tree, chosen).num_accepted.sum() > 0
    assert walked(tree, chosen - HUGE).num_accepted.tolist() == [0, 0]


def test_buffers_are_filled_whole_and_nothing_is_read_or_allocated() -> None:
    tree, chosen = random_batch([(40, 3), (9, 2)], 2, seed=8)
    inputs = [t.to(DEVICE) for t in (tree.tokens, tree.parents, chosen)]
    guarded = torch.full((2 * tree.max_depth + 8,), -77, device=DEVICE)
    out = Walk.empty(2, tree.max_depth, device=DEVICE)
    out.num_accepted.fill_(-77)
    out.next_token.fill_(-77)
    out = out._replace(path=guarded[4:-4].view(2, tree.max_depth))
    with OnDevice() as calls:
        assert walk_chosen(*inputs, tree.max_depth, out=out) is out
    assert not calls.allocated
    assert_walk(tree, chosen, out)
    assert guarded[:4].tolist() == guarded[-4:].tolist() == [-77] * 4
    with OnDevice() as calls:
        walk = walk_chosen(*inputs, tree.max_depth)
    assert sorted(calls.allocated) == sorted(tuple(t.shape) for t in walk)


VOCAB_SIZE = 3  # few, so that drafted tokens are drawn


@pytest.mark.parametrize("seed", range(4))
def test_drawn_is_coupled(seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes, temperatures = (1, 30, 64), (0.3, 1.0, 1.7)
    rows = [
        TreeRow(torch.randint(VOCAB_SIZE, (size,), generator=generator).tolist(), random_parents(size, 60, generator))
        for size in sizes
    ]
    tree = TokenTree.from_rows(rows, device=DEVICE)
    requests = [
        SamplingRequest(params=SamplingParams(temperature=temperature), seed=(-1) ** row * (seed + 10**row))
        for row, temperature in enumerate(temperatures)
    ]
    scores = NodeScores(
        tree=tree, logits=torch.randn(sum(sizes), VOCAB_SIZE, generator=generator).to(DEVICE),
        starts=torch.tensor([0, 1, 31], device=DEVICE),
        batch=SamplingBatch.build(requests, VOCAB_SIZE, DEVICE), history=None,
    )  # fmt: skip
    roots = torch.tensor([0, 17, 90_000], device=DEVICE)
    with OnDevice():
        drawn = accept(scores, ["drawn"] * 3, AcceptancePolicy(), roots)
    coupled = accept(scores, ["coupled"] * 3, AcceptancePolicy(), roots)
    assert int(drawn.num_accepted.max()) > 0, "or nothing was tested"
    for name in ("path", "num_accepted", "next_token"):
        assert torch.equal(getattr(drawn, name), getattr(coupled, name))


@pytest.mark.parametrize(
    ("params", "is_plain"),
    [
        ({}, True), ({"temperature": 0.2, "seed": 4}, True), ({"top_k": 4}, False), ({"top_p": 0.9}, False),
        ({"min_p": 0.1}, False), ({"repetition_penalty": 1.1}, False), ({"presence_penalty": 0.5}, False),
        ({"frequency_penalty": 0.5}, False), ({"logit_bias": {3: 1.0}}, False), ({"bad_words": [[4]]}, False),
        ({"min_tokens": 2}, False),
    ],
)  # fmt: skip
def test_who_is_served_by_kernels(params, *, is_plain) -> None:
    """Never dependent on the neighbours: by the request alone."""
    assert SamplingParams(**params).is_plain is is_plain
    tree = TokenTree.roots([3])
    rule = AcceptancePolicy().rule_for(tree, is_greedy=False, is_seeded=True, row=0, is_plain=is_plain)
    assert rule == ("drawn" if is_plain else "coupled")
