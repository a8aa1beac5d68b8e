"""Recurrent layers of the native kernels: the same bits at every width, unchanged states, quantized weights."""

import random
from collections import Counter
from typing import Any

import pytest
import torch
from tiny_models import LEAN_RECURRENT, tiny_model
from tree_decoding import SLOTS, decode, grow, node_paths, prefill, random_tokens, random_tree, tiny_runner

from foretoken import LLM, SamplingParams
from foretoken.core.backend import set_num_threads
from foretoken.core.errors import ModelError
from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder.native_states import StateMemory, block_bytes
from foretoken.decoder.recurrent_states import PathState, settled_nodes
from foretoken.models.lean_weights import read_weights
from foretoken.models.loading import wrap_model
from foretoken.runner.decoders import probe_layer_shapes, state_bytes
from foretoken.runner.runner import Runner

on_all = pytest.mark.parametrize("architecture", LEAN_RECURRENT)


def native(architecture: str, **options: Any) -> Runner:
    return tiny_runner(architecture, runner="lean-native", **options)


def single_steps(runner: Runner, slot: int, tokens: list[int]) -> list[torch.Tensor]:
    """Logits of tokens that are decoded and committed one by one."""
    logits = []
    for at, token in enumerate(tokens):
        tree = TokenTree.from_rows([TreeRow([token], [-1])])
        logits.append(runner.verify([slot], [at], tree).logits[0])
        runner.commit([slot], [at], [[]])
    return logits


def num_with_bits_of_single_tokens(runner: Runner, found: dict[tuple[int, ...], torch.Tensor], *, every: int) -> int:
    """Compares some of the texts that end with a leaf, at all nodes on the way; gives the number of nodes."""
    begun, num_equal = {text[:end] for text in found for end in range(len(text))}, 0
    for text in [each for each in found if each not in begun][::every]:
        for at, logits in enumerate(single_steps(runner, 1, list(text)), 1):
            if text[:at] in found:
                assert torch.equal(found[text[:at]], logits)
                num_equal += 1
    return num_equal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_all
def test_trees_have_the_bits_of_single_tokens(architecture: str, dtype: torch.dtype) -> None:
    """Prompts in chunks, trees in batches, accepted tokens that are computed again: all as one token after another."""
    runner = native(architecture, dtype=dtype, prefill_chunk=5)
    found: dict[tuple[int, ...], torch.Tensor] = {}
    for each in decode(runner, rounds=3):
        for row in range(len(SLOTS)):
            tokens, logits = each.tree.tokens[row].tolist(), each.logits(row)
            for path in node_paths(each.tree, row):
                for at, node in enumerate(path, 1):
                    found[*each.committed[row], *(tokens[above] for above in path[:at])] = logits[node]
    assert num_with_bits_of_single_tokens(runner, found, every=3) > 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_all
def test_trees_that_grow_have_the_bits_of_single_tokens(architecture: str, dtype: torch.dtype) -> None:
    """A few nodes a pass, as a draft model feeds them."""
    runner = native(architecture, dtype=dtype, prefill_chunk=5)
    found = {tuple(text): logits for text, logits in grow(runner, rounds=6)}
    assert num_with_bits_of_single_tokens(runner, found, every=4) > 40


@on_all
def test_a_committed_state_has_the_bits_of_one_read_anew(architecture: str) -> None:
    """The state behind some tokens, once those behind it are folded: of any acceptance, in any chunks."""
    runner, fresh = native(architecture, prefill_chunk=7), native(architecture)
    states, others = runner.cache.states, fresh.cache.states
    assert states is not None
    assert others is not None

    def folded(of: Runner, slot: int, tokens: list[int]) -> torch.Tensor:
        """The states of all layers behind the tokens, and the window, from a pass with one token more."""
        work = of.verification([slot], [len(tokens)], TokenTree.from_rows([TreeRow([1, 2], [-1, 0])]))
        of.run(work)
        last = of.cache.states._last[slot]
        block = last.states.made[0]
        model = of.decoder._described.structure
        return block.tensor[: model.state_size + model.window * model.row_size].clone()

    def compare(slot: int, tokens: list[int]) -> None:
        prefill(fresh, 1, tokens)
        assert torch.equal(folded(runner, slot, tokens), folded(fresh, 1, tokens))

    decode(runner, rounds=3, after_commit=compare)


