"""Recurrent layers over token trees: every architecture against ordinary forwards, and what a slot keeps."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from plain_model import PlainModel, relative_error
from tiny_models import LEAN_RECURRENT, RECURRENT_ARCHITECTURES, tiny_model
from tree_decoding import SLOTS, Round, decode, grow, path_error, prefill, prompts, random_tokens, tiny_runner

from foretoken import LLM
from foretoken.core.errors import ConfigError, ModelError, PassError
from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.models.level_states import LayerStates, LevelStates
from foretoken.models.loading import wrap_model
from foretoken.runner.decoders import probe_layer_shapes, state_bytes
from foretoken.runner.runner import Runner
from foretoken.runner.self_test import NUM_ROWS

# Relative error of logits, as `FLOAT32_TOLERANCE`; the chunked form of an ordinary forward adds in another order.
# At most 1e-5 is measured; the mutants below give 1e-2 and more.
TOLERANCE = 5e-5


LEAN = ("lean-native", "lean-stock")
QUICK = ("qwen3_5", "qwen3_next", "lfm2", "falcon_h1_biases")  # on lean-stock; the others are slow
ROUTES = [
    pytest.param(name, route, marks=pytest.mark.slow if route == "lean-stock" and name not in QUICK else ())
    for name, route in [*product(RECURRENT_ARCHITECTURES, ["generic"]), *product(LEAN_RECURRENT, LEAN)]
]


class TokenByToken(PlainModel):
    """The transformers model with its own cache, one token at a time: it clamps no time steps of Mamba2."""

    def _run(self, tokens: torch.Tensor, **options: Any) -> Any:
        name = "cache_params" if "Mamba2For" in type(self.module).__name__ else "past_key_values"
        cache, logits = None, []
        with torch.inference_mode():
            for column in tokens.split(1, dim=1):
                out = self.module(column, use_cache=True, **({} if cache is None else {name: cache}))
                cache = getattr(out, name)
                logits.append(out.logits)
        out.logits = torch.cat(logits, dim=1)
        return out


@cache
def reference(architecture: str) -> PlainModel:
    module = tiny_model(architecture)
    if architecture not in {"nemotron_h", "nemotron_h_moe", "zamba2"}:
        return PlainModel(module)
    for mixer in module.modules():
        if hasattr(mixer, "time_step_limit"):
            mixer.time_step_limit = (0.0, float("inf"))  # that of the first token, which has no state before it
    return TokenByToken(module)


@pytest.mark.parametrize(("architecture", "route"), ROUTES)
def test_trees_equal_forwards_of_their_paths(architecture: str, route: str) -> None:
    """Three prompts in chunks, random trees, and random paths of them committed, in one batch."""
    runner = tiny_runner(architecture, prefill_chunk=5, runner=route)
    assert path_error(reference(architecture), decode(runner, rounds=6)) < TOLERANCE


@pytest.mark.parametrize(("architecture", "route"), ROUTES)
def test_trees_that_grow_equal_forwards_of_their_paths(architecture: str, route: str) -> None:
    """As a draft model's: some nodes a pass, in one batch, behind kept nodes, chains and prompts."""
    runner = tiny_runner(architecture, prefill_chunk=5, runner=route)
    texts, found = zip(*grow(runner, rounds=5), strict=True)
    expected = [logits[-1] for logits in reference(architecture).batch(texts)]
    assert relative_error(torch.stack(found), torch.stack(expected)) < TOLERANCE


@pytest.mark.parametrize("architecture", RECURRENT_ARCHITECTURES)
def test_exact_routes_come_first(architecture: str) -> None:
    assert tiny_runner(architecture).name == ("lean-native" if architecture in LEAN_RECURRENT else "generic")


@pytest.mark.parametrize(("architecture", "route"), ROUTES)
def test_prompts_of_any_length(architecture: str, route: str) -> None:
    """Shorter than the window of the convolution, as long, longer, and past the states that a pass keeps."""
    runner, tree = tiny_runner(architecture, runner=route), TokenTree.from_rows([TreeRow([5, 6, 7], [-1, 0, 0])])
    done = []
    for at, length in enumerate((1, 2, 3, 4, 8, 65)):  # the last two in slots that had another text
        prompt, slot = random_tokens(random.Random(length), length), at % 4
        prefill(runner, slot, prompt)
        done.append(Round(committed=[prompt], tree=tree, output=runner.verify([slot], [length], tree)))
    assert path_error(reference(architecture), done) < TOLERANCE


