"""Rows of the comparison on several workloads, and a real run of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.workloads import UNION, as_markdown, main, row_of, rows_of
from foretoken.bench.measurement import Measurement
from foretoken.core.results import GenerationMetrics

pytestmark = pytest.mark.slow


def measured(setup: str, tokens: list[int], seconds: list[float], speed_ups: list[float], steps: int) -> Measurement:
    metrics = GenerationMetrics(steps=steps, num_emitted=sum(tokens))
    identical = len(tokens) if speed_ups else None
    return Measurement(
        setup=setup, temperature=0.0, runner="any", runner_choice="", tokens=tokens, seconds=seconds, metrics=metrics,
        speed_ups=speed_ups, num_identical=identical, texts=[[1]] * len(tokens),
    )  # fmt: skip


def test_the_union_weighs_workloads_by_their_time() -> None:
    first = [measured("plain", [10, 10], [1.0, 1.0], [], 20), measured("ngram", [10, 10], [0.5, 0.25], [2.0, 4.0], 8)]
    second = [measured("plain", [10], [1.0], [], 10), measured("ngram", [10], [1.25], [0.8], 8)]
    rows = rows_of({"one": first, "two": second})
    assert [(row.workload, row.setup) for row in rows] == [
        ("one", "plain"), ("one", "ngram"), ("two", "plain"), ("two", "ngram"), (UNION, "plain"), (UNION, "ngram"),
    ]  # fmt: skip
    union = rows[-1]
    assert (union.tokens_per_s, union.speed_up, union.tau, union.same) == (15.0, 2.0, 30 / 16, (3, 3))
    assert row_of("one", [first[0]]).same == (0, 0)
    table = as_markdown(rows, ["Conditions."])
    assert "| plain | 10.0 (1.00, 1.00) | **10.0** (1.00, 1.00) | 10.0 (1.00, 1.00) |  |" in table
    assert "| ngram | **26.7** (3.00, 2.50) | 8.0 (0.80, 1.25) | **15.0** (2.00, 1.88) | 3/3 |" in table


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--num-prompts", "1", "--max-tokens", "4", "--threads", "1", "--dtype", "float32"]
    main(["-s", "ngram", *sizes, "--out", str(tmp_path / "run")])
    record = json.loads((tmp_path / "run.json").read_text())
    assert [row["workload"] for row in record["rows"]] == [
        "completion", "completion", "edits", "edits", "prose", "prose", UNION, UNION,
    ]  # fmt: skip
    assert all(row["same"] == [1, 1] for row in record["rows"] if row["setup"] == "ngram" and row["workload"] != UNION)
    assert (tmp_path / "run.md").read_text() in capsys.readouterr().out
