"""Finds a drafter by its method's name, and checks its options.

A method is a module with a class `Options(DrafterOptions)` and a function `create(options) -> Drafter`. If its `reads`
depend on the target's model, the function is `create_for(options, model) -> Drafter`. Modules of this package are found
by file name; modules of other packages by an entry point of the group `foretoken.drafters`, or by their import path,
which has a dot: `{"method": "my_package.my_drafter"}`. Methods with a trained network share the module `heads`.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import foretoken.drafters
from foretoken.core.checks import shown, validated
from foretoken.core.errors import ConfigError, described, foreign_errors_as, nearest_name_hint
from foretoken.drafters.base import Drafter, DrafterOptions
from foretoken.heads import head_methods

if TYPE_CHECKING:
    from foretoken.models.loaded import LoadedModel

_GROUP = "foretoken.drafters"
# Files that methods share, and one of a method of `heads`, which holds all methods with a network.
_SHARED = {
    "base", "falcon", "head_drafter", "head_features", "heads", "levels", "native", "partial_reads", "registry",
    "self_drafts", "suffix_tree", "vocabularies",
}  # fmt: skip
# A tool of benchmarks that needs the answer: by its exact name only.
_TOOLS = {"oracle"}
# Methods of papers and other engines, without dashes, that do not exist here.
_PLANNED = frozenset({"clover", "dflash", "kangaroo", "ngramgpu", "pard"})
# Papers with heads that another paper's method drafts with.
_SAME_AS = {"hass": "eagle", "eagle2": "eagle"}
# Other names of methods, without dashes.
_OTHER_NAMES = {
    "layerskip": "early_exit",
    "qwen35mtp": "mtp",
    "qwen3nextmtp": "mtp",
    "lookaheaddecoding": "lookahead",
    "suffixdecoding": "suffix",
    "tokenrecycling": "recycling",
}


def known_methods() -> list[str]:
    """Returns the names that `speculative_config["method"]` may have, besides import paths."""
    return sorted({*_files(), *head_methods(), *_installed()})


def _files() -> set[str]:
    return {module.name for module in pkgutil.iter_modules(foretoken.drafters.__path__)} - _SHARED


def _installed() -> Mapping[str, str]:
    return _entry_points(tuple((path, _changed_at(path)) for path in sys.path))


@lru_cache(maxsize=1)
def _entry_points(search_path: tuple[tuple[str, int | None], ...]) -> Mapping[str, str]:  # noqa: ARG001 - the key
    """Reads the metadata of every installed package, which takes 40 ms; cached until a folder on the path changes."""
    return {point.name: point.value for point in entry_points(group=_GROUP)}


def _changed_at(path: str) -> int | None:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return None


def is_method(name: str) -> bool:
    """Returns whether a name is a method's, or may be the import path of one."""
    return name in known_methods() or is_import_path(name)


def is_import_path(name: str) -> bool:
    """Returns whether a name is that of a module in a package."""
    return "." in name and all(part.isidentifier() for part in name.split("."))


def offered_methods() -> list[str]:
    """Returns the methods to suggest to a user: all but the tools of benchmarks."""
    return [method for method in known_methods() if method not in _TOOLS]


def drafter_options(config: Mapping[str, Any], *, other_keys: frozenset[str] = frozenset()) -> DrafterOptions:
    """Checks a drafter's part of `speculative_config`.

    `other_keys`: keys that are known elsewhere, for suggestions only. Raises `ConfigError` for an unknown method, an
    unknown key (with the nearest known one) or a value out of range.
    """
    method = config.get("method")
    if not isinstance(method, str) or not is_method(method):
        raise ConfigError(unknown_method(method))
    return validated(options_of(method), config, f"method '{method}'", other_keys=other_keys)


def options_of(method: str) -> type[DrafterOptions]:
    """Returns the class of a method's options; raises `ConfigError` if its file is no drafter."""
    options_type: type[DrafterOptions] = _module(method).Options
    return options_type


def unknown_method(method: object, also: Sequence[str] = ()) -> str:
    """Returns the message about an unknown method; also: names of heads that may be meant."""
    plain = str(method).lower().replace("-", "").replace("_", "") if isinstance(method, str) else ""
    if plain in _PLANNED or (plain.endswith("mtp") and plain not in _OTHER_NAMES):
        return f"speculative method {shown(method)} is not there yet. Available: {', '.join(offered_methods())}."
    if plain in _SAME_AS:
        return (
            f"speculative method {shown(method)} has no name of its own: its heads are those of '{_SAME_AS[plain]}'. "
            f"Set 'method' to '{_SAME_AS[plain]}' and 'model' to the head."
        )
    if plain in _OTHER_NAMES:
        return f"speculative method {shown(method)} is named '{_OTHER_NAMES[plain]}' here. Set 'method' to that."
    hint = nearest_name_hint(shown(method), {*offered_methods(), *also})
    return f"speculative method {shown(method)} does not exist. {hint}"


def create_drafter(options: DrafterOptions, model: LoadedModel) -> Drafter:
    """Makes the drafter that the options describe; `attach` loads its weights."""
    module = _module(options.method)
    drafter: Drafter = module.create_for(options, model) if hasattr(module, "create_for") else module.create(options)
    return drafter


def _module(method: str) -> Any:
    path = method
    if not is_import_path(method):
        path = _installed().get(method, f"foretoken.drafters.{method if method in _files() else 'heads'}")
    with foreign_errors_as(
        ConfigError, lambda err: f"the file of method '{method}' cannot be imported: {described(err)}. Mend it."
    ):
        module = import_module(path)
    options, create = getattr(module, "Options", None), getattr(module, "create", getattr(module, "create_for", None))
    if not (isinstance(options, type) and issubclass(options, DrafterOptions) and callable(create)):
        raise ConfigError(
            f"the file of method '{method}' is no drafter. Expected a class Options(DrafterOptions) and a function "
            "create(options) in it, see foretoken.drafters.registry."
        )
    return module