@pytest.mark.parametrize("architecture", ["qwen3_5", "lfm2", "falcon_h1"])
def test_a_committed_state_is_that_of_the_text(architecture: str) -> None:
    """After each commit, of none, some or all nodes, the state is that of a fresh slot that read the text."""
    runner, fresh = (tiny_runner(architecture, runner="generic") for _ in range(2))

    def compare(slot: int, tokens: list[int]) -> None:
        for start, token in enumerate(tokens):
            fresh.prefill(0, [token], start)
        ours, theirs = (each.cache.states._at(at, len(tokens)).state for each, at in ((runner, slot), (fresh, 0)))
        for layer, state in theirs.items():
            for own, other in zip(ours[layer], state, strict=True):
                assert (own is None) == (other is None)
                assert own is None or torch.allclose(own, other, rtol=1e-4, atol=1e-5)

    decode(runner, rounds=3, after_commit=compare)


def test_a_failed_or_repeated_pass_changes_nothing() -> None:
    runner = tiny_runner("qwen3_5", runner="generic")
    prompt = prompts()[1]
    prefill(runner, 0, prompt)
    tree = TokenTree.from_rows([TreeRow([5, 6, 7, 8], [-1, 0, 0, 2])])
    first = runner.verify([0], [len(prompt)], tree).logits

    def fail(*_: Any) -> None:
        raise RuntimeError("lost")

    handle = runner.model.module.lm_head.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="lost"):
        runner.verify([0], [len(prompt)], tree)
    handle.remove()
    for _ in range(2):
        assert torch.equal(runner.verify([0], [len(prompt)], tree).logits, first)


