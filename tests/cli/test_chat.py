"""`foretoken chat`: answers to lines, history, commands, and Ctrl-C that ends an answer alone."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import MODEL, Terminal, assert_refused, done

from foretoken import LLM, SamplingParams
from foretoken.cli.chat import _next_line
from foretoken.core.results import StreamChunk

TEMPLATE = "{% for m in messages %}# {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
ESCAPE = re.compile(r"\x1b\[[\d;]*m")


@pytest.fixture
def template(tmp_path: Path) -> str:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    return str(path)


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were answered."""
    found: list[str] = []
    stream: Callable[..., Any] = LLM.stream

    def watched(self: LLM, prompt: Any, params: SamplingParams) -> Any:
        found.append(prompt["prompt"])
        return stream(self, prompt, params)

    monkeypatch.setattr(LLM, "stream", watched)
    return found


def test_a_conversation(template: str, prompts: list[str]) -> None:
    options = ("--chat-template", template, "--max-tokens", "12", "--system", "code", "-v")
    lines = "class Queue:\n\ndef f():\n/reset\nclass Queue:\n/exit\nnever read\n"
    result = done("chat", MODEL, "-s", "ngram", "--color", *options, stdin=lines)
    beginning = "# system: code\n# user: class Queue:\n"
    assert [prompts[0], prompts[2], len(prompts)] == [beginning, beginning, 3]
    answer = prompts[1].removeprefix(beginning + "# assistant: ").removesuffix("\n# user: def f():\n")
    assert ESCAPE.sub("", result.stdout).startswith(f"{answer}\n")
    plain = LLM(MODEL).generate(prompts[1], SamplingParams(temperature=0.0, max_tokens=12))[0].outputs[0].text
    assert f"{answer}\n{plain}\n{answer}\n" == ESCAPE.sub("", result.stdout)
    assert re.search(r"^ weights and tokenizer +[\d.]+\n runner and drafter +[\d.]+\n", result.stderr, re.MULTILINE)
    assert result.stderr.count("[ended: length]") == 3
    assert result.stderr.count("tokens: the target's own") == 3


def test_ctrl_c_ends_an_answer(template: str, prompts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    begin = StreamChunk.__init__
    made: list[int] = []

    def interrupted(self: StreamChunk, **fields: Any) -> None:
        made.append(1)
        if len(made) == 3:
            raise KeyboardInterrupt
        begin(self, **fields)

    monkeypatch.setattr(StreamChunk, "__init__", interrupted)
    options = ("--chat-template", template, "--max-tokens", "12")
    result = done("chat", MODEL, *options, stdin="class Queue:\ndef f():\n")
    assert result.stderr.count("[ended: interrupted]") == 1
    assert result.stderr.count("[ended: length]") == 1
    first = prompts[1].split("# assistant: ")[1].split("\n# user: def f():")[0]
    assert 0 < len(first) < len(result.stdout)
    assert result.stdout.startswith(first)


def test_lines_of_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C gives up a line, Ctrl-D ends the conversation."""
    events: list[Any] = ["hello", KeyboardInterrupt(), EOFError()]

    def typed(prompt: str) -> str:
        assert prompt == "> "
        event = events.pop(0)
        if isinstance(event, BaseException):
            raise event
        return str(event)

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert [_next_line(), _next_line(), _next_line()] == ["hello", "", None]
    assert "/exit or Ctrl-D ends it" in capsys.readouterr().err


def test_what_is_too_long_or_has_no_template(template: str) -> None:
    parts = ("has no chat template: the model was not trained for conversations", "--chat-template FILE")
    assert_refused(parts, "chat", MODEL, stdin="hello\n")
    long = "x = 1; " * 2000
    options = ("--chat-template", template, "--max-tokens", "2")
    result = done("chat", MODEL, *options, stdin=f"{long}\nclass Queue:\n")
    assert "Expected at most 1023" in result.stderr
    assert "/reset forgets the conversation" in result.stderr
    assert result.stderr.count("[ended: length]") == 1
    assert_refused("chat takes one --speculative-config", "chat", MODEL, "-s", "ngram", "-s", "hydra")
