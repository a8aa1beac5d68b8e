"""Writing rows of the slot cache by a kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from kernel_device import DEVICE, OnDevice, few

from foretoken.attention.layout import AttentionLayout
from foretoken.core.passes import Pass
from foretoken.decoder.slot_cache import LayerShape, SlotCache

PASS = Pass.of_chains([[0] * 3, [0] * 2], slots=[3, 1], prefix_lens=[5, 0], device=DEVICE)


@pytest.mark.parametrize(
    ("dtype", "widths", "is_strided"),
    few([torch.float32, torch.bfloat16, torch.float64], [(8, 8), (6, 20)], [False, True]),
)
def test_rows_of_a_captured_pass(widths, dtype, *, is_strided) -> None:
    """Each token's row is written, no other one, and tokens of no sequence write nothing; nothing is looked at."""
    generator = torch.Generator().manual_seed(0)
    cache = SlotCache([LayerShape(2, *widths)] * 2, num_slots=4, capacity=9, dtype=dtype, device=torch.device(DEVICE))
    for store in cache._stores.values():
        store.copy_(torch.randn(store.shape, generator=generator))
    padded = [torch.randn(7, 2, width, generator=generator).to(DEVICE, dtype) for width in widths]
    if is_strided:
        padded = [part.permute(2, 1, 0).contiguous().permute(2, 1, 0) for part in padded]
    tables = AttentionLayout(PASS).tables()
    filler = torch.tensor([3, 0], device=DEVICE)  # slots that exist; row -1 would be their last one
    tables = replace(
        tables,
        written_slots=torch.cat([tables.written_slots, filler]),
        written_rows=torch.cat([tables.written_rows, torch.full_like(filler, -1)]),
    )
    expected = [part.clone() for part in (cache.keys[1], cache.values[1])]
    others = [part.clone() for part in (cache.keys[0], cache.values[0])]
    for part, new in zip(expected, padded, strict=True):
        for token, (slot, row) in enumerate([(3, 5), (3, 6), (3, 7), (1, 0), (1, 1)]):
            part[slot, :, row] = new[token]
    layout = AttentionLayout(replace(PASS, tables=tables))
    with OnDevice():
        written = cache.write(1, layout, *padded)
    for part, wanted in zip(written, expected, strict=True):
        assert torch.equal(part, wanted)
    for part, wanted in zip((cache.keys[0], cache.values[0]), others, strict=True):
        assert torch.equal(part, wanted), "the other layer"
