"""Other dtypes than float32: the same trees, tolerances by the width of their mantissa."""

from __future__ import annotations

import pytest
import torch
from pairwise import slow_products
from plain_model import PlainModel, relative_error
from tiny_models import tiny_model
from tree_decoding import SLOTS, UNUSED, by_path, decode, tiny_runner

# In float64 the norms of Llama and Gemma still compute in float32, and logits come back as float32: a few units of
# 2**-24. bfloat16 rounds at 2**-9 in each of about 20 steps a layer, on both sides: 5e-2 is measured at the worst node,
# and a lost mask gives 0.3 and more on these weights. float16 rounds at 2**-11.
TOLERANCE = {torch.float64: 2e-6, torch.bfloat16: 1e-1, torch.float16: 2.5e-2}


@pytest.mark.parametrize(("architecture", "dtype"), slow_products(["llama", "gpt2", "gemma2"], list(TOLERANCE), each=1))
def test_nodes_equal_their_paths(architecture: str, dtype: torch.dtype) -> None:
    runner, plain = tiny_runner(architecture, dtype=dtype), PlainModel(tiny_model(architecture, dtype=dtype))
    assert runner.model.dtype == dtype
    assert {part.dtype for part in (*runner.cache.keys, *runner.cache.values)} == {dtype}
    for done in decode(runner, rounds=2):
        for row in range(len(SLOTS)):
            ours = done.logits(row)
            assert ours.dtype == torch.float32
            assert relative_error(ours, by_path(plain, done, row)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_uncommitted_rows_never_matter(dtype: torch.dtype) -> None:
    clean, poisoned = tiny_runner("gemma2", dtype=dtype), tiny_runner("gemma2", dtype=dtype)

    def poison(slot: int, tokens: list[int]) -> None:
        poisoned.cache.poison(slot, len(tokens))
        poisoned.cache.poison(UNUSED, 0)

    for before, after in zip(decode(clean), decode(poisoned, after_commit=poison), strict=True):
        assert torch.equal(before.output.logits, after.output.logits)
