"""Thoughts, content and calls of a message: what every format means, in any pieces, malformed and at length."""

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken import LLM
from foretoken.core.errors import ConfigError
from foretoken.server.message_parts import (
    AnswerFormats,
    MessageForm,
    MessageParts,
    MessageReader,
    joined,
    whole_message,
)
from foretoken.server.tools import FORCED, TAGS, TOOL_FORMATS, ToolFormat, ToolUse, thinking_tags, tool_format

SCHEMAS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "wind": {"anyOf": [{"type": "boolean"}]},
            "where": {"type": ["string", "null"]}, "list": {"type": "array"},
        },
    },
    "now": {"type": "object"},
}  # fmt: skip
V3 = "<\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>{}\n```json\n{}\n```<\uff5ctool▁call▁end\uff5c>"
V31 = "<\uff5ctool▁call▁begin\uff5c>{}<\uff5ctool▁sep\uff5c>{}<\uff5ctool▁call▁end\uff5c>"
BEGIN, END = "<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>"
PARIS = ("weather", {"city": "Paris", "days": 2})
TRICKY = ("weather", {"city": 'a "b" </tool_call> \\ ]}) [ARGS] é\n'})
NOW = ("now", {})


def tags(name: str, **given: Any) -> str:
    """A call as Qwen3-Coder writes it."""
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


