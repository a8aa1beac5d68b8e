"""OpenAI's own client against a live server: all kinds of requests, with drafts and without, alone and together."""

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from server.live_server import LiveServer

CODE = "class Queue:\n    def push(self, item):\n        self.items.append(item)\n\n    def pop(self"
IMPORTS = "import argparse\nimport json\nimport os\nimport re\nimport sys\n"
TALK = [{"role": "system", "content": "Write code."}, {"role": "user", "content": "A queue."}]
SCHEMA = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer"}},
    "required": ["name", "size"], "additionalProperties": False,
}  # fmt: skip
GREEDY = {"temperature": 0.0, "max_tokens": 40}
SEEDED = {"temperature": 0.8, "seed": 11, "max_tokens": 40}
# Every kind of request: a name, and the fields of a completion or of a chat.
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": CODE, **GREEDY},
    "seeded": {"prompt": CODE, **SEEDED, "top_p": 0.9},
    "n": {"prompt": CODE, **SEEDED, "n": 3},
    "several prompts": {"prompt": [CODE, "import os\nimport sys\nimport "], **SEEDED},
    "token ids": {"prompt": [300, 301, 302, 303, 300, 301], **GREEDY},
    "stop": {"prompt": CODE, **GREEDY, "stop": ["\n    def", "self.items["]},
    "logprobs": {"prompt": CODE, **GREEDY, "logprobs": 3},
    "penalties": {"prompt": CODE, **SEEDED, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    "logit bias": {"prompt": CODE, **GREEDY, "logit_bias": {"300": 5.0, "12": -100.0}},
    "extra": {"prompt": CODE, **SEEDED, "extra_body": {"top_k": 20, "min_p": 0.02, "min_tokens": 30}},
    "echo": {"prompt": CODE, **GREEDY, "echo": True},
    "echo, logprobs": {"prompt": CODE, **GREEDY, "echo": True, "logprobs": 2},
    "echo, logprobs, several": {
        "prompt": [CODE, [300, 301, 302, 303, 300, 301], "x"], **SEEDED, "echo": True, "logprobs": 1, "n": 2,
    },
    "regex": {"prompt": CODE, **SEEDED, "extra_body": {"structured_outputs": {"regex": "[a-z]{4,8} = [0-9]+"}}},
    "chat": {"messages": TALK, **GREEDY},
    "chat, seeded": {"messages": TALK, **SEEDED, "n": 2},
    "chat, logprobs": {"messages": TALK, **GREEDY, "logprobs": True, "top_logprobs": 2},
    "chat, schema": {
        "messages": TALK, **SEEDED, "max_tokens": 80,
        "response_format": {"type": "json_schema", "json_schema": {"name": "queue", "schema": SCHEMA, "strict": True}},
    },
    "chat, prediction": {"messages": TALK, **GREEDY, "prediction": {"type": "content", "content": "def push(self"}},
}  # fmt: skip
MIXED = ["greedy", "seeded", "n", "stop", "logprobs", "chat", "chat, schema", "token ids"]
# By default asked for with others at once only, or with more beside it.
ELSEWHERE = {*MIXED, "echo", "echo, logprobs"} - {"greedy"}


def create(client: Any, name: str, **more: Any) -> Any:
    """Sends one of `REQUESTS`."""
    fields = {"model": "tinycode", **REQUESTS[name], **more}
    return (client.chat.completions if "messages" in fields else client.completions).create(**fields)


def choices_of(answer: Any) -> list[dict[str, Any]]:
    """What an answer's choices hold, however the request went."""
    return [
        {key: value for key, value in choice.to_dict().items() if key != "index"}
        for choice in sorted(answer.choices, key=lambda each: each.index)
    ]


