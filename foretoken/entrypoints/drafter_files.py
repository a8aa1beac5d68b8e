"""Finds drafters' files, and makes drafters, the package's own or a caller's."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from foretoken.core.backend import restored_torch_state
from foretoken.core.checks import check_integer, check_text, shown
from foretoken.core.errors import ConfigError, ForetokenError, described, foreign_errors_as
from foretoken.core.token_tree import MAX_NODES
from foretoken.drafters.base import Drafter, TargetHandle, TargetReads
from foretoken.drafting.draft_guard import UntrustedDrafter

if TYPE_CHECKING:
    import torch


DRAFT_MODEL = "draft_model"
_NAME_OF_HEAD = re.compile(r"[\w+-]+")


class FoundWeights(NamedTuple):
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
        return self.method == DRAFT_MODEL


def what_lies_at(path: str | Path) -> FoundWeights | None:
    """Returns the kind of model or head in a directory or file of weights; None if there is neither."""
    from foretoken.formats.describe import native_facts
    from foretoken.formats.registry import holds_head
    from foretoken.models.config import check_model_files
    from foretoken.models.names import is_gguf

    if not exists(path):
        return None
    path = Path(path)
    if is_gguf(path) and path.is_file():
        return FoundWeights(DRAFT_MODEL, "a model")
    try:
        facts = native_facts(path)
        if facts is not None:
            target = facts.get("target") or {}
            return FoundWeights(facts["method"], _head_of(facts["method"]), target.get("name"))
        if holds_head(path):
            return _foreign_head(path)
        check_model_files(str(path), may_be_hub_id=False)
    except ForetokenError:
        return None
    return FoundWeights(DRAFT_MODEL, "a model")


def _foreign_head(path: Path) -> FoundWeights:
    from foretoken.formats.registry import method_of

    try:
        method = method_of(path)
    except ForetokenError:
        return FoundWeights(None, "a draft head")
    return FoundWeights(method, _head_of(method))


def _head_of(method: str) -> str:
    return f"{'an' if method[0] in 'aeiou' else 'a'} {method} head"


def exists(name: str | os.PathLike[str]) -> bool:
    """Whether a file or directory exists; False for invalid paths, such as too long names."""
    return os.path.exists(name)  # noqa: PTH110 - pathlib raises for such names


def beside(target: str | None, name: str) -> Path | None:
    """Returns the directory `TARGET-NAME`, for a draft model `TARGET-draft`; None if it does not exist."""
    path = f"{_stem(target)}-{'draft' if name == DRAFT_MODEL else name}"
    return Path(path) if target is not None and exists(path) and Path(path).is_dir() else None


def head_beside(target: str | None, name: str) -> Path | None:
    """Returns the directory `TARGET-NAME`, such as `TARGET-hass`; None if it holds no head."""
    from foretoken.formats.registry import holds_head

    path = beside(target, name) if _NAME_OF_HEAD.fullmatch(name) else None
    return path if path is not None and holds_head(path) else None


def names_beside(target: str | None) -> list[str]:
    """Returns every NAME of a directory `TARGET-NAME`, sorted."""
    if target is None or not exists(target):
        return []
    stem = Path(_stem(target))
    names = (path.name.removeprefix(f"{stem.name}-") for path in stem.parent.glob("*-*") if path.is_dir())
    return sorted(name for name in names if beside(target, name) is not None)


def _stem(target: str | None) -> str:
    path = os.path.normpath(target or "")
    return os.path.abspath(path) if path.endswith(".") else path  # noqa: PTH100 - links are not followed


def spelled(found: FoundWeights, path: str | Path) -> str:
    """Returns the drafter with these files, as text for `-s`."""
    return f"{found.method or 'METHOD'}:model={path}"


def check_is_no_head(path: str) -> None:
    """Raises `ConfigError` for a head where a target is expected."""
    found = what_lies_at(path)
    if found is None or found.is_model:
        return
    target = f" ('{found.target}')" if found.target else ""
    raise ConfigError(
        f"'{path}' is {found.name}, not a model. Expected the model that it was trained "
        f"for{target} as MODEL, and the head as -s {spelled(found, path)}."
    )


def check_is_no_model(path: str | Path) -> None:
    """Raises `ConfigError` for a whole model where a head is expected."""
    found = what_lies_at(path)
    if found is not None and found.is_model:
        raise ConfigError(
            f"'{path}' is a model and holds no draft head. Expected a directory or file of weights with a head. A "
            f"model drafts by itself: foretoken bench MODEL -s {spelled(found, path)}."
        )


def check_model_of(method: str, model: str | None, target: str | None) -> None:
    """Checks that a drafter's weights exist and fit its method; raises `ConfigError` otherwise.

    `model` is None if no weights were named or found beside the target, `target` is None for a target in memory.
    """
    from foretoken.formats.registry import MODELS_OWN, holds_own_head
    from foretoken.heads import head_methods

    is_head = method in head_methods()
    if not is_head and method != DRAFT_MODEL:
        return
    if model is None:
        if target is not None:
            check_is_no_head(target)
        where = "No directory is known for a target in memory"
        if target is not None:
            own = "The target's files hold none, and there" if method == MODELS_OWN else "There"
            where = f"{own} is no '{_stem(target)}-{method if is_head else 'draft'}'"
        raise ConfigError(
            f"{method} needs {'a trained head' if is_head else 'a draft model'}. {where}. Write {method}:model=PLACE, "
            "a directory or a hub id."
        )
    found = what_lies_at(model)
    if found is not None and found.method not in (None, method) and not holds_own_head(Path(model), method):
        expected = _head_of(method) if is_head else "a model"
        raise ConfigError(
            f"'{model}' is {found.name}, and method '{method}' needs {expected}. Write {spelled(found, model)}."
        )


_METHODS = ("attach", "begin", "propose", "commit", "release")
_ATTRIBUTES = ("name", "reads", "nodes_by_depth", *_METHODS)
_LONGEST_NAME = 100  # characters
_DEEPEST = 512
_MOST_IDS = 1024  # token ids that a drafter may read at a node
_MISSING = object()


def make_drafter(create: Callable[[], Any], *, maker: str, is_trusted: bool, device: torch.device) -> Drafter:
    """Makes a drafter and checks that it has all parts of `Drafter`; `maker` names `create` in messages.

    A trusted drafter gets the engine's own values and is not checked later, see `UntrustedDrafter`. Raises
    `ConfigError` when `create` raises another error than `ForetokenError`, or its result is no drafter.
    """
    if is_trusted:
        drafter: Drafter = create()
        _checked(drafter, {name: getattr(drafter, name, _MISSING) for name in _ATTRIBUTES}, maker)
        return drafter
    with _explained(maker, "make a drafter"):
        with restored_torch_state():
            made = create()
            parts = {name: getattr(made, name, _MISSING) for name in _ATTRIBUTES}
        name, reads, nodes = _checked(made, parts, maker)
        return UntrustedDrafter(made, name=name, reads=reads, nodes_by_depth=nodes, device=device)


def attach_drafter(drafter: Drafter, target: TargetHandle) -> None:
    """Attaches a drafter of `make_drafter`; raises `ConfigError` if it raises, or has larger trees than before."""
    widest = drafter.nodes_by_depth[-1]
    if not isinstance(drafter, UntrustedDrafter):
        drafter.attach(target)
    else:
        with _explained(f"attach of drafter '{drafter.name}'", "prepare for the target"):
            drafter.attach(target)
    if drafter.nodes_by_depth[-1] > widest:
        raise ConfigError(
            f"drafter '{drafter.name}' has nodes_by_depth[-1] = {drafter.nodes_by_depth[-1]} after attach. Expected at "
            f"most {widest}, its value before attach, for which the KV cache has room."
        )


def _explained(what: str, expected: str) -> AbstractContextManager[None]:
    return foreign_errors_as(
        ConfigError,
        lambda err: f"{what} raised {described(err)}. Expected it to {expected}.",
        passing=(ForetokenError,),
    )


def _checked(drafter: object, parts: dict[str, Any], maker: str) -> tuple[str, TargetReads, list[int]]:
    missing = [name for name in _ATTRIBUTES if parts[name] is _MISSING]
    if missing:
        raise ConfigError(
            f"{maker} made {shown(drafter)} without {', '.join(missing)}. Expected a drafter: an object with "
            f"{', '.join(_ATTRIBUTES)}, see foretoken.drafters.base.Drafter."
        )
    owner = f"the drafter of {maker}"
    for method in _METHODS:
        if not callable(parts[method]):
            raise ConfigError(f"{method} of {owner} is {shown(parts[method])}. Expected a method.")
    name = parts["name"]
    check_text(f"name of {owner}", name, error=ConfigError)
    if not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        raise ConfigError(f"name of {owner} is {shown(name)}. Expected 1 to {_LONGEST_NAME} printable characters.")
    return str(name), _checked_reads(parts["reads"], owner), _checked_sizes(parts["nodes_by_depth"], owner)


def _checked_reads(reads: Any, owner: str) -> TargetReads:
    if type(reads) is not TargetReads:
        raise ConfigError(f"reads of {owner} is {shown(reads)}. Expected foretoken.drafters.base.TargetReads(...).")
    taps = reads.taps
    if not isinstance(taps, tuple | list) or not all(map(_is_tap, taps)):
        raise ConfigError(
            f"taps of {owner} are {shown(taps)}. Expected a tuple of layer numbers, 0 for the embeddings, or 'final'."
        )
    check_integer(f"top_k of {owner}", reads.top_k, 0, _MOST_IDS, error=ConfigError)
    for key in ("attention_tokens", "attention_every"):
        check_integer(f"{key} of {owner}", getattr(reads, key), 0, _MOST_IDS, error=ConfigError)
    return replace(reads, taps=tuple(taps), top_k=int(reads.top_k), is_last_enough=False)


def _checked_sizes(sizes: Any, owner: str) -> list[int]:
    expected = f"Expected ascending numbers of nodes from 1 to at most {MAX_NODES}, as range(1, 6) for chains of four."
    found = list(sizes) if isinstance(sizes, range | tuple | list) and len(sizes) <= _DEEPEST else []
    are_numbers = bool(found) and all(type(nodes) is int for nodes in found)
    if not are_numbers or found[0] != 1 or found != sorted(found) or found[-1] > MAX_NODES:
        raise ConfigError(f"nodes_by_depth of {owner} is {shown(sizes)}. {expected}")
    return found


def _is_tap(tap: object) -> bool:
    return tap == "final" if isinstance(tap, str) else type(tap) is int and tap >= 0
