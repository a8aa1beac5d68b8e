"""The native matrix products: right, and with the same bits for a token whatever stands beside it."""

from __future__ import annotations

import pytest
import torch

from foretoken.decoder.native_linear import NativeLinear

pytestmark = pytest.mark.native

# Rows of weights by their length: within the nearest cache, past it, so long that tokens meet them part by part, and so
# long that matrix units do not meet all tokens at once.
LENGTHS = [1, 31, 256, 1000, 1024, 2049, 4500, 9000]
ROWS = 133  # more than two batches of groups that meet the same tokens, for one thread or two
TOKENS = [1, 2, 4, 5, 8, 13, 16, 17, 63, 64, 65, 131]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [5, ROWS])
def test_products(length: int, has_bias: bool, dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(length)
    weight, bias = torch.randn(rows, length).to(dtype), torch.randn(rows)
    linear = NativeLinear(weight, bias if has_bias else None)
    x = torch.randn(max(TOKENS), length).to(dtype).float()
    alone = torch.cat([linear(row) for row in x.split(1)])
    expected = x.double() @ weight.double().T + has_bias * bias
    scale = float((x.double().abs() @ weight.double().abs().T).max())
    assert (alone - expected).abs().max() <= 2e-6 * scale
    for count in TOKENS:
        assert torch.equal(linear(x[:count]), alone[:count])
        assert torch.equal(linear(x[-count:]), alone[-count:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("rows", [5, ROWS])
def test_products_of_int8_are_exact(length: int, dtype: torch.dtype, rows: int) -> None:
    linear = NativeLinear(torch.randn(rows, length).to(dtype), torch.randn(rows), quantization="int8")
    x = torch.randn(max(TOKENS), length)
    alone = torch.cat([linear(row) for row in x.split(1)])
    assert all(torch.equal(linear(x[:count]), alone[:count]) for count in TOKENS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", LENGTHS)
def test_rows_past_the_caches_give_the_same(length: int, dtype: torch.dtype) -> None:
    linear = NativeLinear(torch.randn(ROWS, length).to(dtype))
    x = torch.randn(max(TOKENS), length)
    near = [linear(x[:count]) for count in TOKENS]
    linear._matrix.pass_bytes = 1 << 50  # more than any cache holds
    assert all(torch.equal(linear(x[:count]), expected) for count, expected in zip(TOKENS, near, strict=True))
