"""Recurrent layers of the lean torch decoder: dead memory, unchanged states, sizes of blocks, narrow dtypes."""

from __future__ import annotations

import os
import random

import pytest
import torch
from tree_decoding import SLOTS, decode, grow, prefill, random_tokens, random_tree, tiny_runner

from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.torch_mixers import DepthFirst, MixerSizes, TorchBlock
from foretoken.models.lean_weights import read_weights
from foretoken.runner.decoders import probe_layer_shapes, state_bytes
from foretoken.runner.runner import Runner

# One of each recurrence, and attention beside a mixer.
on_all = pytest.mark.parametrize("architecture", ["qwen3_5", "lfm2", "falcon_h1"])


def stock(architecture: str, *, dtype: torch.dtype = torch.float32) -> Runner:
    return tiny_runner(architecture, dtype=dtype, runner="lean-stock", prefill_chunk=5)


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts NaN into all memory that a block is made in."""
    own = TorchBlock.of.__func__  # type: ignore[attr-defined]

    def poisoned(cls: type[TorchBlock], sizes: MixerSizes, num_rows: int, *, has_states: bool) -> TorchBlock:
        block: TorchBlock = own(cls, sizes, num_rows, has_states=has_states)
        for tensor in block.tensors():
            tensor.fill_(torch.nan)
        return block

    monkeypatch.setattr(TorchBlock, "of", classmethod(poisoned))


@on_all
def test_dead_memory_reaches_nothing(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number that a later pass reads was written."""
    expected = [each.output.logits for each in decode(stock(architecture), rounds=3)]
    grown = [logits for _, logits in grow(stock(architecture), rounds=3)]
    poison(monkeypatch)
    for each, logits in zip(decode(stock(architecture), rounds=3), expected, strict=True):
        assert torch.equal(each.output.logits, logits)
    for (_, found), logits in zip(grow(stock(architecture), rounds=3), grown, strict=True):
        assert torch.equal(found, logits)


def some_passes(runner: Runner) -> list[torch.Tensor]:
    """The logits of two trees behind prompts, of trees behind what is accepted of them, and of a tree that grows."""
    rng, slots, lengths = random.Random(1), [0, 2], [6, 3]
    for slot, length in zip(slots, lengths, strict=True):
        prefill(runner, slot, random_tokens(rng, length), chunk=5)
    trees = [[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 0]]
    outputs = []
    for path in ([1, 4], []):
        tree = TokenTree.from_rows([TreeRow(random_tokens(rng, len(parents)), parents) for parents in trees])
        outputs.append(runner.verify(slots, lengths, tree).logits)
        runner.commit(slots, lengths, [path, [1, 2]])
        lengths = [lengths[0] + 1 + len(path), lengths[1] + 3]
    for fed, earlier in ((2, 0), (3, 2)):
        work = Pass(
            tokens=torch.tensor(random_tokens(rng, fed)),
            positions=torch.arange(lengths[0], lengths[0] + earlier + fed),
            parents=torch.tensor([-1, -1, 0, -1, 2][: earlier + fed]), slots=[0], prefix_lens=lengths[:1],
            offsets=[0, fed], num_earlier=[earlier], logit_rows=torch.arange(fed),
        )  # fmt: skip
        outputs.append(runner.run(work).logits)
    return outputs


