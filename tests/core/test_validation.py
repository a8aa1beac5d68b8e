from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, model_validator

from foretoken.core.checks import validated
from foretoken.core.errors import ConfigError, ModelError


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
