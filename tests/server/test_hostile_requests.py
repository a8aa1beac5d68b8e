"""Requests that nobody should send: each gets an error in OpenAI's shape, and the server goes on as before."""

import gzip
import http.client
import json
import socket
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from served_app import connect, wait_until
from server.live_server import TEMPLATE, LiveServer, live_server

from foretoken import LLM
from foretoken.core.errors import ConfigError
from foretoken.server.app import ServerConfig
from foretoken.server.request_fields import UnknownFields, completion_request

KEYS = ["first-key", "second-key"]
COMPLETION = {"model": "tinycode", "prompt": "def main():", "max_tokens": 4, "temperature": 0.0}
CHAT = {"model": "tinycode", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0.0}
NESTED = {"a": json.loads("[" * 70 + "]" * 70)}


@pytest.fixture(autouse=True)
def _serves_on(speculative: LiveServer) -> Iterator[None]:
    """After each of these requests others get what they got before, and no slot is lost."""
    yield
    assert speculative.complete(**COMPLETION) == "\n        self._"
    speculative.wait_until_idle()


def assert_error(answer: Any, status: int, part: str) -> dict[str, Any]:
    """An error in OpenAI's shape, whose message tells nothing about the server's inside."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    message = body["error"]["message"]
    assert part in message
    assert not any(leak in message for leak in ("Traceback", ".py", "0x", "/usr", "/root", "site-packages"))
    assert len(message) < 1000
    return dict(body["error"])


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[]", "is not a JSON object"),
        (b"null", "is not a JSON object"),
        (b'"text"', "is not a JSON object"),
        (b'{"prompt": "\xff"}', "is not UTF-8"),
        (b'\xef\xbb\xbf{"prompt": "a"}', "is not JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN"),
        (b'{"prompt": "a", "temperature": -Infinity}', "-Infinity"),
        (b'{"prompt": "a", "temperature": 1e999}', "holds 1e999, which is beyond the range"),
        (b'{"prompt": "a", "metadata": {"a": [-1e999]}}', "holds -1e999"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "number that is too long"),
        (b'{"prompt": "a", "prompt": "b"}', "'prompt' twice"),
        (b'{"prompt": "\\ud800"}', "lone surrogate"),
        (b'{"\\ud800": 1}', "lone surrogate"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"a":' * 100_000, "is nested too deeply"),
        (json.dumps(NESTED).encode(), "is nested too deeply"),
    ],
)
def test_bodies_that_are_no_plain_json(content: bytes, part: str, speculative: LiveServer) -> None:
    assert_error(speculative.post("/v1/completions", content=content), 400, part)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_more_tokens_than_the_context_has_room_for(path: str, is_streamed: bool, speculative: LiveServer) -> None:
    limit = speculative.engine.llm.target.context_len
    field = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    text = {"/v1/completions": {"prompt": "class Queue:"}, "/v1/responses": {"input": "A queue."}}.get(
        path, {"messages": [{"role": "user", "content": "A queue."}]}
    )
    body = {"model": "tinycode", **text, "stream": is_streamed, "temperature": 0.0}
    error = assert_error(speculative.post(path, json={**body, field: limit}), 400, f"the context of {limit} tokens")
    assert error["code"] == "context_length_exceeded"
    most = int(error["message"].split("at most ")[1].split(",")[0])
    assert 0 < most < limit
    fits = {**body, field: most, "stop": "\n"}
    assert speculative.post(path, json=fits).status_code == 200
    assert_error(speculative.post(path, json={**fits, field: most + 1}), 400, f"Ask for at most {most},")
    assert speculative.post(path, json={**body, "stop": "\n"}).status_code == 200


@pytest.mark.parametrize("is_streamed", [False, True])
def test_parameters_that_leave_no_token(is_streamed: bool, speculative: LiveServer) -> None:
    """The end of a text alone is allowed, and forbidden before the fourth token."""
    (eos,) = speculative.engine.llm.target.model.eos_ids
    body = {
        "model": "tinycode", "prompt": "class Queue:", "stream": is_streamed, "allowed_token_ids": [eos],
        "min_tokens": 4, "max_tokens": 8, "temperature": 0.0,
    }  # fmt: skip
    answer = speculative.post("/v1/completions", json=body)
    if is_streamed:
        assert answer.status_code == 200
        assert '"code":"no_token_possible"' in answer.text.replace(" ", "")
    else:
        error = assert_error(answer, 400, "the request's parameters leave no token")
        assert error["code"] == "no_token_possible"
    assert speculative.post("/v1/completions", json={**body, "min_tokens": 0}).status_code == 200


# Fields of a completion that do not fit, and what the message must name.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt is missing"),
    ({"prompt": []}, "prompt is []"),
    ({"prompt": ""}, "the prompt is empty"),
    ({"prompt": [""]}, "the prompt is empty"),
    ({"prompt": {"text": "a"}}, "prompt is {"),
    ({"prompt": [1, "a"]}, "neither text nor a list"),
    ({"prompt": [-1]}, "-1"),
    ({"prompt": [10**9]}, "1000000000"),
    ({"prompt": [[1.5]]}, "1.5"),
    ({"prompt": [True]}, "neither text nor a list"),
    ({"prompt": ["a"] * 200}, "200 prompts"),
    ({"prompt": ["a"] * 100_000}, "100000 prompts"),
    ({"prompt": [[[1]]]}, "[1]"),
    ({"prompt": "a b c d " * 2000}, "context length"),
    ({"n": 10**9}, "n is 1000000000"),  # CVE-2026-34756
    ({"n": -7}, "n is -7"),  # CVE-2026-21869, and all negative numbers
    ({"n": 0}, "n is 0"),
    ({"n": True}, "n is True"),
    ({"n": "2"}, "n is '2'"),
    ({"n": 100, "prompt": ["a", "b"]}, "n = 100"),
    ({"best_of": 3}, "best_of"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 2**64}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 1e308}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": -7}, "top_k"),
    ({"logprobs": 10**6}, "logprobs"),
    ({"logprobs": -7}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt_logprobs": 10**6}, "prompt_logprobs"),
    ({"prompt": [5] * 1000, "n": 128, "prompt_logprobs": 20, "max_tokens": 1}, "2688000 log-probabilities"),
    ({"prompt": [5] * 1000, "n": 128, "echo": True, "logprobs": 20}, "log-probabilities"),
    ({"prompt": [[5] * 1000] * 128, "echo": True, "logprobs": 20, "max_tokens": 1}, "log-probabilities"),
    ({"n": 128, "logprobs": 20, "max_tokens": 1000}, "2688000 log-probabilities"),
    ({"stop": ["x"] * 10_000}, "stop has 10000 items"),
    ({"stop": [1]}, "stop"),
    ({"stop": 1.5}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": {"a": "b"}}, "stop"),
    ({"logit_bias": {str(i): 1 for i in range(10_000)}}, "logit_bias has 10000 items"),
    ({"logit_bias": {"one": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1e9}}, "logit_bias"),
    ({"logit_bias": {"999999": 1}}, "999999"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": "x"}, "logit_bias"),
    ({"bad_words": ["x"] * 10_000}, "bad_words has 10000 items"),
    ({"bad_words": [[5] * 129]}, "bad_words holds a word of 129 tokens. Expected at most 128"),
    ({"bad_words": [[5] * 100] * 50}, "bad_words has more than 4096 tokens"),
    ({"bad_words": ["a b c d " * 40]}, "bad_words holds a word of"),
    ({"bad_words": ["a b c d " * 10] * 100}, "bad_words has more than 4096 tokens"),
    ({"bad_words": ["x" * 2**20]}, "a word of bad_words has 1048576 bytes, which are more than 128 tokens"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": list(range(300_000))}, "allowed_token_ids"),  # CVE-2026-105756
    ({"logprob_token_ids": list(range(100_000))}, "logprob_token_ids"),
    ({"allowed_token_ids": [10**9]}, "1000000000"),
    ({"presence_penalty": "x"}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 1.5}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": []}, "stream_options"),
    ({"echo": 1}, "echo"),
    ({"echo": True, "max_tokens": -1}, "max_tokens"),
    ({"echo": True, "max_tokens": False}, "max_tokens"),
    ({"echo": True, "max_tokens": 0, "min_tokens": 2}, "min_tokens"),
    ({"echo": True, "logprobs": 21}, "logprobs"),
    ({"echo": True, "prompt": [10**9]}, "1000000000"),
    ({"suffix": "return"}, "suffix"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"prompt_embeds": "gASVKQAAAAAAAACMBXBvc2l4lIwGc3lzdGVt"}, "prompt_embeds"),  # CVE-2025-62164
    ({"logits_processors": ["os.system"]}, "logits_processors"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    *(({"cache_salt": value}, "cache_salt") for value in (5, {}, [], "")),  # CVE-2026-105756
    ({"cache_salt": "x" * 5000}, "cache_salt"),
    ({"speculative": {"drafter": "ngram"}}, "speculative"),
    ({"speculative": {"max_nodes": 0}}, "max_nodes"),
    ({"speculative": True}, "speculative"),
    ({"prediction": {"type": "image"}}, "prediction"),
    ({"prediction": ""}, "prediction"),
    ({"spec_decode_metrics": "detailed"}, "spec_decode_metrics"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "exclude each other"),
    ({"structured_outputs": {"regex": "(" * 50}}, "regex"),
    ({"structured_outputs": {"regex": "x" * 5000}}, "regex has 5000 characters"),
    ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "exactly one"),
    ({"structured_outputs": {"grammar": "start: nothing"}}, "grammar"),
    ({"structured_outputs": {"json": {"$ref": "http://127.0.0.1:1/schema"}}}, "http"),
    ({"structured_outputs": {"json": {"type": "nonsense"}}}, "json"),
    ({"structured_outputs": {"choice": ["x"] * 10_000}}, "choice has 10000 texts"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "part"), REFUSED, ids=[f"{i}-{'+'.join(f)}" for i, (f, _) in enumerate(REFUSED)])
def test_fields_that_do_not_fit(fields: dict[str, Any], part: str, speculative: LiveServer) -> None:
    assert_error(speculative.post("/v1/completions", {**COMPLETION, **fields}), 400, part)


FORMS = [
    ({"guided_choice": ["a", "b"]}, '{"choice": ["yes", "no"]}'), ({"choice": ["a"]}, '{"choice":'),
    ({"guided_json": {"type": "object"}}, '{"json": SCHEMA}'), ({"json_schema": {"type": "object"}}, '{"json":'),
    ({"guided_json_object": True}, "response_format"), ({"format": "json"}, "response_format"),
    ({"guided_regex": "a+"}, '{"regex":'), ({"regex": "a+"}, '{"regex":'),
    ({"guided_grammar": "root ::= 'a'"}, '{"grammar": TEXT}'), ({"ebnf": "root ::= 'a'"}, '{"grammar": TEXT}'),
    ({"grammar": "root ::= 'a'"}, '{"grammar": TEXT}'), ({"grammar": {"type": "regex", "value": "a"}}, '{"regex":'),
    ({"guided_decoding_backend": "xgrammar"}, "llguidance"), ({"guided_whitespace_pattern": " "}, "whitespace_pattern"),
    ({"structural_tag": {}}, "structured_outputs"),
    ({"max_new_tokens": 2}, "max_tokens"), ({"n_predict": 2}, "max_tokens"), ({"stop_sequences": ["a"]}, "stop"),
    ({"repeat_penalty": 1.1}, "repetition_penalty"), ({"mirostat": 2}, "no such"), ({"typical_p": 0.5}, "top_p"),
    ({"do_sample": False}, "temperature: 0"), ({"enable_thinking": False}, "chat_template_kwargs"),
    ({"lora_path": "x"}, "Adapters"), ({"options": {"temperature": 0}}, "fields of the request"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "instead"), FORMS, ids=[f"{i}-{'+'.join(f)}" for i, (f, _) in enumerate(FORMS)])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_forms_and_samplers_of_other_servers_are_not_ignored(
    path: str, fields: dict[str, Any], instead: str, speculative: LiveServer
) -> None:
    body = {"/v1/completions": COMPLETION, "/v1/responses": {"input": "Hi"}}.get(path, CHAT)
    error = assert_error(speculative.post(path, {**body, **fields}), 400, instead)
    assert error["param"] in fields
    assert error["message"].startswith(error["param"])


def test_names_of_other_servers_that_ask_for_nothing_are_accepted(speculative: LiveServer) -> None:
    nothing = {
        "guided_json": None, "guided_choice": None, "grammar": "", "json_schema": {}, "n_predict": -1, "mirostat": 0,
        "typical_p": 1.0, "repeat_penalty": 1.0, "do_sample": True, "watermark": False, "lora_path": None,
    }  # fmt: skip
    assert [speculative.complete(**COMPLETION, **more) for more in ({}, nothing)] == ["\n        self._"] * 2


def test_a_schema_beside_the_type_is_kept(speculative: LiveServer) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
    form = {"response_format": {"type": "json_object", "schema": schema}, "max_tokens": 60}
    answer = speculative.post("/v1/chat/completions", {**CHAT, **form}).json()
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"a": 7}


REFUSED_IN_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages is missing"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [[{"role": "user", "content": "Hi"}]]}, "messages"),
    ({"messages": [{"role": "user"}] * 5000}, "messages has 5000 items"),
    ({"messages": [{"content": "Hi"}]}, "role"),
    ({"messages": [{"role": "user", "content": 5}]}, "content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}]},
        "Expected text",
    ),
    ({"top_logprobs": 3}, "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"documents": [{"text": "a"}]}, "documents"),
    ({"chat_template": "{% for i in range(10**9) %}{% endfor %}"}, "chat_template"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": "x"}}, "chat_template_kwargs is {'self': 'x'}. Expected variables"),
    ({"chat_template_kwargs": {"deep": {"a": []}}}, "chat_template_kwargs"),
    *(({"chat_template_kwargs": value}, "chat_template_kwargs") for value in ([], "x", 5, {"x": [0] * 1000})),
    ({"add_generation_prompt": True, "continue_final_message": True}, "exclude each other"),
    ({"tools": "all"}, "tools"),
    ({"max_completion_tokens": 0}, "max_tokens"),
]


@pytest.mark.parametrize(
    ("fields", "part"), REFUSED_IN_CHATS, ids=[f"{i}-{'+'.join(f)}" for i, (f, _) in enumerate(REFUSED_IN_CHATS)]
)
def test_fields_of_chats_that_do_not_fit(fields: dict[str, Any], part: str, speculative: LiveServer) -> None:
    assert_error(speculative.post("/v1/chat/completions", {**CHAT, **fields}), 400, part)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_empty_schema_is_any_json(path: str, speculative: LiveServer) -> None:
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "any", "schema": {}}}}
    answer = speculative.post(path, {**(CHAT if "chat" in path else COMPLETION), **form, "max_tokens": 8})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    text = choice["message"]["content"] if "chat" in path else choice["text"]
    assert text.lstrip()[:1] in tuple('{["-0123456789tfn'), text


def test_models_that_are_not_served(speculative: LiveServer) -> None:
    for name in ("gpt-5", "../../etc/passwd", "models/tinycode", 5, ["tinycode"], {"a": 1}, "x" * 100_000):
        error = assert_error(speculative.post("/v1/completions", {**COMPLETION, "model": name}), 404, "does not exist")
        assert error["code"] == "model_not_found"
    assert_error(speculative.get("/v1/models/..%2fother"), 404, "does not exist")


def test_paths_and_methods_that_there_are_not(speculative: LiveServer) -> None:
    assert_error(speculative.get("/nothing"), 404, "no such path")
    assert_error(speculative.get("/docs"), 404, "no such path")
    answer = speculative.get("/v1/completions")
    assert_error(answer, 405, "GET is not answered here")
    assert answer.headers["allow"] == "POST"


def test_unknown_fields_are_accepted_and_named_once(speculative: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        answer = speculative.post("/v1/completions", {**COMPLETION, "novelty\n\x1b[31m": 1, "user": "me"})
        assert answer.status_code == 200
    assert [record.getMessage() for record in caplog.records if "novelty" in record.getMessage()] == [
        "requests have the unknown field 'novelty\\n\\x1b[31m', which is ignored"
    ]
    assert "main" not in caplog.text, "prompts are never logged"


def test_of_unknown_fields_eighty_characters_are_kept() -> None:
    unknown = UnknownFields()
    tracemalloc.start()
    try:
        for number in range(64):
            unknown.log_names({f"{number:04d}" + "x" * (1 << 20): None})
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1 << 20


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a\nb", "a\nb"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([{"type": "text", "text": "a"}], "a"),
    ],
)
def test_parts_of_a_prediction_are_joined_as_those_of_a_message(content: Any, text: str) -> None:
    body = {"prompt": "p", "prediction": {"type": "content", "content": content}}
    (prompt,) = completion_request(body, UnknownFields(), {}).prompts
    assert prompt["prediction"] == text


def test_tokens_there_and_back(speculative: LiveServer) -> None:
    answer = speculative.post("/tokenize", {"prompt": "def größe():"}).json()
    assert answer["count"] == len(answer["tokens"])
    assert speculative.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "def größe():"}
    assert speculative.post("/tokenize", CHAT).json()["count"] > 3
    assert_error(speculative.post("/tokenize", {"prompt": 5}), 400, "the text")
    assert_error(speculative.post("/detokenize", {"tokens": [10**9]}), 400, "1000000000")
    assert_error(speculative.post("/detokenize", {"tokens": "abc"}), 400, "tokens")
    assert_error(speculative.post("/tokenize", {"prompt": "x" * (1 << 20)}), 400, "more than 1024 tokens of at most")
    assert_error(speculative.post("/detokenize", {"tokens": [5] * 262_145}), 400, "tokens has 262145 items")


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (b"[]," * (1 << 18), "262145 lists"),
        (b"{}," * (1 << 18), "262145 objects"),
        (b'"",' * (1 << 19), "524292 strings"),
        (b"1," * 3_000_000, "3000002 values"),
    ],
)
def test_bodies_of_millions_of_values(value: bytes, part: str, speculative: LiveServer) -> None:
    """Reading one of 2.7 million lists took 25 seconds, during which /health took nine."""
    body = b'{"prompt": "a", "max_tokens": 1, "more": [' + value + b"1]}"
    assert_error(speculative.post("/v1/completions", content=body), 400, part)


def test_text_that_looks_like_values_is_none(speculative: LiveServer) -> None:
    text = '"[{,\\' * (1 << 18)
    answer = speculative.post("/v1/completions", {**COMPLETION, "user": text})
    assert answer.status_code == 200, answer.text


def test_bodies_that_are_too_large_or_encoded(speculative: LiveServer) -> None:
    assert_error(speculative.post("/v1/completions", content=b" " * (9 << 20)), 413, "8 MiB")

    def parts() -> Iterator[bytes]:  # without a Content-Length
        for _ in range(10):
            yield b" " * (1 << 20)

    assert_error(speculative.post("/v1/completions", content=parts()), 413, "8 MiB")
    packed = gzip.compress(json.dumps(COMPLETION).encode())
    answer = speculative.post("/v1/completions", content=packed, headers={"Content-Encoding": "gzip"})
    assert_error(answer, 415, "compressed")
    answer = speculative.get("/version", headers=[(f"x-{i}", "1") for i in range(300)])
    assert_error(answer, 431, "Expected at most 256")
    assert speculative.get("/version", headers={"x-long": "a" * (250 << 10)}).status_code == 200
    answer = speculative.get("/version", headers={"x-long": "a" * (256 << 10)})
    assert_error(answer, 431, "Expected at most 256 headers and 262144 bytes")


@pytest.mark.parametrize("header", [{}, {"Transfer-Encoding": "chunked"}, {"Content-Encoding": "gzip"}], ids=str)
def test_who_sends_all_before_reading_sees_why_it_was_refused(header: dict[str, str], speculative: LiveServer) -> None:
    """A connection that is closed while a client sends is a broken pipe to it."""
    connection = http.client.HTTPConnection(speculative.url.removeprefix("http://"), timeout=60)
    connection.request("POST", "/v1/completions", [b" " * (1 << 20)] * 40, header, encode_chunked=bool(header))
    answer = connection.getresponse()
    assert answer.status == (415 if "Content-Encoding" in header else 413)
    assert json.loads(answer.read())["error"]["message"]
    connection.close()


@pytest.mark.parametrize(
    ("version", "hosts", "status"), [("1.1", 0, 400), ("1.1", 1, 200), ("1.1", 2, 400), ("1.0", 0, 200)]
)
def test_requests_say_once_which_host_they_are_for(
    version: str, hosts: int, status: int, speculative: LiveServer
) -> None:
    with connect(speculative.url) as connection:
        headers = "".join(f"Host: {number}\r\n" for number in range(hosts))
        connection.sendall(f"GET /version HTTP/{version}\r\n{headers}\r\n".encode())
        assert b" %d " % status in connection.recv(1000).partition(b"\r\n")[0]


def test_a_client_that_leaves_within_its_body(speculative: LiveServer) -> None:
    with connect(speculative.url) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{")
    with connect(speculative.url) as connection:
        connection.sendall(b"\x16\x03\x01 no HTTP at all\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")


def test_a_body_that_does_not_come(speculative: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.server.edge._BODY_SECONDS", 0.1)
    with connect(speculative.url) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{")
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_a_reader_that_takes_nothing_ends_its_request(speculative: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.server.http_server._READ_SECONDS", 0.2)
    host, port = speculative.url.removeprefix("http://").split(":")
    ask = {**COMPLETION, "max_tokens": 1000, "n": 8, "logprobs": 20, "stream": True, "ignore_eos": True}
    body = json.dumps(ask).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        before = speculative.figure("foretoken:", 'finished_reason="abort"')
        wait_until(lambda: speculative.engine.num_running)
        speculative.wait_until_idle()
        assert speculative.figure("foretoken:", 'finished_reason="abort"') > before


@pytest.fixture(scope="module")
def guarded() -> Iterator[LiveServer]:
    llm = LLM("models/tinycode", max_num_seqs=1)
    with live_server(llm, api_keys=KEYS, max_waiting_requests=1, chat_template=TEMPLATE) as server:
        yield server


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer wrong", "Basic first-key", "first-key", "Bearer first-key2"]
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/version", "/tokenize", "/openapi.json", "//health", "//"])
def test_wrong_keys_open_nothing(path: str, header: str | None, guarded: LiveServer) -> None:
    """CVE-2026-48746: a Host that reads as another path must not count; the path alone decides."""
    for host in ("a/health?b", "a/health", "localhost/health#", "[::1]/health", "/health"):
        headers = {"Host": host} | ({} if header is None else {"Authorization": header})
        error = assert_error(guarded.get(path, headers=headers), 401, "API key")
        assert error["type"] == "authentication_error"


def test_right_keys_open_all_and_health_needs_none(guarded: LiveServer) -> None:
    for key in KEYS:
        assert guarded.client(key).models.list().data[0].id == "tinycode"
    for path in ("/health", "/health/live", "/health/ready"):
        assert guarded.get(path).json() == {"status": "ok"}


ORIGIN = "https://app.example.org"
PREFLIGHT = {
    "Origin": ORIGIN, "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type, x-stainless-lang",
}  # fmt: skip


@pytest.fixture(scope="module")
def shared() -> Iterator[LiveServer]:
    llm = LLM("models/tinycode", max_num_seqs=1)
    with live_server(llm, api_keys=KEYS, allowed_origins=[ORIGIN, "http://localhost:3000"]) as server:
        yield server


def test_pages_of_allowed_origins_read_answers_and_refusals(shared: LiveServer) -> None:
    preflight = httpx.options(f"{shared.url}/v1/completions", headers=PREFLIGHT)
    assert preflight.status_code == 200, "without a key"
    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "x-stainless-lang" in preflight.headers["access-control-allow-headers"]
    headers = {"Origin": ORIGIN, "Authorization": f"Bearer {KEYS[0]}"}
    stream = {**COMPLETION, "stream": True}
    answers = [
        shared.post("/v1/completions", COMPLETION, headers=headers),
        shared.post("/v1/completions", stream, headers=headers),
        shared.post("/v1/completions", {"prompt": None}, headers=headers),
        shared.get("/nowhere", headers=headers),
        shared.get("/v1/models", headers={"Origin": ORIGIN}),
        shared.post("/v1/completions", content=b"x" * ((8 << 20) + 1), headers=headers),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 400, 404, 401, 413]
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "origin" in answer.headers["vary"].lower()
        assert "access-control-allow-credentials" not in answer.headers


def test_pages_of_other_origins_read_nothing(shared: LiveServer, guarded: LiveServer) -> None:
    headers = {**PREFLIGHT, "Origin": "https://evil.example"}
    assert httpx.options(f"{shared.url}/v1/completions", headers=headers).status_code == 400
    for server in (shared, guarded):  # the second one was given no origins
        key = {"Origin": "https://evil.example", "Authorization": f"Bearer {KEYS[0]}"}
        answer = server.get("/v1/models", headers=key)
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("access-control-allow")]
    assert httpx.options(f"{guarded.url}/v1/completions", headers=PREFLIGHT).status_code == 401


def test_pages_of_all_origins_bring_no_cookies() -> None:
    with live_server(LLM("models/tinycode", max_num_seqs=1), allowed_origins=["*"]) as server:
        preflight = httpx.options(f"{server.url}/v1/models", headers=PREFLIGHT)
        assert preflight.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in preflight.headers


@pytest.mark.parametrize(
    "origin", ["https://a.example/", "https://a.example/path", "a.example", "", "https://*.a.example"]
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="an allowed origin is"):
        ServerConfig(names=["m"], allowed_origins=[origin])


def test_a_full_queue_says_when_to_come_back(guarded: LiveServer) -> None:
    client = guarded.client(KEYS[0])
    long = {"model": "tinycode", "prompt": "def main():", "max_tokens": 900, "temperature": 0.0, "stream": True}
    running = client.completions.create(**long)  # type: ignore[call-overload]
    next(iter(running))
    waiting = client.completions.create(**long)  # type: ignore[call-overload]
    answer = guarded.post("/v1/completions", COMPLETION, headers={"Authorization": f"Bearer {KEYS[1]}"})
    error = assert_error(answer, 429, "wait")
    assert error["type"] == "rate_limit_error"
    assert int(answer.headers["retry-after"]) >= 1
    running.close()
    waiting.close()
    guarded.wait_until_idle()
    assert client.completions.create(model="tinycode", prompt="a", max_tokens=2).usage is not None


def test_an_engine_that_stopped(speculative: LiveServer) -> None:
    """`speculative` serves on beside it; only the LLM of this one is its own."""
    with live_server(LLM("models/tinycode", max_num_seqs=1)) as server:
        server.engine.close()
        assert_error(server.get("/health"), 503, "serves no requests")
        assert_error(server.post("/v1/completions", COMPLETION), 503, "serves no requests")


BOOLEANS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "completions": (
        "/v1/completions", COMPLETION,
        [
            "stream", "echo", "store", "return_token_ids", "return_token_origins", "return_tokens_as_token_ids",
            "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize", "use_beam_search",
            "stream_options.include_usage", "stream_options.continuous_usage_stats", "speculative.enabled",
            "structured_outputs.json_object", "structured_outputs.disable_any_whitespace", "guided_json_object",
            "no_stop_trim", "do_sample", "n",
        ],
    ),
    "chat": (
        "/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]},
        [
            "stream", "echo", "store", "logprobs", "parallel_tool_calls", "add_generation_prompt",
            "continue_final_message", "chat_template_kwargs.enable_thinking", "tools.0.function.strict",
            "response_format.json_schema.strict",
        ],
    ),
    "responses": (
        "/v1/responses", {"input": "Hi", "tools": [{"type": "function", "name": "f"}]},
        [
            "stream", "store", "background", "parallel_tool_calls", "logprobs", "return_token_ids", "tools.0.strict",
            "text.format.strict",
        ],
    ),
    "tokenize": ("/tokenize", {"prompt": "a"}, ["add_special_tokens", "add_generation_prompt"]),
    "tokenize a chat": (
        "/tokenize", {"messages": CHAT["messages"]}, ["add_generation_prompt", "continue_final_message"]
    ),
}  # fmt: skip
AROUND = {
    "structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_schema", "schema": {}}},
    "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
}  # fmt: skip


def with_switch(body: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The body with a value at a path; n: at a number where true would be 1."""
    *outer, last = path.split(".")
    made = json.loads(json.dumps({**{name: AROUND[name] for name in outer[:1] if name in AROUND}, **body}))
    inner = made
    for name in outer:
        inner = inner[int(name)] if isinstance(inner, list) else inner.setdefault(name, {})
    inner[last] = value
    return made


@pytest.mark.parametrize(
    ("endpoint", "name"), [(endpoint, name) for endpoint, (_, _, names) in BOOLEANS.items() for name in names]
)
def test_a_boolean_is_a_boolean(endpoint: str, name: str, speculative: LiveServer) -> None:
    """Text, numbers and lists are not taken for true, nor for false."""
    path, body, _ = BOOLEANS[endpoint]
    for value in ("false", "no", 0, 1, 0.0, [], {}) if name != "n" else (True, False):
        answer = speculative.post(path, with_switch(body, name, value))
        assert answer.status_code == 400, f"{name} = {value!r}: {answer.text[:200]}"
        assert name.rsplit(".", 1)[-1] in answer.json()["error"]["message"]
