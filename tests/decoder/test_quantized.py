"""Weights in 4 and 8 bits: how they are rounded, what kernels of every instruction set make of them, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from decoder.instruction_sets import INSTRUCTION_SETS, kernels_for
from decoder.test_block_stack import CAPACITY, OPTIONS, SLOTS, E, chains, in_dtype, numbers, side_of, slow_of, two
from torch import Tensor

from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder import quantized as quantized_module
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.block_stack import BlockStack
from foretoken.decoder.blocks import Block, Blocks, FeedForward, Matrix
from foretoken.decoder.native_linear import NativeLinear
from foretoken.decoder.quantized import Quantization, QuantizedMatrix, quantized


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels_for(request.param):
        yield request.param


def restored(weight: Tensor, quantization: Quantization = "int8") -> Tensor:
    """What a quantised weight stands for, in float64."""
    matrix = quantized(weight, quantization, dtype=torch.float32)
    decoded = matrix.decoded().double()
    return decoded if matrix.row_scales is None else decoded * matrix.row_scales.double().unsqueeze(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_rows_are_rounded_to_multiples_of_their_scale(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = torch.tensor([1.0, 1e-3, 0.0, 1e-44, 1e30])
    weight = (torch.randn(5, 37, generator=torch.Generator().manual_seed(0)) * sizes.unsqueeze(1)).to(dtype)
    made = quantized(weight, "int8")
    numbers, scales = made.numbers, made.row_scales
    assert scales is not None
    assert (numbers.dtype, scales.dtype) == (torch.int8, torch.float32)
    for row, integers, scale in zip(weight.double(), numbers.double(), scales.double(), strict=True):
        greatest = row.abs().max()
        assert abs(scale - greatest / 127) <= 1e-6 * greatest / 127 + 2e-45
        assert (scale * integers - row).abs().max() <= 0.5001 * scale + 1e-43
        assert integers.abs().max() == (127 if greatest > 1e-40 else integers.abs().max())
    assert not numbers[2].any()
    assert scales[2] == 0
    monkeypatch.setattr(quantized_module, "_AT_ONCE", 80)  # two rows at once
    again = quantized(weight, "int8")
    assert torch.equal(again.numbers, numbers)
    assert torch.equal(again.row_scales, scales)


@pytest.mark.parametrize("cols", [64, 37, 200])
@pytest.mark.parametrize("size", [1.0, 1e-9, 1e8])
def test_groups_of_int4_take_the_best_of_several_scales(size: float, cols: int) -> None:
    weight = torch.randn(6, cols, generator=torch.Generator().manual_seed(1)) * size
    weight[2], weight[3, :30] = 0, 0
    made = quantized(weight, "int4", dtype=torch.float32)
    assert made.group_scales.dtype == (torch.float16 if size == 1.0 else torch.float32)
    assert (made.bits, made.shape, made.numbers.shape[1]) == (4, (6, cols), 32 * -(-cols // 64))
    found = made.decoded()
    assert not found[2].any()
    for row, own in zip(weight, found, strict=True):
        for start in range(0, cols, 64):
            part, rounded = row[start : start + 64].double(), own[start : start + 64].double()
            greatest = part[part.abs().argmax()]
            errors = []
            for share in (1.0, 0.93, 0.86, 0.79):
                scale = greatest / -8 * share if greatest else torch.tensor(1.0).double()
                errors.append(((part / scale).round().clamp(-8, 7) * scale - part).square().sum())
            assert (rounded - part).square().sum() <= min(errors) * 1.01 + 1e-30
            assert len(rounded.unique()) <= 16


@pytest.mark.parametrize("quantization", ["int4", "int8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(value: float, quantization: Quantization) -> None:
    weight = torch.ones(3, 5)
    weight[1, 4] = value
    for refused in (quantized, lambda w, q: NativeLinear(w, quantization=q)):
        with pytest.raises(UnsuitableError, match=r"a weight \(3, 5\) torch.float32 holds NaN or infinite values"):
            refused(weight, quantization)


# Bits, weights in a group, dtype of scales, whether there are offsets.
FORMATS = {
    "4 bits, groups of 32": (4, 32, torch.float16, False),
    "4 bits, groups of 64 with offsets": (4, 64, torch.float32, True),
    "4 bits, groups of 128": (4, 128, torch.float32, False),
    "8 bits, groups of 32 with offsets": (8, 32, torch.float16, True),
    "8 bits, groups of 128": (8, 128, torch.float16, False),
}


def some_matrix(name: str, rows: int, cols: int, dtype: torch.dtype) -> QuantizedMatrix:
    bits, group, kind, has_offsets = FORMATS[name]
    generator = torch.Generator().manual_seed(rows + cols)
    shape = (rows, -(-cols // group))
    width = 32 * -(-cols // 64) if bits == 4 else cols
    return QuantizedMatrix(
        numbers=torch.randint(0, 256, (rows, width), generator=generator).to(torch.uint8).view(
            torch.uint8 if bits == 4 else torch.int8
        ),
        num_inputs=cols,
        dtype=dtype,
        group=group,
        group_scales=torch.randn(shape, generator=generator).to(kind),
        group_offsets=torch.randn(shape, generator=generator).to(kind) if has_offsets else None,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_products_have_the_bits_of_decoded_weights(instruction_set: str, name: str, dtype: torch.dtype) -> None:
    for rows, cols in ((1, 32), (37, 96), (50, 200), (120, 1000), (7, 4500)):
        matrix, bias = some_matrix(name, rows, cols, dtype), torch.randn(rows)
        x = torch.randn(40, cols, generator=torch.Generator().manual_seed(0))
        found, dense = NativeLinear(matrix, bias), NativeLinear(matrix.decoded(), bias)
        assert matrix.decoded().dtype == dtype
        for count in (1, 2, 5, 16, 17, 40):
            assert torch.equal(found(x[:count]), dense(x[:count])), (rows, cols, count)


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


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("inner", [200, 1000])
def test_gated_layers_of_several_parts_have_the_bits_of_decoded_weights(inner: int, bits: int) -> None:
    name = next(each for each, (own, *_) in FORMATS.items() if own == bits)
    layers = in_dtype(two(OPTIONS["as llama"]), torch.bfloat16)
    weights = {part: some_matrix(name, *shape, torch.bfloat16) for part, shape in
               {"gate": (inner, E), "up": (inner, E), "down": (E, inner)}.items()}  # fmt: skip

    def stack(is_dense: bool) -> BlockStack:
        own = {part: Matrix(weight=each.decoded() if is_dense else each) for part, each in weights.items()}
        made = [replace(each, mlp=FeedForward(**own)) for each in layers.blocks]
        return BlockStack(Blocks(blocks=made, final_norm=layers.final_norm), num_slots=SLOTS, capacity=CAPACITY)

    text, threads = numbers(40, E, seed=74, scale=1.0), torch.get_num_threads()
    dense, found = stack(True), stack(False)
    assert found.backend == "native"
    try:
        for count, used in ((1, 1), (16, 2), (17, 3), (40, 2)):
            torch.set_num_threads(used)
            work = chains([count], slots=[0], prefix_lens=[0])
            assert torch.equal(found.run(text[:count], work), dense.run(text[:count], work)), (count, used)
    finally:
        torch.set_num_threads(threads)


def quantised(layers: Blocks, quantization: Quantization) -> Blocks:
    """The blocks that the kernels compute: every matrix is what its integers stand for."""

    def matrix(stored: Matrix) -> Matrix:
        decoded = restored(stored.dense().float(), quantization)
        # The kernels of these tests decode groups into bfloat16, and scale rows after the sum.
        return Matrix(weight=decoded if quantization == "int8" else decoded.bfloat16().double(), bias=stored.bias)

    def block(each: Block) -> Block:
        assert isinstance(each.mlp, FeedForward)
        gate = None if each.mlp.gate is None else matrix(each.mlp.gate)
        fields = {name: getattr(each, name) for name in each.__slots__}
        fields |= {name: matrix(fields[name]) for name in ("query", "key", "value", "output")}
        fields["mlp"] = FeedForward(gate=gate, up=matrix(each.mlp.up), down=matrix(each.mlp.down))
        return Block(**fields)

    return Blocks(blocks=[block(each) for each in layers.blocks], final_norm=layers.final_norm)


@pytest.mark.parametrize("quantization", ["int4", "int8"])
@pytest.mark.parametrize("option", [name for name in OPTIONS if "experts" not in name])
def test_quantised_blocks_are_the_formula(option: str, quantization: Quantization) -> None:
    """A prompt, then a tree: keys and values in float32, matrices rounded, tokens in float32 as AVX2 takes them."""
    with kernels_for("x86-64-v3"):
        stack = BlockStack(
            in_dtype(two(OPTIONS[option]), torch.float32), num_slots=SLOTS, capacity=CAPACITY, quantization=quantization
        )
        assert stack.backend == "native"
        layers, text = quantised(two(OPTIONS[option]), quantization), numbers(7, E, seed=70, scale=1.0)
        found = stack.run(text, chains([7], slots=[1], prefix_lens=[0]), side_of(layers, text)).double()
        expected = slow_of(layers, text)[3]
        assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
        parents = [-1, 0, 0, 2]
        nodes, tree = numbers(4, E, seed=72, scale=1.0), TokenTree.from_rows([TreeRow([0] * 4, parents)])
        work = Pass.of_tree(tree, slots=[1], prefix_lens=[7], last_position=CAPACITY - 1)
        found = stack.run(nodes, work, side_of(layers, nodes)).double()[[0, 2, 3]]
        expected = slow_of(layers, torch.cat([text, nodes[[0, 2, 3]]]))[3][7:]
        assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("quantization", ["int4", "int8"])
@pytest.mark.parametrize("option", ["as llama", "two inputs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantised_blocks_are_exact(dtype: torch.dtype, option: str, quantization: Quantization) -> None:
    """Alone on one thread and beside others on two: the same bits."""
    layers, threads = in_dtype(two(OPTIONS[option]), dtype), torch.get_num_threads()
    text = numbers(9, E, seed=74, scale=1.0)
    alone, company = (
        BlockStack(layers, num_slots=SLOTS, capacity=CAPACITY, quantization=quantization) for _ in range(2)
    )
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
