"""Weights in 4 and 8 bits: how they are rounded, what kernels of every instruction set make of them, and refusals."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from decoder.instruction_sets import INSTRUCTION_SETS, kernels_for
from decoder.test_block_stack import (
    CAPACITY,
    OPTIONS,
    SLOTS,
    E,
    assert_exact,
    chains,
    in_dtype,
    numbers,
    one_by_one,
    side_of,
    slow_of,
    two,
)
from limits import threads
from pairwise import slow_products
from torch import Tensor

from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder import quantized as quantized_module
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.block_stack import BlockStack
from foretoken.decoder.blocks import Block, Blocks, Experts, FeedForward, Matrix
from foretoken.decoder.native_linear import NativeLinear
from foretoken.decoder.panels import unpacked
from foretoken.decoder.quantized import Quantization, QuantizedMatrix, quantized
from foretoken.decoder.quantized_modules import quantized_parts, stacked

pytestmark = pytest.mark.native


DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels_for(request.param):
        yield request.param


def integers(matrix: QuantizedMatrix) -> Tensor:
    """The numbers of a matrix, (N, K) int8."""
    return unpacked(matrix.numbers, matrix.num_inputs, matrix.bits)[: matrix.num_outputs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_rows_are_rounded_to_multiples_of_their_scale(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = torch.tensor([1.0, 1e-3, 0.0, 1e-44, 1e30])
    weight = (torch.randn(5, 37, generator=torch.Generator().manual_seed(0)) * sizes.unsqueeze(1)).to(dtype)
    made = quantized(weight, "int8")
    numbers, scales = integers(made), made.row_scales
    assert scales is not None
    assert (numbers.dtype, scales.dtype) == (torch.int8, torch.float32)
    for row, own, scale in zip(weight.double(), numbers.double(), scales.double(), strict=True):
        greatest = row.abs().max()
        assert abs(scale - greatest / 127) <= 1e-6 * greatest / 127 + 2e-45
        assert (scale * own - row).abs().max() <= 0.5001 * scale + 1e-43
        assert own.abs().max() == (127 if greatest > 1e-40 else own.abs().max())
    assert not numbers[2].any()
    assert scales[2] == 0
    more = weight.repeat(8, 1)
    whole = quantized(more, "int8")
    monkeypatch.setattr(quantized_module, "_AT_ONCE", 80)  # 16 rows at once
    again = quantized(more, "int8")
    assert torch.equal(integers(again), integers(whole))
    assert torch.equal(integers(again)[:5], numbers)
    assert torch.equal(again.row_scales, whole.row_scales)


@pytest.mark.parametrize("cols", [64, 37, 200])
@pytest.mark.parametrize("size", [1.0, 1e-9, 1e8])
def test_groups_of_int4_take_the_best_of_several_scales(size: float, cols: int) -> None:
    weight = torch.randn(6, cols, generator=torch.Generator().manual_seed(1)) * size
    weight[2], weight[3, :30] = 0, 0
    made = quantized(weight, "int4", dtype=torch.float32)
    assert made.group_scales.dtype == (torch.float16 if size == 1.0 else torch.float32)
    assert (made.bits, made.shape, made.numbers.numel()) == (4, (6, cols), 16 * 32 * -(-cols // 64))
    assert made.group == 128
    found = made.dequantized()
    assert not found[2].any()
    for row, own in zip(weight, found, strict=True):
        for start in range(0, cols, 128):
            part, rounded = row[start : start + 128].double(), own[start : start + 128].double()
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


ORDER = ", inputs in another order"
LOWEST = ", offsets of the lowest number"
CODED = ", scales in int8"
KINDS = ("scales", "offsets")
# Bits, weights in a group (0: a scale a row), dtype of scales, whether there are offsets, bits of inputs, and whether a
# token has one scale.
FORMATS = {
    "4 bits, groups of 32": (4, 32, torch.float16, False, 16, False),
    "4 bits, groups of 64 with offsets": (4, 64, torch.float32, True, 16, False),
    "4 bits, groups of 128, float32 inputs": (4, 128, torch.float32, False, 24, False),
    "4 bits, groups of 64, inputs of 8 bits": (4, 64, torch.float16, False, 8, False),
    "4 bits, groups of 32 with offsets, inputs of 8 bits, a scale a token": (4, 32, torch.float16, True, 8, True),
    "8 bits, groups of 32 with offsets": (8, 32, torch.float16, True, 24, False),
    "8 bits, groups of 256": (8, 256, torch.float16, False, 16, False),
    "4 bits, groups of 16 with offsets": (4, 16, torch.float32, True, 24, False),
    "8 bits, groups of 16": (8, 16, torch.float32, False, 16, False),
    "8 bits, groups of 16 with offsets": (8, 16, torch.float32, True, 24, False),
    f"4 bits, groups of 128 with offsets{ORDER}": (4, 128, torch.float16, True, 16, False),
    f"8 bits, rows{ORDER}": (8, 0, torch.float32, False, 24, False),
    "4 bits, groups of 32 with offsets, inputs of 24 bits": (4, 32, torch.float32, True, 24, False),
    "5 bits, groups of 32": (5, 32, torch.float16, False, 16, False),
    f"5 bits, groups of 64 with offsets, inputs of 8 bits{LOWEST}": (5, 64, torch.float16, True, 8, False),
    "6 bits, groups of 16": (6, 16, torch.float32, False, 16, False),
    f"4 bits, groups of 32 with offsets{LOWEST}": (4, 32, torch.float16, True, 16, False),
    f"4 bits, groups of 32 with offsets{LOWEST}{CODED}": (4, 32, torch.float16, True, 16, False),
    f"5 bits, groups of 32 with offsets{LOWEST}{CODED}": (5, 32, torch.float16, True, 24, False),
    f"6 bits, groups of 16{CODED}": (6, 16, torch.float16, False, 16, False),
    f"6 bits, groups of 16, inputs of 8 bits, a scale a token{CODED}": (6, 16, torch.float16, False, 8, True),
    "8 bits, rows": (8, 0, torch.float32, False, 16, False),
    "8 bits, rows, inputs of 8 bits, a scale a token": (8, 0, torch.float32, False, 8, True),
}


@cache
def another_order(cols: int) -> Tensor:
    return torch.randperm(cols, generator=torch.Generator().manual_seed(cols)).int()


def some_matrix(name: str, rows: int, cols: int, dtype: torch.dtype) -> QuantizedMatrix:
    bits, group, kind, has_offsets, input_bits, has_token_scales = FORMATS[name]
    generator = torch.Generator().manual_seed(rows + cols)
    shape = (rows, -(-cols // group) if group else 1)
    scales = torch.randn(shape, generator=generator)
    made = QuantizedMatrix.of(
        torch.randint(-(1 << bits - 1), 1 << bits - 1, (rows, cols), generator=generator).to(torch.int8),
        bits=bits,
        dtype=dtype,
        input_bits=input_bits,
        has_token_scales=has_token_scales,
        row_scales=None if group else scales.flatten(),
        group=group,
        group_scales=scales.to(kind) if group else None,
        group_offsets=torch.randn(shape, generator=generator).to(kind) if has_offsets else None,
        input_order=another_order(cols) if name.endswith(ORDER) else None,
        offsets_are_lowest=LOWEST in name,
    )
    if not name.endswith(CODED) or cols % 256:
        return made
    panels = -(-rows // 16), cols // 256, 16
    supers = {f"super_{kind}": torch.randn(panels, generator=generator).half() for kind in KINDS[: 1 + has_offsets]}
    codes = {
        f"group_{kind}": torch.randint(-128, 128, (panels[0], cols // group, 16), generator=generator).to(torch.int8)
        for kind in KINDS[: 1 + has_offsets]
    }
    return replace(made, **codes, **supers)


def rounded_inputs(x: Tensor, most: int, group: int) -> tuple[Tensor, Tensor]:
    """Integers (M, K) and the scale of each, by the kernels' operations in float32."""
    parts = torch.nn.functional.pad(x, (0, -x.shape[1] % group)).unflatten(1, (-1, group))
    size = parts.abs().amax(2, keepdim=True)
    is_zero = size < 1e-30
    factor = torch.where(is_zero, 0, torch.tensor(float(most)) / size)  # a number over a tensor would be rounded twice
    numbers = (parts * factor).round().clamp(-most, most)
    scale = torch.where(is_zero, 0, size / most).expand_as(parts)
    return numbers.flatten(1)[:, : x.shape[1]], scale.flatten(1)[:, : x.shape[1]]


