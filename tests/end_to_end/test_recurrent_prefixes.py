"""Texts begin inside others where a state of the recurrent layers was kept: as a fresh engine reads them as a whole."""

import copy
import random
from functools import cache
from typing import Any

import pytest
import torch
from end_to_end.same_text import assert_same_text
from tiny_models import VOCAB_SIZE, tiny_model

from foretoken import LLM, RequestOutput, SamplingParams
from foretoken.decoder import state_snapshots
from foretoken.decoder.recurrent_states import RecurrentStates
from foretoken.decoder.state_snapshots import Snapshots
from foretoken.engine.scheduler import LEAST_JUNCTION

CASES = [
    *(pytest.param(each, "lean-native") for each in ("qwen3_5", "lfm2", "bamba")),
    pytest.param("qwen3_5", "generic"),
    *(pytest.param(each, "lean-stock", marks=pytest.mark.slow) for each in ("qwen3_5", "lfm2", "bamba")),
]
each = pytest.mark.parametrize(("architecture", "runner"), CASES)
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
LOOKUP = {"method": "ngram", "prompt_lookup_min": 1}


@cache
def module(architecture: str) -> Any:
    return tiny_model(architecture, max_position_embeddings=400)


def engine(architecture: str, runner: str, **more: Any) -> LLM:
    return LLM(module(architecture), **{"max_num_seqs": 3, "runner": runner, "speculative_config": LOOKUP, **more})


def text(seed: int, length: int) -> list[int]:
    return [random.Random(f"{seed} {at}").randrange(3, VOCAB_SIZE) for at in range(length)]


SYSTEM = text(0, 60)
# Short ends: the states of tiny random models forget what they have absorbed within some twenty tokens.
PROMPTS = [[*SYSTEM, 10 + each, *text(each, 2)] for each in range(1, 5)]


@cache
def fresh(architecture: str, runner: str, prompts: tuple[tuple[int, ...], ...]) -> list[RequestOutput]:
    """Without drafts and without the prefix cache, one at a time."""
    llm = LLM(module(architecture), max_num_seqs=1, runner=runner, enable_prefix_caching=False)
    return llm.generate(list(map(list, prompts)), GREEDY)


def check(llm: LLM, case: tuple[str, str], prompts: list[list[int]], names: str) -> list[int]:
    """Compares texts with a fresh engine's; returns the cached tokens of each."""
    got = llm.generate(prompts, GREEDY)
    assert_same_text(
        got, fresh(*case, tuple(map(tuple, prompts))), [f"{names} {at}" for at in range(len(got))], tolerance=1e-4
    )
    return [int(each.num_cached_tokens or 0) for each in got]


def lost(llm: LLM) -> float:
    return next(each.value for each in llm.get_metrics() if each.name == "foretoken:prefix_cache_lost")


@each
def test_the_third_prompt_with_a_system_prompt_begins_behind_it(architecture: str, runner: str) -> None:
    """The second one is read in two parts, as it has most of its tokens in common with a text that is there."""
    llm = engine(architecture, runner)
    found = [check(llm, (architecture, runner), [prompt], "system")[0] for prompt in PROMPTS]
    junction = len(SYSTEM) - 1  # a head needs the pair of the last feature and the token after it
    assert found == [0, 0, junction, junction]
    assert lost(llm) == junction


@each
def test_prompts_that_come_together_wait_for_their_system_prompt(architecture: str, runner: str) -> None:
    llm = engine(architecture, runner, max_num_seqs=4)
    passes, run = [], llm.target.run
    llm.target.run = lambda work: passes.append(work) or run(work)  # type: ignore[method-assign]
    found = check(llm, (architecture, runner), PROMPTS, "together")
    assert sorted(found) == [0, *[len(SYSTEM) - 1] * 3]
    assert [work.num_tokens for work in passes[:2]] == [len(SYSTEM), 3 + 3 * 4]
    assert lost(llm) == 0


