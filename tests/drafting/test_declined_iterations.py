"""Where drafting does not pay an iteration is one of plain decoding: no drafter is asked, told, or read for."""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from drafters.drafting_contexts import handle
from end_to_end.tiny_heads import head
from end_to_end.tiny_llms import llm

from foretoken import LLM, SamplingParams
from foretoken.core.records import StageSeconds, StepRecord
from foretoken.core.token_tree import TokenTree
from foretoken.drafters.base import DraftContext, DraftRequest
from foretoken.drafters.head_features import StackFeatures
from foretoken.drafters.oracle import OracleDrafter
from foretoken.drafters.registry import drafter_options
from foretoken.drafting import choice
from foretoken.drafting.base import Allotment, Allowance, Ask
from foretoken.drafting.choice import time_drafts
from foretoken.drafting.costs import fastest_by_depth
from foretoken.drafting.goodput import Goodput
from foretoken.runner.costs import CostCurve, PassCosts

DEAR = (1, 2, 64), (1.0, 40.0, 400.0)  # seconds of passes: a second token costs as much as 39 passes
PARAMS = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


def adaptive(name: str) -> dict[str, Any]:
    """A head without training, whose depth the controller chooses."""
    plain = llm({}).generate([[5], [6]], PARAMS)
    references = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in plain]
    return head(name, steps=0, tree="chain")(references)


class Calls:
    """Counts what reaches the drafters and the target of an engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, curve: Any, config: dict[str, Any]) -> None:
        monkeypatch.setattr(
            "foretoken.entrypoints.llm.pass_costs", lambda model, name: PassCosts(*[CostCurve(*curve)] * 3)
        )
        self.records: list[StepRecord] = []
        self.engine = llm(config, on_step=self.records.append)
        (drafter,) = self.engine.drafters
        self.proposed = self.committed = self.tapped = 0

        def counting(name: str, original: Any) -> Any:
            def method(argument: Any) -> Any:
                is_step = name != "committed" or argument.verified is not None
                setattr(self, name, getattr(self, name) + is_step)
                return original(argument)

            return method

        inner = self.engine.target.run

        def run(work: Any) -> Any:
            output = inner(work)
            if work.has_all_logits:  # else it reads a prompt, of which drafters are always told
                self.tapped += work.has_features
                assert work.has_features or output.features is None or len(output.features) == work.num_tokens
            return output

        monkeypatch.setattr(drafter, "propose", counting("proposed", drafter.propose))
        monkeypatch.setattr(drafter, "commit", counting("committed", drafter.commit))
        monkeypatch.setattr(self.engine.target, "run", run)


@pytest.mark.parametrize("method", ["medusa", "hydra++"])
def test_an_iteration_without_a_draft_is_one_of_plain_decoding(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, DEAR, adaptive(method))
    prompts = [[5, 6, 5, 6], [7, 8, 9]]
    outputs = [calls.engine.generate(prompt, PARAMS)[0].outputs[0].token_ids for prompt in prompts]
    assert outputs == [llm({}).generate(prompt, PARAMS)[0].outputs[0].token_ids for prompt in prompts]
    num_declined = sum(record.declined is not None for record in calls.records)
    assert num_declined >= 112
    assert calls.proposed <= 4
    if method == "hydra++":  # its block reads every position
        assert calls.committed == len(calls.records) - len(prompts)
        return
    assert calls.committed <= len(calls.records) - num_declined + 2 + 2 * len(prompts)
    assert calls.tapped == calls.committed


def test_what_a_lookup_found_is_not_verified_where_it_costs_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lookup is asked, because asking costs next to nothing."""
    config = {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1}}
    monkeypatch.setattr("foretoken.drafting.choice.time_drafts", lambda drafter, target: [(1, 1e-7), (4, 1e-7)])
    calls = Calls(monkeypatch, DEAR, config)
    output = calls.engine.generate([5, 6, 5, 6], PARAMS)[0].outputs[0].token_ids
    assert output == llm({}).generate([5, 6, 5, 6], PARAMS)[0].outputs[0].token_ids
    steps = [step for record in calls.records for step in record.sequences]
    assert any(step.num_proposed for step in steps)
    assert not any(step.num_drafted for step in steps)


