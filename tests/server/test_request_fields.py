"""Fields of requests that are read in more than one form."""

from __future__ import annotations

from typing import Any

import pytest

from foretoken.server.request_fields import UnknownFields, completion_request


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