# Format, text, content, calls.
WRITTEN: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    (
        "hermes",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>',
        "", [PARIS],
    ),
    (
        "hermes",
        f'Let me see.\n\n<tool_call>{json.dumps({"name": "weather", "arguments": TRICKY[1]})}</tool_call>\n'
        '<tool_call>{"name": "now"}</tool_call>\n',
        "Let me see.", [TRICKY, NOW],
    ),
    ("hermes", '<tool_call>{"name": "other", "parameters": "{\\"a\\": 1}"}', "", [("other", {"a": 1})]),
    ("hermes", "a < b, <tool, <tool_calls> and {}", "a < b, <tool, <tool_calls> and {}", []),
    (
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
        "", [PARIS],
    ),
    (
        "qwen3_coder",
        "So:\n<tool_call><function=weather><parameter=city>5</parameter><parameter=where>null</parameter>"
        '<parameter=wind>true</parameter><parameter=list>[1, "x"]</parameter><parameter=days>many</parameter>'
        "<parameter=new>1</parameter></function></tool_call>",
        "So:",
        [("weather", {"city": "5", "where": None, "wind": True, "list": [1, "x"], "days": "many", "new": "1"})],
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "now", "arguments": {}}]',
        "", [PARIS, NOW],
    ),
    (
        "mistral",
        f'Well. [TOOL_CALLS]weather[ARGS]{json.dumps(TRICKY[1])}[TOOL_CALLS]weather[CALL_ID]a1[ARGS]'
        '{"city": "Paris", "days": 2}[TOOL_CALLS]now{}',
        "Well.", [TRICKY, PARIS, NOW],
    ),
    ("deepseek_v3", BEGIN + V3.format("weather", json.dumps(PARIS[1])) + "\n" + V3.format("now", "{}") + END, "",
     [PARIS, NOW]),
    ("deepseek_v3", "Yes." + BEGIN + V31.format("weather", json.dumps(TRICKY[1])) + V31.format("function", "{}") + END,
     "Yes.", [TRICKY, ("function", {})]),
    ("pythonic", '[weather(city="Paris", days=2), now()]', "", [PARIS, NOW]),
    ("pythonic", "<|python_start|>[weather(city='\\d\\'[', days=-1, list=[1, {'a': (True, None)}])]<|python_end|>", "",
     [("weather", {"city": "\\d'[", "days": -1, "list": [1, {"a": [True, None]}]})]),
    ("pythonic", r"""[weather(city=r'\d\n\'', days=2), weather(city='\\d\d\'', list=['\'', R"\d'"])]""", "",
     [("weather", {"city": r"\d\n\'", "days": 2}), ("weather", {"city": r"\d\d'", "list": ["'", r"\d'"]})]),
    ("pythonic", "[1, 2] are numbers, [now()] is no call here", "[1, 2] are numbers, [now()] is no call here", []),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "Paris", "days": 2}}', "", [PARIS]),
    ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "weather", "parameters": '
     '{"city": "Paris", "days": 2}}', "", [NOW, PARIS]),
    ("llama3_json", '{"name": "Ann", "parameters": {}} is JSON', '{"name": "Ann", "parameters": {}} is JSON', []),
    ("llama3_json", "the set {1, 2}", "the set {1, 2}", []),
    ("forced", '[{"name": "now", "parameters": {}}, {"name": "weather", "parameters": {"city": "Paris", "days": 2}}]',
     "", [NOW, PARIS]),
    ("forced", '[{"name": "now", "parameters": {}}, {"name": "weath', ', {"name": "weath', [NOW]),
]  # fmt: skip
MALFORMED = {
    "hermes": ["<tool_call>{'name': 'now'}</tool_call> x", '<tool_call>{"name": 5}</tool_call>',
               "<tool_call>[]</tool_call>",
               '<tool_call>{"name": "now", "arguments": [1]}</tool_call>', "<tool_call>" + "[" * 100_000,
               '<tool_call>{"name": "now", "arguments": {"a": 1e999}}</tool_call>', "<tool_call></tool_call>",
               '<tool_call>{"name": "now", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>",
               '<tool_call>{"name": "\\ud800"}</tool_call>', '<tool_call>{"name": "now", "a": 1}</tool_call>',
               '<tool_call>{"name": "now", "arguments": {"a": 1, "a": 2}}</tool_call>',
               '<tool_call>{"name": "now", "arguments": null, "parameters": {"a": 1}}</tool_call>',
               '```json\n{"name": "now", "description": "The time.", "parameters": {"type": "object"}}\n```'],
    "qwen3_coder": ["<tool_call>x</tool_call>", "<tool_call><function=now</function></tool_call>",
                    "<tool_call><function=now><parameter=a</function></tool_call>",
                    "<tool_call><function=now><parameter=a>1</parameter><parameter=a>"
                    "<tool_call><function=now></function></tool_call></parameter></function></tool_call>",
                    tags("weather", city="Paris\n<parameter=days>\n2")],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS]now]", "[TOOL_CALLS] []", "[TOOL_CALLS]{}", "[TOOL_CALLS]" + "[" * 100,
                "[TOOL_CALLS]" + "{" * 60 + "}" * 60],
    "deepseek_v3": [V31.format("now", "[]"), V31.format("", "{}"), V3.format("now", "{")],
    "pythonic": ["[now(1)]", "[now(**{})]", "[now(a=b)]", "[now(a=f'{x}')]", "[now(a=b'x')]", "[(lambda: 0)()]", "[]",
                 "[now(a=1, a=2)]",
                 "[now(a=" + "9" * 5000 + ")]", "[now(a=1e999)]", "[now(a='\x00')]", "[__import__(name='os')]",
                 "[" * 60 + "]" * 60, "[" + "{" * 50 + "}" * 50 + "]", "[" + "f(a=" * 50 + ")" * 50 + "]"],
    "llama3_json": ["{", '{"name": "now", "parameters": 5}', "<|python_tag|>print({1: 2})", "{" * 100,
                    '{"name": "now", "age": 5}'],
}  # fmt: skip


def format_of(name: str) -> ToolFormat | None:
    return FORCED if name == "forced" else tool_format(name, "")


def told(parts: MessageParts) -> tuple[str, str, list[tuple[str, Any]]]:
    """What a message says, without the calls' ids."""
    calls: dict[int, list[str]] = {}
    for call in parts.calls:
        at = calls.setdefault(call["index"], [call["function"].get("name", ""), ""])
        at[1] += call["function"]["arguments"]
        assert (len(at[1]) > len(call["function"]["arguments"])) or (call["type"] == "function" and call["id"])
    return parts.reasoning, parts.content, [(name, json.loads(text)) for name, text in calls.values()]


