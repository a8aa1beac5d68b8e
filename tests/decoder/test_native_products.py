"""The native matrix products: right, and with the same bits for a token whatever stands beside it."""

from __future__ import annotations

import pytest
import torch

from foretoken.decoder.lean.native_linear import NativeLinear

# Rows of weights by their length: within the nearest cache, past it, and so long that tokens meet them part by part.
LENGTHS = [1, 31, 256, 1000, 1024, 2049, 4500]
ROWS = 133  # more than two batches of groups that meet the same tokens, for one thread or two
TOKENS = [1, 2, 4, 5, 8, 13, 16, 17, 63, 64, 65, 131]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products(length: int, has_bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(length)
    weight, bias = torch.randn(ROWS, length).to(dtype), torch.randn(ROWS)
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
def test_rows_past_the_caches_give_the_same(length: int, dtype: torch.dtype) -> None:
    linear = NativeLinear(torch.randn(ROWS, length).to(dtype))
    x = torch.randn(max(TOKENS), length)
    near = [linear(x[:count]) for count in TOKENS]
    linear._matrix.pass_bytes = 1 << 50  # more than any cache holds
    assert all(torch.equal(linear(x[:count]), expected) for count, expected in zip(TOKENS, near, strict=True))
