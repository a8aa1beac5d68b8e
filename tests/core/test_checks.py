"""Values in messages, text that cannot be encoded, booleans of other libraries, and mappings with pydantic models."""

from __future__ import annotations

from collections import OrderedDict
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, model_validator

from foretoken.core.checks import check_boolean, check_text, lone_surrogate, shown, validated
from foretoken.core.errors import ConfigError, ModelError, RequestError


class Hostile:
    """An object that must not be asked for its text."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True"),
        (7, "7"),
        (0.5, "0.5"),
        (float("nan"), "nan"),
        (Fraction(1, 3), "1/3"),
        (np.float32(0.5), "0.5"),
        ("a\nb", r"'a\nb'"),
        ("half \ud83d", r"'half \ud83d'"),
        (b"x", "b'x'"),
        ("x" * 200, "'" + "x" * 59 + "… (str)"),
        (10**400, "an integer of 1329 bits"),
        ([], "[]"),
        ((0, 1), "[0, 1]"),
        ({"widths": [3, 2]}, "{'widths': [3, 2]}"),
        ([[0], ["a", None]], "[[0], ['a', None]]"),
        ([[[[1]]]], "[[[of type list]]]"),
        (list(range(9)), "[0, 1, 2, 3, 4, 5, 6, 7, …]"),
        (["x" * 50, "y" * 50, "z"], f"['{'x' * 50}', '{'y' * 50}', …]"),
        ({(1, 2): 3}, "{of type tuple: 3}"),
        ([Hostile()], "[of type Hostile]"),
        (np.zeros(3), "of type ndarray"),
        (torch.zeros(3), "of type Tensor"),
        (OrderedDict(a=1), "of type OrderedDict"),
        ({5}, "of type set"),
    ],
)
def test_shown(value: Any, text: str) -> None:
    assert shown(value) == text


anything = st.recursive(
    st.none()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary()
    | st.builds(pow, st.just(10), st.just(999)),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner),
    max_leaves=60,
)


@given(value=anything)
def test_shown_is_short_and_can_be_printed(value: Any) -> None:
    text = shown(value)
    assert len(text) < 400
    assert text.isprintable()
    text.encode()


def test_a_container_that_holds_itself_is_shown() -> None:
    value: list[Any] = []
    value.append(value)
    assert shown(value) == "[[[of type list]]]"


@given(text=st.text(st.characters(codec=None)))
def test_lone_surrogates(text: str) -> None:
    at = lone_surrogate(text)
    if at is None:
        text.encode()
        check_text("it", text)
    else:
        text[:at].encode()
        assert "\ud800" <= text[at] <= "\udfff"
        with pytest.raises(RequestError, match=f"it holds a lone surrogate, .*, at character {at}. Expected") as error:
            check_text("it", text)
        str(error.value).encode()


@pytest.mark.parametrize("value", [True, False, np.True_, np.False_, np.array([True])[0]])
def test_booleans(value: Any) -> None:
    check_boolean("it", value)


@pytest.mark.parametrize("value", [0, 1, np.int8(1), np.float32(1), np.array(True), torch.tensor(True), "True", None])
def test_what_is_no_boolean(value: Any) -> None:
    with pytest.raises(RequestError, match=r"^it is .*\. Expected True or False\.$"):
        check_boolean("it", value)


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")

    width: int = Field(default=1, ge=1)
    kind: Literal["a", "b"]


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    size: int = Field(ge=1, le=8)
    many: int | list[int] | None = None
    inner: Inner | None = None
    pair: tuple[float, float] = (0, 1)

    @model_validator(mode="after")
    def _check(self) -> Outer:
        if self.size == 7:
            raise ValueError("size must not be 7")
        return self


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"size": 0}, "'size' of a thing is 0. Input should be greater than or equal to 1."),
        ({}, "'size' of a thing is missing. Expected a value."),
        ({3: 1}, "a thing has a key 3. Expected names."),
        ({"sixe": 2, None: 1, ("a",): 1}, "a thing has a key None. Expected names."),
        ({"size": 7}, "a thing: size must not be 7."),
        ({"size": 1, "sixe": 2}, r"a thing has no key 'sixe'. Did you mean 'size'\? Known: inner, many, pair, size."),
        (
            {"size": 1, "many": "x"},
            r"'many' of a thing is 'x'. Input should be a valid integer, .*; or: Input .* list.",
        ),
        ({"size": 1, "many": [1, "x"]}, "'many' of a thing is .1, 'x'.. Input should be a valid integer"),
        ({"size": 1, "inner": {"kind": "a", "width": 0}}, "'inner.width' of a thing is 0. Input should be greater"),
        ({"size": 1, "inner": {"kind": "c"}}, "'inner.kind' of a thing is 'c'. Input should be 'a' or 'b'."),
        ({"size": 1, "inner": {}}, "'inner.kind' of a thing is missing. Expected a value."),
        ({"size": 1, "pair": [1]}, "'pair.1' of a thing is missing. Expected a value."),
        ({"size": 1, "pair": [1, "x"]}, "'pair.1' of a thing is 'x'. Input should be a valid number"),
        (7, "a thing is 7. Expected keys and values."),
        (None, "a thing is None. Expected keys and values."),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named_in_one_sentence(values: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        validated(Outer, values, "a thing")
    with pytest.raises(ModelError, match=r" Write it again\.$"):
        validated(Outer, values, "a thing", error=ModelError, advice="Write it again.")


def test_other_keys_are_suggested_and_still_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"has no key 'sixe'. Did you mean 'sixes'\? Known: inner, many, pair, sixes,"
    ):
        validated(Outer, {"size": 1, "sixe": 2}, "a thing", other_keys=["sixes"])


def test_values_that_fit() -> None:
    assert validated(Outer, {"size": 3, "inner": {"kind": "b"}}, "a thing").inner == Inner(kind="b")