def in_pieces(form: MessageForm, text: str, cuts: list[int]) -> MessageParts:
    reader, made = MessageReader(form), MessageParts()
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    for start, end in pairwise(edges):
        made = joined(made, reader.push(text[start:end]))
    return joined(made, reader.finish())


def assert_told(form: MessageForm, text: str, expected: tuple[str, str, list[tuple[str, Any]]]) -> None:
    """A text means the same whole, a character at a time, and in pieces of some characters."""
    assert told(whole_message(form, text)) == expected, text
    for step in (1, 7):
        assert told(in_pieces(form, text, list(range(0, len(text), step)))) == expected, text


def reading(name: str) -> MessageForm:
    return MessageForm(calls=tool_format(name, ""), schemas=FILES)


@pytest.mark.parametrize(("name", "text", "content", "calls"), WRITTEN)
def test_calls_of_every_format(name: str, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    assert_told(MessageForm(calls=format_of(name), schemas=SCHEMAS), text, ("", content, calls))


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_call_is_content(name: str) -> None:
    form = MessageForm(calls=format_of(name), schemas=SCHEMAS)
    for text in MALFORMED[name]:
        parts = whole_message(form, text)
        assert (parts.content, parts.calls) == (text, []), text[:80]


FILES: dict[str, Any] = {
    "write": {"type": "object", "required": ["text", "path"],
              "properties": {"path": {"type": "string"}, "text": {"type": "string"}, "mode": {"type": "integer"}}},
    "shell": {"type": "object", "properties": {"command": {"type": "string"}}},
}  # fmt: skip


QUOTES = "\"'\\ ' " + "'" * 3 + '"' * 3 + ")]}"
# Texts about the markers of every format, as a tool gets them that writes documentation.
ABOUT_MARKERS = [
    "close it with </parameter> or </function> or </tool_call>, begin it with <tool_call>",
    "</tool_call>", "a</parameter>", "a\n</tool_call>\nb", "a\n</function>\n</tool_call>\nb",
    "a\n</parameter>\n</function>\n</tool_call>\nb", "<tool_call>\n<function=shell>", "<function=shell>",
    "a <parameter=command> b", "a\n<parameter=command>\nb\n</parameter>\nc", "<parameter=path>", "<parameter=mode>\n2",
    tags("shell", command="rm -r x"), tags("write", text="b", path="c"),
    f"First:\n{tags('shell', command='ls')}\n{tags('now')}\nEnd.",
    '<tool_call>{"name": "shell", "arguments": {"command": "ls"}}</tool_call>', "```json\n{}\n```\n</tools>",
    '[TOOL_CALLS]shell[ARGS]{"command": "ls"}', f'{BEGIN}{V31.format("shell", "{}")}{END}', "[shell(command='ls')]",
    '<|python_tag|>{"name": "shell"}; {', QUOTES, "<think>x</think>",
]  # fmt: skip


def written_by(form: ToolFormat, name: str, given_: dict[str, Any]) -> str:
    """One call, as a model of the format writes it."""
    made = json.dumps({"name": name, "arguments": given_}, ensure_ascii=False)
    return {
        "qwen3_coder": tags(name, **given_), "hermes": f"<tool_call>\n{made}\n</tool_call>",
        "mistral": f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given_)}",
        "deepseek_v3": BEGIN + V3.format(name, json.dumps(given_)) + END,
        "pythonic": f"[{name}({', '.join(f'{key}={value!r}' for key, value in given_.items())})]",
        "llama3_json": f"<|python_tag|>{made}",
    }[form.names[0]]  # fmt: skip


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.names[0])
@pytest.mark.parametrize("order", [("path", "text"), ("text", "path"), ("text",)], ids="-".join)
def test_markers_within_arguments_are_text(form: ToolFormat, order: tuple[str, ...]) -> None:
    read = MessageForm(calls=form, schemas=FILES)
    for text in ABOUT_MARKERS:
        sent = {key: {"path": "a.md", "text": text}[key] for key in order}
        written = "" if form.bare else "I write it.\n"
        calls = [written_by(form, "write", sent), written_by(form, "shell", {"command": "ls"})]
        message = written + (
            calls[0] if form.bare == "[" else {"llama3_json": "; "}.get(form.names[0], "\n").join(calls)
        )
        expected = [("write", sent), ("shell", {"command": "ls"})][: 1 + (form.bare != "[")]
        assert_told(read, message, ("", written.strip(), expected))


