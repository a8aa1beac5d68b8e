"""Tells what a path on a command line holds (a model, a head, or neither) and what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from foretoken.core.errors import ConfigError, ForetokenError

if TYPE_CHECKING:
    from collections.abc import Mapping

_DRAFT_MODEL = "draft_model"


class Found(NamedTuple):
    """What a directory or file holds.

    Attributes:
        method: That drafts with it: "draft_model" for a whole model, a head's method, or None where it is not known.
        name: In words, with an article.
        target: That a head was trained for, where it says so.
    """

    method: str | None
    name: str
    target: str | None = None

    @property
    def is_model(self) -> bool:
        """Whether it is a whole model."""
        return self.method == _DRAFT_MODEL


def what_lies_at(place: str | Path) -> Found | None:
    """Looks at a model or a head; None where there is nothing of the kind.

    Args:
        place: A directory, or a file of weights.
    """
    from foretoken.formats.describe import native_facts
    from foretoken.formats.registry import holds_head, method_of
    from foretoken.hf.model_files import check_model_files

    path = Path(place)
    if not path.exists():
        return None
    try:
        facts = native_facts(path)
        if facts is not None:
            target = facts.get("target") or {}
            return Found(facts["method"], _head_of(facts["method"]), target.get("name"))
        if holds_head(path):
            return _foreign(path, method_of)
        check_model_files(str(path), may_be_hub_id=False)
    except ForetokenError:
        return None
    return Found(_DRAFT_MODEL, "a model")


def _foreign(path: Path, method_of: Any) -> Found:
    """A head of another format; one that is not served has no method."""
    try:
        method = method_of(path)
    except ForetokenError:
        return Found(None, "a draft head")
    return Found(method, _head_of(method))


def _head_of(method: str) -> str:
    """A head of a method in words."""
    return f"{'an' if method[0] in 'aeiou' else 'a'} {method} head"


def spelled(found: Found, place: str | Path) -> str:
    """What to write after `-s` to draft with it."""
    return f"-s {found.method or 'METHOD'}:model={place}"


def check_is_no_head(place: str) -> None:
    """Raises `ConfigError` where a head is given for a target."""
    found = what_lies_at(place)
    if found is None or found.is_model:
        return
    target = f" ('{found.target}')" if found.target else ""
    raise ConfigError(
        f"'{place}' is {found.name}, not a model. Expected the model that it was trained "
        f"for{target} as MODEL, and the head as {spelled(found, place)}."
    )


def check_is_no_model(place: str | Path) -> None:
    """Raises `ConfigError` where a whole model is given for a head."""
    found = what_lies_at(place)
    if found is not None and found.is_model:
        raise ConfigError(
            f"'{place}' is a model and holds no draft head. Expected a directory or file of weights with a head. A "
            f"model drafts by itself: foretoken bench MODEL {spelled(found, place)}."
        )


def check_place_of_method(method: str, text: str) -> None:
    """Raises `ConfigError` where a path was written for a method's name; text: all that was written."""
    found = what_lies_at(method)
    if found is not None:
        raise ConfigError(
            f"'{method}' is {found.name}, and -s takes a method before it. Write {spelled(found, method)} instead of "
            f"-s {text}."
        )


def check_model_of(config: Mapping[str, Any], target: str | None) -> None:
    """Holds the drafter's weights that a configuration names against its method.

    Args:
        config: With a method.
        target: The target's directory, beside which a drafter without a `model` is looked for.

    Raises:
        ConfigError: When there is a model where a head is needed, the other way round, another head, or none.
    """
    from foretoken.heads.methods import head_methods

    method, model = config["method"], config.get("model")
    is_head = method in head_methods()
    if not is_head and method != _DRAFT_MODEL:
        return
    if model is None:
        beside = f"{target}-{method if is_head else 'draft'}"
        if target is not None and not Path(beside).is_dir():
            check_is_no_head(target)
            raise ConfigError(
                f"-s {method} needs {'a trained head' if is_head else 'a draft model'}, and there is no '{beside}'. "
                f"Write -s {method}:model=PLACE, a directory or a hub id."
            )
        return
    found = what_lies_at(model) if isinstance(model, str) else None
    if found is not None and found.method not in (None, method):
        expected = _head_of(method) if is_head else "a model"
        raise ConfigError(
            f"'{model}' is {found.name}, and method '{method}' needs {expected}. Write {spelled(found, model)}."
        )