def test_a_draft_after_missed_iterations_has_its_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features of the last position are there when a draft asks for them, after many that were left out."""
    calls = Calls(monkeypatch, ((1, 64), (1.0, 1.0)), adaptive("medusa"))
    engine_drafting: Any = calls.engine._engine._drafting
    script = itertools.chain([False] * 33, itertools.repeat(True))

    controller = engine_drafting._usual.controller

    def allot(batch_size: int, num_prompt_tokens: int = 0) -> Allotment:
        controller._begin(batch_size)
        if next(script):
            first = controller._asking(Ask((0,), 4))
            return Allotment(allowances=[Allowance(depth=4, nodes=16)] * batch_size, first=first)
        return Allotment.nothing(batch_size, mock.Mock())

    monkeypatch.setattr(controller, "allot", allot)
    calls.engine.generate([5, 6, 7], replace(PARAMS, max_tokens=80))
    first, *records = calls.records
    assert first.sequences[0].ends_prompt
    assert [record.declined is not None for record in records].index(False) == 33
    waiting, *later = records[33:-1]
    assert (waiting.asked, waiting.declined) == ([], None), "the drafter gets the last feature before the draft"
    assert len(later) > 5
    assert all(record.sequences[0].tree_depth > 0 for record in later), "none was asked for without a feature"
    assert calls.tapped == calls.committed < 55


def test_drafting_rests_where_the_clock_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft was timed as cheap, and is not: nobody is told any more, until one is tried with a feature at hand."""
    calls = Calls(monkeypatch, ((1, 64), (1.0, 1.0)), adaptive("medusa"))
    engine_drafting: Any = calls.engine._engine._drafting
    nodes = [*calls.engine.drafters[0].nodes_by_depth]
    cost = CostCurve((1, 64), (1.0, 1.0))
    controller = Goodput(cost, nodes_by_depth=[nodes], max_nodes=16, is_read=False, timed=[[(1, 0.01), (2, 0.02)]])
    learn_step = controller.learn_step

    def learn(record: StepRecord) -> None:
        asked = [replace(each, seconds=1.0) for each in record.asked]
        seconds = StageSeconds(draft=1.0, verify=2.0) if asked else StageSeconds(verify=1.0)
        learn_step(replace(record, seconds=seconds, asked=asked))

    monkeypatch.setattr(controller, "learn_step", learn)
    monkeypatch.setattr(engine_drafting, "_usual", engine_drafting._usual._replace(controller=controller))
    got = calls.engine.generate([5, 6, 7], replace(PARAMS, max_tokens=120))[0].outputs[0].token_ids
    assert got == llm({}).generate([5, 6, 7], replace(PARAMS, max_tokens=120))[0].outputs[0].token_ids
    drafted = [record for record in calls.records if record.asked]
    assert 2 <= len(drafted) <= 20
    assert all(record.sequences[0].tree_depth > 0 for record in drafted), "none was asked for without a feature"
    rests = sum(record.declined is not None for record in calls.records)
    assert rests > 60
    assert calls.tapped == calls.committed <= len(calls.records) - rests + 6


