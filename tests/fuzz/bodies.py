"""HTTP bodies: good ones, ones with any value in any field, and damaged bytes, many at once, some given up on the way.

Nothing is answered with a server error, good ones get the answer of plain decoding alone, and afterwards no request is
left in the engine.
"""

import asyncio
import json
import random
from typing import Any, NamedTuple

import httpx
from tiny_models import CONTEXT_LEN, VOCAB_SIZE

from foretoken import AsyncLLM, SamplingParams
from foretoken.core.checks import as_python
from foretoken.server.app import ServerConfig, make_app
from fuzz import engines, values
from fuzz.engines import shown
from fuzz.worker import Case, FindingError

_TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}{% for m in messages %}{{ m.role }} "
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}\n{% endfor %}"
    "{# </think> #}"
)
_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_PATHS = {
    "/v1/completions": "prompt", "/v1/chat/completions": "messages", "/v1/responses": "input", "/tokenize": "prompt",
    "/detokenize": "tokens",
}  # fmt: skip
_FIELDS = (
    *values.FIELDS, "prompt", "messages", "tokens", "model", "stream", "stream_options", "echo", "suffix", "best_of",
    "user", "response_format", "structured_outputs", "cache_salt", "speculative", "prediction", "top_logprobs", "tools",
    "tool_choice", "parallel_tool_calls", "max_completion_tokens", "chat_template", "chat_template_kwargs",
    "add_generation_prompt", "continue_final_message", "add_special_tokens", "return_token_ids", "spec_decode_metrics",
    "input", "instructions", "max_output_tokens", "text", "include", "metadata", "previous_response_id",
    "unheard_of", "",
    "guided_choice", "grammar", "json_schema", "regex", "n_predict", "mirostat", "lora_path", "options", "thinking",
)  # fmt: skip
_ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**30, 0.5, -1.5, 1e308, "", "x", "1", "\x00", "é" * 300,
    "a\nb", [], {}, {"format": {"type": "json_object"}}, ["message.output_text.logprobs"],
    [None], [[]], [[[1]]], ["a", 1], {"a": 1}, {"": {}}, {"type": "json_object"},
    {"type": "json_object", "schema": {"type": "array"}}, {"type": "json_object", "schema": 5},
    {"type": "json_schema"}, {"regex": "[a-z]{1,4}"}, {"regex": "("}, {"choice": ["a", "b"]}, {"enabled": False},
    {"max_nodes": 3},
    {"type": "content", "content": "abc"}, {"role": "user", "content": "a"}, [{"role": "user", "content": []}],
    [{"role": "user", "content": "abc"}], "none", "auto", "required", "summary", VOCAB_SIZE, [VOCAB_SIZE], [-1],
    ["a"] * 99,
    [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"enum": [1, 2]}}}}}],
    [{"type": "function", "name": "f"}], {"type": "function", "function": {"name": "f"}},
    {"type": "function", "name": "f"},
    [{"role": "assistant", "tool_calls": [_CALL]}, {"role": "tool", "tool_call_id": "a", "content": "x"}],
    [{"type": "function_call", **_CALL["function"], "call_id": "a"}, {"type": "reasoning", "content": [{"text": "x"}]},
     {"type": "function_call_output", "call_id": "a", "output": "x"}],
]  # fmt: skip


class Post(NamedTuple):
    """One request.

    Attributes:
        path: Where it goes.
        content: Its body.
        ids: Of the prompt, where the request is fine and its answer known; None else.
        params: Likewise.
    """

    path: str
    content: bytes
    ids: list[int] | None = None
    params: SamplingParams | None = None


def run(case: Case) -> None:
    """One server with thirty to sixty requests, up to eight at a time."""
    setup = engines.drawn_setup(case.rng, engines.Target.of(case.settings))._replace(rule="auto", control=None)
    posts = [_post(case.rng, setup.context_len) for _ in range(case.rng.randint(30, 60))]
    case.size = len(posts)
    case.note(f"{setup}: " + "; ".join(f"{post.path} {shown(post.content, 300)}" for post in posts))
    known = [
        [*post.ids, *_alone(setup, post).outputs[0].token_ids]
        for post in posts
        if post.ids is not None and post.params is not None
    ]
    llm, _ = engines.engine_with(setup, known)
    asyncio.run(_serve(case, AsyncLLM(llm), posts, setup))
    engines.check_idle(llm, setup)


def _alone(setup: engines.Setup, post: Post) -> Any:
    """What plain decoding answers."""
    return engines.alone(setup.target, setup.context_len, post.ids, post.params)


async def _serve(case: Case, engine: AsyncLLM, posts: list[Post], setup: engines.Setup) -> None:
    """Sends all requests, and gives one in ten up on the way."""
    app: Any = make_app(engine, ServerConfig(names=["tiny"], chat_template=_TEMPLATE))
    busy = asyncio.Semaphore(8)

    async def send(client: httpx.AsyncClient, post: Post, patience: float | None) -> None:
        async with busy:
            try:
                async with asyncio.timeout(patience):
                    answer = await client.post(post.path, content=post.content)
            except TimeoutError:
                case.count("given up")
                return
        _check(case, post, answer, setup)

    transport = httpx.ASGITransport(app=app)
    async with engine, httpx.AsyncClient(transport=transport, base_url="http://tiny", timeout=None) as client:
        patience = [case.rng.choice([None] * 9 + [0.0, 0.003, 0.03]) for _ in posts]
        await asyncio.gather(*(send(client, *each) for each in zip(posts, patience, strict=True)))
        async with asyncio.timeout(case.settings.limit_s / 2):
            while engine.num_running or engine.num_waiting:
                await asyncio.sleep(0.001)


