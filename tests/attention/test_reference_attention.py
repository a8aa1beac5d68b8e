"""The definition of attention against a loop over single numbers."""

import pytest
import torch
from attention_loop import loop_attention

from foretoken.attention.layout import reference_attention

# float64 against float64: only the order of sums differs, over at most 7 terms of order 1.
EXACT = {"rtol": 0.0, "atol": 1e-12}


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def random_mask(queries: int, keys: int, seed: int) -> torch.Tensor:
    """Each query sees about half of the keys, at least one."""
    mask = torch.rand(queries, keys, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask[torch.arange(queries), torch.arange(queries) % keys] = True
    return mask


@pytest.mark.parametrize(
    ("heads", "kv_heads", "key_width", "value_width"),
    [(1, 1, 4, 4), (4, 4, 3, 3), (6, 2, 4, 4), (4, 1, 5, 2), (4, 2, 3, 7)],
    ids=["one head", "multi-head", "grouped", "multi-query, narrow values", "grouped, wide values"],
)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_equals_the_loop(
    heads: int, kv_heads: int, key_width: int, value_width: int, softcap: float | None, has_sinks: bool
) -> None:
    queries, keys = 5, 7
    query = draw(heads, queries, key_width, seed=1)
    key, value = draw(kv_heads, keys, key_width, seed=2), draw(kv_heads, keys, value_width, seed=3)
    sinks = draw(heads, seed=4) if has_sinks else None
    mask = random_mask(queries, keys, seed=5)
    ours = reference_attention(query, key, value, mask, scale=0.7, softcap=softcap, sinks=sinks)
    theirs = loop_attention(query, key, value, mask.tolist(), scale=0.7, softcap=softcap, sinks=sinks)
    torch.testing.assert_close(ours, theirs, **EXACT)


def test_no_mask_means_every_key() -> None:
    query, key, value = draw(2, 3, 4, seed=1), draw(2, 5, 4, seed=2), draw(2, 5, 4, seed=3)
    ours = reference_attention(query, key, value, None, scale=0.5)
    torch.testing.assert_close(ours, loop_attention(query, key, value, [[True] * 5] * 3, scale=0.5), **EXACT)


def test_sinks_take_weight_without_giving_value() -> None:
    # One key of score 0 beside a sink of 0: half of the weight is lost. A sink of -inf takes nothing.
    query, key, value = torch.zeros(2, 1, 3), torch.zeros(1, 1, 3), torch.ones(1, 1, 2)
    ours = reference_attention(query, key, value, None, scale=1.0, sinks=torch.tensor([0.0, float("-inf")]))
    assert ours[:, 0].tolist() == [[0.5, 0.5], [1.0, 1.0]]


def test_softcap_bends_scores_before_the_mask() -> None:
    # A hidden key of huge score must stay hidden: capped after the mask, -inf would become -softcap.
    query, key = torch.ones(1, 1, 1), torch.tensor([[[0.0], [1e4]]])
    value = torch.tensor([[[3.0], [-100.0]]])
    ours = reference_attention(query, key, value, torch.tensor([[True, False]]), scale=1.0, softcap=2.0)
    assert ours.item() == 3.0


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # One rounding to the dtype in scores, weights and sums each: a few units in the last place of values of order 1.
    [(torch.float32, 1e-6), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)],
)
def test_narrow_dtypes_keep_their_dtype(dtype: torch.dtype, tolerance: float) -> None:
    query, key, value = (draw(4, 5, 8, seed=seed, dtype=dtype) for seed in (1, 2, 3))
    mask = random_mask(5, 5, seed=4)
    sinks = draw(4, seed=5, dtype=dtype)
    ours = reference_attention(query, key, value, mask, scale=0.35, softcap=3.0, sinks=sinks)
    assert ours.dtype == dtype
    theirs = loop_attention(query, key, value, mask.tolist(), scale=0.35, softcap=3.0, sinks=sinks)
    torch.testing.assert_close(ours.double(), theirs, rtol=0.0, atol=tolerance)