def test_a_slow_first_draft_is_not_the_last_one_that_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles or captures; of each depth the fastest draft counts, so there is another one of each."""
    timed: list[list[tuple[int, float]]] = []
    monkeypatch.setattr("foretoken.drafting.choice._LIMIT_S", 0.0)
    monkeypatch.setattr(
        choice, "time_drafts", lambda drafter, target: timed.append(time_drafts(drafter, target)) or timed[-1]
    )
    llm(adaptive("hydra++"))
    assert sorted(Counter(depth for depth, _ in timed[0]).values()) == [2, 2]


def test_a_timed_draft_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that are timed before the first request change no draft, and say what they take by depth."""
    timed: list[list[tuple[int, float]]] = []

    def timing(drafter: Any, target: Any) -> list[tuple[int, float]]:
        timed.append(time_drafts(drafter, target))
        return timed[-1]

    config = adaptive("hydra++")
    monkeypatch.setattr(choice, "time_drafts", timing)
    engine = llm(config)
    assert len(timed) == 1
    assert len(timed[0]) >= 2
    assert min(seconds for _, seconds in timed[0]) > 0
    assert {depth for depth, _ in timed[0]} == {1, max(timed[0])[0]}
    features = engine.drafters[0]._features  # type: ignore[attr-defined]
    assert isinstance(features, StackFeatures)
    assert all(held.length == 0 for held in engine._engine._scheduler._slots._free), (
        "nothing that a request could go on from"
    )
    request = DraftRequest(request_id="r", prompt=[0] * 9, params=PARAMS)
    engine.drafters[0].begin(0, request)
    assert (set(features._fed), set(features._known)) == ({0}, {0})
    assert not any(features._waiting)


class Clock:
    """A clock that work advances, by several times as much while another program runs."""

    def __init__(self, slowness: Callable[[int], float]) -> None:
        self.now, self._slowness, self._num = 0.0, slowness, 0

    def work(self, seconds: float) -> None:
        self.now += seconds * self._slowness(self._num)
        self._num += 1


@pytest.mark.parametrize(
    "slowness",
    [lambda i: 1.0, lambda i: 5.0, lambda i: 5.0 if i < 12 else 1.0, lambda i: 5.0 if i % 5 == 4 else 1.0],
    ids=["idle", "busy", "busy at first", "busy now and then"],
)
def test_what_drafts_take_is_told_as_on_an_idle_machine(
    slowness: Callable[[int], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes were timed on an idle machine before: a busy one made drafts five times as dear beside them."""
    clock, costs = Clock(slowness), CostCurve((1, 16), (1.0, 1.0))

    def run(work: Any) -> Any:
        clock.work(costs(work.num_tokens))
        return SimpleNamespace(features=None)

    class Steady(OracleDrafter):
        def propose(self, context: DraftContext) -> TokenTree:
            clock.work(0.2 * context.max_depth[0])
            return super().propose(context)

    monkeypatch.setattr(choice, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(choice, "_LIMIT_S", 1e9)
    options = drafter_options({"method": "oracle", "references": [[0] * 90], "num_speculative_tokens": 4})
    drafter = Steady(options)  # type: ignore[arg-type]
    target = handle(run=run, measured_costs=lambda: costs)
    drafter.attach(target)
    fastest = fastest_by_depth(time_drafts(drafter, target))
    assert fastest == pytest.approx({1: 0.2, 4: 0.8}, rel=1e-9)


MODEL = str(Path(__file__).parents[2] / "models/tinycode")
SHORT = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = ["def read_config(path):\n", "class Queue:\n", "import os\n"]


@pytest.fixture(scope="module")
def plain() -> list[str]:
    return [each.outputs[0].text for each in LLM(MODEL, max_num_seqs=3).generate(PROMPTS, SHORT)]


@pytest.mark.parametrize("drafter", ["hass:chain", "draft_model"])
def test_drafts_of_three_sequences_are_timed_and_leave_nothing_behind(drafter: str, plain: list[str]) -> None:
    llm = LLM(MODEL, speculative_config=f"{drafter}:num_speculative_tokens=6", max_num_seqs=3)
    for slot in range(3):
        llm.target.cache.reserve(slot, 64)
    drafted: list[tuple[int, int]] = []
    own = llm.drafters[0]
    propose = own.propose

    def counted(context):
        tree = propose(context)
        drafted.append((tree.batch_size, tree.max_depth))
        return tree

    own.propose = counted  # type: ignore[method-assign]
    timed = time_drafts(own, llm.handle, 3)
    own.propose = propose  # type: ignore[method-assign]
    assert {depth for depth, _ in timed} == {1, 4}
    assert {size for size, _ in drafted} == {3}
    assert all(seconds > 0 for _, seconds in timed)
    for slot in range(3):
        llm.target.cache.trim(slot, 0)
    assert [each.outputs[0].text for each in llm.generate(PROMPTS, SHORT)] == plain
