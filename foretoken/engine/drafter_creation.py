"""Making a drafter, the package's own or a caller's, and checking what was made before anything relies on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foretoken.core.checks import check_integer, check_text, shown
from foretoken.core.errors import ConfigError, ForetokenError, described, foreign_errors_as
from foretoken.core.token_tree import MAX_NODES
from foretoken.drafters.base import TargetReads
from foretoken.engine.torch_state import restored_torch_state
from foretoken.engine.untrusted_drafter import UntrustedDrafter

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch

    from foretoken.drafters.base import Drafter, TargetHandle

_METHODS = ("attach", "begin", "propose", "commit", "release")
_ATTRIBUTES = ("name", "reads", "nodes_by_depth", *_METHODS)
_LONGEST_NAME = 100  # characters
_DEEPEST = 512
_MOST_IDS = 1024  # that may be read at a node
_MISSING = object()


def make_drafter(create: Callable[[], Any], *, maker: str, is_trusted: bool, device: torch.device) -> Drafter:
    """A drafter that has what `Drafter` asks for.

    Args:
        create: Makes it.
        maker: Who that is, for messages.
        is_trusted: Whether the drafter is handed the engine's own values and its word is taken, see `UntrustedDrafter`.
        device: Where trees must lie.

    Raises:
        ConfigError: When `create` raises, or makes something else.
        ForetokenError: As `create` raises it.
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
    """Attaches a drafter that `make_drafter` gave.

    Raises:
        ConfigError: When it raises, or drafts more than it said when it was made.
        ForetokenError: As it raises it.
    """
    widest = drafter.nodes_by_depth[-1]
    if not isinstance(drafter, UntrustedDrafter):
        drafter.attach(target)
    else:
        with _explained(f"attach of drafter '{drafter.name}'", "prepare for the target"):
            drafter.attach(target)
    if drafter.nodes_by_depth[-1] > widest:
        raise ConfigError(
            f"drafter '{drafter.name}' has trees of {drafter.nodes_by_depth[-1]} nodes once it is attached, and said "
            f"{widest} before. Expected no more, since the cache has no room for them."
        )


def _explained(what: str, expected: str) -> AbstractContextManager[None]:
    """Turns what a caller's code raises into a sentence, as `ConfigError`; what the package raises itself passes."""
    return foreign_errors_as(
        ConfigError,
        lambda err: f"{what} raised {described(err)}. Expected it to {expected}.",
        passing=(ForetokenError,),
    )


def _checked(drafter: object, parts: dict[str, Any], maker: str) -> tuple[str, TargetReads, list[int]]:
    """Name, reads and sizes of a drafter.

    Raises:
        ConfigError: When one of them, or a method, is missing or of another type.
    """
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
    """What a drafter reads.

    Raises:
        ConfigError: When it is no `TargetReads` of valid taps.
    """
    if type(reads) is not TargetReads:
        raise ConfigError(f"reads of {owner} is {shown(reads)}. Expected foretoken.drafters.base.TargetReads(...).")
    taps = reads.taps
    if not isinstance(taps, tuple | list) or not all(map(_is_tap, taps)):
        raise ConfigError(
            f"taps of {owner} are {shown(taps)}. Expected a tuple of layer numbers, 0 for the embeddings, or 'final'."
        )
    check_integer(f"top_k of {owner}", reads.top_k, 0, _MOST_IDS, error=ConfigError)
    return TargetReads(taps=tuple(taps), top_k=int(reads.top_k))


def _checked_sizes(sizes: Any, owner: str) -> list[int]:
    """Nodes of a drafter's trees by depth.

    Raises:
        ConfigError: When they are no sizes of trees.
    """
    expected = f"Expected ascending numbers of nodes from 1 to at most {MAX_NODES}, as range(1, 6) for chains of four."
    is_sizes = isinstance(sizes, range | tuple | list) and 0 < len(sizes) <= _DEEPEST
    if not is_sizes or any(type(nodes) is not int for nodes in sizes):
        raise ConfigError(f"nodes_by_depth of {owner} is {shown(sizes)}. {expected}")
    found = list(sizes)
    if found[0] != 1 or found != sorted(found) or found[-1] > MAX_NODES:
        raise ConfigError(f"nodes_by_depth of {owner} is {shown(sizes)}. {expected}")
    return found


def _is_tap(tap: object) -> bool:
    """Whether a value is of the type `Tap`."""
    return tap == "final" if isinstance(tap, str) else type(tap) is int and tap >= 0
