"""The table of all methods: which requests count, and what its figures are."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pairs import everyone
from benchmarks.pairs.prompts import in_tokens, spread, write_edits
from benchmarks.pairs.report import over, same_texts, table, tau
from foretoken.models.loading import load_tokenizer

TARGET, OTHER = list(everyone.TARGETS)[:2]


def row(who: str, prompt: str, seconds: float, ids: list[int], **more: Any) -> dict[str, Any]:
    return {
        "target": TARGET, "temperature": 0.0, "category": "qa", "prompt": prompt, "tokens": 9, "who": who,
        "base": "plain", "machine": "one", "commit": "abc", "ids": ids, "seconds": seconds, "steps": 2,
    } | more  # fmt: skip


ROWS = [
    row("plain", "a", 4.0, [1, 2, 3, 4, 5]), row("suffix", "a", 2.0, [1, 2, 3, 4, 5]),
    row("plain", "b", 3.0, [1, 2, 3]), row("suffix", "b", 3.0, [1, 2, 9]),
    row("plain", "c", 1.0, [1]),  # not answered by all
    row("plain", "d", 1.0, [7], target=OTHER), row("suffix", "e", 1.0, [7], target=OTHER),
]  # fmt: skip


def shown(place: Path, capsys: pytest.CaptureFixture[str]) -> str:
    everyone.show(argparse.Namespace(out=place))
    return capsys.readouterr().out


def test_figures() -> None:
    plain, suffix = ([each for each in ROWS[:4] if each["who"] == who] for who in ("plain", "suffix"))
    assert tau(suffix) == (4 + 2) / 4
    assert over(suffix, plain) == 1.5, "the median of 2 and 1"
    assert same_texts(suffix, plain) == 1
    assert "| suffix | 1.8 | 1.0 to 2.5 | 1.50 | 1.50 | 0% | 0% | 1/2 |" in table(
        {"plain": plain, "suffix": suffix}, {"plain": "plain", "suffix": "plain"}
    )


def test_prompts_count_that_everyone_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps(each) + "\n" for each in (*ROWS, ROWS[1] | {"seconds": 1.0})]  # measured again: the last counts
    (tmp_path / "requests.jsonl").write_text("".join(lines) + '{"target": "cut')
    text = shown(tmp_path, capsys)
    assert f"**{TARGET}, T 0.0**, 2 prompts, one, commit abc" in text
    assert "| suffix | 2.50, 1.50 |" in text
    assert "differ from plain decoding of the same engine: suffix" in text
    assert f"{OTHER}, T 0.0: no prompt was answered by all yet" in text
    assert f"| {TARGET}, 0.0 | 1.1 | suffix 3.0 (2.50) |  |  |" in text
    assert "no prompt" not in shown(tmp_path / "none", capsys)


def test_a_killed_run_goes_on_behind_its_last_whole_line(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(json.dumps(ROWS[0]) + "\n" + '{"target": "cut')
    assert everyone._rows(file, ends=True) == [ROWS[0]]
    assert file.read_text() == json.dumps(ROWS[0]) + "\n"
    file.write_text('{"target": "cut')
    assert everyone._rows(file, ends=True) == []
    assert file.read_text() == ""


def test_prompts(tmp_path: Path) -> None:
    rows = [{"category": "writing", "turns": [letter]} for letter in "abcd"] + [{"turns": ["word " * 50]}]
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    tokenizer = load_tokenizer(str(Path(__file__).parents[2] / "models" / "tinycode"))
    found = in_tokens([str(tmp_path / "set.jsonl")], tokenizer, limit=20, groups={"writing": "mt-bench"})
    assert {name: len(each) for name, each in found.items()} == {"mt-bench": 4}, "one is too long"
    assert spread([[n] for n in range(8)], 3) == [[0], [2], [5]]
    task = tmp_path / "tasks" / "one"
    (task / ".docs").mkdir(parents=True)
    (task / ".docs" / "instructions.md").write_text("Move it.")
    (task / "a.py").write_text("def f(): ...\n")
    (task / "a_test.py").write_text("assert True\n")
    assert write_edits(tmp_path / "tasks", tmp_path / "edits.jsonl") == 1
    assert (
        "Move it.\n\na.py:\n\n```python\ndef f(): ...\n```"
        in json.loads((tmp_path / "edits.jsonl").read_text())["messages"][0]["content"]
    )
