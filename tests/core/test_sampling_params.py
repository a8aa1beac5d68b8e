"""Sampling parameters and forms of output: every range and mistake with its sentence, and what is derived from them."""

import json
import math
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from foretoken.core import checks
from foretoken.core.errors import RequestError
from foretoken.core.sampling_params import OTHER_FIELDS, SamplingParams, StructuredOutputsParams

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("temperature", [-0.1, 100.5, NAN, INF], "at least 0 and at most 100."),
        ("top_p", [0.0, -0.5, 1.01, NAN], "above 0 and at most 1."),
        ("min_p", [-0.01, 1.01, NAN], "at least 0 and at most 1."),
        ("repetition_penalty", [0.0, -1.0, 9e-7, 1e-50, 100.5, NAN], "at least 9.536743164e-07 and at most 100."),
        ("presence_penalty", [-100.5, 100.5, NAN, INF], "at least -100 and at most 100."),
        ("frequency_penalty", [-100.5, 100.5, NAN, -INF], "at least -100 and at most 100."),
        ("n", [0, -1, 129], "at least 1 and at most 128."),
        ("top_k", [-2], "at least -1."),
        ("min_tokens", [-1, 2**31], "at least 0 and at most 2147483647."),
        ("max_tokens", [0, -5, 2**40], "at least 1 and at most 2147483647."),
        ("logprobs", [-1, 1025], "at least 0 and at most 1024."),
        ("prompt_logprobs", [-1, 1025], "at least 0 and at most 1024."),
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
        {"repetition_penalty": 1e-6},
        {"repetition_penalty": np.float32(1e-6)},  # which is a little less
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
        {"bad_words": [[1] * 128] * 32},
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
        (
            {"bad_words": ["ab", [1] * 129]},
            "bad_words holds a word of 129 tokens. Expected at most 128. Forbid a part of it.",
        ),
        (
            {"bad_words": [[1, 2]] * 2049},
            "bad_words has more than 4096 tokens. Expected at most that in all words together. Pass fewer, or shorter "
            "ones.",
        ),
        ({"bad_words": [""]}, "bad_words holds an empty word. Expected at least one token each. Leave it out."),
    ],
)
def test_other_sentences(fields: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**fields)
    assert str(error.value) == message


NOT_NUMBERS = [True, "3", b"3", [3], {}, object()]
NOT_INTEGERS = [*NOT_NUMBERS, 1.5, 1.0, INF]


@pytest.mark.parametrize(
    ("names", "values", "expected"),
    [
        (["n", "top_k", "min_tokens", "max_tokens", "seed", "logprobs", "prompt_logprobs"], NOT_INTEGERS, "an integer"),
        (
            ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"],
            [*NOT_NUMBERS, 1j],
            "a number",
        ),
        (["ignore_eos", "include_stop_str_in_output", "skip_special_tokens"], [0, 1, "true", []], "True or False"),
        (["stop_token_ids"], [5, "5", b"5", {5: 5}, 1.5], "a list of token ids"),
        (["stop"], [5, b"a", {"a": 1}, True], "text or a list of texts"),
        (["bad_words"], [5, "word", b"a", {"a": 1}], "a list of texts or of lists of token ids"),
        (["logit_bias"], [5, "5", [5], [(5, 1.0)]], "a mapping from token id to a number"),
    ],
)
def test_every_field_refuses_every_other_type(names: list[str], values: list[object], expected: str) -> None:
    for name in names:
        for value in values:
            with pytest.raises(RequestError, match=f"^{name} is .*Expected {expected}"):
                SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("stop_token_ids", [[True], [1.5], ["3"], [None], [-1], [[3]]]),
        ("stop", [[5], [b"a"], [None], ["\ud800"], "half a character: \udfff"]),
        ("bad_words", [[5], [None], [b"a"], [[True]], [[1.5]], [["a"]], [[-1]], ["\ud83d"], [["a", 5]]]),
        ("logit_bias", [{"3": 1.0}, {True: 1.0}, {1.5: 1.0}, {3: "1"}, {3: True}, {3: None}, {3: INF}]),
    ],
)
def test_what_lists_and_mappings_hold_is_checked_too(name: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(RequestError, match=name) as error:
            SamplingParams(**{name: value})
        str(error.value).encode()  # the message can be printed


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "bad_words"])
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [(-1, "is -1. Expected at least 0"), (True, "is True. Expected an integer"), ("a", "is 'a'. Expected an integer")],
)
def test_every_id_of_a_long_list_is_checked(name: str, wrong: object, sentence: str) -> None:
    for at in (0, 50, 100):
        ids: list[object] = [5] * 101
        ids[at] = wrong
        with pytest.raises(RequestError, match=f"^a token id of {name} {sentence}"):
            SamplingParams(**{name: [ids] if name == "bad_words" else ids})


