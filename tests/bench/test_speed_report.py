"""SPEED-Bench's figures, recomputed from step records and answers by code of its own; Spec-Bench's leaderboard.

The leaderboard's figures are computed by hand, and the command runs on rows in the form of its file.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.command_line import MODEL, run

from foretoken import LLM, SamplingParams
from foretoken.bench.serving import Answer, DraftCounts, Load, LoadRun, load_results
from foretoken.bench.speed_report import RequestRun, RunLog, leaderboard, speed_report
from foretoken.bench.workload import load_prompts, read_prompts
from foretoken.core.records import StepRecord

CATEGORIES = ["coding", "math", "coding", "writing"]


def emitted(records: list[StepRecord], request: str) -> list[int]:
    """Tokens of each pass of one request after prefill."""
    steps = [step for record in records for step in record.sequences if step.request_id == request]
    return [step.num_emitted for step in steps if not step.ends_prompt]


def chained_rates(lengths: list[int]) -> list[float]:
    """P(length >= k | length >= k - 1) for k = 1.., pass by pass."""
    return [
        sum(length >= k for length in lengths) / sum(length >= k - 1 for length in lengths)
        for k in range(1, max(lengths) + 1)
    ]


def test_figures_of_an_engine_are_those_of_its_records() -> None:
    records: list[StepRecord] = []
    times: list[float] = []
    log = RunLog()

    def note(record: StepRecord) -> None:
        records.append(record)
        times.append(0.25 * len(records) ** 1.5)  # a clock of the test's own, with passes of several lengths
        log.add(record, times[-1])

    config = {"method": "draft_model", "model": "models/tinycode-draft", "num_speculative_tokens": 4}
    engine = LLM("models/tinycode", speculative_config=config, max_num_seqs=2, on_step=note)
    params = [SamplingParams(temperature=0, max_tokens=20 + 10 * i, ignore_eos=True) for i in range(4)]
    outputs = engine.generate(load_prompts(limit=4), params)
    runs = [
        log.run_of(output.request_id, name, question=0, begin=0.0)
        for output, name in zip(outputs, CATEGORIES, strict=True)
    ]
    report = speed_report(runs, seconds=times[-1], concurrency=2)

    each = [emitted(records, output.request_id) for output in outputs]
    lengths = [length for some in each for length in some]
    assert max(lengths) > 2
    assert report["concurrency"] == 2
    assert report["Request_AL"] == {str(i): pytest.approx(np.mean(some)) for i, some in enumerate(each)}
    assert report["Average_AL"] == pytest.approx(np.mean([np.mean(some) for some in each]))
    assert report["Category_AL"] == {
        "coding": pytest.approx((np.mean(each[0]) + np.mean(each[2])) / 2),
        "math": pytest.approx(np.mean(each[1])), "writing": pytest.approx(np.mean(each[3])),
    }  # fmt: skip
    histogram = {int(length): count for length, count in report["Acceptance_Length_Histogram"].items()}
    assert {length: count for length, count in histogram.items() if count} == Counter(lengths)
    rates = chained_rates(lengths)
    assert list(report["Conditional_Acceptance_Rate"].values()) == pytest.approx(rates)
    assert list(report["Joint_Acceptance_Rate"].values()) == pytest.approx(np.cumprod(rates))
    coding = report["categories"]["coding"]
    assert list(coding["Conditional_Acceptance_Rate"].values()) == pytest.approx(chained_rates(each[0] + each[2]))

    speeds = []
    for output, one in zip(outputs, params, strict=True):
        came = [
            now for now, record in zip(times, records, strict=True)
            if any(step.request_id == output.request_id and step.num_emitted for step in record.sequences)
        ]  # fmt: skip
        speeds.append((one.max_tokens - 1) / (came[-1] - came[0]))
    users = report["Request Generation Tokens Per Second"]
    assert (users["mean"], users["max"]) == (pytest.approx(np.mean(speeds)), pytest.approx(max(speeds)))
    assert users["quantiles"]["0.5"] == pytest.approx(np.median(speeds))
    assert report["Output TPS"] == pytest.approx(sum(20 + 10 * i for i in range(4)) / times[-1])
    assert coding["Output TPS"] == pytest.approx((20 + 40) / times[-1])
    json.dumps(report, allow_nan=False)


def test_requests_without_passes_have_no_figures() -> None:
    report = speed_report([RunLog().run_of("none", "all", question=0, begin=0.0)], seconds=0.0, concurrency=None)
    assert (report["Average_AL"], report["Output TPS"], report["Conditional_Acceptance_Rate"]) == (None, None, {})
    assert report["Request Generation Tokens Per Second"] is None


def answer(times: list[float], tokens: int, histogram: list[int] | None) -> Answer:
    drafting = None if histogram is None else {"acceptance_histogram": histogram}
    return Answer(start=0.0, latency=times[-1], times=times, num_output=tokens, drafting=drafting)


def load(count: int) -> Load:
    return Load(base_url="http://127.0.0.1:1", prompts=["x"] * count, categories=CATEGORIES[:count], max_concurrency=3)


def test_answers_of_a_server_have_the_same_figures() -> None:
    """A histogram's entry k counts passes that accepted k drafted tokens: their length is k + 1."""
    answers = [answer([0.5, 1.0, 2.5], 9, [2, 0, 2]), answer([1.0, 3.0], 5, [1, 1]), answer([2.0], 1, None)]
    answers.append(Answer(start=0.0, status="500"))
    results = load_results(load(4), LoadRun(model="m", answers=answers, duration=4.0, drafting=None))
    report = results["speed_bench"]
    assert report["Category_AL"] == {"coding": 2.0, "math": 1.5}
    assert report["Acceptance_Length_Histogram"] == {"1": 3, "2": 1, "3": 2}
    assert list(report["Conditional_Acceptance_Rate"].values()) == pytest.approx([1.0, 3 / 6, 2 / 3])
    assert report["Request Generation Tokens Per Second"]["mean"] == pytest.approx((8 / 2 + 4 / 2) / 2)
    assert report["Output TPS"] == results["output_throughput"] == 15 / 4.0
    assert report["concurrency"] == 3


