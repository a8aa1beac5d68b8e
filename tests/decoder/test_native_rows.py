"""Copies of listed rows: native kernels and torch against indexing, on any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from foretoken.decoder import native_rows
from foretoken.decoder.native_rows import gather_rows


@pytest.fixture(params=[0, 1, 2, 3], ids=["torch", "1 thread", "2 threads", "3 threads"], autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(max(request.param, 1))
    try:
        if request.param:
            yield
        else:
            with mock.patch.object(native_rows, "library_or_none", return_value=None):
                yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_by_head", [False, True], ids=["one list", "a list of each head"])
def test_listed_rows_are_copied(dtype: torch.dtype, *, is_by_head: bool) -> None:
    """Two parts of different widths, from one place of a cache to rows behind others."""
    generator = torch.Generator().manual_seed(2)
    sources = [torch.randn(5, 3, 50, width, generator=generator).to(dtype)[1] for width in (8, 33)]
    outs = [torch.zeros(2, 3, 20, width, dtype=dtype) for width in (8, 33)]
    rows = torch.rand(3 if is_by_head else 1, 50, generator=generator).topk(11).indices.sort(-1).values.expand(3, -1)
    gather_rows(sources, [rows, rows], [out[1, :, 4:] for out in outs])
    for source, out in zip(sources, outs, strict=True):
        assert out[1, :, 4:15].equal(torch.stack([part[each] for part, each in zip(source, rows, strict=True)]))
        assert not out[0].any()
        assert not out[1, :, :4].any()
        assert not out[1, :, 15:].any()


def test_rows_past_the_end_are_refused() -> None:
    source, out = torch.zeros(2, 10, 4), torch.zeros(2, 10, 4)
    for row in (-1, 10):
        with pytest.raises((ValueError, IndexError), match=r"refused|out of range"):
            gather_rows([source], [torch.tensor([[0, row]] * 2)], [out])
    with pytest.raises(ValueError, match="6 rows are listed, and an output has 5"):
        gather_rows([source], [torch.arange(6).expand(2, -1)], [out[:, :5]])
