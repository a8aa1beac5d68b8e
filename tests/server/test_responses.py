"""/v1/responses by OpenAI's own client: the text of the chat that asks for the same, whole and as events."""

import asyncio
import json
from itertools import groupby
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response
from server.live_server import TEMPLATE, LiveServer, live_server

from foretoken import LLM
from foretoken.server.batch import Line, LineAnswers
from foretoken.server.request_fields import structured_outputs
from foretoken.server.responses import _add_to, as_chat

TALK = [{"role": "user", "content": "A queue."}, {"role": "assistant", "content": "class Queue:"}]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_output_tokens": 40}
SEEDED: dict[str, Any] = {"temperature": 0.8, "max_output_tokens": 40, "extra_body": {"seed": 11}}
SCHEMA = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"],
    "additionalProperties": False,
}  # fmt: skip
FORMAT = {"type": "json_schema", "name": "queue", "schema": SCHEMA, "strict": True}
# Every kind of request, and the fields of a chat that asks for the same.
REQUESTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": ({"input": "A queue.", **GREEDY}, {"messages": TALK[:1]}),
    "instructions": (
        {"input": "A queue.", "instructions": "Write code.", **SEEDED},
        {"messages": [{"role": "system", "content": "Write code."}, TALK[0]]},
    ),
    "messages": ({"input": [*TALK, {"role": "user", "content": "Go on."}], **SEEDED, "top_p": 0.9},
        {"messages": [*TALK, {"role": "user", "content": "Go on."}]}),
    "parts": (
        {"input": [{"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "A"}, {"type": "input_text", "text": "queue."}]}], **GREEDY},
        {"messages": [{"role": "user", "content": "A\nqueue."}]},
    ),
    "logprobs": (
        {"input": "A queue.", **GREEDY, "include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"messages": TALK[:1], "logprobs": True},
    ),
    "schema": (
        {"input": "A queue.", **SEEDED, "text": {"format": FORMAT, "verbosity": "low"}},
        {"messages": TALK[:1], "response_format": {"type": "json_schema", "json_schema": FORMAT}},
    ),
    "stop": ({"input": "A queue.", **GREEDY, "extra_body": {"stop": "self"}}, {"messages": TALK[:1]}),
}  # fmt: skip


def requests(*quick: str) -> list[Any]:
    """All of `REQUESTS` as parameters; those that are not named are slow."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in REQUESTS]


def respond(server: LiveServer, name: str, **more: Any) -> Any:
    """Sends one of `REQUESTS`."""
    return server.client().responses.create(model="tinycode", **{**REQUESTS[name][0], **more})


def chat(server: LiveServer, name: str) -> Any:
    """The chat that asks for the same."""
    asked, fields = REQUESTS[name]
    same: dict[str, Any] = {
        key: asked[key] for key in ("temperature", "top_p", "top_logprobs", "extra_body") if key in asked
    }
    given: dict[str, Any] = {"max_tokens": asked["max_output_tokens"], **same, **fields}
    return server.client().chat.completions.create(model="tinycode", **given)


def told(response: Any) -> dict[str, Any]:
    """What a response says, without its names, its time and what of its prompt was known."""
    body = response.to_dict()
    body["usage"].pop("input_tokens_details")
    body["output"] = [{key: value for key, value in item.items() if key != "id"} for item in body["output"]]
    return {key: value for key, value in body.items() if key not in ("id", "created_at")}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_response_is_the_chat_that_asks_for_the_same(name: str, speculative: LiveServer, plain: LiveServer) -> None:
    expected, got = chat(plain, name), respond(speculative, name)
    choice = expected.choices[0]
    assert got.output_text == choice.message.content
    assert got.usage.input_tokens == expected.usage.prompt_tokens
    assert got.usage.output_tokens == expected.usage.completion_tokens > 0
    is_cut = choice.finish_reason == "length"
    assert got.status == got.output[0].status == ("incomplete" if is_cut else "completed")
    assert (got.incomplete_details and got.incomplete_details.reason) == ("max_output_tokens" if is_cut else None)
    logprobs = [] if choice.logprobs is None else choice.logprobs.to_dict()["content"]
    assert got.output[0].content[0].to_dict()["logprobs"] == logprobs
    assert told(got) == told(respond(plain, name))
    if name == "schema":
        assert set(json.loads(got.output_text)) == {"name"}


def test_usage_tells_the_prompt_tokens_that_were_not_read(plain: LiveServer) -> None:
    usage = [respond(plain, "text", extra_body={"cache_salt": "of this test"}).usage for _ in range(2)]
    assert [each.input_tokens_details.cached_tokens for each in usage] == [0, usage[0].input_tokens - 1]


@pytest.mark.parametrize("name", requests("logprobs", "schema", "stop"))
def test_events_make_up_the_response(name: str, speculative: LiveServer) -> None:
    whole = respond(speculative, name)
    events = list(respond(speculative, name, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [kind for kind, _ in groupby(event.type for event in events)] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", f"response.{whole.status}",
    ]  # fmt: skip
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > (name != "stop")  # a text of few tokens may come at once
    assert "".join(event.delta for event in deltas) == whole.output_text
    entries = [entry.to_dict() for event in deltas for entry in event.logprobs]
    assert entries == whole.output[0].content[0].to_dict()["logprobs"]
    last = events[-1].response
    assert told(last) == told(whole)
    assert events[-4].text == whole.output_text
    assert events[-3].part.to_dict() == last.output[0].content[0].to_dict()
    assert events[-2].item.to_dict() == last.output[0].to_dict()
    assert {event.item_id for event in deltas} == {last.output[0].id}
    assert events[0].response.id == last.id
    assert events[0].response.status == "in_progress"


def test_events_are_named_and_nothing_follows_the_last(speculative: LiveServer) -> None:
    text = speculative.post("/v1/responses", {"input": "A", "max_output_tokens": 4, "stream": True}).text
    parts = text.removesuffix("\n\n").split("\n\n")
    for part in parts:
        name, data = part.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert parts[-1].startswith("event: response.incomplete\n")


def test_a_class_says_the_form(speculative: LiveServer) -> None:
    class Queue(pydantic.BaseModel):
        size: int = pydantic.Field(ge=0, le=99)

    client = speculative.client().responses
    for _ in range(2):
        parsed = client.parse(
            model="tinycode", input="A queue.", text_format=Queue, max_output_tokens=60, temperature=0
        )
        assert 0 <= parsed.output_parsed.size <= 99


def test_what_a_response_tells_of_its_request(speculative: LiveServer) -> None:
    got = respond(
        speculative, "text", instructions="Write code.", metadata={"a": "b"}, store=True, truncation="disabled",
        user="me", reasoning={"effort": "low"}, parallel_tool_calls=False,
        extra_body={"spec_decode_metrics": "summary", "prediction": {"type": "content", "content": "class Queue"}},
    )  # fmt: skip
    assert (got.instructions, got.metadata, got.max_output_tokens) == ("Write code.", {"a": "b"}, 40)
    assert (got.temperature, got.text.format.type, got.model) == (0.0, "text", "tinycode")
    body = got.to_dict()
    assert body["store"] is False, "nothing is stored, whatever was asked"
    assert body["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


def test_the_schema_of_a_json_object_counts() -> None:
    """`text.format` with llama.cpp's form lost its schema without a word."""
    chat = as_chat({"input": "A queue.", "text": {"format": {"type": "json_object", "schema": {"type": "object"}}}})
    assert structured_outputs(chat["response_format"]) == {"json": {"type": "object"}}


@pytest.mark.parametrize("text", [None, {}, {"format": None}])
def test_a_form_that_is_null_asks_for_text(text: Any, speculative: LiveServer) -> None:
    body = {"input": "A queue.", "max_output_tokens": 4, "temperature": 0.0}
    got, expected = (speculative.post("/v1/responses", each) for each in ({**body, "text": text}, body))
    assert got.status_code == 200, got.text
    assert got.json()["output"][0]["content"] == expected.json()["output"][0]["content"]
    assert got.json()["text"]["format"] == {"type": "text"}


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"input": None}, "input", "Expected text, or a list of messages."),
        ({"input": []}, "input", "Expected text, or a list of messages."),
        ({"input": 5}, "input", "Expected text, or a list of messages."),
        ({"input": ["A"]}, "input", "Expected messages with role and content."),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": 5}]}, "input", "a result of a call"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": 5}]}, None, "the tool_calls of a message"),
        ({"input": [{"type": "reasoning", "content": [5]}]}, "input", "input has thoughts [5]"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input", "Expected messages"),
        ({"input": [{"role": "user"}]}, "input", "content None"),
        ({"input": [{"role": "user", "content": []}]}, "input", "content []"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://a/b"}]}]}, "input",
         "'input_text'"),
        ({"input": [{"content": "A"}]}, None, "a message is"),
        ({"instructions": [1]}, "instructions", "Expected text."),
        ({"metadata": 1}, "metadata", "metadata is 1"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"max_output_tokens": "9"}, "max_output_tokens", "max_output_tokens"),
        ({"text": 5}, "text", "text.format is"),
        ({"text": {"format": {"type": "text", "more": "x" * (1 << 18)}}}, "text", "more than 262144 bytes"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "at most 16 keys"),
        ({"metadata": {"k" * 65: ""}}, "metadata", "at most 64 characters"),
        ({"metadata": {"k": "v" * 513}}, "metadata", "at most 512"),
        ({"metadata": {"k": 5}}, "metadata", "at most 512"),
        ({"metadata": []}, "metadata", "metadata is []"),
        ({"text": {"format": 5}}, "text", "text.format is"),
        ({"text": {"format": {"type": "json_schema"}}}, "text", "text.format is"),
        ({"include": "usage"}, "include", "Expected a list of names."),
        ({"top_logprobs": 2}, "top_logprobs", "message.output_text.logprobs"),
        ({"top_logprobs": 50, "include": ["message.output_text.logprobs"]}, "top_logprobs", "top_logprobs"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "Send the whole conversation as input."),
        ({"conversation": "conv_1"}, "conversation", "Send the whole conversation as input."),
        ({"background": True}, "background", "set stream"),
        ({"tools": [{"name": "f"}]}, "tools", "{'type': 'function', 'name': ..., "),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools", "the name 'a b'. Expected 1 to 64"),
        ({"tools": {}}, "tools", "tools is {}. Expected a list of functions."),
        ({"tool_choice": "required"}, "tool_choice", "without tools."),
        ({"truncation": "auto"}, "truncation", "Shorten it."),
        ({"max_tokens": 5}, "max_tokens", "Pass max_output_tokens."),
        ({"messages": TALK}, "messages", "Send them as input."),
        ({"n": 2}, "n", "one message"),
    ],
)  # fmt: skip
def test_fields_that_do_not_fit(fields: dict[str, Any], param: str | None, part: str, speculative: LiveServer) -> None:
    for is_streamed in (False, True):
        body = {"input": "A queue.", "max_output_tokens": 4, "stream": is_streamed, **fields}
        answer = speculative.post("/v1/responses", body)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
        assert part in error["message"]