@each
def test_a_long_prompt_keeps_states_inside(architecture: str, runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in chunks of 32 tokens; a state about every 64."""
    monkeypatch.setattr(state_snapshots, "SPACING", 60)
    llm, long = engine(architecture, runner, max_num_batched_tokens=32), text(9, 200)
    others = [[*long[:length], 5, 6] for length in (190, 130, 66, 30)]
    found = [check(llm, (architecture, runner), [prompt], "long")[0] for prompt in [long, *others]]
    assert found == [0, 127, 127, 63, 0]


@each
def test_a_turn_that_is_asked_again(architecture: str, runner: str) -> None:
    """The state behind the first answer stays while the second turn is decoded, and a third text begins there."""
    llm, case = engine(architecture, runner), (architecture, runner)
    check(llm, case, [SYSTEM], "first")
    answer = fresh(*case, (tuple(SYSTEM),))[0].outputs[0].token_ids
    turns = [[*SYSTEM, *answer, each, 7] for each in (20, 21, 22)]
    found = [check(llm, case, [turn], "again")[0] for turn in turns]
    assert found == [len(SYSTEM) + len(answer) - 1] * 3


@each
def test_snapshots_have_a_tenant(architecture: str, runner: str) -> None:
    llm = engine(architecture, runner)

    def cached(salt: str | None, prompt: list[int]) -> int | None:
        (output,) = llm.generate({"prompt_token_ids": prompt, "cache_salt": salt}, GREEDY)
        assert_same_text([output], fresh(architecture, runner, (tuple(prompt),)), [f"{salt}"], tolerance=1e-4)
        return output.num_cached_tokens

    junction = len(SYSTEM) - 1
    assert [cached("mine", prompt) for prompt in PROMPTS[:3]] == [0, 0, junction]
    assert [cached(salt, PROMPTS[3]) for salt in ("yours", None, "mine")] == [0, 0, junction]


@each
def test_snapshots_of_old_weights_are_dropped(architecture: str, runner: str) -> None:
    own = copy.deepcopy(module(architecture))
    llm = LLM(own, max_num_seqs=3, runner=runner, speculative_config=LOOKUP)
    before = llm.generate(PROMPTS[:2], GREEDY)
    with torch.no_grad():
        own.lm_head.weight.mul_(-0.7)
    (after,) = llm.generate([PROMPTS[2]], GREEDY)
    assert after.num_cached_tokens == 0
    plain = LLM(own, max_num_seqs=1, runner=runner, enable_prefix_caching=False)
    assert_same_text([after], plain.generate([PROMPTS[2]], GREEDY), ["after"], tolerance=1e-4)
    states = llm.target.cache.states
    assert states is not None
    assert before[0].outputs[0].token_ids != after.outputs[0].token_ids
    assert llm.reset_prefix_cache()
    assert states.snapshots.num_bytes == 0


@each
def test_a_small_budget_loses_hits_but_no_text(architecture: str, runner: str) -> None:
    llm = engine(architecture, runner)
    states = llm.target.cache.states
    assert states is not None
    states.snapshots.most_bytes = 0
    found = [check(llm, (architecture, runner), [prompt], "small")[0] for prompt in PROMPTS]
    assert found == [0, 0, 0, 0]
    assert states.snapshots.num_bytes == 0
    assert lost(llm) == 3 * (len(SYSTEM) - 1)


def _one_token_further(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = RecurrentStates.keep

    def wrong(self: RecurrentStates, slot: int, length: int) -> None:
        keep(self, slot, length)
        self.snapshots.keep(slot, length, self._at(slot, length + 1).state)

    monkeypatch.setattr(RecurrentStates, "keep", wrong)
    monkeypatch.setattr(Snapshots, "keep_end", lambda *_: None)  # it would replace the wrong one


def _of_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    keep, trim, ended = RecurrentStates.keep, RecurrentStates.trim, list[Any]()

    def noted(self: RecurrentStates, slot: int, length: int) -> None:
        trim(self, slot, length)
        ended.extend(each.state for each in self._committed if each.state is not None)

    def wrong(self: RecurrentStates, slot: int, length: int) -> None:
        keep(self, slot, length)
        self.snapshots.keep(slot, length, ended[0])

    monkeypatch.setattr(RecurrentStates, "trim", noted)
    monkeypatch.setattr(RecurrentStates, "keep", wrong)
    monkeypatch.setattr(Snapshots, "keep_end", lambda *_: None)


def _stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that begins another text keeps the snapshots of the one before."""
    monkeypatch.setattr(Snapshots, "cut", lambda self, slot, length: None)


MUTANTS = {"one token further": _one_token_further, "of another text": _of_another_text, "stale": _stale}


@pytest.mark.parametrize("runner", ["lean-native", "generic"])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_control_a_wrong_snapshot_is_noticed(runner: str, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[mutant](monkeypatch)
    llm, other = engine("qwen3_5", runner, max_num_seqs=1), text(50, 40)
    prompts = [[*other, 20], [*other, 21, 7], *PROMPTS]
    with pytest.raises(AssertionError, match="system"):
        _ = [check(llm, ("qwen3_5", runner), [prompt], "system") for prompt in prompts]


def test_short_beginnings_are_not_worth_a_pass() -> None:
    llm, shared = engine("qwen3_5", "lean-native"), SYSTEM[: LEAST_JUNCTION - 1]
    passes, run = [], llm.target.run
    llm.target.run = lambda work: passes.append(work.num_tokens) or run(work)  # type: ignore[method-assign]
    prompts = [[*shared, *text(each, 10)] for each in range(3)]
    for prompt in prompts:
        llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1))
    assert passes == [len(prompts[0])] * 3
