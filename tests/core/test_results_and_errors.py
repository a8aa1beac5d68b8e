"""Metrics of steps, traces of trees, suggested names, foreign exceptions as text or as one type, undone blocks."""

import asyncio
import json
from dataclasses import replace

import pytest

from foretoken.core.errors import (
    ConfigError,
    RequestError,
    described,
    foreign_errors_as,
    listed,
    nearest_name_hint,
    undone_on_error,
)
from foretoken.core.records import GenerationMetrics, NodeOutcome, SequenceStep, StageSeconds, StepRecord, TreeTrace


def step(num_accepted: int, *, depth: int = 3, num_emitted: int | None = None, **by: int) -> SequenceStep:
    return SequenceStep(
        request_id="0",
        num_drafted=5,
        tree_depth=depth,
        num_accepted=num_accepted,
        num_emitted=num_accepted + 1 if num_emitted is None else num_emitted,
        accepted_by=by,
    )


def test_metrics_over_three_passes() -> None:
    metrics = GenerationMetrics()
    metrics.add_sequence(step(3, ngram=2, head=3))
    metrics.add_sequence(step(0, depth=1))
    metrics.add_sequence(step(2, depth=2, num_emitted=1, head=2))  # stopped inside the path
    assert metrics.steps == 3
    assert metrics.num_emitted == 4 + 1 + 1
    assert metrics.num_accepted == 3 + 0 + 2
    assert metrics.num_drafted == 15
    assert metrics.mean_acceptance_length == pytest.approx(6 / 3)
    # Depth 1 was reached by all three passes, depth 2 by two, depth 3 by one.
    assert metrics.acceptance_by_depth == pytest.approx([2 / 3, 2 / 2, 1 / 1])
    assert metrics.accepted_by == {"ngram": 2, "head": 5}


def test_the_token_that_prefill_gives_counts_in_no_mean() -> None:
    metrics = GenerationMetrics()
    first = replace(step(0, depth=0), num_drafted=0, ends_prompt=True)
    seconds = StageSeconds(verify=2.0, accept=0.5)
    metrics.add_step(first, StepRecord(sequences=[first], num_tokens=1, num_prompt_tokens=3, seconds=seconds))
    assert (metrics.prefill_seconds, metrics.seconds.total) == (1.0, 0.0), (
        "the root's quarter of the pass, and the host"
    )
    assert (metrics.steps, metrics.num_emitted, metrics.mean_acceptance_length) == (0, 1, 0.0)
    metrics.add_sequence(step(3, ngram=2, head=3))
    assert (metrics.steps, metrics.num_emitted, metrics.num_prefill_emitted) == (1, 5, 1)
    assert metrics.mean_acceptance_length == 4.0


def test_metrics_add_time_and_errors() -> None:
    seconds = StageSeconds(draft=1.0, verify=2.0, accept=0.5, commit=0.25)
    record = StepRecord(sequences=[], num_tokens=6, seconds=seconds, draft_error="it failed", lossy_tv=0.125)
    metrics = GenerationMetrics()
    for _ in range(2):
        metrics.add_step(step(1), record)
    assert metrics.seconds == StageSeconds(draft=2.0, verify=4.0, accept=1.0, commit=0.5)
    assert metrics.seconds.total == 7.5
    assert metrics.draft_errors == 2
    assert metrics.lossy_tv == 0.25
    flat = json.loads(json.dumps(metrics.as_dict()))
    assert flat["verify_seconds"] == 4.0
    assert flat["mean_acceptance_length"] == 2.0


def test_speed_up_counts_passes_for_which_plain_decoding_was_measured() -> None:
    metrics = GenerationMetrics()
    for plain, num_prompt in ((None, 0), (3.0, 5), (3.0, 0), (3.0, 0)):
        shares = {"num_tokens": 6, "num_prompt_tokens": num_prompt}
        record = StepRecord(sequences=[], **shares, seconds=StageSeconds(verify=4.0), plain_seconds=plain)
        metrics.add_step(step(1), record)
    assert (metrics.compared_seconds, metrics.plain_seconds, metrics.speedup) == (8.0, 12.0, 1.5)
    assert GenerationMetrics().speedup is None
    assert GenerationMetrics().tokens_per_second == GenerationMetrics().mean_acceptance_length == 0.0
    assert GenerationMetrics().acceptance_by_depth == []


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ngrm", "Did you mean 'ngram'? Known: medusa, ngram."),
        ("zzz", "Known: medusa, ngram."),
        ("", "Known: medusa, ngram."),
    ],
)
def test_nearest_name(name: str, hint: str) -> None:
    assert nearest_name_hint(name, ["ngram", "medusa"]) == hint


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise self.args[0]


class Shouting(type):
    """The class of a class whose name cannot be read."""

    @property
    def __name__(cls) -> str:
        raise RuntimeError("no name")


