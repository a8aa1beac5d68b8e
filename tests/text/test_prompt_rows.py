"""Rows of prompt sets: every published form is read by the one rule of `foretoken.text.prompt_rows`."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from foretoken.bench.workload import load_prompts, read_prompts
from foretoken.core.errors import RequestError
from foretoken.text.prompt_rows import PromptRow, read_prompt_row
from foretoken.training.data.corpus import file_source


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Spec-Bench and MT-bench": (
        {"question_id": 81, "category": "writing", "turns": ["Write a post.", "Rewrite it.", "Shorter."]},
        {
            "messages": (user("Write a post."),),
            "later_turns": ("Rewrite it.", "Shorter."),
            "category": "writing",
        },
    ),
    "EAGLE's alpaca": (
        {"question_id": 0, "category": "", "turns": ["Which exercise?"], "reference": ["Swimming."]},
        {"messages": (user("Which exercise?"),)},
    ),
    "HumanEval": (
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "    return 1\n"},
        {"raw": "def f():\n", "answer": ""},
    ),
    "GSM8K": (
        {"question": "How many eggs?", "answer": "18"},
        {"messages": (user("How many eggs?"), assistant("18"))},
    ),
    "MBPP": (
        {"task_id": 11, "text": "Write f.", "code": "def f(): ...", "test_list": ["assert f()", "assert not f()"]},
        {"messages": (user("Write f.\n\nYour code should pass these tests:\n\nassert f()\nassert not f()"),)},
    ),
    "MBPP, sanitized": (
        {"prompt": "Write g.", "code": "def g(): ...", "test_imports": [], "test_list": ["assert g()"]},
        {"messages": (user("Write g.\n\nYour code should pass these tests:\n\nassert g()"),)},
    ),
    "Alpaca": (
        {"instruction": "Translate.", "input": "Hund", "output": "dog"},
        {"messages": (user("Translate.\n\nHund"), assistant("dog"))},
    ),
    "Alpaca without input": ({"instruction": "Say hi.", "input": ""}, {"messages": (user("Say hi."),)}),
    "chats": (
        {"messages": [{"role": "developer", "content": "Be brief."}, user("Hi"), assistant("Ho"), user("Bye")]},
        {"messages": ({"role": "developer", "content": "Be brief."}, user("Hi"), assistant("Ho"), user("Bye"))},
    ),
    "ShareGPT": (
        {"conversations": [{"from": "gpt", "value": "?"}, {"from": "human", "value": "Hi"}]},
        {"messages": (user("Hi"),)},
    ),
    "a prompt with a task": ({"prompt": "a", "task": "qa"}, {"raw": "a", "answer": "", "category": "qa"}),
    "a document": ({"text": "a", "category": None}, {"raw": "a"}),
}


@pytest.mark.parametrize("form", FORMS)
def test_published_forms(form: str) -> None:
    row, expected = FORMS[form]
    assert read_prompt_row(row, "x:1") == PromptRow(where="x:1", **expected)


def test_a_recorded_answer_is_not_asked() -> None:
    """A prompt ends at the last message that is not an answer; earlier answers stay as recorded."""
    row = read_prompt_row({"messages": [user("Hi"), assistant("Ho"), user("Bye"), assistant("Bye")]}, "x:1")
    assert row.asked == (user("Hi"), assistant("Ho"), user("Bye"))
    assert row.text == "Hi\n\nHo\n\nBye"


def test_later_turns_follow_the_given_answers() -> None:
    row = read_prompt_row({"turns": ["a", "b", "c"], "category": "math"}, "x:1")
    second = row.followed("A")
    assert second is not None
    assert (second.asked, second.category) == ((user("a"), assistant("A"), user("b")), "math")
    third = second.followed("B")
    assert third is not None
    assert third.text == "a\n\nA\n\nb\n\nB\n\nc"
    assert third.followed("C") is None


def test_an_unknown_row_names_place_and_fields() -> None:
    with pytest.raises(RequestError, match=r"x:7 has the columns \['prompts'\].*'turns'.*Did you mean 'prompt'\?"):
        read_prompt_row({"prompts": "a"}, "x:7")


def test_packed_files_and_byte_order_marks(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"turns": [text]}) + "\n" for text in ("a", "b")).encode()
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + lines)
    assert load_prompts(str(tmp_path / "rows.jsonl.gz")) == load_prompts(str(tmp_path / "rows.jsonl")) == ["a", "b"]
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(lines)[:-12])
    with pytest.raises(RequestError, match=r"cut\.jsonl\.gz' cannot be read"):
        load_prompts(str(tmp_path / "cut.jsonl.gz"))


def test_files_that_cannot_be(tmp_path: Path) -> None:
    for name in ("a" * 5000, "x\0y"):
        with pytest.raises(RequestError, match="there is no prompt file"):
            read_prompts(f"{name}.jsonl")
        with pytest.raises(RequestError, match="there is no file"):
            file_source(f"{name}.jsonl")
    (tmp_path / "deep.json").write_text("[" * 200_000)
    with pytest.raises(RequestError, match=r"deep\.json' is not valid JSON: maximum recursion depth"):
        list(file_source(str(tmp_path / "deep.json")).records())


def test_a_limit_takes_evenly_from_categories(tmp_path: Path) -> None:
    """Fewer rows than asked for in one category leave room for the others; without a limit the file's order stays."""
    rows = [("math", 1), ("math", 2), ("math", 3), ("qa", 4), ("", 5), ("qa", 6)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"category": name, "prompt": str(n)}) + "\n" for name, n in rows))
    assert [row.text for row in read_prompts(str(file))] == ["1", "2", "3", "4", "5", "6"]
    assert [(row.category, row.text) for row in read_prompts(str(file), limit=4)] == [
        ("math", "1"), ("qa", "4"), ("all", "5"), ("math", "2"),
    ]  # fmt: skip
    assert [row.text for row in read_prompts(str(file), limit=9, groups={"qa": "math"})] == [
        "1", "5", "2", "3", "4", "6",
    ]  # fmt: skip
