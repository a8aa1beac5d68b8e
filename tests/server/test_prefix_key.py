"""Keys by which requests with a common beginning find the same engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="needs the extra [ray]")

from foretoken.server.ray_forwarding import prefix_key

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