@pytest.mark.parametrize("form", [form for form in TOOL_FORMATS if form.opens], ids=lambda form: form.names[0])
def test_prose_about_markers_hides_no_call(form: ToolFormat) -> None:
    read, marks = MessageForm(calls=form, schemas=FILES), [*form.opens]
    call = written_by(form, "shell", {"command": "ls"})
    for mark in marks:
        for prose in (f"The {mark} tag opens a call.\n", f"{mark}\n", f"`{mark}`, then {mark} {{name}} and [x]: ",
                      f'{mark}{{"name": "shell", and so on\n', f'Write {mark}{{"a": 1}} first.\n'):  # fmt: skip
            made = whole_message(read, prose + call)
            assert told(made)[2] == [("shell", {"command": "ls"})], prose
            assert re.sub(r"\s", "", made.content) == re.sub(r"\s|" + "|".join(map(re.escape, form.silent)), "", prose)
            assert told(in_pieces(read, prose + call, list(range(400)))) == told(whole_message(read, prose + call))


@pytest.mark.parametrize(
    "prose",
    [
        "<tool_call><function=shell><parameter=command> opens a call.", "Use <tool_call>\n<function=NAME>\n.",
        "Use <tool_call>\n<function=NAME>\n<parameter=KEY>\nand so on.", "<tool_call><function=shell>...</tool_call>",
        "Use <tool_call><function=NAME>...</function></tool_call>.", "`<tool_call>`, `<function=a>`, `</tool_call>`",
    ],
)  # fmt: skip
def test_prose_that_shows_the_tags_of_a_call(prose: str) -> None:
    text = f"{prose}\n{tags('shell', command='ls')}"
    assert_told(reading("qwen3_coder"), text, ("", prose, [("shell", {"command": "ls"})]))


ENDS = ["</parameter>", "</function>", "</tool_call>"]


@pytest.mark.parametrize("closing", [*ENDS, "\n".join(ENDS[:2]), "\n".join(ENDS[1:]), "\n".join(ENDS)])
def test_doubled_closing_tags_are_no_text(closing: str) -> None:
    text = tags("shell", command="ls").replace(closing, f"{closing}\n{closing}")
    json_call = '<tool_call>{"name": "shell", "arguments": {"command": "ls"}}</tool_call>\n</tool_call>'
    for name, message in (("qwen3_coder", text), ("hermes", json_call)):
        for end in ("", "\n" + message):
            assert_told(reading(name), message + end, ("", "", [("shell", {"command": "ls"})] * (1 + bool(end))))


def test_a_call_that_is_cut_off_is_no_call() -> None:
    """Also where its text shows a whole call."""
    whole = tags("write", path="a.md", text=f"For example:\n{tags('shell', command='rm -r x')}\nand so on")
    read = reading("qwen3_coder")
    for length in range(20, len(whole) - len("</tool_call>\n")):
        made = told(whole_message(read, whole[:length]))
        if whole[:length].rstrip().endswith("</tool_call>"):
            continue  # the end of the example may be the end of the call
        assert made == ("", whole[:length].rstrip() if made[1] != whole[:length] else whole[:length], []), length


