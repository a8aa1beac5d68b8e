"""The native feed-forward network: right for matrices of any size, and with the same bits in a chunk and alone."""

from functools import cache
from typing import Any

import pytest
import torch
from decoder.instruction_sets import INSTRUCTION_SETS, kernels_for
from decoder.slow_blocks import Slow
from decoder.test_block_stack import E, block, chains, experts, in_dtype, matrix, numbers
from pairwise import slow_products
from torch import Tensor

from foretoken.decoder.block_stack import BlockStack
from foretoken.decoder.blocks import Blocks, Experts, FeedForward

pytestmark = pytest.mark.native

# Rows of the first matrices: fewer than a tile of matrix units has, whole tiles, and more: a last tile then begins with
# an even or an odd number of rows of the one before it.
SIZES = [1, 5, 16, 20, 47, 64, 130]
NUM_TOKENS = 65
COUNTS = [1, 2, 3, 8, 15, 16, 17, 31, 33, NUM_TOKENS]
MLPS: dict[str, dict[str, Any]] = {
    "gated": {},
    "biases": {"has_bias": True},
    "gelu": {"activation": "gelu"},
    "gelu tanh": {"activation": "gelu_tanh", "has_bias": True},
    "squared relu": {"activation": "relu2", "is_gated": False},
    "not gated": {"is_gated": False, "has_bias": True},
}
WEIGHTS = {"float32": (torch.float32, None), "bfloat16": (torch.bfloat16, None), "int8": (torch.bfloat16, "int8")}


def feed_forward(size: int, *, is_gated: bool = True, has_bias: bool = False) -> FeedForward:
    return FeedForward(
        gate=matrix(size, E, 11, has_bias=has_bias) if is_gated else None,
        up=matrix(size, E, 12, has_bias=has_bias),
        down=matrix(E, size, 13, has_bias=has_bias),
    )


def of_kind(size: int, kind: str) -> Blocks:
    options = dict(MLPS[kind])
    activation = options.pop("activation", "silu")
    return layers_of(feed_forward(size, **options), activation)


def layers_of(mlp: FeedForward | Experts, activation: str = "silu") -> Blocks:
    return Blocks(blocks=[block(spec={"activation": activation}, mlp=mlp, rotary=None)], final_norm=None)


def outputs(layers: Blocks, weights: str, rows: Tensor, *, chunk: int) -> Tensor:
    dtype, quantization = WEIGHTS[weights]
    made: Any = {"num_slots": 1, "capacity": NUM_TOKENS, "backend": "native", "quantization": quantization}
    stack = BlockStack(in_dtype(layers, dtype), **made)
    found = []
    for start in range(0, len(rows), chunk):
        part = rows[start : start + chunk]
        found.append(stack.run(part, chains([len(part)], slots=[0], prefix_lens=[start])))
    return torch.cat(found)


def assert_same_bits(layers: Blocks, weights: str) -> None:
    rows = numbers(NUM_TOKENS, E, seed=5, scale=1.0)
    alone = outputs(layers, weights, rows, chunk=1)
    for count in COUNTS:
        assert torch.equal(outputs(layers, weights, rows, chunk=count), alone)


@pytest.mark.parametrize(("size", "kind", "weights"), slow_products(SIZES, list(MLPS), list(WEIGHTS)))
def test_tokens_keep_their_bits_at_any_width(size: int, kind: str, weights: str) -> None:
    assert_same_bits(of_kind(size, kind), weights)


@pytest.mark.parametrize("size", [0, 47])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_experts_keep_their_tokens_bits(weights: str, size: int) -> None:
    """Alone, and beside a shared expert of some size."""
    shared = {"shared": feed_forward(size), "shared_gate": matrix(1, E, 14)} if size else {}
    assert_same_bits(layers_of(experts(5, 2, is_normalized=True, **shared)), weights)


@cache
def slow_outputs(size: int, kind: str, dtype: torch.dtype) -> Tensor:
    """What the formula gives for the rows of the test below, with weights that a dtype holds."""
    layers = in_dtype(in_dtype(of_kind(size, kind), dtype), torch.float64)
    return Slow(layers)(numbers(NUM_TOKENS, E, seed=6, scale=1.0))[-1]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_networks_of_any_size(instruction_set: str, weights: str) -> None:
    rows = numbers(NUM_TOKENS, E, seed=6, scale=1.0)
    dtype = WEIGHTS[weights][0]
    tolerance = 2e-5 if weights == "float32" else 0.05
    with kernels_for(instruction_set):
        for size in SIZES:
            for kind in MLPS:
                layers, expected = of_kind(size, kind), slow_outputs(size, kind, dtype)
                for chunk in (3, NUM_TOKENS):
                    worst = (outputs(layers, weights, rows, chunk=chunk).double() - expected).abs().max()
                    assert worst <= tolerance * expected.abs().max(), (size, kind, chunk)
