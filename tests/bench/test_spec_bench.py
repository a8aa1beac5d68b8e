"""The leaderboard of Spec-Bench: figures by hand, and the command on rows in the form of its file."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cli.command_line import MODEL, run

from foretoken.bench.speed_report import RequestRun, leaderboard


def a_run(category: str, question: int, seconds: float, lengths: dict[int, int]) -> RequestRun:
    tokens = 1 + sum(length * count for length, count in lengths.items())
    return RequestRun(
        category=category, question=question, num_tokens=tokens, seconds=seconds, lengths=Counter(lengths)
    )


def test_figures_are_those_of_spec_benchs_program() -> None:
    """A question's turns count together; speeds are averaged over questions, tau over passes."""
    plain = [
        a_run("mt-bench", 0, 2.0, {1: 9}), a_run("mt-bench", 0, 3.0, {1: 9}), a_run("qa", 1, 1.0, {1: 19}),
        a_run("qa", 2, 1.0, {1: 9}),
    ]  # fmt: skip
    drafted = [
        a_run("mt-bench", 0, 1.0, {3: 3}), a_run("mt-bench", 0, 1.0, {1: 1, 4: 2}), a_run("qa", 1, 0.5, {1: 19}),
        a_run("qa", 2, 0.5, {1: 9}),
    ]  # fmt: skip
    board = leaderboard(drafted, plain)
    assert list(board) == ["mt-bench", "qa", "all"]
    assert board["mt-bench"] == {"speed_up": pytest.approx((20 / 2) / (20 / 5)), "tau": 18 / 6, "questions": 1}
    assert board["qa"] == {"speed_up": pytest.approx(2.0), "tau": 1.0, "questions": 2}
    assert board["all"]["speed_up"] == pytest.approx((10 + 40 + 20) / (4 + 20 + 10))
    assert board["all"]["tau"] == pytest.approx((18 + 28) / (6 + 28))
    assert {each["speed_up"] for each in leaderboard(plain, plain).values()} == {1.0}


ROWS: list[dict[str, Any]] = [
    {"question_id": 1, "category": "coding", "turns": ["class Queue:", "class Stack:"]},
    {"question_id": 2, "category": "writing", "turns": ["import os", "import sys"]},
    {"question_id": 3, "category": "qa", "turns": ["def f(x):"]},
    {"question_id": 4, "category": "qa", "turns": ["def g(x):"]},
]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "question.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


def bench(file: Path, *more: str) -> Any:
    return run(
        "bench", MODEL, "-s", "ngram:num_speculative_tokens=3", "--suite", "spec-bench", "--prompts", str(file),
        "--max-tokens", "8", *more,
    )  # fmt: skip


def test_the_command_prints_the_leaderboard(questions: Path) -> None:
    """Three rows: two of mt-bench with two turns each, and one of qa."""
    finished = bench(questions, "--num-prompts", "3")
    assert finished.returncode == 0, finished.stderr
    assert " prompts=5 " in finished.stdout
    speeds, lengths = finished.stdout.partition("Spec-Bench: speed-up")[2].split("Spec-Bench: accepted tokens")
    heading = next(line for line in speeds.splitlines() if line.startswith(" drafter")).split()
    assert heading == ["drafter", "T", "batch", "mt-bench", "translation", "summ.", "qa", "math", "rag", "tau", "all"]
    plain = next(line for line in speeds.splitlines() if line.startswith(" plain")).split()
    assert plain == ["plain", "0", "1", "1.00", "1.00", "1.00", "1.00"]  # mt-bench, qa, tau, all
    assert (
        len(next(line for line in lengths.splitlines() if line.startswith(" ngram")).split()) == 4 + 3
    )  # the name has two words
    sentence = next(line for line in finished.stdout.splitlines() if line.startswith("temperature 0: "))
    assert "plain decoding takes " in sentence
    assert sentence.endswith("(measured)")


def test_json_has_the_leaderboard_and_the_verdict(questions: Path) -> None:
    found = json.loads(bench(questions, "--json").stdout)
    plain, ngram = found["spec_bench"]
    assert list(plain["categories"]) == ["mt-bench", "qa", "all"]
    assert [each["questions"] for each in ngram["categories"].values()] == [2, 2, 4]
    runs = next(row for row in found["measurements"] if row["setup"].startswith("ngram"))
    assert ngram["categories"]["all"]["tau"] == pytest.approx(runs["mean_acceptance_length"])
    (verdict,) = found["verdicts"]
    assert verdict["drafter"] == runs["setup"]
    assert verdict["low"] <= verdict["high"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--suite", "mt-bench"), "--suite is 'mt-bench'. Expected spec-bench"),
        (("--suite", "spec-bench"), "Pass --prompts question.jsonl, which lies in data/spec_bench"),
        (
            ("--suite", "spec-bench", "--prompts", "all"),
            "has the category 'completion', which Spec-Bench does not have",
        ),
    ],
)
def test_another_suite_or_file_is_refused(arguments: tuple[str, ...], sentence: str) -> None:
    finished = run("bench", MODEL, *arguments)
    assert finished.returncode == 2
    assert sentence in finished.stderr
