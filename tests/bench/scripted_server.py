"""A server with OpenAI's API whose tokens, pauses and errors are known beforehand."""

import asyncio
import json
import time
from typing import Any

NUM_INPUT = 7
COUNTERS = (
    'vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}.0\n'
    'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {drafted}.0\n'
    'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}.0\n'
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {accepted}.0\n'
)


class ScriptedServer:
    """An ASGI application: a prompt is `TOKENS PAUSE`, or `STATUS !`, `cut !` or `broken !` for an answer that fails.

    Attributes:
        bodies: Of requests, in the order in which they came.
        key: That every request has to bring, if any.
        has_usage: Whether streams end with the tokens used.
        has_counters: Whether /metrics shows counters: of each answer 4 drafts of 8 tokens, 6 of them accepted.
        most_at_once: Most requests that were under way at one time.
    """

    def __init__(self, *, key: str | None = None, has_usage: bool = True, has_counters: bool = True) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.key, self.has_usage, self.has_counters = key, has_usage, has_counters
        self.most_at_once = self._running = 0
        self._num_answered = 10  # of earlier clients

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        if self.key is not None and dict(scope["headers"]).get(b"authorization") != f"Bearer {self.key}".encode():
            return await whole(send, 401, {"error": {"message": "no key"}})
        if scope["path"] == "/v1/models":
            return await whole(send, 200, {"data": [{"id": "scripted"}]})
        if scope["path"] == "/metrics":
            if not self.has_counters:
                return await whole(send, 404, {})
            n = self._num_answered
            return await whole(send, 200, COUNTERS.format(drafts=4 * n, drafted=32 * n, accepted=6 * n))
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.bodies.append(json.loads(body))
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        try:
            return await self._answer(self.bodies[-1], send, is_chat="chat" in scope["path"])
        finally:
            self._running -= 1

    async def _answer(self, body: dict[str, Any], send: Any, *, is_chat: bool) -> None:
        what, pause = (body["messages"][0]["content"] if is_chat else body["prompt"]).split()
        if what.isdigit() and pause == "!":
            await whole(send, int(what), {"error": {"message": f"refused with {what}"}})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        count = int(what) if what.isdigit() else 1
        if is_chat:
            await event(send, {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for number in range(count):
            await paused(float(pause) if pause != "!" else 0)
            last = "length" if number == count - 1 and what.isdigit() else None
            part = {"delta": {"content": " word"}} if is_chat else {"text": " word"}
            await event(send, {"choices": [{**part, "finish_reason": last}]})
        if what == "broken":
            await event(send, {"error": {"message": "the engine broke"}})
        if what.isdigit():
            self._num_answered += 1
            if self.has_usage:  # two tokens in every part
                usage = {"prompt_tokens": NUM_INPUT, "completion_tokens": 2 * count}
                await event(send, {"choices": [], "usage": usage})
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def paused(seconds: float) -> None:
    """Waits no less than that: timers of an event loop may go off up to a millisecond early."""
    end = time.perf_counter() + seconds
    await asyncio.sleep(seconds)
    while time.perf_counter() < end:
        await asyncio.sleep(0)


async def whole(send: Any, status: int, body: Any) -> None:
    """Sends an answer at once."""
    data = body if isinstance(body, str) else json.dumps(body)
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": data.encode()})


async def event(send: Any, body: Any) -> None:
    """Sends a part of a stream."""
    await send({"type": "http.response.body", "body": f"data: {json.dumps(body)}\n\n".encode(), "more_body": True})