def test_lists_are_copied_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Item by item, a quarter of a million ids take as long as many passes of a model."""
    given = [5] * 262_144
    monkeypatch.setattr(checks, "check_integer", lambda name, *_: pytest.fail(name))
    monkeypatch.setattr(checks, "as_python", lambda *_: pytest.fail("an item was looked at"))
    params = SamplingParams(allowed_token_ids=given, stop_token_ids=given)
    assert params.allowed_token_ids == given
    assert params.allowed_token_ids is not given
    assert params.stop_token_ids is not given


def test_refused_values_are_shown_shortly() -> None:
    for value in ("x" * 10**6, [1] * 10**6, 10**10_000, object()):
        with pytest.raises(RequestError) as error:
            SamplingParams(temperature=value)
        assert len(str(error.value)) < 200
        assert "\n" not in str(error.value)


def test_none_leaves_a_field_at_its_default() -> None:
    """Clients that fill every field of a request say None for what nobody set. `max_tokens=None` means no limit."""
    names = [field.name for field in fields(SamplingParams) if field.name != "max_tokens"]
    assert SamplingParams(**dict.fromkeys(names)) == SamplingParams()
    assert SamplingParams(max_tokens=None).max_tokens is None
    assert replace(SamplingParams(top_k=5), top_k=None, seed=3) == SamplingParams(seed=3)


def test_a_seed_of_minus_one_is_none() -> None:
    """As in vLLM; other negative numbers are seeds."""
    for seed in (-1, np.int64(-1), None):
        assert SamplingParams(seed=seed).seed is None
        assert replace(SamplingParams(seed=5), seed=seed) == SamplingParams()
    assert SamplingParams(seed=-2).seed == -2
    with pytest.raises(RequestError, match=r"seed is -1\.0"):
        SamplingParams(seed=-1.0)


def test_a_field_that_does_not_exist_is_refused_also_without_a_value() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=None)


# Fields that are one number or boolean, by what they take.
BOOLEANS = ["ignore_eos", "include_stop_str_in_output", "skip_special_tokens"]
INTEGERS = ["n", "top_k", "min_tokens", "max_tokens", "seed", "logprobs", "prompt_logprobs"]
FLOATS = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
OTHERS = ["logit_bias", "bad_words", "stop", "stop_token_ids", "allowed_token_ids"]
NUMPY: dict[type, list[object]] = {
    bool: [np.True_, np.False_, np.ones(2, bool)[0]],
    int: [kind(1) for kind in (np.int8, np.uint8, np.int16, np.int32, np.int64, np.uint64, np.longlong)],
    float: [kind(0.5) for kind in (np.float16, np.float32, np.float64, np.longdouble)],
}


def test_every_field_is_of_one_kind() -> None:
    """So that none is left out below."""
    assert sorted(BOOLEANS + INTEGERS + FLOATS + OTHERS + ["structured_outputs", "output_kind"]) == sorted(
        field.name for field in fields(SamplingParams)
    )


@pytest.mark.parametrize("name", BOOLEANS + INTEGERS + FLOATS)
def test_scalars_of_numpy_are_pythons_own_or_refused(name: str) -> None:
    """Booleans are no numbers and numbers no booleans, and an integer is a number."""
    (own,) = (kind for kind, names in ((bool, BOOLEANS), (int, INTEGERS), (float, FLOATS)) if name in names)
    taken = {bool: (bool,), int: (int,), float: (int, float)}[own]
    for kind, values in NUMPY.items():
        for value in values:
            if kind not in taken:
                with pytest.raises(RequestError, match=rf"^{name} is {value}\. Expected "):
                    SamplingParams(**{name: value})
                continue
            params = SamplingParams(**{name: value})
            assert getattr(params, name) == value
            assert type(getattr(params, name)) is kind
            hash((getattr(params, name), repr(params)))


@pytest.mark.parametrize("name", OTHERS)
def test_scalars_of_numpy_in_lists_and_mappings(name: str) -> None:
    good: dict[str, object] = {
        "logit_bias": {np.int32(3): np.float64(1.0)},
        "bad_words": [[np.int64(3)], np.array([4, 5]), np.str_("word")],
        "stop": [np.str_("end")],
        "stop_token_ids": np.array([4, 5]),
        "allowed_token_ids": np.array([4, 5]),
    }
    plain: dict[str, object] = {
        "logit_bias": {3: 1.0}, "bad_words": [[3], [4, 5], "word"], "stop": ["end"], "stop_token_ids": [4, 5],
        "allowed_token_ids": [4, 5],
    }  # fmt: skip
    assert getattr(SamplingParams(**{name: good[name]}), name) == plain[name]
    bad: dict[str, object] = {
        "logit_bias": {np.True_: 1.0}, "bad_words": [[np.False_]], "stop": [np.True_], "stop_token_ids": [np.True_],
        "allowed_token_ids": [np.True_],
    }  # fmt: skip
    with pytest.raises(RequestError, match=f"{name} is (True|False)"):
        SamplingParams(**{name: bad[name]})


def test_no_allowed_token_is_refused() -> None:
    with pytest.raises(RequestError, match=r"allowed_token_ids is empty\. Expected at least one token id"):
        SamplingParams(allowed_token_ids=[])
    assert not SamplingParams(allowed_token_ids=[3]).is_plain


def test_other_fields_of_vllm_ask_for_nothing_or_are_refused() -> None:
    for name, other in OTHER_FIELDS.items():
        for value in (None, *other.neutral):
            assert SamplingParams(**{name: value, "top_k": 5}) == SamplingParams(top_k=5)
        with pytest.raises(RequestError, match=rf"^{name} = 7 is not supported\. \w.*\.$"):
            SamplingParams(**{name: 7})
    with pytest.raises(RequestError, match="best_of = True is not supported"):
        SamplingParams(best_of=True)


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


def test_numbers_of_other_libraries_become_pythons_own() -> None:
    """Whatever is accepted can be put into a tensor: a numpy number in logit_bias could not."""
    given = {
        "n": np.int8(2),
        "temperature": Fraction(1, 2),
        "top_p": np.float32(0.5),
        "max_tokens": np.int32(2**31 - 1),
        "logit_bias": {np.int64(3): np.float32(2.5), 4: Fraction(1, 4)},
        "bad_words": [np.array([1, 2]), torch.tensor([3]), "th", (np.int64(4),)],
        "stop_token_ids": torch.tensor([5, 6]),
    }
    params = SamplingParams(**given)
    assert params == SamplingParams(
        n=2, temperature=0.5, top_p=0.5, max_tokens=2**31 - 1, logit_bias={3: 2.5, 4: 0.25},
        bad_words=[[1, 2], [3], "th", (4,)], stop_token_ids=[5, 6],
    )  # fmt: skip
    numbers = (params.n, params.temperature, params.top_p, params.max_tokens, *params.logit_bias)
    numbers += (*params.logit_bias.values(), *params.bad_words[3], *params.stop_token_ids)
    assert {type(number) for number in numbers} == {int, float}


def test_the_callers_lists_are_copied() -> None:
    stop, bias, words = ["a"], {3: 1.0}, [[1, 2]]
    params = SamplingParams(stop=stop, logit_bias=bias, bad_words=words)
    stop.append(""), bias.update({-1: 0.0}), words[0].clear()
    assert params == SamplingParams(stop=["a"], logit_bias={3: 1.0}, bad_words=[[1, 2]])


@pytest.mark.parametrize("name", ["bad_words", "stop", "stop_token_ids"])
def test_arrays_without_dimensions_are_no_lists(name: str) -> None:
    for value in (np.array(3), torch.tensor(3), Fraction(10**400)):
        with pytest.raises(RequestError, match=f"{name} is"):
            SamplingParams(**{name: value})
    with pytest.raises(RequestError, match="temperature is"):
        SamplingParams(temperature=Fraction(10**400))
    with pytest.raises(RequestError, match="a token id of logit_bias is of type Tensor"):
        SamplingParams(logit_bias={torch.tensor([3]): 1.0})


def test_integers_that_cannot_be_printed_are_refused() -> None:
    for large in (2**1001, 10**5000):
        for given in (
            {"seed": large}, {"seed": -large}, {"top_k": large}, {"logit_bias": {large: 1.0}},
            {"stop_token_ids": [large]}, {"bad_words": [[large]]}, {"allowed_token_ids": [large]},
        ):  # fmt: skip
            with pytest.raises(RequestError, match="an integer of"):
                SamplingParams(**given)  # type: ignore[arg-type]


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
