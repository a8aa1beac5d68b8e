"""Weights in int8: how they are rounded, what kernels of every instruction set make of them, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from decoder.instruction_sets import INSTRUCTION_SETS, kernels_for
from decoder.test_block_stack import CAPACITY, OPTIONS, SLOTS, E, chains, in_dtype, numbers, side_of, slow_of, two
from torch import Tensor

from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder import native_linear
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.block_stack import BlockStack
from foretoken.decoder.blocks import Block, Blocks, FeedForward, Matrix
from foretoken.decoder.native_linear import NativeLinear, int8_weight


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels_for(request.param):
        yield request.param


def restored(weight: Tensor) -> Tensor:
    """What a quantised weight stands for, in float64."""
    numbers, scales = int8_weight(weight)
    return numbers.double() * scales.double().unsqueeze(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_rows_are_rounded_to_multiples_of_their_scale(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = torch.tensor([1.0, 1e-3, 0.0, 1e-44, 1e30])
    weight = (torch.randn(5, 37, generator=torch.Generator().manual_seed(0)) * sizes.unsqueeze(1)).to(dtype)
    numbers, scales = int8_weight(weight)
    assert (numbers.dtype, scales.dtype) == (torch.int8, torch.float32)
    for row, integers, scale in zip(weight.double(), numbers.double(), scales.double(), strict=True):
        greatest = row.abs().max()
        assert abs(scale - greatest / 127) <= 1e-6 * greatest / 127 + 2e-45
        assert (scale * integers - row).abs().max() <= 0.5001 * scale + 1e-43
        assert integers.abs().max() == (127 if greatest > 1e-40 else integers.abs().max())
    assert not numbers[2].any()
    assert scales[2] == 0
    monkeypatch.setattr(native_linear, "_AT_ONCE", 80)  # two rows at once
    again = int8_weight(weight)
    assert torch.equal(again.numbers, numbers)
    assert torch.equal(again.scales, scales)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    weight = torch.ones(3, 5)
    weight[1, 4] = value
    for refused in (int8_weight, lambda w: NativeLinear(w, quantization="int8")):
        with pytest.raises(UnsuitableError, match=r"a weight \(3, 5\) torch.float32 holds NaN or infinite values"):
            refused(weight)


@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_the_integers(instruction_set: str, has_bias: bool) -> None:
    """Sizes around every block; a token's bits are the same alone and beside up to eight others."""
    for rows, cols in ((1, 1), (7, 33), (24, 64), (50, 100), (37, 127), (31, 1000), (9, 4500)):
        generator = torch.Generator().manual_seed(rows)
        weight, bias = torch.randn(rows, cols, generator=generator), torch.randn(rows, generator=generator)
        weight[rows // 2] = 0
        x = torch.randn(9, cols, generator=generator).to(torch.bfloat16).float()  # some kernels round to it
        linear = NativeLinear(weight, bias if has_bias else None, quantization="int8")
        exact = restored(weight)
        expected = x.double() @ exact.T + has_bias * bias.double()
        scale = x.double().abs() @ exact.abs().T + bias.double().abs()
        alone = torch.cat([linear(row) for row in x.split(1)])
        assert ((alone - expected).abs() / scale).max() < 1e-6
        assert torch.equal(alone[:, rows // 2], torch.full((9,), float(has_bias * bias[rows // 2])))
        for count in range(1, 10):
            assert torch.equal(linear(x[:count]), alone[:count])


def quantised(layers: Blocks) -> Blocks:
    """The blocks that the kernels compute: every matrix is what its integers stand for."""

    def matrix(stored: Matrix) -> Matrix:
        return Matrix(weight=restored(stored.weight.float()), bias=stored.bias)

    def block(each: Block) -> Block:
        assert isinstance(each.mlp, FeedForward)
        gate = None if each.mlp.gate is None else matrix(each.mlp.gate)
        fields = {name: getattr(each, name) for name in each.__slots__}
        fields |= {name: matrix(fields[name]) for name in ("query", "key", "value", "output")}
        fields["mlp"] = FeedForward(gate=gate, up=matrix(each.mlp.up), down=matrix(each.mlp.down))
        return Block(**fields)

    return Blocks(blocks=[block(each) for each in layers.blocks], final_norm=layers.final_norm)


@pytest.mark.parametrize("option", [name for name in OPTIONS if "experts" not in name])
def test_quantised_blocks_are_the_formula(option: str) -> None:
    """A prompt, then a tree: keys and values in float32, matrices in int8, tokens in float32 as AVX2 takes them."""
    with kernels_for("x86-64-v3"):
        stack = BlockStack(
            in_dtype(two(OPTIONS[option]), torch.float32), num_slots=SLOTS, capacity=CAPACITY, quantization="int8"
        )
        assert stack.backend == "native"
        layers, text = quantised(two(OPTIONS[option])), numbers(7, E, seed=70, scale=1.0)
        found = stack.run(text, chains([7], slots=[1], prefix_lens=[0]), side_of(layers, text)).double()
        expected = slow_of(layers, text)[3]
        assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
        parents = [-1, 0, 0, 2]
        nodes, tree = numbers(4, E, seed=72, scale=1.0), TokenTree.from_rows([TreeRow([0] * 4, parents)])
        work = Pass.of_tree(tree, slots=[1], prefix_lens=[7], last_position=CAPACITY - 1)
        found = stack.run(nodes, work, side_of(layers, nodes)).double()[[0, 2, 3]]
        expected = slow_of(layers, torch.cat([text, nodes[[0, 2, 3]]]))[3][7:]
        assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("option", ["as llama", "two inputs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantised_blocks_are_exact(dtype: torch.dtype, option: str) -> None:
    """Alone on one thread and beside others on two: the same bits."""
    layers, threads = in_dtype(two(OPTIONS[option]), dtype), torch.get_num_threads()
    text = numbers(9, E, seed=74, scale=1.0)
    alone, company = (BlockStack(layers, num_slots=SLOTS, capacity=CAPACITY, quantization="int8") for _ in range(2))
    try:
        torch.set_num_threads(1)
        one = [
            alone.run(part, chains([1], slots=[0], prefix_lens=[t]), side_of(layers, part))
            for t, part in enumerate(text.split(1))
        ]
        torch.set_num_threads(2)
        fed, work = torch.cat([text, numbers(7, E, seed=75)]), chains([9, 5, 2], slots=[1, 0, 2], prefix_lens=[0, 0, 0])
        found = company.run(fed, work, side_of(layers, fed))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.cat(one), found[:9])


def test_blocks_that_cannot_be_quantised() -> None:
    made = {"num_slots": SLOTS, "capacity": CAPACITY}
    with pytest.raises(UnsuitableError, match="a mixture of experts has no kernels for int8"):
        BlockStack(in_dtype(two(OPTIONS["experts"]), torch.float32), **made, quantization="int8")
    with pytest.raises(UnsuitableError, match="only native kernels on CPUs run int8 weights"):
        BlockStack(in_dtype(two(OPTIONS["as llama"]), torch.float32), **made, backend="torch", quantization="int8")
    with pytest.raises(UnsuitableError, match=r"float32 and bfloat16, not torch\.float64"):
        BlockStack(two(OPTIONS["as llama"]), **made, quantization="int8")
