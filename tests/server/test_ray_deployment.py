"""Ray Serve without a cluster: keys of prompts, an application's answer as messages, and figures of several servers."""

import asyncio
import json
import pickle
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from foretoken.server.ray_deployment import answer_messages, merged_pages, portable_scope, prefix_key

SYSTEM = {"role": "system", "content": "Write code. " * 10}
FIRST, ANSWER, NEXT = ({"role": role, "content": role * 9} for role in ("user", "assistant", "user"))


def key(body: Any, length: int = 64) -> str | None:
    return prefix_key(json.dumps(body).encode(), length)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"prompt": "x" * 64 + "a"}, {"prompt": "x" * 64 + "b", "temperature": 0}),
        ({"prompt": ["x", "y"]}, {"prompt": "x"}),
        ({"prompt": [*range(64), 1]}, {"prompt": [[*range(64), 2]]}),
        ({"messages": [FIRST]}, {"messages": [FIRST, ANSWER, NEXT]}),
        ({"messages": [SYSTEM, FIRST]}, {"messages": [SYSTEM, {"role": "user", "content": "another"}]}),
        ({"input": "x" * 65}, {"input": "x" * 66}),
    ],
)
def test_requests_with_a_common_beginning_have_one_key(one: Any, other: Any) -> None:
    assert key(one) == key(other) != None  # noqa: E711 - both have one


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"prompt": "x" * 63 + "a"}, {"prompt": "x" * 63 + "b"}),
        ({"prompt": "x"}, {"prompt": "x", "cache_salt": "mine"}),
        ({"messages": [FIRST]}, {"messages": [{"role": "user", "content": "another"}]}),
        ({"input": "x", "instructions": "a"}, {"input": "x", "instructions": "b"}),
    ],
)
def test_others_have_their_own(one: Any, other: Any) -> None:
    assert key(one) != key(other)


@pytest.mark.parametrize(
    "body", [b"", b"no json", b"[1]", b"[" * 100_000, b'{"prompt": 7}', b'{"messages": []}', b"{}"]
)
def test_what_has_no_prompt_has_no_key(body: bytes) -> None:
    assert prefix_key(body, 64) is None


@pytest.mark.parametrize("body", [{"prompt": "\ud800"}, {"messages": [{"role": "user"}]}, {"prompt": [[[1.5]]]}])
def test_no_prompt_is_too_odd_for_a_key(body: Any) -> None:
    assert key(body)


SCOPE = {"type": "http", "method": "POST", "path": "/echo", "query_string": b"", "headers": [(b"x-name", b"a")]}


def test_an_answer_comes_in_its_messages() -> None:
    async def echo(request: Request) -> PlainTextResponse:
        return PlainTextResponse(request.headers["x-name"].encode() + await request.body())

    async def run() -> list[Any]:
        app = Starlette(routes=[Route("/echo", echo, methods=["POST"])])
        scope = portable_scope({**SCOPE, "app": object(), "state": {}})
        assert pickle.loads(pickle.dumps(scope)) == SCOPE
        return [message async for message in answer_messages(app, scope, b"bc")]

    start, body = asyncio.run(run())
    assert (start["status"], body["body"]) == (200, b"abc")


def test_closing_tells_the_application() -> None:
    ended: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        ended.append((await receive())["type"])

    async def run() -> None:
        messages = answer_messages(app, dict(SCOPE), b"")
        assert (await anext(messages))["status"] == 200
        await messages.aclose()

    asyncio.run(run())
    assert ended == ["http.disconnect"]


def test_what_the_application_raises_comes_through() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("broken")

    async def run() -> None:
        _ = [message async for message in answer_messages(app, dict(SCOPE), b"")]

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(run())


def page(engine: str, count: int, reason: str) -> str:
    registry = CollectorRegistry()
    Counter("requests", "How many.", ["engine", "reason"], registry=registry).labels(engine, reason).inc(count)
    Histogram("seconds", "How long.", ["engine"], registry=registry).labels(engine).observe(count)
    return generate_latest(registry).decode()


def test_every_family_stands_once_with_the_samples_of_all() -> None:
    merged = merged_pages([page("a", 2, "stop"), page("b", 3, "length")])
    families = {family.name: family for family in text_string_to_metric_families(merged)}
    assert merged.count("# TYPE requests_total ") == merged.count("# TYPE seconds ") == 1
    told = {sample.labels["engine"]: sample.value for sample in families["requests"].samples if "total" in sample.name}
    assert told == {"a": 2, "b": 3}
    sums = {each.labels["engine"]: each.value for each in families["seconds"].samples if each.name == "seconds_sum"}
    assert sums == {"a": 2, "b": 3}
    assert merged_pages([]) == ""
