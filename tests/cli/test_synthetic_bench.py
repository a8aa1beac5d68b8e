"""`foretoken bench` with synthetic acceptance, and which commands refuse it."""

import json
from typing import Any

import numpy as np
import pytest
from command_line import MODEL, assert_refused, done

CONDITIONAL = (0.8, 0.7, 0.6)
RATES = ("--synthetic-acceptance", "0.8,0.7,0.6")
DRAFTER = ("-s", "draft_model:chain:num_speculative_tokens=3")
SYNTHETIC = ("-s", "ngram:acceptance=synthetic:synthetic_acceptance_length=2")
LOAD = ("--temperature", "0", "--max-tokens", "160", "--num-prompts", "4", "--batch-size", "4")
SHORT = ("--max-tokens", "40", "--num-prompts", "2")


def measured(*arguments: str) -> dict[str, Any]:
    """The measurement of the drafter in `foretoken bench … --json`."""
    finished = done("bench", MODEL, *DRAFTER, *LOAD, "--json", *arguments)
    assert "texts are not the target's" in finished.stderr
    found: dict[str, Any] = json.loads(finished.stdout)["measurements"][1]
    return found


def test_tau_is_as_asked_for() -> None:
    row = measured(*RATES)
    metrics = row["metrics"]
    assert row["setup"].endswith("synthetic 0.8,0.7,0.6")
    assert row["nats_per_token"] is not None
    assert metrics["num_synthetic"] == metrics["steps"]
    assert metrics["lossy_tv"] is None
    # 2 iterations for each of the 4 texts: what a schedule may be off at most, and the draft that `max_tokens` cuts.
    slack = 3 * 4 / metrics["steps"]
    assert row["mean_acceptance_length"] == pytest.approx(1 + sum(np.cumprod(CONDITIONAL)), abs=slack)
    assert metrics["acceptance_by_depth"] == pytest.approx(np.cumprod(CONDITIONAL), abs=0.03)


def test_the_same_seed_accepts_the_same() -> None:
    """Texts, drafts and lengths: all figures but times."""
    first, again, other = (measured(*RATES, *SHORT, "--seed", seed) for seed in ("3", "3", "8"))
    figures = [(row["metrics"]["accepted_at_depth"], row["speed_bench"]["Request_AL"]) for row in (first, again, other)]
    assert figures[0] == figures[1] != figures[2]


def test_a_mean_length_is_split_between_its_neighbours() -> None:
    row = measured("--synthetic-acceptance", "2.5", *SHORT)
    assert set(row["speed_bench"]["Acceptance_Length_Histogram"]) <= {"1", "2", "3"}  # 1: a draft that the end cut
    assert row["mean_acceptance_length"] == pytest.approx(2.5, abs=0.1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("bench", MODEL, *DRAFTER, "--synthetic-acceptance", "0.8,high"), "Expected conditional acceptance rates"),
        (("bench", MODEL, *DRAFTER, "--synthetic-acceptance", "0.8,1.7"), "Expected conditional acceptance rates"),
        (("bench", MODEL, *DRAFTER, "--synthetic-acceptance", "nan"), "Expected conditional acceptance rates"),
        (("bench", MODEL, *DRAFTER, "--synthetic-acceptance", "9999"), "Expected at least 1 and at most 512"),
        (("bench", MODEL, *DRAFTER, "--synthetic-acceptance", "6.5"), "drafts are at most 3 deep"),
        (("bench", MODEL, "-s", "ngram:acceptance=coupled", *RATES), "is lossy, and 'ngram acceptance=coupled' sets"),
        (("bench", MODEL, "-s", "ngram:rejection_sample_method=block", *RATES), "sets rejection_sample_method"),
        (("serve", MODEL, *RATES), "--synthetic-acceptance needs a drafter"),
        *(
            (
                (command, MODEL, *SYNTHETIC, *more),
                f"`foretoken {command}` needs the text of the target",
            )
            for command, more in (
                ("verify", ()),
                ("generate", ("-p", "def")),
                ("chat", ()),
                ("data", ("--self-distill", "--text", "README.md", "--out", "runs/never")),
            )
        ),
        (
            ("batch", "README.md", "runs/never.jsonl", "--model", MODEL, *SYNTHETIC),
            "`foretoken batch` needs the text of the target",
        ),
    ],
)
def test_conflicts_are_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    assert_refused(sentence, *arguments)
