"""Making a drafter, the package's own or a caller's, and checking what was made before anything relies on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foretoken.core.checks import check_integer, check_text, shown
from foretoken.core.errors import ConfigError, ForetokenError, described
from foretoken.core.token_tree import MAX_NODES
from foretoken.engine.torch_state import restored_torch_state
from foretoken.engine.untrusted_drafter import UntrustedDrafter

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from foretoken.core.taps import Tap
    from foretoken.drafters.base import Drafter

_METHODS = ("propose", "commit", "release")
_ATTRIBUTES = ("name", "taps", "max_nodes", *_METHODS)
_LONGEST_NAME = 100  # characters
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
    try:
        with restored_torch_state():
            drafter = create()
            parts = {name: getattr(drafter, name, _MISSING) for name in _ATTRIBUTES}
        name, taps, max_nodes = _checked(drafter, parts, maker)
        return UntrustedDrafter(drafter, name=name, taps=taps, max_nodes=max_nodes, device=device)
    except ForetokenError:
        raise
    except Exception as err:  # a caller's code
        raise ConfigError(f"{maker} raised {described(err)}. Expected it to make a drafter.") from err


def _checked(drafter: object, parts: dict[str, Any], maker: str) -> tuple[str, tuple[Tap, ...], int]:
    """Name, taps and widest tree of a drafter.

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
    name, taps, max_nodes = parts["name"], parts["taps"], parts["max_nodes"]
    check_text(f"name of {owner}", name, error=ConfigError)
    if not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        raise ConfigError(f"name of {owner} is {shown(name)}. Expected 1 to {_LONGEST_NAME} printable characters.")
    if not isinstance(taps, tuple | list) or not all(map(_is_tap, taps)):
        raise ConfigError(
            f"taps of {owner} are {shown(taps)}. Expected a tuple of layer numbers, 0 for the embeddings, or 'final'."
        )
    check_integer(f"max_nodes of {owner}", max_nodes, 1, MAX_NODES, error=ConfigError)
    return str(name), tuple(taps), int(max_nodes)


def _is_tap(tap: object) -> bool:
    """Whether a value is of the type `Tap`."""
    return tap == "final" if isinstance(tap, str) else type(tap) is int and tap >= 0