def test_tags_that_a_model_leaves_out() -> None:
    read = reading("qwen3_coder")
    whole = tags("write", path="a.md", text="x")
    for message in (whole.replace("</parameter>\n", ""), whole.replace("</parameter>\n", "", 1),
                    whole.removesuffix("</tool_call>")):  # fmt: skip
        assert told(whole_message(read, message))[2] == [("write", {"path": "a.md", "text": "x"})]
    message = tags("write", path="a.md", text="x", mode=2).replace("</parameter>\n", "")
    assert told(whole_message(read, message))[2] == [("write", {"path": "a.md", "text": "x", "mode": 2})]


def test_a_parameter_that_the_schema_lacks_is_no_text() -> None:
    read = reading("qwen3_coder")
    for sent in ({"command": "ls", "why": "a"}, {"why": "a", "command": "ls"}):
        for message in (tags("shell", **sent), tags("shell", **sent).replace("\n", "")):
            assert told(whole_message(read, message)) == ("", "", [("shell", sent)])


@pytest.mark.parametrize(("left_out", "is_call"), [("</tool_call>", True), ("</function>\n", False)])
def test_a_call_that_is_not_closed_takes_no_other(left_out: str, is_call: bool) -> None:
    first, second = tags("shell", command="ls").replace(left_out, ""), tags("shell", command="rm")
    calls = [("shell", {"command": "ls"}), ("shell", {"command": "rm"})][not is_call :]
    assert_told(reading("qwen3_coder"), f"{first}\n{second}", ("", "" if is_call else first, calls))


def test_a_call_without_its_opening_marker_is_content() -> None:
    second = tags("shell", command="rm").removeprefix("<tool_call>")
    message = f"{tags('shell', command='ls')}{second}"
    assert_told(reading("qwen3_coder"), message, ("", second, [("shell", {"command": "ls"})]))


TYPED: list[tuple[Any, str, Any]] = [
    ({"oneOf": [{"type": "object"}, {"type": "array"}]}, '{"x": 1}', {"x": 1}),
    ({"allOf": [{"type": "integer"}, {"minimum": 1}]}, "5", 5),
    ({"enum": [1, 2]}, "2", 2), ({"const": True}, "true", True), ({"enum": ["1", "2"]}, "2", "2"),
    ({"enum": ["null", None]}, "null", "null"), ({"enum": ["a", None]}, "None", None),
    ({"properties": {"x": {"type": "integer"}}}, '{"x": 1}', {"x": 1}), ({"items": {}}, "[1]", [1]),
    ({"minimum": 0}, "5", 5), ({"minLength": 1}, "5", "5"), ({}, "[1, 2]", [1, 2]), (True, "[1]", [1]),
    ({}, "some text", "some text"), ({"$ref": "#/$defs/A"}, "5", 5), ({"anyOf": [{"$ref": "#/$defs/A"}]}, "5", 5),
    ({"$ref": "#/$defs/B"}, "5", "5"), ({"$ref": "#/$defs/C"}, "5", 5), ({"$ref": "#/$defs/none"}, "{}", {}),
    ({"$ref": "#/$defs/A%20B"}, "5", "5"),
    ({"type": "boolean"}, "True", True), ({"type": "boolean"}, "False", False),
    ({"type": ["integer", "null"]}, "None", None), ({"type": ["string", "null"]}, "None", None),
    ({"type": "object"}, "{'x': True, 'y': None, 'z': false}", {"x": True, "y": None, "z": False}),
    ({"type": "array"}, "['a', \"b\"]", ["a", "b"]), ({"type": "string"}, "True", "True"),
    ({"type": "string"}, '{"x": 1}', '{"x": 1}'), ({"type": ["string", "object"]}, '{"x": 1}', {"x": 1}),
    ({"type": ["string", "number"]}, "1.10", "1.10"), ({"type": ["string", "number"]}, "1.5", 1.5),
    ({"type": "number"}, "NaN", "NaN"), ({"type": "number"}, "1e999", "1e999"), ({"type": "integer"}, "many", "many"),
    ({"type": "integer", "nullable": True}, "null", None), ({"type": "object"}, "{1, 2}", "{1, 2}"),
    ({"type": "integer"}, "9" * 5000, "9" * 5000), ({"type": "array"}, "[" * 5000, "[" * 5000),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "text", "value"), TYPED)
