"""Whole drafts as captured graphs, run again with other slots, lengths, tokens and seeds.

Slow because every captured kernel runs in Triton's interpreter.
"""

import copy
import random
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from drafters.autoregressive_heads import SHAPES, Texts
from drafters.autoregressive_heads import drafter as head_drafter
from drafters.drafting_contexts import attached, context
from drafters.test_spire_drafter import drafter as spire_drafter
from end_to_end.tiny_llms import draft_model, noisy
from kernel_device import DEVICE, Rerun, graph_decoder
from tiny_models import VOCAB_SIZE

from foretoken import SamplingParams
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.drafters.head_drafter import HeadDrafter
from foretoken.runner.decoders import DECODERS

if DEVICE == "cuda":
    pytest.skip("the drafters that it compares lie on the CPU", allow_module_level=True)


def accepted(tree: TreeRow, dice: random.Random) -> list[int]:
    """A path down the tree, ended by chance, and one token more."""
    node, path = 0, []
    while (children := [child for child, parent in enumerate(tree.parents) if parent == node]) and dice.random() < 0.7:
        node = dice.choice(children)
        path.append(tree.tokens[node])
    return [*path, dice.randrange(VOCAB_SIZE)]


@pytest.fixture
def trees(monkeypatch: pytest.MonkeyPatch) -> Rerun:
    """What whole drafts are captured with, on the device that has graphs here."""
    made = Rerun()
    monkeypatch.setattr("foretoken.decoder.cuda_graphs._LEAST_BOUND", 32)  # fewer programs for the interpreter
    monkeypatch.setattr("foretoken.decoder.fused_linear.is_packable", lambda weight: False)  # as on a GPU
    monkeypatch.setattr("foretoken.trees.dynamic.reads_are_free", lambda device: False)
    monkeypatch.setattr("foretoken.drafters.levels.has_cuda_runtime", lambda device: True)
    monkeypatch.setattr("foretoken.drafters.levels.CudaGraphCapture", lambda device: made)
    monkeypatch.setattr("foretoken.decoder.block_stack.runs_cpu_kernels", lambda device: False)
    monkeypatch.setattr("foretoken.decoder.block_stack.has_cuda_runtime", lambda device: True)
    monkeypatch.setattr("foretoken.decoder.block_stack.CudaGraphCapture", lambda device: Rerun())
    monkeypatch.setitem(DECODERS, "lean-graphs", graph_decoder(Rerun()))
    return made


def assert_same_trees(ours: TokenTree, theirs: TokenTree) -> None:
    """The same nodes, and the same draft distributions up to rounding."""
    assert [(row.tokens, row.parents) for row in ours.rows()] == [(row.tokens, row.parents) for row in theirs.rows()]
    assert (ours.distributions is None) == (theirs.distributions is None)
    if ours.distributions is not None and theirs.distributions is not None:
        assert torch.equal(ours.distributions.row_of, theirs.distributions.row_of)
        torch.testing.assert_close(ours.distributions.rows, theirs.distributions.rows, rtol=1e-3, atol=1e-5)


PARAMS = [SamplingParams(temperature=0.9), SamplingParams(temperature=0.7, seed=3), SamplingParams(temperature=0.0)]
COUPLED = [False, True, False]


def assert_drafts_agree(captured: HeadDrafter, plain: HeadDrafter, kind: str, shape: str) -> None:
    dice, texts = random.Random(shape), Texts(kind)
    for slot, length in enumerate((3, 9, 6)):
        texts.begin([captured, plain], slot, [dice.randrange(VOCAB_SIZE) for _ in range(length)])
    for round_ in range(4):
        slots = dice.sample(range(3), 2 if round_ % 2 else 3)
        texts.commit([captured, plain], slots)
        asked = context(
            [texts.texts[slot] for slot in slots], slots=slots, params=[PARAMS[slot] for slot in slots],
            is_coupled=[COUPLED[slot] for slot in slots], max_depth=8 if round_ < 3 else [2] * len(slots),
        )  # fmt: skip
        ours, theirs = captured.propose(asked), plain.propose(asked)
        assert_same_trees(ours, theirs)
        for slot, row in zip(slots, ours.rows(), strict=True):
            texts.texts[slot] += accepted(row, dice)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("eagle3", "dynamic"),
        *(pytest.param("eagle3", shape, marks=pytest.mark.slow) for shape in ("chain", "static")),
        *(pytest.param("eagle", shape, marks=pytest.mark.slow) for shape in ("chain", "static", "dynamic")),
    ],
)
def test_a_head_drafts_the_trees_of_the_loop(kind: str, shape: str, trees: Rerun) -> None:
    """Slots change places and lengths differ, so that a graph that kept any of them would draft another tree."""
    captured = head_drafter(kind, **SHAPES[shape])
    assert captured._stack.backend == "graphs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foretoken.drafters.levels.has_cuda_runtime", lambda device: False)
        plain = head_drafter(kind, **SHAPES[shape])
    assert_drafts_agree(captured, plain, kind, shape)
    assert trees.num_runs >= 1


@pytest.mark.parametrize("shape", ["chain", "static", "dynamic"])
@pytest.mark.parametrize("kind", ["spire", "spire, no feedback"])
def test_spire_drafts_the_trees_of_the_loop(kind: str, shape: str, trees: Rerun) -> None:
    captured = spire_drafter(kind, **SHAPES[shape])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foretoken.drafters.levels.has_cuda_runtime", lambda device: False)
        plain = spire_drafter(kind, **SHAPES[shape])
    assert_drafts_agree(captured, plain, kind, shape)
    assert trees.num_runs >= 1


@pytest.mark.parametrize(
    "shape",
    [
        {"num_speculative_tokens": 2},
        pytest.param({"num_speculative_tokens": 4}, marks=pytest.mark.slow),
        pytest.param({"tree": "dynamic", "tree_top_k": 3, "max_nodes": 9}, marks=pytest.mark.slow),
    ],
)
def test_a_draft_model_drafts_the_trees_of_the_loop(shape: dict[str, Any], trees: Rerun) -> None:
    """A slot's drafted rows are kept although a graph drafts for another slot in between."""
    module = copy.deepcopy(noisy()).float()
    captured = attached(draft_model(module, **shape)(), runner="lean-graphs")
    plain = attached(draft_model(module, **shape)(), runner="lean-stock")
    dice = random.Random(0)
    written = [[dice.randrange(VOCAB_SIZE) for _ in range(length)] for length in (3, 9, 6)]
    for round_ in range(8):
        slots = dice.sample(range(3), 1 if round_ % 2 else 2)
        asked = context(
            [written[slot] for slot in slots], slots=slots, params=[PARAMS[slot] for slot in slots],
            is_coupled=[COUPLED[slot] for slot in slots],
        )  # fmt: skip
        ours, theirs = captured.propose(asked), plain.propose(asked)
        assert_same_trees(ours, theirs)
        for slot, row in zip(slots, ours.rows(), strict=True):
            written[slot] += accepted(row, dice)
            rows = [made._runner.cache.keys[0][slot, :, : len(written[slot]) - 1] for made in (captured, plain)]
            known = len(captured._levels._slots[slot].tokens)
            torch.testing.assert_close(rows[0][:, :known], rows[1][:, :known], rtol=1e-4, atol=1e-4)
    assert trees.num_runs >= 2