def product(matrix: QuantizedMatrix, bias: Tensor, x: Tensor) -> Tensor:
    """The kernels' product, operation by operation: exact sums, and one rounding to float32 for each fused addition."""
    digits, (rows, cols) = matrix.digits, matrix.shape
    lift = 1 << matrix.bits - 1 if matrix.offsets_are_lowest else 0
    own, padded = integers(matrix).double() + lift, -(-cols // 64) * 64
    group = matrix.input_group or padded
    x = x if matrix.input_order is None else x[:, matrix.input_order.long()]
    x, scale = rounded_inputs(x, {8: 127, 16: 32639, 24: 8355711}[matrix.input_bits], group)
    unit = min(group, matrix.group or group, 512 if digits == 2 else 1024)
    span = max(unit, min(group, 128))
    scales, offsets = (
        None if getattr(matrix, f"group_{kind}") is None else matrix._of_groups(kind, slice(rows)) for kind in KINDS
    )
    total = torch.zeros(len(x), rows)

    def joined(parts: list[Tensor]) -> Tensor:
        if digits == 2:
            return (parts[0] * 256 + parts[1]).float()
        value = parts[0].float()
        for each in parts[1:]:
            value = (value.double() * 256 + each).float()
        return value

    for first in range(0, cols, span):
        part = torch.zeros_like(total)
        for start in range(first, min(first + span, cols), unit):
            rest, split = x[:, start : start + unit].double(), []
            for _ in range(digits):
                low = (rest + 128) % 256 - 128 if len(split) < digits - 1 else rest
                split.insert(0, low)
                rest = (rest - low) / 256
            at = start // matrix.group if matrix.group else 0
            value = joined([each @ own[:, start : start + unit].T for each in split])
            part = (value.double() * (1.0 if scales is None else scales[:, at].double()) + part).float()
            if offsets is not None:
                inputs = joined([each.sum(1, keepdim=True) for each in split])
                part = (inputs.double() * offsets[:, at].double() + part).float()
        total = (part.double() * scale[:, first : first + 1].double() + total).float()
    return (total if matrix.row_scales is None else total * matrix.row_scales) + bias


@cache
def some_product(name: str, rows: int, cols: int, dtype: torch.dtype) -> tuple[QuantizedMatrix, Tensor, Tensor, Tensor]:
    """A matrix and bias, inputs of 40 tokens, and the product."""
    generator = torch.Generator().manual_seed(0)
    matrix, bias = some_matrix(name, rows, cols, dtype), torch.randn(rows, generator=generator)
    x = torch.randn(40, cols, generator=generator)
    x[3], x[5, :40] = 0, 1e-38
    x = x.to(dtype).float()
    return matrix, bias, x, product(matrix, bias, x)


@pytest.mark.parametrize(
    ("instruction_set", "name", "dtype"), slow_products(list(INSTRUCTION_SETS), list(FORMATS), DTYPES),
    indirect=["instruction_set"],
)  # fmt: skip
def test_products_are_exact(instruction_set: str, name: str, dtype: torch.dtype) -> None:
    """Sizes around every block. Numbers of tokens, and instruction sets with fused additions, give the same bits."""
    for rows, cols in ((1, 1), (16, 32), (37, 96), (50, 200), (150, 1000), (7, 4500), (37, 768)):
        matrix, bias, x, expected = some_product(name, rows, cols, dtype)
        found = NativeLinear(matrix, bias)
        for count in (1, 2, 3, 4, 5, 6, 7, 16, 17, 40):
            got = found(x[:count])
            if instruction_set == "x86-64":
                assert (got - expected[:count]).abs().max() <= 1e-5 * expected.abs().max()
                assert torch.equal(got, found(x)[:count])
            else:
                assert torch.equal(got, expected[:count]), (rows, cols, count)
        weights = matrix.dequantized().double()
        error = (expected - x.double() @ weights.T - bias).abs()
        size = x.double().abs() @ weights.abs().T + bias.abs() + 1e-30
        assert (error / size).max() <= {8: 0.02, 16: 1e-4, 24: 1e-6}[matrix.input_bits]


def test_inputs_that_are_not_finite_stay_so(instruction_set: str) -> None:
    for value in (float("nan"), float("inf"), -float("inf")):
        x = torch.ones(5, 200)
        x[2, 150] = value
        for quantization in ("int4", "int8"):
            found = NativeLinear(torch.eye(40, 200) + 1, quantization=quantization)(x)
            assert found.isfinite().all(1).tolist() == [True, True, False, True, True]


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_a_matrix(name: str) -> None:
    matrix = some_matrix(name, 75, 130, torch.float32)
    whole = matrix.dequantized()
    for start, end in ((0, 75), (16, 48), (32, 75), (5, 20), (48, 50), (70, 75), (0, 16)):
        part = matrix.rows(start, end)
        assert part.shape == (end - start, 130)
        assert torch.equal(part.dequantized(), whole[start:end])
        own = part.numbers.untyped_storage().data_ptr() == matrix.numbers.untyped_storage().data_ptr()
        assert own == (start % 16 == 0 and (end % 16 == 0 or end == 75))


def of_integers(layers: Blocks, quantization: Quantization, *, is_dense: bool) -> Blocks:
    """The blocks with matrices for float32 inputs; is_dense: with the weights that these stand for, in float64."""

    def matrix(stored: Matrix) -> Matrix:
        made = quantized(stored.dense().float(), quantization, dtype=torch.float32)
        return Matrix(weight=made.dequantized().double() if is_dense else made, bias=stored.bias)

    def feed_forward(mlp: FeedForward | Experts) -> FeedForward | Experts:
        if isinstance(mlp, FeedForward):
            gate = None if mlp.gate is None else matrix(mlp.gate)
            return FeedForward(gate=gate, up=matrix(mlp.up), down=matrix(mlp.down))
        if mlp.shared is not None:
            gate = None if mlp.shared_gate is None else matrix(mlp.shared_gate)
            mlp = replace(mlp, shared=feed_forward(mlp.shared), shared_gate=gate)
        gate_up, down = (each.float() for each in mlp.dense())
        count = 2 if mlp.is_gated else 1
        if not is_dense:
            made = (quantized_parts(each, parts, quantization, dtype=torch.float32)
                    for each, parts in ((gate_up, count), (down, 1)))  # fmt: skip
            return replace(mlp, **dict(zip(("gate_up", "down"), made, strict=True)))
        stand_ins = [
            torch.stack([quantized(each, quantization, dtype=torch.float32).dequantized() for each in weight])
            for weight in (gate_up.unflatten(1, (count, -1)).flatten(0, 1), down)
        ]
        return replace(mlp, gate_up=stand_ins[0].view_as(gate_up).double(), down=stand_ins[1].double())

    def block(each: Block) -> Block:
        fields = {name: getattr(each, name) for name in each.__slots__}
        fields |= {name: matrix(fields[name]) for name in ("query", "key", "value", "output")}
        return Block(**fields | {"mlp": feed_forward(each.mlp)})

    return Blocks(blocks=[block(each) for each in layers.blocks], final_norm=layers.final_norm)


@pytest.mark.parametrize("quantization", ["int4", "int8"])
@pytest.mark.parametrize("option", OPTIONS)
def test_quantised_blocks_are_the_formula(option: str, quantization: Quantization) -> None:
    """A prompt, then a tree."""
    exact, sizes = (
        of_integers(two(OPTIONS[option]), quantization, is_dense=True),
        {"num_slots": SLOTS, "capacity": CAPACITY},
    )
    narrow = in_dtype(two(OPTIONS[option]), torch.float32)
    stack = BlockStack(of_integers(narrow, quantization, is_dense=False), **sizes)
    rough = BlockStack(narrow, **sizes, quantization=quantization)  # as of drafts: inputs have 16 bits
    assert stack.backend == rough.backend == "native"
    text, nodes = numbers(7, E, seed=70, scale=1.0), numbers(4, E, seed=72, scale=1.0)
    parents = [-1, 0, 0, 2]
    tree = TokenTree.from_rows([TreeRow([0] * 4, parents)])
    work = Pass.of_tree(tree, slots=[1], prefix_lens=[7], last_position=CAPACITY - 1)
    expected = slow_of(exact, text)[3], slow_of(exact, torch.cat([text, nodes[[0, 2, 3]]]))[3][7:]
    for each, bound in ((stack, 2e-5), (rough, 2e-2)):
        prompt = each.run(text, chains([7], slots=[1], prefix_lens=[0]), side_of(exact, text)).double()
        found = prompt, each.run(nodes, work, side_of(exact, nodes)).double()[[0, 2, 3]]
        for got, right in zip(found, expected, strict=True):
            assert (got - right).abs().max() <= bound * right.abs().max()


@pytest.mark.parametrize("quantization", ["int4", "int8"])
@pytest.mark.parametrize("option", ["as llama", "two inputs", "experts", "a shared expert with a gate"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantised_blocks_are_exact(dtype: torch.dtype, option: str, quantization: Quantization) -> None:
    """Alone on one thread and beside others on two: the same bits."""
    assert_exact(in_dtype(two(OPTIONS[option]), dtype), quantization)


def assert_exact_at(layers: Blocks, counts: tuple[int, ...]) -> None:
    """Tokens in passes of these sizes on two threads, and each alone on one, have the same bits."""
    text, made = numbers(40, E, seed=74, scale=1.0), {"num_slots": SLOTS, "capacity": CAPACITY}
    alone, company = one_by_one(BlockStack(layers, **made), layers, text), BlockStack(layers, **made)
    assert company.backend == "native"
    with threads(2):
        for count in counts:
            found = company.run(text[:count], chains([count], slots=[1], prefix_lens=[0]))
            assert torch.equal(found, alone[:count]), count


# Formats of gate, up and down: offsets in one of two matrices with the same inputs; these in 4 and in 8 bits.
MIXED = {
    "mixed offsets": ("4 bits, groups of 32", "4 bits, groups of 64 with offsets", "8 bits, rows"),
    "mixed bits": ("4 bits, groups of 64 with offsets", "8 bits, groups of 16", "8 bits, groups of 256"),
}


@pytest.mark.parametrize("inner", [200, 1000])
@pytest.mark.parametrize("name", [*FORMATS, *MIXED])
def test_layers_are_exact_in_every_format(name: str, inner: int) -> None:
    """Many tokens on two threads, and each alone on one: the same bits."""
    dense = numbers(inner, E, seed=76).bfloat16()
    shapes = {"gate": (inner, E), "up": (inner, E), "down": (E, inner)}
    formats = dict.fromkeys(shapes, name)
    if name in MIXED:
        formats = dict(zip(shapes, MIXED[name], strict=True))
    made = {part: Matrix(weight=some_matrix(formats[part], *shape, torch.bfloat16), bias=torch.ones(shape[0]) / 8)
            for part, shape in shapes.items()}  # fmt: skip
    layers = in_dtype(two(OPTIONS["as llama"]), torch.bfloat16)
    kinds = [made, made | {"up": Matrix(weight=dense)}]  # in the second block, with a dense one
    blocks = [replace(each, mlp=FeedForward(**own)) for each, own in zip(layers.blocks, kinds, strict=True)]
    assert_exact_at(Blocks(blocks=blocks, final_norm=layers.final_norm), (2, 5, 16, 21, 40))


@pytest.mark.parametrize(
    ("instruction_set", "name", "inner"), slow_products(list(INSTRUCTION_SETS), list(FORMATS), [40, 64]),
    indirect=["instruction_set"],
)  # fmt: skip
def test_experts_are_exact_in_every_format(name: str, inner: int, instruction_set: str) -> None:
    """Many tokens on two threads, and each alone on one: the same bits, and those of torch but for rounding."""
    count, dtype = 3, torch.bfloat16 if FORMATS[name][4] == 16 else torch.float32
    gate_up, down = ([some_matrix(name, *shape, dtype) for _ in range(number)]
                     for shape, number in (((inner, E), 2 * count), ((E, inner), count)))  # fmt: skip
    for index, each in enumerate((*gate_up, *down)):  # experts differ
        for scales in (each.row_scales, each.group_scales):
            if scales is not None:
                scales.mul_((1 + index) / 64)
    mlp = Experts(router=Matrix(weight=numbers(count, E, seed=50).to(dtype)), gate_up=stacked(gate_up),
                  down=stacked(down), top_k=2, is_normalized=True)  # fmt: skip
    layers = in_dtype(two(OPTIONS["as llama"]), dtype)
    blocks = Blocks(blocks=[replace(layers.blocks[0], mlp=mlp)], final_norm=None)
    assert_exact_at(blocks, (2, 7, 21, 40))


def test_stacked_matrices_differ_in_scales_alone() -> None:
    dtype = torch.float32
    half, single = (
        some_matrix("4 bits, groups of 32", 20, 96, dtype),
        some_matrix("4 bits, groups of 32", 30, 96, dtype),
    )
    assert half.group_scales is not None
    single = replace(single, group_scales=None if single.group_scales is None else single.group_scales.float() * 1e-9)
    made = stacked([half, single])
    assert made.shape == (32 + 32, 96)
    dense = made.dequantized()
    assert torch.equal(dense[:20], half.dequantized())
    assert torch.equal(dense[32:62], single.dequantized())
    assert not dense[20:32].any()
    with pytest.raises(ValueError, match="matrices that are stacked differ in kind"):
        stacked([half, some_matrix("4 bits, groups of 64 with offsets", 20, 96, dtype)])


def test_matrices_of_other_shapes_are_refused() -> None:
    numbers_of, fields = torch.zeros(32, 200, dtype=torch.int8), {"bits": 4, "dtype": torch.float32, "group": 64}
    for shape in ((32, 1), (32, 5), (20, 4)):
        with pytest.raises(ValueError, match="scales and offsets of groups have another shape"):
            QuantizedMatrix.of(numbers_of, group_scales=torch.ones(shape), **fields)
    with pytest.raises(ValueError, match="numbers have other bits"):
        QuantizedMatrix.of(numbers_of + 8, group_scales=torch.ones(32, 4), **fields)
    with pytest.raises(ValueError, match="not one scale in float32"):
        QuantizedMatrix.of(numbers_of, bits=8, dtype=torch.float32, row_scales=torch.ones(32).half())
    for order in (torch.arange(199), torch.arange(200), torch.arange(200).int() // 2, -torch.arange(200).int()):
        with pytest.raises(ValueError, match="the order of inputs is no permutation"):
            QuantizedMatrix.of(numbers_of, bits=8, dtype=torch.float32, input_order=order)


def test_blocks_that_cannot_be_quantised() -> None:
    made = {"num_slots": SLOTS, "capacity": CAPACITY}
    blocks = of_integers(in_dtype(two(OPTIONS["as llama"]), torch.float32), "int8", is_dense=False).blocks
    for name in ("key", "mlp"):
        first, other = blocks[1], in_dtype(two(OPTIONS["as llama"]), torch.float32).blocks[1]
        mixed = first.mlp if name == "mlp" else first.key
        part = other.mlp.up if name == "mlp" else other.key
        odd = Matrix(weight=quantized(part.dense(), "w8a8", dtype=torch.float32))
        changed = replace(first, **{name: replace(mixed, up=odd) if name == "mlp" else odd})
        with pytest.raises(UnsuitableError, match="matrices of block 1 with the same inputs round them in different"):
            BlockStack(Blocks(blocks=[blocks[0], changed], final_norm=None), **made, backend="native")
    experts = of_integers(in_dtype(two(OPTIONS["experts"]), torch.float32), "int8", is_dense=False)
    with pytest.raises(UnsuitableError, match="only native kernels on CPUs run weights in 8 bits"):
        BlockStack(experts, **made, backend="torch")
    with pytest.raises(UnsuitableError, match="only native kernels on CPUs run int8 weights"):
        BlockStack(in_dtype(two(OPTIONS["as llama"]), torch.float32), **made, backend="torch", quantization="int8")
    with pytest.raises(UnsuitableError, match=r"float32 and bfloat16, not torch\.float64"):
        BlockStack(two(OPTIONS["as llama"]), **made, quantization="int8")
