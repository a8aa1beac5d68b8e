"""Features of the native kernels: any taps in any order, in the dtype of the model."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CONTEXT_LEN, tiny_model

from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder.native import NativeBlocks
from foretoken.decoder.slot_cache import LayerShape, SlotCache
from foretoken.models.lean_weights import read_weights
from foretoken.models.loading import wrap_model

TREE = TokenTree.from_rows([TreeRow([5, 6, 7], [-1, 0, 0]), TreeRow([9], [-1])])


def features(dtype: torch.dtype, taps: list[int]) -> torch.Tensor:
    """(4, F, 32), of two sequences."""
    model = wrap_model(tiny_model("mistral").to(dtype), name="tiny")
    cache = SlotCache(
        [LayerShape(2, 8, 8)] * 3, num_slots=2, capacity=CONTEXT_LEN, dtype=dtype, device=model.device
    )  # fmt: skip
    weights = read_weights(model, CONTEXT_LEN)
    made = NativeBlocks(weights.layers, cache, taps, ends=weights)
    given = made.run(Pass.of_tree(TREE, slots=[0, 1], prefix_lens=[0, 0], last_position=CONTEXT_LEN - 1)).features
    assert given is not None
    return given


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("taps", [[4, 0, 3, 0], [2], [4], [0, 1, 2, 3, 4]])
def test_taps_are_given_in_the_order_that_they_are_asked_for(taps: list[int], dtype: torch.dtype) -> None:
    """0 is the embedding, 3 what comes out of the last of three layers, and 4 its final norm."""
    given = features(dtype, taps)
    assert (given.dtype, given.shape) == (dtype, (4, len(taps), 32))
    assert torch.isfinite(given).all()
    for place, tap in enumerate(taps):
        assert torch.equal(given[:, place], features(dtype, [tap])[:, 0])
    exact = features(torch.float32, taps)
    tolerance = 1e-5 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(given.float(), exact, rtol=tolerance, atol=tolerance)
    if len(taps) > 1:
        assert not torch.equal(given[:, 0], given[:, 1])
