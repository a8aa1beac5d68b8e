"""Finds drafters' files: tells a model from a head, and looks for drafters beside the target."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from foretoken.core.errors import ConfigError, ForetokenError

_DRAFT_MODEL = "draft_model"
_NAME_OF_HEAD = re.compile(r"[\w+-]+")


class Found(NamedTuple):
    """The content of a directory or file of weights.

    Attributes:
        method: The method that drafts with it: "draft_model" for a whole model, a head's method, or None if unknown.
        name: A description with an article, such as "a hass head".
        target: The name of the target that a head was trained for, if the head states it.
    """

    method: str | None
    name: str
    target: str | None = None

    @property
    def is_model(self) -> bool:
        """Whether the files are a whole model."""
        return self.method == _DRAFT_MODEL


def what_lies_at(place: str | Path) -> Found | None:
    """Returns the kind of model or head at a path; None if there is neither.

    Args:
        place: A directory, or a file of weights.
    """
    from foretoken.formats.describe import native_facts
    from foretoken.formats.registry import holds_head, method_of
    from foretoken.hf.model_files import check_model_files

    path = Path(place)
    if not exists(path):
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
    """Describes a head in another format; the method is None if it is not supported."""
    try:
        method = method_of(path)
    except ForetokenError:
        return Found(None, "a draft head")
    return Found(method, _head_of(method))


def _head_of(method: str) -> str:
    """Returns a method's head in words."""
    return f"{'an' if method[0] in 'aeiou' else 'a'} {method} head"


def exists(name: str | os.PathLike[str]) -> bool:
    """Whether a file or directory exists; False for invalid paths, such as too long names."""
    return os.path.exists(name)  # noqa: PTH110 - pathlib raises for such names


def beside(target: str | None, name: str) -> Path | None:
    """Returns the directory `TARGET-NAME`; None if it does not exist.

    Args:
        target: The target's directory; None for a target in memory.
        name: The name of a method or a head; for `draft_model` the directory is `TARGET-draft`.
    """
    place = f"{_stem(target)}-{'draft' if name == _DRAFT_MODEL else name}"
    return Path(place) if target is not None and exists(place) and Path(place).is_dir() else None


def head_beside(target: str | None, name: str) -> Path | None:
    """Returns the directory `TARGET-NAME`, such as `TARGET-hass`; None if it holds no head."""
    from foretoken.formats.registry import holds_head

    place = beside(target, name) if _NAME_OF_HEAD.fullmatch(name) else None
    return place if place is not None and holds_head(place) else None


def names_beside(target: str | None) -> list[str]:
    """Returns every NAME of a directory `TARGET-NAME`, sorted."""
    if target is None or not exists(target):
        return []
    stem = Path(_stem(target))
    names = (path.name.removeprefix(f"{stem.name}-") for path in stem.parent.glob("*-*") if path.is_dir())
    return sorted(name for name in names if beside(target, name) is not None)


def _stem(target: str | None) -> str:
    """Returns a target's path without a final slash; makes paths that end with `.` or `..` absolute."""
    path = os.path.normpath(target or "")
    return os.path.abspath(path) if path.endswith(".") else path  # noqa: PTH100 - links are not followed


def spelled(found: Found, place: str | Path) -> str:
    """Returns the drafter with these files, as text for `-s`."""
    return f"{found.method or 'METHOD'}:model={place}"


def check_is_no_head(place: str) -> None:
    """Raises `ConfigError` for a head in the place of a target."""
    found = what_lies_at(place)
    if found is None or found.is_model:
        return
    target = f" ('{found.target}')" if found.target else ""
    raise ConfigError(
        f"'{place}' is {found.name}, not a model. Expected the model that it was trained "
        f"for{target} as MODEL, and the head as -s {spelled(found, place)}."
    )


def check_is_no_model(place: str | Path) -> None:
    """Raises `ConfigError` for a whole model in the place of a head."""
    found = what_lies_at(place)
    if found is not None and found.is_model:
        raise ConfigError(
            f"'{place}' is a model and holds no draft head. Expected a directory or file of weights with a head. A "
            f"model drafts by itself: foretoken bench MODEL -s {spelled(found, place)}."
        )


def check_model_of(method: str, model: str | None, target: str | None) -> None:
    """Checks that a drafter's weights exist and fit its method.

    Args:
        method: The drafter's method.
        model: The directory or file of its weights; None if none were named or found beside the target.
        target: The target's directory; None for a target in memory.

    Raises:
        ConfigError: When the weights are missing, or are a model instead of a head, a head instead of a model, or the
            head of another method.
    """
    from foretoken.heads.methods import head_methods

    is_head = method in head_methods()
    if not is_head and method != _DRAFT_MODEL:
        return
    if model is None:
        if target is not None:
            check_is_no_head(target)
        where = "of a target in memory no directory is known"
        if target is not None:
            where = f"there is no '{_stem(target)}-{method if is_head else 'draft'}'"
        raise ConfigError(
            f"{method} needs {'a trained head' if is_head else 'a draft model'}, and {where}. Write "
            f"{method}:model=PLACE, a directory or a hub id."
        )
    found = what_lies_at(model)
    if found is not None and found.method not in (None, method):
        expected = _head_of(method) if is_head else "a model"
        raise ConfigError(
            f"'{model}' is {found.name}, and method '{method}' needs {expected}. Write {spelled(found, model)}."
        )