def test_counters_of_a_server_give_rates_but_no_lengths() -> None:
    counts = DraftCounts(10, 30, 12, {0: 8, 1: 4})
    run_of_load = LoadRun(model="m", answers=[answer([1.0, 2.0], 5, None)] * 2, duration=2.0, drafting=counts)
    report = load_results(load(2), run_of_load)["speed_bench"]
    assert report["Acceptance_Length_Histogram"] == {"1": 2, "2": 4, "3": 4}
    assert report["Conditional_Acceptance_Rate"] == {"1": 1.0, "2": 0.8, "3": 0.5}
    assert (report["Average_AL"], report["Category_AL"]) == (None, {"coding": None, "math": None})
    for unknown in (DraftCounts(by_position={0: 0}), DraftCounts(10, 30, 12)):  # nothing drafted; no positions
        idle = LoadRun(model="m", answers=[], duration=2.0, drafting=unknown)
        assert load_results(load(0), idle)["speed_bench"]["Acceptance_Length_Histogram"] == {}


def test_bundled_prompts_have_categories() -> None:
    in_turn = read_prompts("all", limit=5)
    assert [prompt.category for prompt in in_turn] == ["completion", "edits", "prose", "completion", "edits"]
    assert in_turn[3].text == load_prompts("heldout")[1]
    assert len(read_prompts("all")) == sum(len(load_prompts(name)) for name in ("heldout", "edit", "prose"))


BENCH = (
    "bench", MODEL, "-s", "ngram:num_speculative_tokens=3", "--prompts", "all", "--num-prompts", "3", "--max-tokens",
    "8", "--temperature", "0", "--batch-size", "1", "--batch-size", "3",
)  # fmt: skip


def test_bench_prints_one_line_a_batch_size_and_category() -> None:
    finished = run(*BENCH)
    assert finished.returncode == 0, finished.stderr
    table = finished.stdout.partition("as SPEED-Bench reports it")[2]
    rows = [line.split() for line in table.splitlines() if line.split()[:1] in (["plain"], ["ngram"])]
    names = [next(word for word in row if word in ("all", "completion", "edits", "prose")) for row in rows]
    assert names == ["all", "completion", "edits", "prose"] * 4


@pytest.mark.slow
def test_bench_tells_figures_of_each_batch_size_and_category() -> None:
    measurements: list[dict[str, Any]] = json.loads(run(*BENCH, "--json").stdout)["measurements"]
    assert [each["speed_bench"]["concurrency"] for each in measurements] == [1, 1, 3, 3]
    assert {*measurements[0]["speed_bench"]["categories"]} == {"completion", "edits", "prose"}


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


def spec_bench(file: Path, *more: str) -> Any:
    return run(
        "bench", MODEL, "-s", "ngram:num_speculative_tokens=3", "--suite", "spec-bench", "--prompts", str(file),
        "--max-tokens", "8", *more,
    )  # fmt: skip


def test_the_command_prints_the_leaderboard(questions: Path) -> None:
    """Three rows: two of mt-bench with two turns each, and one of qa."""
    finished = spec_bench(questions, "--num-prompts", "3")
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
    found = json.loads(spec_bench(questions, "--json").stdout)
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