@on_all
def test_dead_memory_reaches_nothing(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in all memory that a block of states is made in, and in the workspace."""
    expected = [each.output.logits for each in decode(native(architecture), rounds=4)]
    grown = [logits for _, logits in grow(native(architecture), rounds=4)]
    own = StateMemory.take

    def poisoned(memory: StateMemory, size: int) -> torch.Tensor:
        return own(memory, size).fill_(torch.nan)

    monkeypatch.setattr(StateMemory, "take", poisoned)
    runner = native(architecture)
    workspaces = runner.decoder.workspaces
    workspaces.give_back(torch.full((1 << 22,), 255, dtype=torch.uint8))  # NaN in float32
    for each, logits in zip(decode(runner, rounds=4), expected, strict=True):
        assert torch.equal(each.output.logits, logits)
    for (_, found), logits in zip(grow(runner, rounds=4), grown, strict=True):
        assert torch.equal(found, logits)


@on_all
def test_a_pass_leaves_its_states_alone(architecture: str) -> None:
    """A repeated pass, or one that is never committed, changes no bit of what later passes begin with."""
    runner, rng = native(architecture), random.Random(3)
    prompt = random_tokens(rng, 20)
    prefill(runner, 0, prompt)
    tree = TokenTree.from_rows([random_tree(rng, 9)])
    first = runner.verify([0], [20], tree).logits
    state = runner.cache.states._at(0, 20).state
    kept = state.block.tensor.clone()
    for other in (random_tree(rng, 6), random_tree(rng, 3)):
        runner.verify([0], [20], TokenTree.from_rows([other]))
    assert torch.equal(state.block.tensor.view(torch.int32), kept.view(torch.int32))
    assert torch.equal(runner.verify([0], [20], tree).logits, first)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_no_bit(threads: int) -> None:
    expected = [each.output.logits for each in decode(native("qwen3_5"), rounds=2)]
    set_num_threads(threads)
    try:
        found = [each.output.logits for each in decode(native("qwen3_5"), rounds=2)]
    finally:
        set_num_threads(2)
    assert all(map(torch.equal, found, expected))


@on_all
def test_blocks_are_as_large_as_counted(architecture: str) -> None:
    """Before a decoder exists; two blocks of a slot with the inputs of a tree, and four for the next passes."""
    runner = native(architecture)
    weights = read_weights(runner.model, 1).layers
    model = runner.decoder._described.structure
    assert block_bytes(weights.mixers, 11) == 4 * (model.state_size + (model.window + 11) * model.row_size)
    shapes = probe_layer_shapes(runner.model.module)
    counted = state_bytes(runner.model, shapes, "auto", num_slots=3, max_nodes=11)
    assert counted == (10 * block_bytes(weights.mixers, 11), block_bytes(weights.mixers, 1))
    allocated = Counter[int]()
    runner = Runner(runner.model, num_slots=3, max_nodes=11, runner="lean-native")
    memory, _ = runner.decoder._state_memory
    memory._idle.clear()  # of the self-test
    take = memory.take
    memory.take = lambda size: allocated.update([0]) or take(size)  # type: ignore[method-assign]
    prompts = [random_tokens(random.Random(slot), 15) for slot in range(3)]
    for slot, prompt in enumerate(prompts):
        prefill(runner, slot, prompt)
    tree = TokenTree.from_rows([random_tree(random.Random(slot), 11) for slot in range(3)])
    for at in range(5):
        runner.verify(range(3), [15 + at] * 3, tree)
        runner.commit(range(3), [15 + at] * 3, [[]] * 3)
    states = runner.cache.states
    assert states is not None
    alive = {id(each.state.block): each.state.block.tensor.nbytes for each in states._committed}
    idle = [each.nbytes for each in memory._idle]
    assert sum(alive.values()) + sum(idle) <= counted.slots
    assert (len(alive), allocated[0]) == (3, 3 + 5 * 3)


def test_what_a_pass_settles() -> None:
    """The first nodes of a chain whose states nobody needs; all others come after them."""
    chain = [-1, 0, 1, 2, 3]
    assert settled_nodes(chain, 0, {3, 4}) == 4  # a prompt: another text may begin before its last token
    assert settled_nodes(chain, 7, {7 + node for node in range(5)}) == 1  # drafts: the root is always accepted
    assert settled_nodes([-1, 0, 0, 1], 0, {0, 1, 2, 3}) == 1
    assert settled_nodes([-1, -1], 0, {0, 1}) == 0
    assert settled_nodes([-1, 0, 1, 0], 0, {2, 3}) == 1  # node 3 begins behind node 0
    assert settled_nodes([-1], 0, {0}) == 1


def test_accepted_tokens_alone_are_computed_again() -> None:
    runner = native("qwen3_5")
    prefill(runner, 0, list(range(10)))
    states = runner.cache.states
    assert [row.place for row in states._at(0, 10).state.rows] == [0]
    assert states._at(0, 9).state.rows == []
    runner.verify([0], [10], TokenTree.from_rows([TreeRow([5, 6, 7, 8], [-1, 0, 0, 2])]))
    runner.commit([0], [10], [[2, 3]])
    state = states._at(0, 13).state
    assert isinstance(state, PathState)
    assert [row.place for row in state.rows] == [1, 2]  # the rows of nodes 2 and 3: the root is settled
    runner.verify([0], [13], TokenTree.from_rows([TreeRow([5, 6], [-1, 0])]))
    runner.commit([0], [13], [[]])
    assert states._at(0, 14).state.rows == []


def test_levels_copy_no_state() -> None:
    """Passes over the levels of a tree make rows, and begin with the block behind the prefix."""
    runner = native("qwen3_5")
    prefill(runner, 0, list(range(10)))
    runner.run(Pass.of_chains([[5, 6]], slots=[0], prefix_lens=[10], has_last_logits=True))
    states, rows = runner.cache.states, runner.decoder._described.structure.row_size
    for fed, earlier in ((2, 0), (3, 2), (1, 5)):
        work = Pass(
            tokens=torch.arange(fed), positions=torch.arange(12, 12 + earlier + fed),
            parents=torch.tensor([-1, *range(-1, 9)][: earlier + fed]), slots=[0], prefix_lens=[12], offsets=[0, fed],
            num_earlier=[earlier], logit_rows=torch.arange(fed),
        )  # fmt: skip
        runner.run(work)
        assert states._last[0].states.made[0].tensor.numel() <= 2 * fed * rows
    behind, node = states._at(0, 12).state, states._last[0].after(5)
    assert node.block is behind.block
    assert [row.place for row in node.rows] == [0, 1, 1, 0]  # of the chain [5, 6] the last; of the levels one each


@on_all
def test_prompts_beside_trees(architecture: str) -> None:
    """One pass with a tree, a prompt's chunk and a single token, in any order."""
    runner, rng = native(architecture), random.Random(1)
    texts = [random_tokens(rng, length) for length in (6, 11)]
    for slot, text in enumerate(texts):
        prefill(runner, slot, text)
    tree = TokenTree.from_rows([TreeRow([3, 4, 5], [-1, 0, 0]), TreeRow([9], [-1])])
    work = runner.verification([0, 1], [6, 11], tree)
    chunk = Pass.of_chains([random_tokens(rng, 13)], slots=[2], prefix_lens=[0], has_last_logits=True)
    mixed = runner.run(work.with_chains(chunk)).logits
    apart = [*runner.run(work).logits, *runner.run(chunk).logits]
    assert all(map(torch.equal, mixed, apart))


@pytest.mark.parametrize("bits", [8, 4])
@on_all
def test_quantized_weights(architecture: str, bits: int) -> None:
    """The projections of recurrent layers too: a text that plain decoding writes."""
    texts, module = [], tiny_model(architecture)
    for config in (None, {"method": "ngram", "num_speculative_tokens": 4}):
        llm = LLM(module, quantization=f"int{bits}", runner="lean-native", speculative_config=config)
        outputs = llm.generate(
            [{"prompt_token_ids": [5, 6, 7, 5, 6, 7]}], SamplingParams(max_tokens=24, temperature=0.0)
        )
        texts.append(outputs[0].outputs[0].token_ids)
    assert texts[0] == texts[1]


def test_layers_that_no_kernel_runs_are_named() -> None:
    """Heads of keys whose size the kernels do not take."""
    module = tiny_model("bamba", mamba_d_state=6)
    with pytest.raises(ModelError, match=r"runner 'lean-native' cannot run 'tiny'.*heads of 6 for keys"):
        Runner(wrap_model(module, name="tiny"), num_slots=1, runner="lean-native")
    assert Runner(wrap_model(module, name="tiny"), num_slots=1).name in ("lean-stock", "generic")
