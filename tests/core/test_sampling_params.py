"""Sampling parameters: every range with its sentence, and what is derived from them."""

import math

import pytest

from foretoken.core.errors import ForetokenError, RequestError
from foretoken.core.sampling_params import SamplingParams

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("temperature", [-0.1, 100.5, NAN, INF], "at least 0 and at most 100."),
        ("top_p", [0.0, -0.5, 1.01, NAN], "above 0 and at most 1."),
        ("min_p", [-0.01, 1.01, NAN], "at least 0 and at most 1."),
        ("repetition_penalty", [0.0, -1.0, 100.5, NAN], "above 0 and at most 100."),
        ("presence_penalty", [-100.5, 100.5, NAN, INF], "at least -100 and at most 100."),
        ("frequency_penalty", [-100.5, 100.5, NAN, -INF], "at least -100 and at most 100."),
        ("n", [0, -1, 129], "at least 1 and at most 128."),
        ("top_k", [-2], "at least -1."),
        ("min_tokens", [-1], "at least 0."),
        ("max_tokens", [0, -5], "at least 1."),
        ("logprobs", [-1, 1025], "at least 0 and at most 1024."),
    ],
)
def test_ranges(name: str, values: list[float], expected: str) -> None:
    for value in values:
        with pytest.raises(RequestError) as error:
            SamplingParams(**{name: value})
        assert str(error.value) == f"{name} is {value}. Expected {expected}"


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"temperature": 100.0},
        {"top_p": 1.0},
        {"top_p": 1e-9},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"repetition_penalty": 0.01},
        {"presence_penalty": -100.0, "frequency_penalty": 100.0},
        {"n": 128},
        {"top_k": -1},
        {"top_k": 10**9},
        {"max_tokens": None, "min_tokens": 1000},
        {"max_tokens": 5, "min_tokens": 5},
        {"logprobs": 0},
        {"logit_bias": {0: -100.0, 5: 100.0}},
        {"stop": "end"},
        {"bad_words": ["word", [1, 2]]},
        {"seed": -(2**70)},
    ],
)
def test_ends_of_the_ranges_are_allowed(fields: dict[str, object]) -> None:
    params = SamplingParams(**fields)
    assert all(getattr(params, name) == value for name, value in fields.items())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_tokens": 17}, "min_tokens 17 is above max_tokens 16. Expected at most as many."),
        ({"logit_bias": {3: 101.0}}, "logit_bias[3] is 101.0. Expected at least -100 and at most 100."),
        ({"logit_bias": {3: NAN}}, "logit_bias[3] is nan. Expected at least -100 and at most 100."),
        ({"logit_bias": {-1: 1.0}}, "a token id of logit_bias is -1. Expected at least 0."),
        ({"stop": ""}, "stop holds an empty string. Expected non-empty strings. Leave it out."),
        ({"stop": ["a", ""]}, "stop holds an empty string. Expected non-empty strings. Leave it out."),
        ({"bad_words": [[1], []]}, "bad_words holds an empty word. Expected at least one token each. Leave it out."),
        ({"bad_words": [""]}, "bad_words holds an empty word. Expected at least one token each. Leave it out."),
    ],
)
def test_other_sentences(fields: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**fields)
    assert str(error.value) == message


def test_errors_are_the_projects() -> None:
    assert issubclass(RequestError, ForetokenError)


def test_stop_strings() -> None:
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


@pytest.mark.parametrize(("temperature", "is_greedy"), [(0.0, True), (9e-6, True), (1e-5, False), (1.0, False)])
def test_greedy_limit(temperature: float, is_greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is is_greedy


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_are_noticed(name: str) -> None:
    assert not SamplingParams().has_penalties
    assert SamplingParams(**{name: 0.5}).has_penalties
