"""Memory that does not hold a pass costs drafts, not requests and not text."""

import weakref
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from end_to_end.tiny_llms import drafters, llm
from pairwise import slow_products

from foretoken import LLM, SamplingParams
from foretoken.core.backend import is_out_of_memory
from foretoken.core.passes import Pass
from foretoken.core.records import StepRecord
from foretoken.engine.sequence import MemoryPressure

DRAFTERS = drafters()
PROMPTS = [[5], [6, 7], [8, 9, 10]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24),
    SamplingParams(temperature=0.8, seed=1, max_tokens=24, repetition_penalty=1.2),
    SamplingParams(temperature=0.9, seed=2, max_tokens=24, logprobs=1),
]


@cache
def plain() -> list[list[int]]:
    """What the target writes."""
    return [output.outputs[0].token_ids for output in llm({}).generate(PROMPTS, PARAMS)]


def with_room_for(most: int, engine: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets passes over more tokens fail; returns a list that the tokens of every failure are added to."""
    original, failures = engine.target.run, []

    def run(work: Pass) -> Any:
        if work.num_tokens > most:
            failures.append(work.num_tokens)
            raise torch.OutOfMemoryError(f"no room for {work.num_tokens} tokens")
        return original(work)

    monkeypatch.setattr(engine.target, "run", run)
    return failures


class Clock:
    """Seconds that a test sets, and that pass by `step` whenever they are asked for."""

    def __init__(self, step: float = 0.0) -> None:
        self.seconds, self.step = 0.0, step

    def __call__(self) -> float:
        self.seconds += self.step
        return self.seconds


def give_clock(engine: LLM, clock: Clock) -> None:
    """Lets the engine count its failures by a test's clock."""
    engine._engine._memory = MemoryPressure(torch.device("cpu"), now=clock)


@pytest.mark.parametrize("has_cause", [False, True])
def test_nothing_holds_a_failed_pass_when_its_memory_is_freed(has_cause: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm(DRAFTERS["ngram"](None), max_num_seqs=3)
    held: list[Any] = []
    are_held: list[bool] = []
    original = engine.target.run

    def allocate() -> None:
        scratch = torch.zeros(8)
        held.append(weakref.ref(scratch))
        raise torch.OutOfMemoryError("no room")

    def run(work: Any) -> Any:
        if work.num_tokens > 3:
            try:
                allocate()
            except torch.OutOfMemoryError as err:
                if has_cause:
                    raise torch.OutOfMemoryError("no room for another way either") from err
                raise
        return original(work)

    monkeypatch.setattr(engine.target, "run", run)
    monkeypatch.setattr(engine._engine._memory, "note_failure", lambda: are_held.append(held[-1]() is not None))
    assert [output.outputs[0].token_ids for output in engine.generate(PROMPTS, PARAMS)] == plain()
    assert are_held
    assert not any(are_held)


@pytest.mark.parametrize(
    ("most", "name"),
    slow_products([3, 7], ["draft itself", "draft itself tree", "ngram", "random wide", "oracle [3, 0, 5]"], each=1),
)
def test_narrower_trees_write_the_same_text(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = [prompt + tokens for prompt, tokens in zip(PROMPTS, plain(), strict=True)]
    engine = llm(DRAFTERS[name](contexts), max_num_seqs=3)
    give_clock(engine, Clock(step=100.0))  # drafting is never switched off
    failures = with_room_for(most, engine, monkeypatch)
    assert [output.outputs[0].token_ids for output in engine.generate(PROMPTS, PARAMS)] == plain()
    assert failures
    assert engine._engine._memory.num_failures == len(failures)
    counted = {metric.name: metric for metric in engine.get_metrics()}["foretoken:out_of_memory"]
    assert counted.value == len(failures)


def test_three_failures_in_a_minute_switch_drafting_off_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[StepRecord] = []
    engine = llm(DRAFTERS["draft itself"](None), max_num_seqs=1, on_step=records.append)
    clock = Clock()
    give_clock(engine, clock)
    failures = with_room_for(1, engine, monkeypatch)
    first = engine.generate(PROMPTS[:1], PARAMS[:1])[0].outputs[0].token_ids
    assert first == plain()[0]
    assert len(failures) == 3
    assert not any(step.num_drafted for record in records for step in record.sequences)
    clock.seconds += 60.0
    monkeypatch.undo()
    assert engine.generate(PROMPTS[:1], PARAMS[:1])[0].outputs[0].token_ids == plain()[0]
    assert any(step.num_drafted for record in records for step in record.sequences)


def test_failures_that_lie_further_apart_switch_nothing_off() -> None:
    clock = Clock()
    memory = MemoryPressure(torch.device("cpu"), now=clock)
    for _ in range(9):
        memory.note_failure()
        assert memory.allows_drafts
        clock.seconds += 31.0


def test_what_a_grammar_forces_is_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forced tokens may be more than a drafter's tree; without a drafter they are all there is."""
    params = SamplingParams(temperature=0.0, max_tokens=40, structured_outputs={"choice": ["a b c d e f g h i j k l"]})
    for arguments in ({}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}):
        records: list[StepRecord] = []
        engine = LLM("models/tinycode", on_step=records.append, **arguments)
        want = engine.generate(["def"], params)[0].outputs[0]
        assert max(record.num_tokens for record in records) > 3
        with monkeypatch.context() as patch:
            failures = with_room_for(3, engine, patch)
            got = engine.generate(["def"], params)[0].outputs[0]
        assert failures
        assert (got.token_ids, got.finish_reason, got.error) == (want.token_ids, want.finish_reason, None)


def test_memory_that_does_not_hold_one_token_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm(DRAFTERS["draft itself tree"](None), max_num_seqs=2)
    with monkeypatch.context() as patch:
        with_room_for(0, engine, patch)
        outputs = [output.outputs[0] for output in engine.generate([[5], [6]], PARAMS[:2])]
    assert [output.finish_reason for output in outputs] == ["error", "error"]
    assert all("OutOfMemoryError" in str(output.error) for output in outputs)
    assert [output.outputs[0].token_ids for output in engine.generate(PROMPTS, PARAMS)] == plain()


def test_real_failures_of_the_host_are_recognised() -> None:
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(1 << 58)
    with pytest.raises(MemoryError) as of_numpy:
        np.empty(1 << 58)
    assert is_out_of_memory(of_torch.value)
    assert is_out_of_memory(of_numpy.value)
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))