def _check(case: Case, post: Post, answer: httpx.Response, setup: engines.Setup) -> None:
    """Raises `FindingError` where an answer is not what it should be."""
    what = f"{post.path} {shown(post.content)}: {answer.status_code} {answer.text[:500]}"
    case.count(f"status {answer.status_code}")
    if answer.status_code != 200:
        _check_error(post, answer, setup, what)
        return
    if post.ids is None or post.params is None:
        return
    if _is_too_long(post, setup):
        raise FindingError(f"there is no room for that: {what}")
    want = [list(each.token_ids) for each in _alone(setup, post).outputs]
    if answer.headers["content-type"].startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        if lines[-1] != "[DONE]":
            raise FindingError(f"a stream without an end: {what}")
        got: list[list[int]] = [[] for _ in want]
        for chunk in map(json.loads, lines[:-1]):
            for choice in chunk.get("choices", []):
                got[choice["index"]] += choice.get("token_ids", [])
        case.count("streams compared")
    else:
        got = [choice["token_ids"] for choice in answer.json()["choices"]]
        case.count("answers compared")
    if got != want and "no_token_possible" not in answer.text:
        raise FindingError(f"{got} instead of {want}: {what}")


def _check_error(post: Post, answer: httpx.Response, setup: engines.Setup, what: str) -> None:
    """Raises `FindingError` where an error is not one, or should have been an answer."""
    if answer.status_code >= 500:
        raise FindingError(f"a server error: {what}")
    error = answer.json()["error"]
    if set(error) != {"message", "type", "param", "code"} or not 0 < len(error["message"]) < 1000:
        raise FindingError(f"not OpenAI's shape: {what}")
    if post.ids is None or post.params is None or error["code"] == "no_token_possible":
        return
    if error["code"] != "context_length_exceeded" or not _is_too_long(post, setup):
        raise FindingError(f"a valid request was refused: {what}")


def _is_too_long(post: Post, setup: engines.Setup) -> bool:
    """Whether a fine request asks for more tokens than the context holds."""
    wanted = post.params.max_tokens if post.params is not None and post.params.max_tokens is not None else 0
    return len(post.ids or ()) + wanted > (setup.context_len or CONTEXT_LEN)


def _post(rng: random.Random, context_len: int | None) -> Post:
    """A request: one in two is fine, the others have one to three odd fields, or damaged bytes."""
    kind = rng.random()
    if kind < 0.5:
        return _fine(rng, context_len)
    path = rng.choice(list(_PATHS))
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body: dict[str, Any] = {"model": "tiny", limit: 4, _PATHS[path]: rng.choice([[3, 4, 5], "abc"])}
    if path == "/v1/chat/completions":
        body["messages"] = [{"role": "user", "content": values.text(rng, 1, 9)}]
    for name in rng.sample(_FIELDS, rng.randint(1, 3)):
        body[name] = rng.choice(_ODD)
    if isinstance(body.get(limit), int) and rng.random() < 0.9:
        body[limit] = min(body[limit], CONTEXT_LEN)
    content = bytearray(json.dumps(_replaced(rng, body) if rng.random() < 0.3 else body).encode())
    if kind > 0.8:
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(content))
            content[at : at + rng.randrange(3)] = rng.choice(
                [b"", b"{", b'"', b"\xff", b"[" * 99, b"NaN", b"\x00", b"1e999"]
            )
            content = content or bytearray(b" ")
    return Post(path, bytes(content))


def _replaced(rng: random.Random, value: Any) -> Any:
    """A body with one part of it, however deep, replaced by an odd value."""
    if not value or not isinstance(value, dict | list) or rng.random() < 0.2:
        return rng.choice(_ODD)
    made, key = value.copy(), rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    made[key] = _replaced(rng, value[key])
    return made


def _fine(rng: random.Random, context_len: int | None) -> Post:
    """A completion whose answer is known: greedy or seeded, of token ids, in JSON's types."""
    ids = values.tokens(rng, 1, min(context_len or CONTEXT_LEN, 20) - 1)
    drawn = values.sampling_fields(rng)
    drawn.pop("structured_outputs", None)  # `requests` has these
    fields = {name: _plain(value) for name, value in drawn.items()}
    fields = {name: value for name, value in fields.items() if value is not None}
    fields.setdefault("max_tokens", 8)
    if fields.get("temperature") != 0.0:
        fields["seed"] = rng.randrange(100)
    for name in ("logprobs", "prompt_logprobs"):
        if name in fields:
            fields[name] = min(fields[name], 20)
    params = SamplingParams(**{**fields, "logit_bias": {int(k): v for k, v in fields.get("logit_bias", {}).items()}})
    more = {"stream": True} if rng.random() < 0.4 and "prompt_logprobs" not in fields else {}
    body = {"model": "tiny", "prompt": ids, "return_token_ids": True, **fields, **more}
    return Post("/v1/completions", json.dumps(body).encode(), ids, params)


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, dict):
        return {str(key): float(each) for key, each in value.items()}
    made = as_python(value)
    return float(made) if hasattr(made, "numerator") and not isinstance(made, int) else made