def test_xml_arguments_have_the_types_of_their_schema(schema: Any, text: str, value: Any) -> None:
    as_text = {"type": "string"}
    inner = {"A": {"type": "integer"}, "B": as_text, "C": {"allOf": [{"$ref": "#/$defs/A"}]}, "A B": as_text}
    for tool in (
        {"properties": {"a": schema}, "$defs": inner},
        {"allOf": [{"$ref": "#/$defs/All"}], "$defs": {**inner, "All": {"properties": {"a": schema}}}},
        {"additionalProperties": schema, "$defs": inner} if schema is not True else {"properties": {"a": True}},
    ):
        read = MessageForm(calls=tool_format("qwen3_coder", ""), schemas={"f": {"type": "object", **tool}})
        assert told(whole_message(read, tags("f", a=text)))[2] == [("f", {"a": value})]


def test_a_schema_is_read_once_a_call() -> None:
    """A schema that repeats itself without end, and one with thousands of forms for thousands of parameters."""
    loop = {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A"}]}
    many = {f"p{i}": {"anyOf": [{"type": "integer"}] * 2000} for i in range(500)}
    given = [f"<parameter={name}>\n5\n</parameter>\n" for name in ("p0", *(f"q{i}" for i in range(3000)))]
    for tool in ({"properties": {"p0": loop}, "$defs": {"A": loop}}, {"properties": many}):
        read = MessageForm(calls=tool_format("qwen3_coder", ""), schemas={"f": tool})
        text = "<tool_call>\n<function=f>\n" + "".join(given) + "</function>\n</tool_call>"
        assert len(whole_message(read, text).calls) == 1
        assert len(whole_message(read, tags("f", p0="5") * 1000).calls) == 1000


@pytest.mark.parametrize(
    ("value", "expected"),
    [("true", True), ("null", None), ('{"x": false}', {"x": False}), ("[True, null]", [True, None]),
     ('"true"', "true"), ('\'\'\'a "b" ) ]\'\'\'', 'a "b" ) ]'), ('""', ""), ("-1.5", -1.5)],
)  # fmt: skip
def test_python_calls_take_the_words_of_json(value: str, expected: Any) -> None:
    read = MessageForm(calls=tool_format("pythonic", ""), schemas={"f": {}})
    assert_told(read, f"[f(a={value})]", ("", "", [("f", {"a": expected})]))


@pytest.mark.parametrize(
    ("text", "content", "count"),
    [
        ('```json\n{"name": "shell", "arguments": {"command": "ls"}}\n```', "", 1),
        ('So:\n```\n{"name": "shell", "arguments": {"command": "ls"}}\n```\nDone.', "So:\nDone.", 1),
        ('<tools>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tools>', "", 1),
        ('<tools>\n{"name": "shell", "arguments": {"command": "ls"}}\n{"name": "shell", "arguments": {"command": "ls"}}'
         "\n</tools>", "", 2),
        ('```json\n[{"name": "shell", "arguments": {"command": "ls"}}]', "", 1),
        ('```json\n{"name": "other", "arguments": {}}\n```', None, 0), ('```json\n{"a": 1}\n```', None, 0),
        ("```python\nx = {1: 2}\n```", None, 0), ("<tools> are listed above", None, 0),
    ],
)  # fmt: skip
def test_forms_of_a_call_of_qwen_coder(text: str, content: str | None, count: int) -> None:
    for name in ("hermes", "qwen2_5_coder"):
        calls = [("shell", {"command": "ls"})] * count
        assert_told(reading(name), text, ("", text if content is None else content, calls))


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(WRITTEN),
    st.lists(st.integers(0, 400)),
    st.sampled_from(["", "<think>a < b\n</think>\n\n", "<think>"]),
)
def test_pieces_change_nothing(written: Any, cuts: list[int], thoughts: str) -> None:
    name, text, *_ = written
    form = MessageForm(calls=format_of(name), schemas=SCHEMAS, tags=TAGS[0])
    assert told(in_pieces(form, thoughts + text, cuts)) == told(whole_message(form, thoughts + text))


