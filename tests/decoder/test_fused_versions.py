"""Fused projections are those of the weights as they are now, also while a decoder lives that fused them before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from foretoken.decoder.blocks import Matrix
from foretoken.decoder.torch_blocks import fuse


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_weight_that_is_written_to_is_fused_anew(dtype: torch.dtype) -> None:
    layers = [nn.Linear(8, rows, bias=False, dtype=dtype) for rows in (4, 6)]
    parts = [Matrix(weight=layer.weight) for layer in layers]
    x = torch.linspace(-1, 1, 8, dtype=dtype).unsqueeze(0)
    first = fuse(*parts)
    assert fuse(*parts) is first
    with torch.no_grad():
        layers[0].weight.mul_(-0.5)
    second = fuse(*parts)
    assert second is not first
    torch.testing.assert_close(second(x), torch.cat([layer(x) for layer in layers], dim=1))
