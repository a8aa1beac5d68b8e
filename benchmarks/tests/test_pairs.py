"""The table of all methods: which requests count, and what its figures are."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pairs import everyone
from benchmarks.pairs.contestants import vllm
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
    (row,) = (line for line in text.splitlines() if line.startswith("| suffix |"))
    assert row.endswith("| 2.50 | 1.50 | 0% | 0% | 1/2 | 2.50 |"), row
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


# Stands in for vLLM's package, whose engine brings one token with the prompt, two by a draft, and one alone.
ENGINE = """
from types import SimpleNamespace as Of
print("chatter, as libraries print")

class SamplingParams:
    def __init__(self, **given):
        self.most = given["max_tokens"]

class LLM:
    def __init__(self, model, **options):
        assert model == "DIRECTORY" and options["dtype"] == "bfloat16"
        self.llm_engine, self.is_drafting = self, "speculative_config" in options

    def add_request(self, number, prompt, params):
        first = prompt["prompt_token_ids"][-1]
        ids = [first + 1 + i for i in range(params.most)]
        self.left = [ids[:1], ids[:1], ids[:3], ids] if self.is_drafting else [ids[:n + 1] for n in range(len(ids))]

    def has_unfinished_requests(self):
        return bool(self.left)

    def step(self):
        return [Of(outputs=[Of(token_ids=self.left.pop(0))])]
"""


@pytest.mark.slow
def test_passes_of_vllm_are_its_steps_that_bring_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm.py").write_text(ENGINE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    everyone_of_it = vllm(sys.executable, "DIRECTORY", more={"head": {"speculative_config": {"method": "eagle"}}})
    assert [each.name for each in everyone_of_it] == ["vLLM plain", "vLLM lookup", "vLLM head"]
    request = {"prompt": [5, 6], "tokens": 4, "temperature": 0.0, "top_p": 1.0, "seed": 0}
    found = {each.name: each.answer(**request) for each in everyone_of_it}
    for each in everyone_of_it:
        each.end()
    assert {name: (answer["ids"], answer["steps"]) for name, answer in found.items()} == {
        "vLLM plain": ([7, 8, 9, 10], 3), "vLLM lookup": ([7, 8, 9, 10], 2), "vLLM head": ([7, 8, 9, 10], 2),
    }  # fmt: skip