FRAGMENTS = st.lists(st.sampled_from([
    "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "now", "arguments": {}}', "{", "}", "[", "]",
    "(", ")", '"', "'", "\\", "[TOOL_CALLS]", "[ARGS]", BEGIN, END, V31.format("now", "{}"), "now", "=", ",", ";", " ",
    "\n\n", "x", "<", "<tool", "<|python_tag|>", "[now()]", "<function=now>", "</function>", "<parameter=a>",
    "</parameter>", "é", "<tools>", "</tools>", "```", "json", "<parameter=city>", tags("weather", city="x"), QUOTES,
    "<|python_start|>", "[CALL_ID]", "true", "\n</function>\n</tool_call>",
]), max_size=24).map("".join)  # fmt: skip


@settings(max_examples=600, deadline=None)
@given(FRAGMENTS, st.lists(st.integers(0, 400), max_size=30), st.sampled_from([*TOOL_FORMATS, FORCED, None]),
       st.sampled_from([*TAGS, None]), st.booleans(), st.booleans(), st.sampled_from([None, "now"]))  # fmt: skip
def test_pieces_of_any_text_change_nothing(
    text: str, cuts: list[int], calls: Any, tags: Any, is_thinking: bool, is_parallel: bool, forced: str | None
) -> None:
    if forced is not None:
        calls = FORCED
    form = MessageForm(
        calls=calls, tags=tags, is_thinking=is_thinking and tags is not None, schemas=SCHEMAS, is_parallel=is_parallel,
        forced=forced,
    )  # fmt: skip
    whole, pieces = whole_message(form, text), in_pieces(form, text, cuts)
    if forced is not None:  # its arguments come as they are, and may be cut
        whole.calls, pieces.calls = (
            [{**each, "id": "", "index": 0} for each in made.calls] for made in (whole, pieces)
        )
        arguments = ["".join(each["function"]["arguments"] for each in made.calls) for made in (whole, pieces)]
        assert arguments[0] == arguments[1]
        whole.calls = pieces.calls = []
    assert told(whole) == told(pieces)
    assert is_parallel or len(whole.calls) <= 1
    if calls is None and tags is None:
        assert whole.content == text


@pytest.mark.parametrize(
    ("name", "is_thinking", "text", "expected"),
    [
        ("qwen3", False, "<think>\nHm.\n</think>\n\nYes.\n", ("Hm.", "Yes.\n")),
        ("qwen3", False, "Yes, <think> is a tag.", ("", "Yes, <think> is a tag.")),
        ("qwen3", False, " <thin", ("", " <thin")),
        ("qwen3", True, "\nHm.\n</think>\n\nYes.", ("Hm.", "Yes.")),
        ("qwen3", True, "Hm. </th", ("Hm. </th", "")),
        ("qwen3", True, "<think>Hm.</think></think>", ("Hm.", "</think>")),
        ("deepseek_r1", False, "Hm.</think>Yes.", ("Hm.", "Yes.")),
        ("deepseek_r1", False, "Hm.", ("Hm.", "")),
        ("mistral", False, "[THINK]Hm.[/THINK]Yes.", ("Hm.", "Yes.")),
    ],
)
def test_thoughts(name: str, is_thinking: bool, text: str, expected: tuple[str, str]) -> None:
    form = MessageForm(tags=thinking_tags(name, ""), is_thinking=is_thinking)
    assert_told(form, text, (*expected, []))