class NamelessError(Exception, metaclass=Shouting): ...


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no such token"), "ValueError: no such token"),
        (ValueError("a sentence."), "ValueError: a sentence"),
        (ValueError("\n\n  first  \nsecond"), "ValueError: first"),
        (KeyError("a"), "KeyError: 'a'"),
        (ValueError(), "ValueError: no message"),
        (ValueError(" \n"), "ValueError: no message"),
        (ValueError("red \x1b[31m\x00 \u202eback"), "ValueError: red  [31m   back"),
        (UnprintableError(ValueError("again")), "UnprintableError: its text cannot be shown, str() raised ValueError"),
        (UnprintableError(RecursionError()), "UnprintableError: its text cannot be shown, str() raised RecursionError"),
        (NamelessError("x"), "NamelessError: x"),
    ],
)
def test_foreign_exceptions_are_described_in_one_line(error: Exception, text: str) -> None:
    assert described(error) == text


def test_descriptions_are_bounded() -> None:
    for error in (ValueError("a" * 10**7), type("E" * 10**5, (Exception,), {})("b" * 1000)):
        assert 200 < len(described(error)) <= 300
    assert described(type("A\nB", (Exception,), {})("b")).isprintable()


def test_foreign_errors_become_one_type_from_the_original() -> None:
    original = ZeroDivisionError("of a template")
    with pytest.raises(RequestError) as caught, foreign_errors_as(RequestError, lambda err: f"no: {described(err)}"):
        raise original
    assert str(caught.value) == "no: ZeroDivisionError: of a template"
    assert caught.value.__cause__ is original


@pytest.mark.parametrize("error", [ConfigError("ours"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_named_types_and_what_is_no_exception_pass_as_they_are(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, foreign_errors_as(RequestError, described, passing=(ConfigError,)):
        raise error
    assert caught.value is error


def test_names_of_any_number_and_length_are_listed_briefly() -> None:
    assert listed(["b", "a"]) == "a, b"
    many = listed(f"layers.{i:04}.weight" for i in range(5000))
    assert many.startswith("layers.0000.weight, layers.0001.weight, ")
    assert many.endswith(f" and {5000 - many.count('weight')} more")
    assert len(many) < 260
    assert listed(["x" * 10_000, "y"]) == f"{'x' * 119}…, y"
    assert listed([]) == ""


@pytest.mark.parametrize(
    "error", [ValueError("a fault"), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()]
)
def test_whatever_is_raised_undoes_the_block_once_and_goes_on(error: BaseException) -> None:
    undone: list[int] = []
    with pytest.raises(type(error)) as caught, undone_on_error(lambda: undone.append(1)):
        raise error
    assert caught.value is error
    assert undone == [1]


def test_a_block_that_ends_well_is_not_undone() -> None:
    undone: list[int] = []
    with undone_on_error(lambda: undone.append(1)):
        pass
    assert not undone


def test_an_error_of_undoing_is_raised_with_what_it_was_for() -> None:
    def undo() -> None:
        raise OSError("no room to put it back")

    with pytest.raises(OSError, match="no room") as caught, undone_on_error(undo):
        raise ValueError("a fault")
    assert isinstance(caught.value.__context__, ValueError)


#   0 ─┬─ 1 ─┬─ 3 ─── 6
#      │     └─ 4
#      ├─ 2 ─── 5
#      └─ 7 ─── 8       (7 is a probe)
TRACE = TreeTrace(
    rule="greedy",
    position=9,
    tokens=[50, 11, 12, 13, 14, 15, 16, 17, 18],
    parents=[-1, 0, 0, 1, 1, 2, 3, 0, 7],
    depths=[0, 1, 1, 2, 2, 2, 3, 1, 2],
    drafters=[(), *[("a",)] * 8],
    probes=frozenset({7}),
    scores=None,
    draft_probs=None,
    token_probs=[None, *[0.5] * 8],
    target_tokens=[11, 14, 1, 2, 30, 4, 5, 6, 7],
    target_probs=[0.5] * 9,
    path=[1, 4],
    next_token=30,
)
ROOT, TAKEN, OUT, FAR, ENDED, PROBE = (
    NodeOutcome.ROOT,
    NodeOutcome.ACCEPTED,
    NodeOutcome.REJECTED,
    NodeOutcome.UNREACHED,
    NodeOutcome.ENDED,
    NodeOutcome.PROBE,
)


@pytest.mark.parametrize(
    ("path", "next_token", "outcomes"),
    [
        ([1, 4], 30, [ROOT, TAKEN, OUT, OUT, TAKEN, FAR, FAR, PROBE, PROBE]),
        ([], 30, [ROOT, OUT, OUT, FAR, FAR, FAR, FAR, PROBE, PROBE]),
        ([1], None, [ROOT, TAKEN, OUT, ENDED, ENDED, FAR, FAR, PROBE, PROBE]),
        ([], None, [ROOT, ENDED, ENDED, FAR, FAR, FAR, FAR, PROBE, PROBE]),
        ([1, 3, 6], 5, [ROOT, TAKEN, OUT, TAKEN, OUT, FAR, TAKEN, PROBE, PROBE]),
    ],
)
def test_outcomes(path: list[int], next_token: int | None, outcomes: list[NodeOutcome]) -> None:
    trace = replace(TRACE, path=path, next_token=next_token)
    assert trace.outcomes() == outcomes


def test_what_was_written_after_a_node() -> None:
    assert [TRACE.written_after(node) for node in (0, 1, 4, 2, 3)] == [11, 14, 30, None, None]
    assert replace(TRACE, next_token=None).written_after(4) is None
