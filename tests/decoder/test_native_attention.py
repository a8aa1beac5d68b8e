"""The native attention: right for heads of any size, and with the same bits in a tree, in a chunk and alone."""

from functools import cache

import pytest
import torch
from decoder.instruction_sets import INSTRUCTION_SETS, kernels_for
from decoder.slow_blocks import Slow
from decoder.test_block_stack import E, block, chains, in_dtype, matrix, numbers, one_by_one
from torch import Tensor

from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder.block_stack import BlockStack
from foretoken.decoder.blocks import Blocks, Rotary

pytestmark = pytest.mark.native

PREFIX, CAPACITY = 37, 96
# Two paths of a tree, which take turns.
FIRST, SECOND = [0, 1, 3, 5, 7, 9, 11, 13, 15, 17], [0, 2, 4, 6, 8, 10, 12, 14, 16, 18]
PARENTS = [-1, 0, 0, *range(1, 17)]
# Elements of a head: less than one step of the widest registers, several of them, and what is left behind whole ones.
SIZES = [5, 6, 16, 32, 33, 40, 80, 128]


def layers_of(heads: int, kv_heads: int, size: int, *, window: int | None = None) -> Blocks:
    made = [
        block(
            seed,
            spec={
                "num_heads": heads,
                "num_kv_heads": kv_heads,
                "head_dim": size,
                "window": window,
                "scale": 0.3 / size,
            },
            query=matrix(heads * size, E, seed + 1),
            key=matrix(kv_heads * size, E, seed + 2),
            value=matrix(kv_heads * size, E, seed + 3),
            output=matrix(E, heads * size, seed + 4),
            rotary=None if size % 2 else Rotary.plain(num_positions=CAPACITY, head_dim=size, theta=100.0),
        )
        for seed in (0, 100)
    ]
    return in_dtype(Blocks(blocks=made, final_norm=None), torch.bfloat16)


def stack_of(layers: Blocks) -> BlockStack:
    return BlockStack(layers, num_slots=2, capacity=CAPACITY, backend="native")


@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (6, 1), (20, 2)])
@pytest.mark.parametrize("size", [5, 32, 40])
def test_a_path_of_a_tree_has_the_bits_of_a_chain(size: int, heads: int, kv_heads: int, window: int | None) -> None:
    """Threads have KV heads of their own where these can be divided, else they share all of them."""
    layers = layers_of(heads, kv_heads, size, window=window)
    prompt, nodes = numbers(PREFIX, E, seed=7, scale=1.0), numbers(len(PARENTS), E, seed=8, scale=1.0)
    stack = stack_of(layers)
    found = [stack.run(prompt, chains([PREFIX], slots=[1], prefix_lens=[0]))]
    tree = TokenTree.from_rows([TreeRow([0] * len(PARENTS), PARENTS)])
    found.append(stack.run(nodes, Pass.of_tree(tree, slots=[1], prefix_lens=[PREFIX], last_position=CAPACITY - 1)))
    for path in (FIRST, SECOND):
        alone = one_by_one(stack_of(layers), layers, torch.cat([prompt, nodes[path]]))
        assert torch.equal(found[0], alone[:PREFIX])
        assert torch.equal(found[1][path], alone[PREFIX:])


@cache
def slow_outputs(size: int) -> Tensor:
    """What the formula gives for the rows of the test below."""
    return Slow(in_dtype(layers_of(4, 2, size), torch.float64))(numbers(PREFIX + 1, E, seed=9, scale=1.0))[-1]


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_heads_of_any_size(instruction_set: str) -> None:
    rows = numbers(PREFIX + 1, E, seed=9, scale=1.0)
    with kernels_for(instruction_set):
        for size in SIZES:
            stack, expected = stack_of(layers_of(4, 2, size)), slow_outputs(size)
            for start, end in ((0, PREFIX), (PREFIX, PREFIX + 1)):
                found = stack.run(rows[start:end], chains([end - start], slots=[0], prefix_lens=[start]))
                assert (found.double() - expected[start:end]).abs().max() <= 0.05 * expected.abs().max(), size
