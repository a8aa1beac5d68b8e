"""docs/dropins.md names every argument and field of the installed transformers, and says what the code does."""

from __future__ import annotations

import inspect
import runpy
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, GenerationMixin

from foretoken.hf.generate_fields import ARGUMENTS, FIELDS, set_argument, set_field

ROOT = Path(__file__).parents[1]
# A value that asks for something, for fields whose type matters.
VALUES: dict[str, Any] = {"num_beams": 4, "num_beam_groups": 2, "guidance_scale": 2.0}


def test_page_is_up_to_date() -> None:
    written = (ROOT / "docs" / "dropins.md").read_text(encoding="utf-8")
    page = runpy.run_path(str(ROOT / ".ci" / "make_dropins.py"))["page"]()
    assert written == page, "docs/dropins.md is stale. Run `python .ci/make_dropins.py` and commit the result."


def test_every_field_and_argument_of_the_installed_transformers_is_listed() -> None:
    known = set(GenerationConfig().to_dict())
    assert len(known) > 50
    assert not known - FIELDS.keys()
    signature = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    assert len(signature) > 8
    assert not signature - ARGUMENTS.keys()


def config(**values: Any) -> GenerationConfig:
    """A configuration whose values nobody checks."""
    made = GenerationConfig()
    for name, value in {**made._get_default_generation_params(), **values}.items():
        setattr(made, name, value)
    return made


def test_defaults_ask_for_nothing() -> None:
    assert set_field(config()) is None
    assert set_argument(dict.fromkeys(ARGUMENTS)) is None


@pytest.mark.parametrize("name", [name for name, each in FIELDS.items() if each.how == "by transformers"])
def test_fields_that_are_left_to_transformers_are_noticed(name: str) -> None:
    assert set_field(config(**{name: VALUES.get(name, 3)})) == name
    for value in FIELDS[name].neutral:
        assert set_field(config(**{name: value})) is None


def test_fields_that_work_or_do_nothing_are_not() -> None:
    values = {name: 3 for name, each in FIELDS.items() if each.how != "by transformers"}
    assert set_field(config(**values)) is None


def test_fields_of_later_releases_are_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GenerationConfig, "to_dict", lambda self: {"from_the_future": None, "top_k": None})
    assert set_field(config(from_the_future=1)) == "from_the_future"
    assert set_field(config()) is None
    assert set_argument({"inputs": 1, "from_the_future": 1}) == "from_the_future"
