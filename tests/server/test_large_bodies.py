"""Large bodies are read, and answers made, in threads, with the same answers and errors, while others are served."""

import asyncio
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import pytest
from held_calls import HeldCalls
from server.live_server import LiveServer

from foretoken.engine.sequence import Sequence
from foretoken.server import answers, app, live_request, request_fields
from foretoken.server.live_request import in_pool, in_thread, is_large

LONGEST_S = 60
LARGE = " " * (app._LARGE_BODY + 1)
MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "def main():", "max_tokens": 4, "temperature": 0.0}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, "temperature": 0.0}),
    "response": ("/v1/responses", {"input": "Hi", "max_output_tokens": 16, "temperature": 0.0}),
    "tokens": ("/tokenize", {"prompt": "def main():"}),
    "tokens of a chat": ("/tokenize", {"messages": MESSAGES}),
    "text": ("/detokenize", {"tokens": [5, 6]}),
    "no prompt": ("/v1/completions", {"max_tokens": 4}),
    "no messages": ("/v1/chat/completions", {"max_tokens": 4}),
    "no input": ("/v1/responses", {"max_output_tokens": 4}),
    "no range": ("/v1/completions", {"prompt": "a", "temperature": -1}),
    "another model": ("/v1/completions", {"prompt": "a", "model": "other"}),
    "no ids": ("/detokenize", {"tokens": "a"}),
}
CHANGING = {"id", "created", "created_at", "metrics"}


def told(answer: Any) -> tuple[int, Any]:
    """Status and body of an answer, without what differs between two of the same request."""

    def same(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: same(item) for key, item in value.items() if key not in CHANGING}
        return [same(item) for item in value] if isinstance(value, list) else value

    return answer.status_code, same(answer.json())


@pytest.mark.parametrize("name", BODIES)
def test_answers_and_errors_are_the_same(name: str, speculative: LiveServer) -> None:
    path, body = BODIES[name]
    small, large = (speculative.post(path, content=json.dumps(body).encode() + end) for end in (b"", LARGE.encode()))
    assert told(large) == told(small)


@pytest.mark.parametrize("content", ["{", "[]", '{"a": NaN}'])
def test_bodies_that_are_no_objects(content: str, speculative: LiveServer) -> None:
    small, large = (speculative.post("/v1/completions", content=text) for text in (content, LARGE + content))
    assert (large.status_code, small.status_code) == (400, 400)
    assert (
        large.json()["error"]["message"].split(" at line")[0] == small.json()["error"]["message"].split(" at line")[0]
    )


@pytest.mark.parametrize(("module", "step"), [(app, "parse_object"), (request_fields, "completion_request")])
def test_others_are_served_while_a_large_body_is_read(
    module: Any, step: str, speculative: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading it ends only after /health was answered."""
    held = HeldCalls(monkeypatch, module, step)
    path, body = BODIES["completion"]
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(speculative.post, path, content=json.dumps(body).encode() + LARGE.encode())
        with held:
            assert speculative.get("/health").status_code == 200
            assert not reading.done()
        assert reading.result().status_code == 200


def test_small_requests_wait_for_no_large_one(speculative: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many large bodies are read, threads are left for others."""
    held = HeldCalls(monkeypatch, app, "parse_object", lambda body: len(body) > len(LARGE))
    path, body = BODIES["completion"]
    large, count = json.dumps(body).encode() + LARGE.encode(), min(32, (os.cpu_count() or 1) + 4) + 1
    with ThreadPoolExecutor(count) as pool:
        reading = [pool.submit(speculative.post, path, content=large) for _ in range(count)]
        with held:
            assert speculative.post(path, body).status_code == 200
            assert not any(each.done() for each in reading)
        assert {each.result().status_code for each in reading} == {200}


@pytest.mark.parametrize(
    ("maker", "step", "name", "is_streamed"),
    [
        (answers.Envelope, "whole", "completion", False), (answers.Envelope, "last", "chat", True),
        (live_request, "dumped_in_pieces", "response", True),
    ],
)  # fmt: skip
def test_others_are_served_while_an_answer_is_made(
    maker: Any, step: str, name: str, is_streamed: bool, speculative: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldCalls(monkeypatch, maker, step)
    path, body = BODIES[name]
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(speculative.post, path, {**body, "stream": is_streamed})
        with held:
            assert speculative.get("/health").status_code == 200
        assert asking.result().status_code == 200


def test_log_probabilities_of_a_prompt_are_made_once(speculative: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, int] = {"told": 0, "scores": 0}

    def counted(name: str, call: Any) -> Any:
        def count(*given: Any) -> Any:
            made[name] += 1
            return call(*given)

        return count

    monkeypatch.setattr(answers, "_by_id", counted("told", answers._by_id))
    monkeypatch.setattr(Sequence, "_logprobs", counted("scores", Sequence._logprobs))
    body = {"prompt": [5, 6, 7, 8, 9], "n": 3, "max_tokens": 2, "ignore_eos": True, "prompt_logprobs": 2, "logprobs": 1}
    choices = speculative.post("/v1/completions", body).json()["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [5, 5, 5]
    assert [choice["prompt_logprobs"] for choice in choices] == [choices[0]["prompt_logprobs"]] * 3
    assert made == {"told": 4, "scores": 4 + 3 * 2}


def test_a_forked_child_has_threads_of_its_own() -> None:
    async def answered() -> int:
        is_large.set(True)
        return await asyncio.wait_for(in_thread(int), 30)

    assert asyncio.run(answered()) == 0  # the parent's threads have begun
    child = os.fork()
    if not child:
        os._exit(asyncio.run(answered()))
    assert os.waitpid(child, 0)[1] == 0


def test_values_context_and_errors_come_through() -> None:
    name = ContextVar("name", default="none")

    async def asked() -> list[object]:
        name.set("one")
        return [await in_thread(divmod, 7, 2), await in_thread(sorted, [1, 2], reverse=True), await in_thread(name.get)]

    assert asyncio.run(asked()) == [(3, 1), [2, 1], "one"]
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_thread(divmod, 1, 0))


@pytest.mark.parametrize("has_pool", [False, True])
def test_a_stop_of_an_iterator_ends_the_wait(has_pool: bool) -> None:
    async def asked() -> None:
        with ThreadPoolExecutor(1) as own:
            await asyncio.wait_for(in_pool(own if has_pool else None, lambda: next(iter(()))), LONGEST_S)

    with pytest.raises(RuntimeError, match="StopIteration out of a call in a thread"):
        asyncio.run(asked())
