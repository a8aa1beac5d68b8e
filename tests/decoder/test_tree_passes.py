"""Every architecture, ragged batches, several rounds: a tree pass is its paths' ordinary forwards."""

from typing import Any

import pytest
import torch
from pairwise import slow_products
from plain_model import FLOAT32_TOLERANCE, PlainModel, relative_error
from tiny_models import tiny_model
from tree_decoding import CASES, UNUSED, decode, path_error, prefill, prompts, tiny_runner

from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder.slot_cache import SlotCache
from foretoken.runner.runner import Runner

pytestmark = pytest.mark.native

# Rows of the cache hold keys and values of order 1 to 10 that come out of at most 3 layers of float32.
ROW_TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
# In float64 the norms of Llama and Gemma still compute in float32, and logits come back as float32: a few units of
# 2**-24. bfloat16 rounds at 2**-9 in each of about 20 steps a layer, on both sides: 5e-2 is measured at the worst node,
# and a lost mask gives 0.3 and more on these weights. float16 rounds at 2**-11.
TOLERANCES = {torch.float64: 2e-6, torch.bfloat16: 1e-1, torch.float16: 2.5e-2}


def some_cases(place: int) -> list[Any]:
    """Every third of the cases that are not slow; the others are slow too."""
    quick = [case for case in CASES if not case.marks]
    chosen = quick[place::3]
    return [case if case in chosen or case.marks else pytest.param(*case.values, marks=pytest.mark.slow, id=case.id)
            for case in CASES]  # fmt: skip


def rows_of(runner: Runner, slot: int, length: int) -> list[torch.Tensor]:
    """The committed keys and values of a slot, layer by layer."""
    return [part[slot, :, :length].clone() for part in (*runner.cache.keys, *runner.cache.values)]


def assert_paths(runner: Runner, plain: PlainModel, rounds: int, tolerance: float) -> None:
    """The logits of every node are those of its path."""
    done = decode(runner, rounds=rounds)
    assert all(each.output.logits.dtype == torch.float32 for each in done)
    assert path_error(plain, done) < tolerance


@pytest.mark.parametrize(("architecture", "runner_name"), CASES)
def test_nodes_equal_their_paths(architecture: str, runner_name: str) -> None:
    plain = PlainModel(tiny_model(architecture))
    assert_paths(tiny_runner(architecture, runner=runner_name), plain, 3, FLOAT32_TOLERANCE)


@pytest.mark.parametrize(
    ("architecture", "dtype"), slow_products(["llama", "gpt2", "gemma2"], list(TOLERANCES), each=1)
)
def test_nodes_equal_their_paths_in_other_dtypes(architecture: str, dtype: torch.dtype) -> None:
    runner, plain = tiny_runner(architecture, dtype=dtype), PlainModel(tiny_model(architecture, dtype=dtype))
    assert runner.model.dtype == dtype
    assert {part.dtype for part in (*runner.cache.keys, *runner.cache.values)} == {dtype}
    assert_paths(runner, plain, 2, TOLERANCES[dtype])


@pytest.mark.parametrize(("architecture", "runner_name"), some_cases(0))
def test_committed_rows_equal_a_fresh_prefill(architecture: str, runner_name: str) -> None:
    runner, fresh = tiny_runner(architecture, runner=runner_name), tiny_runner(architecture, runner=runner_name)

    def compare(slot: int, tokens: list[int]) -> None:
        prefill(fresh, slot, tokens)
        for ours, theirs in zip(rows_of(runner, slot, len(tokens)), rows_of(fresh, slot, len(tokens)), strict=True):
            torch.testing.assert_close(ours, theirs, **ROW_TOLERANCE)

    decode(runner, rounds=3, after_commit=compare)


def assert_poison_is_not_read(architecture: str, **how: Any) -> None:
    clean, poisoned = tiny_runner(architecture, **how), tiny_runner(architecture, **how)

    def poison(slot: int, tokens: list[int]) -> None:
        poisoned.cache.poison(slot, len(tokens))
        poisoned.cache.poison(UNUSED, 0)

    for before, after in zip(decode(clean), decode(poisoned, after_commit=poison), strict=True):
        assert torch.equal(before.output.logits, after.output.logits)  # bit by bit: the same arithmetic


@pytest.mark.parametrize(("architecture", "runner_name"), some_cases(1))
def test_uncommitted_rows_never_matter(architecture: str, runner_name: str) -> None:
    assert_poison_is_not_read(architecture, runner=runner_name)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_uncommitted_rows_never_matter_in_other_dtypes(dtype: torch.dtype) -> None:
    assert_poison_is_not_read("gemma2", dtype=dtype)


@pytest.mark.parametrize(("architecture", "runner_name"), some_cases(2))
def test_chunks_of_a_prompt_change_nothing(architecture: str, runner_name: str) -> None:
    whole, chunked = tiny_runner(architecture, runner=runner_name), tiny_runner(architecture, runner=runner_name)
    tree = TokenTree.from_rows([TreeRow([5, 6, 7, 8], [-1, 0, 0, 2])])
    for prompt in prompts():
        prefill(whole, 0, prompt)
        prefill(chunked, 0, prompt, chunk=3)
        for ours, theirs in zip(rows_of(chunked, 0, len(prompt)), rows_of(whole, 0, len(prompt)), strict=True):
            torch.testing.assert_close(ours, theirs, **ROW_TOLERANCE)
        logits = [runner.verify([0], [len(prompt)], tree).logits for runner in (whole, chunked)]
        assert relative_error(logits[1], logits[0]) < FLOAT32_TOLERANCE


def test_control_rows_left_where_they_were_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotCache, "move_rows", lambda self, slot, source, start: None)
    assert path_error(PlainModel(tiny_model("llama")), decode(tiny_runner("llama"), rounds=3)) > 1e-2


def test_control_poison_on_a_committed_row_shows() -> None:
    runner = tiny_runner("llama")
    done = decode(runner, after_commit=lambda slot, tokens: runner.cache.poison(slot, len(tokens) - 1))
    assert done[-1].output.logits.isnan().all()