@pytest.mark.parametrize("route", ["generic", *LEAN])
def test_a_reused_slot_and_a_copied_prefix(route: str) -> None:
    """A slot begins anew; completions begin before a prompt's last token; other prefixes are not known."""
    runner, rng = tiny_runner("qwen3_5", runner=route), random.Random(5)
    prompt = random_tokens(rng, 20)
    prefill(runner, 0, prompt, chunk=9)
    states = runner.cache.states
    assert states is not None
    assert [runner.cache.reusable(0, length) for length in (20, 19, 18, 17, 12)] == [20, 19, 18, 17, 0]
    tree = TokenTree.from_rows([TreeRow([5, 6, 7], [-1, 0, 1])])
    whole = runner.verify([0], [20], tree).logits
    runner.commit([0], [20], [[1]])
    assert [runner.cache.reusable(0, length) for length in (30, 22, 21, 19, 18)] == [22, 22, 19, 19, 0]
    runner.copy_prefix(0, 1, 19)
    runner.prefill(1, prompt[19:], 19)
    assert torch.allclose(runner.verify([1], [20], tree).logits, whole, rtol=1e-4, atol=1e-4)
    with pytest.raises(PassError, match=r"slot 0 has no recurrent state behind 7 tokens"):
        runner.copy_prefix(0, 1, 7)
    prefill(runner, 0, prompt[:8])  # another text in the slot
    assert runner.cache.reusable(0, 22) == 8
    again = runner.verify([0], [8], tree).logits
    prefill(runner, 3, prompt[:8])
    assert torch.allclose(runner.verify([3], [8], tree).logits, again, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("route", ["generic", *LEAN])
def test_commits_of_no_pass_are_refused(route: str) -> None:
    runner = tiny_runner("lfm2", runner=route)
    prefill(runner, 0, [1, 2, 3])
    runner.verify([0], [3], TokenTree.from_rows([TreeRow([5, 6], [-1, 0])]))
    with pytest.raises(PassError, match=r"slot 0 has no nodes behind 4 tokens"):
        runner.commit([0], [4], [[]])
    runner.commit([0], [3], [[1]])
    with pytest.raises(PassError, match=r"slot 0 has no nodes behind 3 tokens"):
        runner.commit([0], [3], [[1]])


def _sibling(monkeypatch: pytest.MonkeyPatch) -> None:
    own = LevelStates.of

    def wrong(work: Pass, slots: Any) -> LevelStates:
        made = own(work, slots)
        levels = [
            level._replace(parents=level.parents.roll(1) if at else level.parents)
            for at, level in enumerate(made.levels)
        ]
        return replace(made, levels=levels)

    monkeypatch.setattr(LevelStates, "of", staticmethod(wrong))


def _one_step_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    own = LevelStates.after

    def wrong(states: LevelStates, node: int) -> LayerStates:
        level, row = states.place[node]
        below = states.levels[level + 1].parents.tolist() if level + 1 < len(states.levels) else []
        child = (level + 1, below.index(row)) if row in below else (level, row)
        return own(states, next(each for each, place in states.place.items() if place == child))

    monkeypatch.setattr(LevelStates, "after", wrong)


def _stale(part: str) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        own = LevelStates.after

        def wrong(states: LevelStates, node: int) -> LayerStates:
            old = states.starts[0].state or states.empty  # of the first sequence, before the pass
            return LayerStates({
                layer: each._replace(**{part: getattr(old[layer], part)}) for layer, each in own(states, node).items()
            })  # fmt: skip

        monkeypatch.setattr(LevelStates, "after", wrong)

    return plant


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a sibling's state": _sibling,
    "a commit one step too far": _one_step_too_far,
    "a stale window": _stale("window"),
    "a stale recurrent state": _stale("recurrent"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = tiny_runner("qwen3_5", runner="generic")
    MUTANTS[mutant](monkeypatch)
    assert path_error(reference("qwen3_5"), decode(runner, rounds=4)) > 1e-3


def test_the_self_test_catches_a_siblings_state(monkeypatch: pytest.MonkeyPatch) -> None:
    _sibling(monkeypatch)
    with pytest.raises(ModelError, match="gives wrong logits for a token tree"):
        Runner(wrap_model(tiny_model("lfm2", seed=1), name="unproven"), num_slots=4, runner="generic")


def test_a_pass_leaves_committed_states_alone() -> None:
    runner, prompt = tiny_runner("bamba", runner="generic"), prompts()[1]
    for slot in SLOTS:
        prefill(runner, slot, prompt)
    tree = TokenTree.from_rows([TreeRow([5, 6, 7], [-1, 0, 0])] * len(SLOTS))
    lengths = [len(prompt)] * len(SLOTS)
    runner.verify(SLOTS, lengths, tree)
    states = runner.cache.states
    assert states is not None
    before = states._committed[SLOTS[0]].state
    copies = {layer: [None if part is None else part.clone() for part in state] for layer, state in before.items()}
    runner.verify(SLOTS, lengths, tree)
    assert states._committed[SLOTS[0]].state is before or states._committed[SLOTS[0]].state == before
    for layer, state in before.items():
        for part, copied in zip(state, copies[layer], strict=True):
            assert part is None or torch.equal(part, copied)


def level(fed: list[int], num_earlier: int | None, length: int = 3) -> Pass:
    """A chain that goes on behind so many nodes."""
    nodes = (num_earlier or 0) + len(fed)
    return Pass(
        tokens=torch.tensor(fed), positions=torch.arange(length, length + nodes), parents=torch.arange(-1, nodes - 1),
        slots=[0], prefix_lens=[length], offsets=[0, len(fed)],
        num_earlier=None if num_earlier is None else [num_earlier], logit_rows=torch.arange(len(fed)),
    )  # fmt: skip


@pytest.mark.parametrize("route", ["generic", *LEAN])
def test_earlier_nodes_are_those_of_the_pass_before(route: str) -> None:
    runner = tiny_runner("qwen3_5", runner=route)
    prefill(runner, 0, [1, 2, 3])
    runner.run(level([5, 6], 0))
    for earlier, length in ((3, 3), (2, 4)):
        with pytest.raises(PassError, match=rf"slot 0 has no states of {earlier} earlier nodes behind {length} tokens"):
            runner.run(level([7], earlier, length))
    want = runner.run(level([7], 2)).logits
    assert torch.equal(runner.run(level([7], 2)).logits, want), "the pass before has more nodes than are earlier"
    runner.run(level([5, 6], None))  # all but the last may be folded into one state
    with pytest.raises(PassError, match="slot 0 has no states of 2 earlier nodes behind 3 tokens"):
        runner.run(level([7], 2))


@pytest.mark.parametrize("route", ["generic", *LEAN])
def test_the_last_token_may_be_fed_again(route: str) -> None:
    """A draft model feeds it again where its draft was discarded; no other state before the last nodes is known."""
    runner = tiny_runner("qwen3_5", runner=route)
    prefill(runner, 0, [1, 2, 3])
    for token, length in ((4, 3), (5, 4)):
        root = Pass.of_chains([[token]], slots=[0], prefix_lens=[length], has_last_logits=True)
        want = runner.run(root).logits
        for _ in range(2):
            runner.run(level([6, 7], 0, length + 1))
            runner.run(level([8], 2, length + 1))
            assert [runner.cache.reusable(0, at) for at in (length + 1, length)] == [length + 1, length]
            assert torch.equal(runner.run(root).logits, want)


@pytest.mark.parametrize("route", ["generic", *LEAN])
def test_a_part_of_the_model_is_refused(route: str) -> None:
    runner = tiny_runner("lfm2", runner=route)
    prefill(runner, 0, [1, 2, 3])
    work = runner.verification([0], [3], TokenTree.from_rows([TreeRow([5, 6], [-1, 0])]))
    with pytest.raises(PassError, match="run through all blocks"):
        runner.run(replace(work, num_layers=1))


@pytest.mark.parametrize("method", ["early_exit", "sparse_kv"])
def test_drafts_of_the_target_itself_are_refused(method: str) -> None:
    with pytest.raises(ConfigError, match=r"has recurrent layers, whose states a part of the model"):
        LLM(tiny_model("lfm2"), speculative_config={"method": method})


def test_states_are_part_of_the_memory_of_the_cache() -> None:
    """On `generic` two states of a slot and one of each node, which a state's copy does not keep; snapshots beside."""
    model = wrap_model(tiny_model("qwen3_5"), name="tiny")
    shapes = probe_layer_shapes(model.module)
    state = sum(part.nbytes for shape in shapes for part in shape.state or () if part is not None)
    assert state_bytes(model, shapes, "generic", num_slots=2, max_nodes=12) == (28 * state, state)
    assert state_bytes(model, probe_layer_shapes(tiny_model("llama")), "auto", num_slots=2, max_nodes=12) == (0, 0)
    row = 2 * 2 * 8 * 4  # keys and values of one layer, two heads, eight numbers of four bytes
    memory = (28 * state + 2 * (NUM_ROWS + 12) * row) * 8 // 7 + 8  # an eighth is for snapshots
    options: dict[str, Any] = {"num_slots": 2, "max_nodes": 12, "kv_cache_memory_bytes": memory}
    cut = Runner(model, runner="generic", **options)
    assert cut.context_len == NUM_ROWS
    assert cut.cache.states is not None
    assert cut.cache.states.snapshots.most_bytes == min(memory // 8, 2 * 4 * state)
    with pytest.raises(ModelError, match=r"there is no memory for the KV cache of 'tiny', 2 sequences"):
        Runner(model, runner="generic", **options | {"kv_cache_memory_bytes": memory - 4 * row})
    runner = Runner(model, num_slots=2, max_nodes=12, runner="generic")
    prefill(runner, 0, [1, 2, 3])
    runner.verify([0], [3], TokenTree.from_rows([TreeRow([5, 6, 7, 8], [-1, 0, 0, 0])]))
    runner.commit([0], [3], [[2]])
    states = runner.cache.states
    assert states is not None
    kept = [part for layer in states._committed[0].state.values() for part in layer if part is not None]
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in kept)


@pytest.mark.parametrize("is_scored", [False, True])
def test_a_prompt_keeps_two_states(is_scored: bool) -> None:
    runner, prompt = tiny_runner("qwen3_5", runner="generic"), prompts()[1]
    states = runner.cache.states
    assert states is not None
    for slot in SLOTS:
        work = Pass.of_chains([prompt], slots=[slot], prefix_lens=[0])
        runner.run(work.with_all_logits() if is_scored else work)
        last = states._last[slot]
        assert last is not None
        assert all(len(levels) == 2 for levels in last.states.kept.values())
