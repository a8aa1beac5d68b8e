"""What a form of output may be asked for with: one sentence for each mistake, before anything is compiled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from foretoken import SamplingParams, StructuredOutputsParams
from foretoken.core.errors import RequestError


def nested(depth: int) -> dict[str, Any]:
    """A schema of so many objects in each other."""
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({}, "none of its fields"),
        ({"json_object": False}, "none of its fields"),
        ({"regex": "a", "choice": ["a"]}, "regex and choice. Expected exactly one of"),
        ({"regexp": "a"}, "Did you mean 'regex'?"),
        ({7: "a"}, "no field 7"),
        ("a*", "Expected StructuredOutputsParams or a mapping"),
        ({"regex": 3}, "regex is 3. Expected text"),
        ({"regex": ""}, "regex has 0 characters"),
        ({"regex": "a" * 2049}, "Expected 1 to 2048"),
        ({"grammar": "a" * 65537}, "Expected 1 to 65536"),
        ({"regex": "\ud800"}, "lone surrogate"),
        ({"choice": []}, "choice has 0 texts"),
        ({"choice": "yes"}, "Expected a list of texts"),
        ({"choice": ["yes", 1]}, "a text of choice is 1"),
        ({"choice": ["yes", ""]}, "empty text"),
        ({"choice": ["a"] * 2001}, "Expected 1 to 2000"),
        ({"choice": ["a" * 40000, "b" * 40000]}, "more than 65536 characters"),
        ({"json": "{"}, "json is no JSON"),
        ({"json": "[" * 60000}, "json is no JSON"),
        ({"json": "[]"}, "Expected a JSON schema: an object"),
        ({"json": 5}, "json is 5"),
        ({"json": {"const": {1, 2}}}, "cannot be written as JSON"),
        ({"json": {"const": float("nan")}}, "cannot be written as JSON"),
        ({"json": {"enum": list(range(2001))}}, "a list of 2001 values"),
        ({"json": nested(33)}, "more than 32 objects"),
        ({"json": {"description": "a" * 65536}}, "Expected 1 to 65536"),
        ({"json_object": 1}, "json_object is 1. Expected True or False"),
        ({"json_object": True, "disable_any_whitespace": "no"}, "disable_any_whitespace is 'no'"),
        ({"regex": "a", "reasoning": "</think>"}, "reasoning is '</think>'. Expected two texts"),
        ({"regex": "a", "reasoning": ["<think>"]}, "Expected two texts, the second not empty"),
        ({"regex": "a", "reasoning": ["<think>", ""]}, "Expected two texts, the second not empty"),
        ({"regex": "a", "reasoning": ["", 5]}, "a text of reasoning is 5"),
        ({"regex": "a", "reasoning": ["", "a" * 65]}, "reasoning has a text of 65 characters. Expected at most 64."),
    ],
)
def test_mistakes_get_one_sentence(given: Any, part: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(structured_outputs=given)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_mappings_and_text_mean_the_same() -> None:
    schema = nested(32)
    params = SamplingParams(structured_outputs={"json": schema, "regex": None})
    assert params.structured_outputs == StructuredOutputsParams(json=schema)
    assert json.loads(StructuredOutputsParams(json=json.dumps(schema)).schema) == schema
    assert SamplingParams(structured_outputs=None).structured_outputs is None


@pytest.mark.parametrize(
    "given", [{"json": {}}, {"json": "{}"}, {"regex": "a"}, {"choice": ["a"]}, {"grammar": "a"}, {"json_object": True}]
)
def test_kind_is_the_field_that_is_given(given: dict[str, Any]) -> None:
    """Also where its value is empty: any JSON matches an empty schema."""
    assert StructuredOutputsParams(**{"json_object": False, **given}).kind == next(iter(given))


def test_requests_with_a_form_are_not_plain() -> None:
    """What chooses tokens inside the decoder, by temperature alone, must not serve them."""
    assert SamplingParams().is_plain
    assert not SamplingParams(structured_outputs={"choice": ["a"]}).is_plain
