"""The native matrix products: right, and with the same bits for a token whatever stands beside it."""

import pytest
import torch

from foretoken.decoder.native_linear import NativeLinear, fast_linear

pytestmark = pytest.mark.native

# Rows of weights by their length: within the nearest cache, past it, so long that tokens meet them part by part, and so
# long that matrix units do not meet all tokens at once.
LENGTHS = [1, 31, 256, 1000, 1024, 2049, 4500, 9000]
ROWS = 133  # more than two batches of groups that meet the same tokens, for one thread or two
TOKENS = [1, 2, 4, 5, 8, 13, 16, 17, 63, 64, 65, 131]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 24, ROWS])
def test_products(length: int, has_bias: bool, dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(length)
    weight, bias = torch.randn(rows, length).to(dtype), has_bias * torch.randn(rows)
    linear = NativeLinear(weight, bias if has_bias else None)
    x = torch.randn(max(TOKENS), length).to(dtype).float()
    alone = torch.cat([linear(row) for row in x.split(1)])
    expected = x.double() @ weight.double().T + bias
    size = x.double().abs() @ weight.double().abs().T + bias.abs()
    assert ((alone - expected).abs() / size).max() < 1e-6
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lead", [(1,), (2,), (3, 4), (0,)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_linear_layer(lead: tuple[int, ...], has_bias: bool, dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(33, 50, bias=has_bias, dtype=dtype)
    x = torch.randn(*lead, 33).to(dtype)
    got = fast_linear(layer)(x)
    assert isinstance(fast_linear(layer), NativeLinear)
    assert got.dtype == torch.float32
    bias = 0.0 if layer.bias is None else layer.bias.double()
    torch.testing.assert_close(got.double(), x.double() @ layer.weight.double().T + bias, rtol=1e-4, atol=1e-4)


def test_layers_that_are_not_for_native_kernels() -> None:
    """Other dtypes, transposed weights and subclasses stay what they are."""
    transposed = torch.nn.Linear(4, 6)
    transposed.weight = torch.nn.Parameter(torch.randn(4, 6).T)

    class Scaled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    for layer in (torch.nn.Linear(4, 6, dtype=torch.float64), transposed, Scaled(4, 6), torch.nn.Identity()):
        assert fast_linear(layer) is layer