@pytest.mark.parametrize("name", requests("instructions", "schema", "stop"))
def test_a_line_of_a_batch_is_answered_as_a_request(name: str, speculative: LiveServer) -> None:
    fields = dict(REQUESTS[name][0])
    body = {"model": "tinycode", **fields.pop("extra_body", {}), **fields}
    lines = LineAnswers(speculative.engine, "tinycode", TEMPLATE)
    asked = {"custom_id": "a", "url": "/v1/responses", "body": body}
    answer = asyncio.run(lines.answer(Line(1, json.dumps(asked).encode()), asked))["response"]
    assert answer["status_code"] == 200
    assert told(Response.model_validate(answer["body"])) == told(respond(speculative, name))


def test_calls_of_a_message_are_not_copied_for_each_further_one() -> None:
    """Time is linear in the calls: a body of 129,000 of them kept the threads of large requests for minutes."""
    message: dict[str, Any] = {"role": "assistant"}
    _add_to(message, {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"})
    calls = message["tool_calls"]
    _add_to(message, {"type": "function_call", "call_id": "b", "name": "f", "arguments": "{}"})
    assert message["tool_calls"] is calls
    assert [call["id"] for call in calls] == ["a", "b"]


def test_nothing_is_stored(speculative: LiveServer) -> None:
    name = respond(speculative, "text").id
    with pytest.raises(openai.NotFoundError, match="no such path"):
        speculative.client().responses.retrieve(name)


def test_a_model_without_a_template() -> None:
    with live_server(LLM("models/tinycode", max_num_seqs=1)) as server:
        messages = [{"role": "user", "content": "A queue."}]
        for path, body in (
            ("/v1/responses", {"input": "A queue."}),
            ("/v1/chat/completions", {"messages": messages}),
            ("/tokenize", {"messages": messages}),
        ):
            answer = server.post(path, body)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"] == (
                "The model has no chat template. Start the server with --chat-template FILE, or send the text to "
                "/v1/completions."
            )


def test_a_stream_that_comes_to_no_end_says_so() -> None:
    with live_server(LLM("models/tinycode", max_num_seqs=1), chat_template=TEMPLATE) as server:
        stream = respond(server, "text", max_output_tokens=900, stream=True)
        while next(stream).type != "response.output_text.delta":
            pass
        server.engine.close()
        *_, last = stream
        assert last.type == "response.failed"
        assert last.response.status == "failed"
        assert last.response.error.code == "server_error"
        assert last.response.error.message.startswith("The ")