def streamed(client: Any, name: str) -> tuple[list[dict[str, Any]], Any]:
    """The choices of a stream put together, in the shape of a whole answer's, and its last chunk."""
    made: dict[int, dict[str, Any]] = {}
    last = None
    for chunk in create(client, name, stream=True, stream_options={"include_usage": True}):
        last = chunk
        for choice in chunk.choices:
            parts = choice.to_dict()
            index, told = parts.pop("index"), parts.pop("logprobs", None)
            at = made.setdefault(index, {"logprobs": None})
            if "delta" in parts:
                message = at.setdefault("message", {"role": None, "content": "", "refusal": None})
                message["role"] = parts["delta"].get("role") or message["role"]
                message["content"] += parts.pop("delta").get("content") or ""
            else:
                at["text"] = at.get("text", "") + parts.pop("text")
            at.update(parts)
            if told is not None and at["logprobs"] is None:
                at["logprobs"] = told
            elif told is not None:
                for key, value in told.items():
                    at["logprobs"][key] = at["logprobs"][key] + value if isinstance(value, list) else value
    return [made[index] for index in sorted(made)], last


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow) if each in ELSEWHERE else each for each in REQUESTS]
)
def test_speculation_changes_no_answer(name: str, speculative: LiveServer, plain: LiveServer) -> None:
    answers = [create(server.client(), name) for server in (plain, speculative)]
    expected, got = (choices_of(answer) for answer in answers)
    assert got == expected
    assert answers[0].usage.completion_tokens == answers[1].usage.completion_tokens > 0
    parts, last = streamed(speculative.client(), name)
    assert parts == expected
    assert last.choices == []
    told = [usage.to_dict() for usage in (last.usage, answers[1].usage)]
    cached = [usage.pop("prompt_tokens_details")["cached_tokens"] for usage in told]
    for usage in told:  # it depends on the clock how much of a wrong prediction is worth a try
        usage.get("completion_tokens_details", {}).pop("rejected_prediction_tokens", None)
    assert told[0] == told[1]
    assert cached[0] >= cached[1], "what was asked for before is in the prefix cache"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_tells_the_prompt_tokens_that_the_prefix_cache_had(path: str, speculative: LiveServer) -> None:
    text = {"prompt": CODE, "n": 2} if path == "/v1/completions" else {"messages": TALK}
    body = {"model": "tinycode", **text, "max_tokens": 2, "cache_salt": f"of {path}"}
    usage = [speculative.post(path, body).json()["usage"] for _ in range(2)]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    last = speculative.post(path, {**body, **options}).text.split("data: ")[-2]
    cached = [each["prompt_tokens_details"]["cached_tokens"] for each in (*usage, json.loads(last)["usage"])]
    assert cached == [0, *[usage[0]["prompt_tokens"] - 1] * 2]


def test_several_prompts_tell_what_all_of_them_found_in_the_cache(speculative: LiveServer) -> None:
    body = {"model": "tinycode", "prompt": [CODE, IMPORTS], "max_tokens": 1, "cache_salt": "two prompts"}
    speculative.post("/v1/completions", body)
    usage = speculative.post("/v1/completions", body).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": usage["prompt_tokens"] - 2}
    fresh = speculative.post("/v1/completions", {**body, "cache_salt": "not used yet", "prompt": CODE})
    assert fresh.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize("server", ["plain", "speculative"])
def test_a_prediction_is_drafted_and_counted_whatever_the_drafters(server: str, request: pytest.FixtureRequest) -> None:
    """`usage` said 0 and 0 unless the method `prediction` was chosen at the start."""
    client = request.getfixturevalue(server).client()
    asked: dict[str, Any] = {"model": "tinycode", "messages": TALK, "temperature": 0.0, "max_tokens": 24, "seed": 1}
    first = client.chat.completions.create(**asked)
    predicted = {"type": "content", "content": first.choices[0].message.content}
    second = client.chat.completions.create(**asked, prediction=predicted)
    assert second.choices[0].message.content == first.choices[0].message.content
    counted = [answer.usage.completion_tokens_details for answer in (first, second)]
    assert (counted[0].accepted_prediction_tokens, counted[0].rejected_prediction_tokens) == (0, 0)
    assert 0 < counted[1].accepted_prediction_tokens < second.usage.completion_tokens
    wrong = client.chat.completions.create(**asked, prediction={"type": "content", "content": "0 1 2 3 4 5 6 7 8 9"})
    assert wrong.choices[0].message.content == first.choices[0].message.content
    assert wrong.usage.completion_tokens_details.rejected_prediction_tokens > 0


def test_the_model_says_since_when_it_is_served(plain: LiveServer) -> None:
    begin = plain.client().models.list().data[0].created
    assert 1_600_000_000 < begin <= time.time()
    assert plain.client().models.retrieve("tinycode").created == begin


def test_requests_of_all_kinds_at_once_get_their_own_answers(speculative: LiveServer, plain: LiveServer) -> None:
    alone = {name: choices_of(create(plain.client(), name)) for name in MIXED}
    client = speculative.client()
    with ThreadPoolExecutor(16) as pool:
        whole = {name: pool.submit(create, client, name) for name in MIXED}
        parts = {name: pool.submit(streamed, client, name) for name in MIXED}
    assert {name: choices_of(future.result()) for name, future in whole.items()} == alone
    assert {name: future.result()[0] for name, future in parts.items()} == alone


def test_drafts_were_accepted(speculative: LiveServer) -> None:
    """The comparisons above are worth what was drafted; the request says it wants to know."""
    answer = create(speculative.client(), "greedy", max_tokens=120, extra_body={"spec_decode_metrics": "summary"})
    told = answer.to_dict()["metrics"]["speculative_decoding"]
    assert told["num_accepted_draft_tokens"] > 10
    assert told["mean_acceptance_length"] > 1.2
    assert sum(told["acceptance_histogram"]) * told["mean_acceptance_length"] == pytest.approx(120)


def test_a_schema_is_kept(speculative: LiveServer) -> None:
    made = json.loads(create(speculative.client(), "chat, schema").choices[0].message.content)
    assert set(made) == {"name", "size"}
    assert isinstance(made["size"], int)


