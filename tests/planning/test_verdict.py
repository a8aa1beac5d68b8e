"""Verdicts on runs: the words follow the intervals, and an estimate follows from the passes of a run alone."""

from typing import Any

import pytest

from foretoken.bench.compare import Measurement
from foretoken.core.records import GenerationMetrics, SequenceStep, StageSeconds, StepRecord
from foretoken.planning.verdict import RunVerdict, is_declined, next_step, verdicts


def row(setup: str, speed_ups: list[float], seconds: float = 1.0, **counts: Any) -> Measurement:
    made = Measurement(setup, 0.8, "lean", "", seconds=[seconds], tokens=[100], metrics=GenerationMetrics(**counts))
    made.speed_ups, made.speed_up = speed_ups, sorted(speed_ups)[len(speed_ups) // 2] if speed_ups else 1.0
    return made


PLAIN = row("plain", [])


@pytest.mark.parametrize(
    ("speed_ups", "word"),
    [
        ([2.0, 2.2, 1.9], "take"),
        ([1.2], "take"),
        ([1.1], "not decided"),  # one round tells little
        ([0.7, 1.6, 1.1], "not decided"),
        ([0.95, 0.96, 0.94], "do not draft"),
        ([1.0, 1.0, 1.0], "do not draft"),
    ],
)
def test_words_follow_the_interval(speed_ups: list[float], word: str) -> None:
    (verdict,) = verdicts([PLAIN, row("ngram", speed_ups)], {"ngram"})
    assert verdict.verdict == word
    assert verdict.sentence.startswith(f"temperature 0.8: {word}")
    assert "plain decoding takes 10.00 ms a token, ngram 10.00" in verdict.sentence
    assert verdict.sentence.endswith("(measured)")


def test_the_fastest_drafter_that_can_be_taken() -> None:
    rows = [PLAIN, row("ngram", [1.5, 1.6]), row("oracle", [4.0, 4.1]), row("hass", [2.0, 2.1], seconds=0.5)]
    found = verdicts(rows, {"ngram", "hass"})
    assert (found[0].drafter, "take hass, 2.10x" in found[0].sentence) == ("hass", True)
    assert "`foretoken plan 'my model' --measure`" in next_step("my model", found)
    assert verdicts(rows, set()) == []
    assert next_step("m", verdicts([PLAIN, row("ngram", [1.0])], {"ngram"})).startswith("next: more rounds")


def test_a_row_is_declined_if_the_controller_chose_so() -> None:
    """A slow drafter that did draft is no such row, nor is one that gained."""
    assert is_declined(row("hydra", [0.9], steps=100, num_declined=80))
    assert not is_declined(row("hydra", [0.9], steps=100, num_declined=20))
    assert not is_declined(row("hydra", [1.1], steps=100, num_declined=80))
    (verdict,) = verdicts([PLAIN, row("hydra", [0.9, 0.91], steps=100, num_declined=80)], {"hydra"})
    assert "chose not to draft in 80% of the passes" in verdict.sentence


def step(emitted: int, seconds: float, *, width: int = 1, told: float | None = None, **more: Any) -> StepRecord:
    sequence = SequenceStep(
        request_id="0", num_drafted=width - 1, tree_depth=width - 1, num_accepted=emitted - 1, num_emitted=emitted,
        accepted_by={}, **more,
    )  # fmt: skip
    return StepRecord(
        sequences=[sequence], num_tokens=width, seconds=StageSeconds(draft=0.5, verify=seconds), plain_seconds=told
    )


def a_run(*steps: StepRecord) -> RunVerdict:
    verdict = RunVerdict()
    for each in (step(1, 9.0, ends_prompt=True), *steps):
        verdict.add_step(each)
    return verdict


def test_the_cost_models_seconds_are_taken() -> None:
    verdict = a_run(step(4, 1.5, width=6, told=None), step(4, 1.5, width=6, told=1.0))
    assert (verdict.plain_seconds, verdict.speed_up) == (8.0, 2.0)
    told, following = verdict.sentences("m", "ngram", "ngram")
    assert told == (
        "take ngram, 2.00x: plain decoding would have taken 8.00 s for 8 tokens after the first, ngram took 4.00 s "
        "(estimated from passes of this run)"
    )
    assert "`foretoken bench m -s ngram`" in following


def test_else_passes_without_drafts_are() -> None:
    """The seconds of drafting that found nothing are not plain decoding's."""
    verdict = a_run(step(4, 1.5, width=6), step(1, 1.0))
    assert verdict.plain_seconds == 5.0
    assert next(iter(verdict.sentences("m", "ngram", "ngram"))).startswith("take ngram, 1.43x")
    assert next(iter(a_run(step(1, 0.5), step(1, 0.5)).sentences("m", "ngram", "ngram"))).startswith(
        "do not draft, 0.50x"
    )


def test_nothing_is_invented_without_such_passes() -> None:
    verdict = a_run(step(4, 1.5, width=6))
    assert (verdict.plain_seconds, verdict.speed_up) == (None, None)
    told, following = verdict.sentences("m", "ngram", "ngram:a=1 2")
    assert told.startswith("not decided: ngram took 2.00 s for 4 tokens after the first; no pass of this run")
    assert following == "next: `foretoken bench m -s 'ngram:a=1 2'` measures both"
    assert list(a_run().sentences("m", "ngram", "ngram")) == []
    assert next(iter(a_run(step(1, 0.5)).sentences("m", None))).startswith("plain decoding took 1.00 s for 1 tokens")
