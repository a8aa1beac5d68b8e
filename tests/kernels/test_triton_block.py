"""What stands between the products of a block, against torch's operations in float64."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import rms_norm, silu

pytest.importorskip("triton")

from kernel_device import DEVICE, GuardedMemory, few

from foretoken.attention.layout import AttentionLayout
from foretoken.core.passes import Pass
from foretoken.decoder.triton_kernels import add_and_norm, gated_silu, rotate_and_write, small_batch_gemm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPSILON = 1e-5


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_rounded(ours, exact, roundings=3):
    """Equal but for a few roundings to the dtype of `ours`."""
    step = torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours.double(), exact, rtol=roundings * step, atol=roundings * step)


@pytest.mark.parametrize(("dtype", "width", "has_delta"), few(DTYPES, [32, 44, 600], [True, False]))
def test_add_and_norm(width, dtype, *, has_delta) -> None:
    x, delta = random(2, 3, width, dtype=dtype), random(2, 3, width, dtype=dtype, seed=1) if has_delta else None
    weight = random(width, dtype=dtype, seed=2)
    total, normed = add_and_norm(x, delta, weight, EPSILON)
    expected = x if delta is None else x + delta
    if dtype == torch.bfloat16 and DEVICE == "cpu":  # the interpreter cuts where the compiler rounds
        assert_rounded(total, x.double() + (0 if delta is None else delta.double()), 1)
    else:
        assert torch.equal(total, expected)
    assert_rounded(normed, rms_norm(total.double(), (width,), weight.double(), EPSILON))
    alone = add_and_norm(
        x[1:, 1:2].contiguous(), None if delta is None else delta[1:, 1:2].contiguous(), weight, EPSILON
    )
    assert torch.equal(alone[1][0, 0], normed[1, 1]), "a row does not depend on its neighbours"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 101, 1030])
def test_gated_silu(width, dtype) -> None:
    gate_up = 4 * random(2, 2, 2 * width, dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_rounded(gated_silu(gate_up), silu(gate) * up)


def tables_of(positions):
    """Of a pass of two sequences, three tokens and two."""
    parents = torch.tensor([-1, 0, 0, -1, 0], device=DEVICE)
    work = Pass(
        tokens=parents, positions=positions, parents=parents, slots=[3, 1], prefix_lens=[5, 0], offsets=[0, 3, 5],
        logit_rows=None,
    )  # fmt: skip
    tables = AttentionLayout(work).tables()
    assert tables.written_rows.tolist() == [5, 6, 7, 0, 1]
    return tables


@pytest.mark.parametrize(
    ("sizes", "dtype", "has_norms"), few([(4, 2, 8), (3, 1, 80), (2, 2, 6)], DTYPES, [True, False])
)
def test_rotate_and_write(sizes, dtype, *, has_norms) -> None:
    """Queries come back rotated, keys and values stand in the rows of the pass, and no other row is touched.

    The last two tokens belong to no sequence.
    """
    (heads, kv_heads, size), (tokens, slots, capacity) = sizes, (7, 4, 11)
    joined = random(tokens, (heads + 2 * kv_heads) * size, dtype=dtype)
    angles = random(20, size // 2, seed=3)
    cos, sin = angles.cos(), angles.sin()
    positions = torch.tensor([5, 6, 6, 0, 19, 0, 0], device=DEVICE)
    tables = replace(
        tables_of(positions[:5]),
        written_slots=torch.tensor([3, 3, 3, 1, 1, 3, 0], device=DEVICE),
        written_rows=torch.tensor([5, 6, 7, 0, 1, -1, -1], device=DEVICE),
    )
    keys, values = (random(slots, kv_heads, capacity, size, dtype=dtype, seed=seed) for seed in (4, 5))
    expected_keys, expected_values = keys.double(), values.double()
    norms = (random(size, dtype=dtype, seed=6), random(size, dtype=dtype, seed=7)) if has_norms else None
    query = rotate_and_write(joined, cos, sin, positions, keys, values, tables, norms, EPSILON)

    parts = joined.double().unflatten(1, (-1, size)).split([heads, kv_heads, kv_heads], dim=1)
    exact, new_keys, new_values = parts
    if norms is not None:
        exact, new_keys = (
            rms_norm(part, (size,), norm.double(), EPSILON).to(dtype).double()
            for part, norm in zip((exact, new_keys), norms, strict=True)
        )
    c, s = (table.double()[positions].unsqueeze(1) for table in (cos, sin))

    def rotated(part):
        a, b = part.chunk(2, dim=-1)
        return torch.cat([a * c - b * s, b * c + a * s], dim=-1)

    new_keys = rotated(new_keys)
    for token, (slot, row) in enumerate([(3, 5), (3, 6), (3, 7), (1, 0), (1, 1)]):
        expected_keys[slot, :, row] = new_keys[token]
        expected_values[slot, :, row] = new_values[token]
    assert_rounded(query, rotated(exact), 4)
    assert_rounded(keys, expected_keys, 4)
    assert torch.equal(values.double(), expected_values)


@pytest.mark.parametrize(
    ("tokens", "sizes", "dtype"),
    few([1, 3, 16, 17, 64], [(64, 128), (128, 256), (192, 384)], [torch.bfloat16, torch.float16]),
)
def test_small_batch_gemm(tokens, sizes, dtype, monkeypatch) -> None:
    """Against float64; in two parts where the inputs can be halved."""
    outputs, inputs = sizes
    generator = torch.Generator().manual_seed(tokens + outputs)
    x, weight = (
        torch.randn(rows, inputs, generator=generator).to(DEVICE, dtype).contiguous() for rows in (tokens, outputs)
    )
    wanted = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    memory = GuardedMemory(monkeypatch)
    for result_dtype in (None, torch.float32):
        whole = small_batch_gemm(x, weight, result_dtype)
        assert whole.dtype == (result_dtype or dtype)
        rounding = torch.finfo(whole.dtype).eps  # the interpreter cuts bfloat16 where the compiler rounds
        assert ((whole.double() - wanted).abs() <= size * 2.0**-20 + wanted.abs() * rounding + 1e-7).all()
    parts = small_batch_gemm(x, weight, in_parts=True)
    memory.check()
    if inputs == 256:
        assert (parts.shape, parts.dtype) == ((2, tokens, outputs), torch.float32)
        parts = parts.sum(0)
        assert ((parts.double() - wanted).abs() <= size * 2.0**-20).all()
    else:
        assert torch.equal(parts, small_batch_gemm(x, weight))
    row = tokens // 2
    alone = small_batch_gemm(x[row : row + 1].contiguous(), weight)
    assert torch.equal(alone[0], small_batch_gemm(x, weight)[row]), "a token's result depends on the token alone"


@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_add_and_norm_sums_parts(num_parts) -> None:
    generator = torch.Generator().manual_seed(num_parts)
    x, weight = (torch.randn(*size, generator=generator).to(DEVICE, torch.bfloat16) for size in ((5, 96), (96,)))
    parts = torch.randn(num_parts, 5, 96, generator=generator).to(DEVICE)
    total, normed = add_and_norm(x, parts, weight, 1e-5)
    assert_rounded(total, x.double() + parts.double().sum(0), 1)
    assert torch.equal(normed, add_and_norm(total, None, weight, 1e-5)[1])