@pytest.mark.parametrize("architecture", ["qwen3_5", "falcon_h1"])
def test_the_kernel_gives_the_logits_of_the_loop(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, with NaN in dead memory; models in float64 keep the loop."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the models are on the CPU")
    from benchmarks.gpu_suite.interpreter import mend_interpreter
    from foretoken.decoder import triton_kernels

    mend_interpreter()
    loop, kernel, wide = stock(architecture), stock(architecture), stock(architecture, dtype=torch.float64)
    for runner in (kernel, wide):
        runner.decoder._blocks._ops.kernels = triton_kernels
    poison(monkeypatch)
    for ours, theirs in zip(some_passes(kernel), some_passes(loop), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    work = Pass.of_chains([[1]], slots=[0], prefix_lens=[0])
    found = [isinstance(each.decoder._blocks.mixed(work).recurrence, DepthFirst) for each in (loop, kernel, wide)]
    assert found == [False, True, False]


@on_all
def test_a_pass_leaves_its_states_alone(architecture: str) -> None:
    """A repeated pass, or one that is never committed, changes no bit of what later passes begin with."""
    runner, rng = stock(architecture), random.Random(3)
    prefill(runner, 0, random_tokens(rng, 20))
    tree = TokenTree.from_rows([random_tree(rng, 9)])
    first = runner.verify([0], [20], tree).logits
    state = runner.cache.states._at(0, 20).state
    kept = [tensor.clone() for tensor in state.tensors()]
    for other in (random_tree(rng, 6), random_tree(rng, 3)):
        runner.verify([0], [20], TokenTree.from_rows([other]))
    assert all(map(torch.equal, state.tensors(), kept))
    assert torch.equal(runner.verify([0], [20], tree).logits, first)


@on_all
def test_blocks_are_as_large_as_counted(architecture: str) -> None:
    """Before a decoder exists; of the slots' committed states, and of those that the next pass makes."""
    runner = stock(architecture)
    counted = state_bytes(
        runner.model, probe_layer_shapes(runner.model.module), "lean-stock", num_slots=3, max_nodes=11
    )
    for slot in SLOTS:
        prefill(runner, slot, random_tokens(random.Random(slot), 15))
    tree = TokenTree.from_rows([random_tree(random.Random(slot), 11) for slot in SLOTS])
    for at in range(3):
        runner.verify(SLOTS, [15 + at] * 3, tree)
        runner.commit(SLOTS, [15 + at] * 3, [[]] * 3)
    states = runner.cache.states
    tensors = [tensor for slot in SLOTS for tensor in states._committed[slot].state.tensors()]
    sizes = MixerSizes.of(read_weights(runner.model, 1).layers.mixers, torch.float32, runner.device)
    assert sum(tensor.nbytes for tensor in tensors) == 3 * sizes.block_bytes(10)  # the root is settled
    assert counted == (6 * sizes.block_bytes(11), sizes.block_bytes(1))
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)


def test_levels_make_no_states() -> None:
    """A pass over a level of a tree keeps rows alone, and computes no branch of earlier nodes that it does not need."""
    runner = stock("qwen3_5")
    prefill(runner, 0, list(range(10)))
    states = runner.cache.states
    for fed, earlier in ((2, 0), (3, 2), (1, 5)):
        work = Pass(
            tokens=torch.arange(fed), positions=torch.arange(10, 10 + earlier + fed),
            parents=torch.tensor([-1, -1, 0, 0, 1, 4][: earlier + fed]), slots=[0], prefix_lens=[10],
            offsets=[0, fed], num_earlier=[earlier], logit_rows=torch.arange(fed),
        )  # fmt: skip
        mixed = runner.decoder._blocks.mixed(work)
        runner.run(work)
        (block,) = states._last[0].states.made
        assert (block.state, len(block.rows), block.window) == (None, fed, 0)
    assert len(mixed._taps) == 1 + 3  # the last token of the prompt; nodes 1, 4 and 5


def test_accepted_tokens_alone_are_computed_again() -> None:
    runner = stock("qwen3_5")
    prefill(runner, 0, list(range(10)))
    runner.verify([0], [10], TokenTree.from_rows([TreeRow([5, 6, 7, 8], [-1, 0, 0, 2])]))
    runner.commit([0], [10], [[2, 3]])
    tree = TokenTree.from_rows([TreeRow([5, 6, 7], [-1, 0, 0])])
    mixed = runner.decoder._blocks.mixed(runner.verification([0], [13], tree))
    assert [len(level.nodes) for level in mixed.recurrence.levels] == [1, 1, 1, 2]  # two accepted, then 3 nodes
    assert mixed.tokens.tolist() == [2, 3, 4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_all
def test_narrow_dtypes(architecture: str, dtype: torch.dtype) -> None:
    """The self-test accepts them, states stay in float32, and a path as a chain gives nearly the logits of the tree."""
    runner = stock(architecture, dtype=dtype)
    prefill(runner, 0, list(range(10)))
    tree = TokenTree.from_rows([TreeRow([5, 6, 7, 8], [-1, 0, 0, 2])])
    whole = runner.verify([0], [10], tree).logits
    (block,) = runner.cache.states._last[0].states.made
    assert block.rows.dtype == dtype
    assert block.state is None or block.state.dtype == torch.float32
    path = runner.verify([0], [10], TokenTree.from_rows([TreeRow([5, 7, 8], [-1, 0, 1])])).logits
    assert (path - whole[[0, 2, 3]]).norm() < 0.02 * whole.norm()


def test_layers_of_several_sizes_are_refused() -> None:
    mixers = [
        read_weights(tiny_runner(name, runner="lean-stock").model, 1).layers.mixers[0] for name in ("lfm2", "qwen3_5")
    ]
    with pytest.raises(UnsuitableError, match="recurrent layers of one size alone"):
        MixerSizes.of(mixers, torch.float32, torch.device("cpu"))
