"""`generate --show` and `--trace`, and `report`: colours that match tokens, files that are not lost, the same text."""

import os
import pty
import re
from pathlib import Path
from typing import Any

import pytest
from command_line import MODEL, done, output_of, refused
from end_to_end.tiny_llms import tokenizer

from foretoken.cli.chat import ShownTokens, has_colours, runs, safe_and_painted
from foretoken.core.records import SequenceStep, StageSeconds, StepRecord
from foretoken.core.results import StreamChunk, TextPart
from foretoken.text.codec import Codec, Detokenizer

GENERATE = (
    "generate", MODEL, "-p", "class Queue:\n", "-s", "ngram:num_speculative_tokens=3+hydra:num_speculative_tokens=3",
    "--max-tokens", "24",
)  # fmt: skip
ESCAPE = re.compile(r"\x1b\[[\d;]*m")


def test_show_trace_and_report(tmp_path: Path) -> None:
    plain = output_of(*GENERATE[:4], *GENERATE[6:])
    trace, page = str(tmp_path / "a.jsonl"), tmp_path / "a.html"
    shown = done(*GENERATE, "--show", "--color", "--trace", trace)
    assert "\x1b[32m" in shown.stdout
    assert ESCAPE.sub("", shown.stdout) == plain
    summary = next(line for line in ESCAPE.sub("", shown.stderr).splitlines() if line.startswith("[tokens: "))
    assert re.fullmatch(r"\[tokens: the target's own \d+ \(\d+%\)(, [a-z ]+ \d+ \(\d+%\))+; tau \d\.\d\d\]", summary)
    assert sum(map(int, re.findall(r"(\d+) \(", summary))) == 24
    assert output_of("report", trace) == f"{page}\n"
    for arguments in ((*GENERATE, "--trace", trace), ("report", trace)):
        assert "exists. Expected the name of a new file. Pass --force to replace it." in refused(*arguments)
    assert "<!doctype html>" in page.read_text()
    output_of("report", trace, "--force")
    assert "exclude each other" in refused(*GENERATE, "--show", "--json")


@pytest.mark.parametrize(
    ("wish", "environment", "is_coloured"),
    [(None, {}, True), (None, {"NO_COLOR": "1"}, False), (True, {"NO_COLOR": "1"}, True), (False, {}, False)],
)
def test_on_a_terminal(
    wish: bool | None, environment: dict[str, str], is_coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": "xterm", **environment}.items():
        monkeypatch.setenv(name, value)
    parent, child = pty.openpty()
    with os.fdopen(child, "w") as terminal:
        assert has_colours(terminal, wish) == is_coloured
    os.close(parent)


def test_no_colours_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        assert not has_colours(pipe, None)
        assert has_colours(pipe, wish=True)


def record(tokens: list[int], accepted_from: list[tuple[str, ...]]) -> StepRecord:
    step = SequenceStep(
        request_id="0", num_drafted=len(accepted_from), tree_depth=1, num_accepted=len(accepted_from),
        num_emitted=len(tokens), tokens=tokens, accepted_by={}, accepted_from=accepted_from,
    )  # fmt: skip
    return StepRecord(sequences=[step], num_tokens=1, seconds=StageSeconds())


def tokens_of(text: str) -> list[int]:
    ids: list[int] = tokenizer()(text)["input_ids"]
    return ids


def chunk(*parts: TextPart) -> StreamChunk:
    text = "".join(part.text for part in parts)
    return StreamChunk(
        request_id="0", prompt_index=0, index=0, text=text, token_ids=[], finish_reason=None, parts=parts
    )  # fmt: skip


def test_tokens_have_the_colours_of_their_drafters(capsys: pytest.CaptureFixture[str]) -> None:
    shown = ShownTokens(colour=True, raw=False)
    shown.add_step(record([5, 6, 7], [("one",), ("one",)]))
    shown.write(chunk(TextPart("a", ("one",)), TextPart("€", ())))
    shown.add_step(record([8, 9], [("two",)]))
    shown.write(chunk(TextPart("b", ("two",))))
    shown.note_summary()
    out, err = capsys.readouterr()
    assert out == "\x1b[32ma\x1b[0m€\x1b[36mb\x1b[0m"
    assert (
        err == "[tokens: the target's own 2 (40%), \x1b[32mone\x1b[0m 2 (40%), \x1b[36mtwo\x1b[0m 1 (20%); tau 2.50]\n"
    )


def test_spans_are_the_text() -> None:
    codec = Codec(tokenizer(), len(tokenizer()))
    text = "the ab€ß😀 thing\n😀"
    spans = Detokenizer(codec, tokens_of("x"))
    spans.push_all(tokens_of(text))
    assert "".join(spans.parts(text)) == text
    assert "".join(spans.parts(text[:7])) == text[:7]
    assert len(spans.parts(text)) == len(tokens_of(text))


@pytest.mark.parametrize(
    ("characters", "painted"),
    [
        ([("e", "32"), ("\u0301", "36"), ("x", None)], "\x1b[32me\u0301\x1b[0mx"),
        ([("👩", None), ("\u200d", "32"), ("💻", "32"), ("!", "32")], "👩\u200d💻\x1b[32m!\x1b[0m"),
        ([("漢", "32"), ("字", "32"), ("\x1b", "32")], "\x1b[32m漢字\\x1b\x1b[0m"),
        ([], ""),
    ],
)
def test_what_is_drawn_together_has_one_colour(characters: list[Any], painted: str) -> None:
    assert safe_and_painted(characters, is_visible=True) == painted
    assert "".join(text for text, _ in runs(characters)) == "".join(char for char, _ in characters)