def test_every_token_has_one_entry_of_log_probabilities(speculative: LiveServer) -> None:
    answer = create(speculative.client(), "logprobs", extra_body={"return_token_ids": True})
    told, choice = answer.choices[0].logprobs, answer.choices[0].to_dict()
    count = len(choice["token_ids"])
    assert count == answer.usage.completion_tokens
    assert [len(part) for part in (told.tokens, told.token_logprobs, told.top_logprobs, told.text_offset)] == [
        count
    ] * 4
    assert "".join(told.tokens) == choice["text"]
    assert all(choice["text"][at:].startswith(token) for at, token in zip(told.text_offset, told.tokens, strict=True))
    assert all(max(top.values()) <= 0 and len(top) >= 3 for top in told.top_logprobs)
    content = create(speculative.client(), "chat, logprobs").choices[0].logprobs.content
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content), "greedy tokens are the best ones"


def test_a_stop_string_ends_the_text_and_is_named(speculative: LiveServer) -> None:
    whole = create(speculative.client(), "greedy").choices[0].text
    stop = whole[20:25]
    stopped = create(speculative.client(), "greedy", stop=["never there", stop]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (whole[: whole.index(stop)], "stop")
    assert stopped.to_dict()["stop_reason"] == stop


def test_every_chunk_tells_the_tokens_used(speculative: LiveServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    told = [chunk.usage for chunk in create(speculative.client(), "seeded", stream=True, stream_options=options)]
    alone = create(speculative.client(), "seeded").usage
    assert {usage.prompt_tokens for usage in told} == {alone.prompt_tokens}
    counts = [usage.completion_tokens for usage in told]
    assert counts == sorted(counts)
    assert counts[-2:] == [alone.completion_tokens] * 2, "of the last chunk with text, and of that for usage"
    assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in told)


@pytest.mark.parametrize("name", [pytest.param("greedy", marks=pytest.mark.slow), "stop", "chat, seeded", "echo"])
def test_chunks_tell_which_tokens_were_drafted(name: str, speculative: LiveServer) -> None:
    more = {**REQUESTS[name].get("extra_body", {}), "return_token_origins": True}
    texts, told, origins = ["", ""], ["", ""], []
    for chunk in create(speculative.client(), name, stream=True, extra_body=more):
        for choice in chunk.to_dict()["choices"]:
            texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"]["content"]
            if "token_origins" not in choice:
                assert choice["delta"] == {"role": "assistant", "content": ""}
                continue
            told[choice["index"]] += "".join(part["text"] for part in choice["token_origins"])
            origins += choice["token_origins"]
    assert [text.removeprefix(CODE) if name == "echo" else text for text in texts] == told
    assert all(part["text"] and part["drafters"] == ["ngram"] * part["is_drafted"] for part in origins)
    assert {part["is_drafted"] for part in origins} == {False, True}


def test_origins_of_tokens_come_only_where_they_are_asked_for(speculative: LiveServer) -> None:
    for more in ({}, {"return_token_origins": False}):
        for chunk in create(speculative.client(), "greedy", stream=True, extra_body=more):
            assert set(chunk.to_dict()["choices"][0]) == {"index", "text", "logprobs", "finish_reason", "stop_reason"}
    with pytest.raises(openai.BadRequestError, match="return_token_origins"):
        create(speculative.client(), "greedy", stream=True, extra_body={"return_token_origins": 1})


def test_a_request_may_do_without_speculation(speculative: LiveServer) -> None:
    more = {"speculative": {"enabled": False}, "spec_decode_metrics": "summary"}
    answer = create(speculative.client(), "greedy", extra_body=more)
    assert answer.to_dict()["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert choices_of(answer) == choices_of(create(speculative.client(), "greedy"))


def test_leaving_a_stream_ends_the_request(speculative: LiveServer) -> None:
    stream = create(speculative.client(), "greedy", max_tokens=900, stream=True)
    next(iter(stream))
    stream.close()
    speculative.wait_until_idle()
    written = speculative.figure("foretoken:generation_tokens_total")
    assert "foretoken:client_disconnects_total" in speculative.get("/metrics").text
    assert speculative.figure("foretoken:client_disconnects_total") >= 1
    assert speculative.figure("foretoken:generation_tokens_total") == written


def test_cancelling_a_whole_answer_ends_the_request(speculative: LiveServer) -> None:
    async def run() -> None:
        client = openai.AsyncOpenAI(base_url=f"{speculative.url}/v1", api_key="none", max_retries=0)
        task = asyncio.ensure_future(
            client.completions.create(model="tinycode", prompt=CODE, max_tokens=900, temperature=0.0, n=8)
        )
        while not speculative.engine.num_running:
            assert not task.done()
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await client.close()

    before = speculative.figure("foretoken:client_disconnects_total")
    asyncio.run(run())
    speculative.wait_until_idle()
    assert speculative.figure("foretoken:client_disconnects_total") == before + 1