def test_a_text_is_shown_as_soon_as_it_is_decided() -> None:
    reader = MessageReader(MessageForm(calls=tool_format("hermes", ""), tags=TAGS[0]))
    pieces = ["<th", "ink>A", " b</", "think> C <", "3 ", "D<tool_call>", '{"name": "now"}', "</tool_call>"]
    shown = [reader.push(piece).delta() for piece in pieces]
    thoughts = [{"reasoning_content": text, "reasoning": text} for text in ("A", " b")]
    assert shown[:7] == [{}, *thoughts, {"content": "C"}, {"content": " <3"}, {"content": " D"}, {}]
    (call,) = shown[7]["tool_calls"]
    assert call["function"] == {"name": "now", "arguments": "{}"}


def test_arguments_of_a_named_tool_come_in_pieces() -> None:
    form = MessageForm(calls=FORCED, schemas=SCHEMAS, forced="weather", tags=TAGS[0], is_thinking=True)
    reader = MessageReader(form)
    parts = [reader.push(piece) for piece in ("Hm.", "</think>\n", '{"city": ', '"Paris"', ', "days": 2}')]
    assert [call["function"].get("name") for part in parts for call in part.calls] == ["weather", None, None]
    made = MessageParts()
    for part in parts:
        made = joined(made, part)
    assert told(made) == ("Hm.", "", [PARIS])


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.names[0])
def test_time_is_linear_in_the_text(form: ToolFormat) -> None:
    """Time that grew with the square of these texts would be hours."""
    mark = next(iter(form.opens), "")
    xml = f"{mark}<function=now><parameter=a>"
    for begin, unit in (
        (mark, '"\\" '), (mark + form.bare, "[ ] { } "), ("", "<tool_cal"), (mark, "    "), ("", "\n"),
        ("", mark + '{"'), ("", mark + '["x", " '), (mark + '{"', mark + '{\\"'), ("", xml), ("", "```json\n["),
    ):  # fmt: skip
        text = begin + unit * (200_000 // len(unit))
        made = whole_message(MessageForm(calls=form, tags=TAGS[0], schemas=SCHEMAS), text)
        assert (made.content, made.calls) == (text, [])
        short = text[:12_000]
        assert in_pieces(MessageForm(calls=form, schemas=SCHEMAS), short, list(range(0, 12_000, 3))).content == short


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.names[0])
def test_a_format_is_recognised_by_its_template(form: ToolFormat) -> None:
    for clue in form.clues:
        assert tool_format("auto", f"{{{{ x }}}} {clue} {'<tool_call>' if 'function' in clue else ''}") is form
    for name in form.names:
        assert tool_format(name, "") is form
        assert tool_format("none", name) is None


def test_what_a_prompt_ends_with_decides_about_thoughts() -> None:
    template = "{{ '<think>' }} {{ '</think>' }} <tool_call>"
    formats = AnswerFormats.of_llm(LLM("models/tinycode"), template)
    assert formats.tags is TAGS[0]
    for prompt, is_thinking in (("<assistant><think>\n", True), ("<assistant>", False)):
        form = formats.form(prompt, None)
        assert form is not None
        assert form.is_thinking is is_thinking
    assert formats.form("<assistant><think>\n\n</think>\n\n", None) is None
    use = ToolUse(schemas=SCHEMAS, choice="auto")
    form = formats.form("<think></think>", use)
    assert form is not None
    assert (form.tags, form.calls) == (None, tool_format("hermes", ""))
    assert AnswerFormats().form("x", use) is None, "a text whose calls nobody can read is content"
    assert AnswerFormats().form("x", ToolUse(schemas=SCHEMAS, choice="required")) is not None


def test_a_parser_that_is_not_known() -> None:
    with pytest.raises(ConfigError, match=r"--tool-call-parser is 'hermess'. Did you mean 'hermes'\? Known: auto, "):
        tool_format("hermess", "")
    with pytest.raises(ConfigError, match=r"--reasoning-parser is 'qwen'. Did you mean 'qwen3'\? Known: auto, "):
        thinking_tags("qwen", "")
