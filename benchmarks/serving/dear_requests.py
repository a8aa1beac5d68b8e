"""The dearest requests that one client can send: every path, every field that multiplies work, and odd connections."""

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

_MOST_BYTES = 8_000_000
_IDS = [5, 60, 700, 5000]  # of the bundled model's vocabulary
_COMPLETIONS, _CHAT, _RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"


class DearRequest(NamedTuple):
    """A request, and what is dear about it."""

    name: str
    path: str
    content: bytes  # the body; without a `path` all bytes that a connection sends
    copies: int = 1  # sent at the same time


def dear_requests(context_len: int) -> Iterator[DearRequest]:
    """Each of them, made when it is asked for; context_len: most tokens of a sequence of the model."""
    for name, (path, make) in _REQUESTS.items():
        body = make(context_len)
        yield DearRequest(
            name, path, body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode(),
            _COPIES.get(name, 1),
        )  # fmt: skip


def _text(unit: str) -> str:
    return unit * ((_MOST_BYTES - 1000) // len(unit.encode()))


def _list(item: str) -> bytes:
    """A prompt, or anything else, of as many values as a body has room for."""
    count = (_MOST_BYTES - 1000) // (len(item) + 1)
    return b'{"max_tokens": 1, "prompt": [' + ",".join([item] * count).encode() + b"]}"


def _prompt(length: int, **more: Any) -> dict[str, Any]:
    return {"prompt": (_IDS * length)[:length], "temperature": 0, **more}


def _tools(num_bytes: int) -> list[dict[str, Any]]:
    parameters = {f"p{i}": {"type": "string", "description": "text"} for i in range(num_bytes // 100 // 54)}
    schema = {"type": "object", "properties": parameters}
    return [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(100)]


def _user(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def _calls(count: int) -> list[dict[str, Any]]:
    """A conversation with so many calls of functions."""
    function = {"name": "find", "arguments": '{"x": [1, 2, 3], "text": "' + "x" * 1000 + '"}'}
    calls = [{"id": f"call_{i}", "type": "function", "function": function} for i in range(count)]
    return [*_user("Hi"), {"role": "assistant", "content": None, "tool_calls": calls}]


def _wire(body: bytes, after: bytes = b"") -> bytes:
    """What a connection sends for a body that is chunked already."""
    begin = b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"
    return begin + body + b"0\r\n" + after + b"\r\n"


def _long(most: int, **more: Any) -> dict[str, Any]:
    """Completions of 900 tokens, or of as many as there is room for."""
    return {"max_tokens": min(900, most - 100), "temperature": 0, "ignore_eos": True, **more}


def _form(**form: Any) -> dict[str, Any]:
    """A completion whose form is bound."""
    return {"prompt": "def main():", "max_tokens": 32, "temperature": 0.8, "structured_outputs": form}


_SCHEMA = {"type": "object", "properties": {f"property_{i}": {"type": "string"} for i in range(1500)}}
_EVERYTHING = {
    "n": 128, "max_tokens": 16, "ignore_eos": True, "temperature": 1.0, "top_p": 0.9, "top_k": 50, "min_p": 0.01,
    "presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.1,
    "logit_bias": {str(i): 1 for i in range(4096)}, "bad_words": [[i, i + 1] for i in range(256)],
    "allowed_token_ids": list(range(6000)), "stop": ["x" * (1000 + i) for i in range(64)],
}  # fmt: skip
_REQUESTS: dict[str, tuple[str, Callable[[int], Any]]] = {
    "/tokenize of one letter": ("/tokenize", lambda _: {"prompt": _text("x")}),
    "/tokenize of code": ("/tokenize", lambda _: {"prompt": _text("def a_b(x): return 1\n")}),
    "/tokenize of a conversation": ("/tokenize", lambda _: {"messages": _user(_text("é"))}),
    "/detokenize": ("/detokenize", lambda _: _list("5").replace(b"prompt", b"tokens")),
    "a prompt of one letter": (_COMPLETIONS, lambda _: {"prompt": _text("x"), "max_tokens": 1}),
    "a prompt of token ids": (_COMPLETIONS, lambda _: _list("5")),
    "a prompt of empty lists": (_COMPLETIONS, lambda _: _list("[]")),
    "a prompt of empty objects": (_COMPLETIONS, lambda _: _list("{}")),
    "a prediction": (_COMPLETIONS, lambda _: _prompt(8, max_tokens=1, prediction=_text("x "))),
    "logprobs of a prompt, n = 128": (
        _COMPLETIONS, lambda most: _prompt(most - 100, n=128, prompt_logprobs=20, max_tokens=1),
    ),
    "echo with logprobs, n = 128": (
        _COMPLETIONS, lambda most: _prompt(most - 100, n=128, echo=True, logprobs=20, max_tokens=1),
    ),
    "echo of 128 prompts with logprobs, streamed": (
        _COMPLETIONS,
        lambda most: {
            "prompt": [[5, i, *_IDS * (most // 5)] for i in range(128)], "echo": True, "logprobs": 20, "max_tokens": 1,
            "stream": True,
        },
    ),
    "logprobs of 128 completions": (
        _COMPLETIONS, lambda most: _prompt(8, n=128, logprobs=20, max_tokens=most // 4, ignore_eos=True),
    ),
    "most logprobs that are served": (
        _COMPLETIONS, lambda most: _prompt(most - 100, n=12, echo=True, logprobs=20, max_tokens=1),
    ),
    "every field of sampling, n = 128": (_COMPLETIONS, lambda _: {"prompt": "def main():", **_EVERYTHING}),
    "64 stop strings of 120 kB": (
        _COMPLETIONS, lambda _: {"prompt": "x", "max_tokens": 64, "stop": [f"{i}" + "x" * 120_000 for i in range(64)]},
    ),
    "bad words": (
        _COMPLETIONS,
        lambda _: {"prompt": "x", "max_tokens": 8, "bad_words": [f"{i}" + "x" * 30_000 for i in range(256)]},
    ),
    "allowed_token_ids": (_COMPLETIONS, lambda _: _list("5").replace(b"prompt", b"allowed_token_ids")),
    "logit_bias": (_COMPLETIONS, lambda _: {"prompt": "x", "logit_bias": {str(i): 1 for i in range(600_000)}}),
    "unknown fields": (
        _COMPLETIONS, lambda _: {"prompt": "x", "max_tokens": 1, **{f"f{i}": 1 for i in range(250_000)}},
    ),
    "choice of 2,000 texts": (_COMPLETIONS, lambda _: _form(choice=[f"choice number {i}" for i in range(2000)])),
    "schema of 1,500 properties": (_COMPLETIONS, lambda _: _form(json=_SCHEMA)),
    "regex that repeats": (_COMPLETIONS, lambda _: _form(regex="((a{1,200}b){1,200}c){1,50}")),
    "grammar": (_COMPLETIONS, lambda _: _form(grammar="start: " + " | ".join(f'"{i}" start' for i in range(4000)))),
    "schema of 8 MB": (_COMPLETIONS, lambda _: _form(json={"enum": [f"value {i}" for i in range(400_000)]})),
    "tools": (_CHAT, lambda _: {"messages": _user("Hi"), "tools": _tools(_MOST_BYTES), "max_tokens": 1}),
    "4,096 messages": (_CHAT, lambda _: {"messages": _user("x" * 1900) * 4096, "max_tokens": 1}),
    "parts of a message": (
        _CHAT, lambda _: {"messages": _user([{"type": "text", "text": ""}] * 250_000), "max_tokens": 1},
    ),
    "tool calls in messages": (
        _CHAT,
        lambda _: {
            "messages": [{"role": "assistant", "content": "", "tool_calls": _tools(_MOST_BYTES)}], "max_tokens": 1,
        },
    ),
    "a response told back": (_RESPONSES, lambda _: {"input": "x", "text": {"more": _text("x")}, "stream": True}),
    "input of a response": (_RESPONSES, lambda _: {"input": [{"role": "user", "content": ""}] * 200_000}),
    "a chat of 4 MiB": (_CHAT, lambda _: {"messages": _user("def a_b(x): return 1\n" * 199_728), "max_tokens": 1}),
    "a chat of 8 MB, one letter": (_CHAT, lambda _: {"messages": _user(_text("x")), "max_tokens": 1}),
    "/tokenize of a chat of code": ("/tokenize", lambda _: {"messages": _user(_text("def a_b(x): return 1\n"))}),
    "a response to 8 MB": (_RESPONSES, lambda _: {"input": _text("def a_b(x): return 1\n")}),
    "4,000 tool calls": (_CHAT, lambda _: {"messages": _calls(4000), "max_tokens": 1}),
    "128 tools of 500 kB": (
        _CHAT, lambda _: {"messages": _user("Hi"), "tools": [*_tools(400_000)], "max_tokens": 1},
    ),
    "a template that does not end": (_CHAT, lambda _: {"messages": _user("forever"), "max_tokens": 1}),
    "a template that fills the memory": (_CHAT, lambda _: {"messages": _user("memory"), "max_tokens": 1}),
    "9 prompts of 900 tokens": (_COMPLETIONS, lambda most: _long(most, prompt=["def area(self):"] * 9)),
    "128 prompts of 300 tokens": (
        _COMPLETIONS, lambda most: _long(most, prompt=["def area(self):"] * 128) | {"max_tokens": 300},
    ),
    "8 requests of 900 tokens": (_COMPLETIONS, lambda most: _long(most, prompt="def area(self):")),
    "24 requests of 8 prompts": (
        _COMPLETIONS, lambda most: _long(most, prompt=[f"def area{i}(self):" for i in range(8)]) | {"max_tokens": 100},
    ),
    "8 MiB in chunks of one byte": ("", lambda _: _wire(b"1\r\nx\r\n" * (8 << 20))),
    "chunks with extensions": ("", lambda _: _wire((b"1;" + b"e" * 1000 + b"\r\nx\r\n") * 8000)),
    "trailers of 8 MB": ("", lambda _: _wire(b"1\r\nx\r\n", b"a: b\r\n" * 1_300_000)),
    "headers of 300 kB": ("", lambda _: b"GET / HTTP/1.1\r\nHost: here\r\nX: " + b"a" * 300_000 + b"\r\n\r\n"),
    "20,000 requests before an answer": ("", lambda _: b"GET /version HTTP/1.1\r\nHost: here\r\n\r\n" * 20_000),
}  # fmt: skip
_COPIES = {"8 requests of 900 tokens": 8, "24 requests of 8 prompts": 24, "a template that does not end": 3}
