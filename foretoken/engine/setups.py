"""Parses the syntax for drafters, which the command line and `speculative_config` share."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError
from foretoken.drafters.registry import known_methods
from foretoken.engine.drafter_files import exists, head_beside, names_beside, spelled, what_lies_at
from foretoken.files.bounded_reads import MIB, read_named

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from foretoken.core.results import RequestOutput

PLAIN = "plain"
_BEFORE_KEY = re.compile(r":(?=[A-Za-z_]\w*=)")
_LONGEST_PATH = 4096  # characters; PATH_MAX of Linux
_MOST_BYTES = 16 * MIB  # of a JSON file; references of the method `oracle` are whole texts


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to decode.

    Attributes:
        name: Shown in tables.
        config: `speculative_config`, or None for plain decoding.
    """

    name: str
    config: Mapping[str, Any] | None

    @property
    def needs_references(self) -> bool:
        """Whether the drafter is an `oracle` that still needs the output of plain decoding."""
        return self.config is not None and self.config.get("method") == "oracle" and "references" not in self.config

    def with_references(self, outputs: Iterable[RequestOutput]) -> Mapping[str, Any] | None:
        """Returns the configuration; adds the output of plain decoding for an `oracle` without references.

        Args:
            outputs: Results of plain decoding.
        """
        if not self.needs_references or self.config is None:
            return self.config
        texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
        return {**self.config, "references": texts}


def parse_setup(given: str | os.PathLike[str], *, target: str | None = None, reads_files: bool = True) -> Setup:
    """Parses one way to decode; `foretoken.engine.config` checks whether the drafter exists.

    Args:
        given: `DRAFTER[:TREE][:KEY=VALUE]...`, or several of these joined by `+` for one merged tree, or a JSON object,
            or `@FILE` with a JSON object; `plain` for plain decoding. DRAFTER is a method, a name such as `hass` for
            the head in `TARGET-hass`, a directory or file of weights, or a hub id (with a slash). VALUE is JSON, text,
            or `@FILE` with JSON.
        target: The target's directory or hub id; None if it is unknown yet.
        reads_files: Whether `@FILE` is allowed; only the command line allows it.

    Raises:
        ConfigError: When the text does not follow this syntax, or a file cannot be read.
    """
    if isinstance(given, os.PathLike):
        return Setup(Path(given).name, {"model": os.fspath(given)})
    text = given.strip()
    if text == PLAIN:
        return Setup(PLAIN, None)
    if text.startswith(("@", "{", "[", '"')):
        return _from_json(_read(text, reads_files) if text.startswith("@") else text)
    parts = [_from_words(part.strip(), target, reads_files) for part in _between_drafters(text, target)]
    if len(parts) == 1:
        return parts[0]
    return Setup("+".join(part.name for part in parts), {"drafters": [part.config for part in parts]})


def _between_drafters(text: str, target: str | None) -> list[str]:
    """Splits a text at the plus signs between drafters.

    A plus inside an existing path does not split. A plus inside a value splits only before a drafter's name or path.
    """
    names = {*known_methods(), *names_beside(target)}
    parts: list[str] = []
    for piece in text.split("+"):
        word = piece.partition(":")[0].strip()
        before = re.split("[:=]", parts[-1])[-1] if parts else ""
        is_start = word in names or exists(word)
        if parts and (exists(f"{before}+{word}") or (_BEFORE_KEY.search(parts[-1]) and not is_start)):
            parts[-1] += f"+{piece}"
        else:
            parts.append(piece)
    return parts


def _from_words(text: str, target: str | None, reads_files: bool) -> Setup:
    """Parses `DRAFTER:TREE:KEY=VALUE`."""
    drafter = _drafter_of(text)
    tree, *pairs = _BEFORE_KEY.split(text[len(drafter) :])
    tree = tree.removeprefix(":")
    is_name = drafter in known_methods() or head_beside(target, drafter) is not None
    is_path = not is_name and ("/" in drafter or exists(drafter))
    config: dict[str, Any] = {"model" if is_path else "method": drafter, **({"tree": tree} if tree else {})}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key in config:
            raise ConfigError(f"{shown(text)} gives {shown(key)} twice. Expected it once.")
        config[key] = _value(value, reads_files)
    found = what_lies_at(tree) if tree else None
    if found is not None:
        raise ConfigError(
            f"'{tree}' is {found.name}, and {shown(text)} takes it for a tree. Write {spelled(found, tree)}."
        )
    name = ":".join([Path(drafter).name, *([tree] if tree else [])])
    return Setup(" ".join([name, *(pair for pair in pairs if not pair.startswith("model="))]), config)


def _drafter_of(text: str) -> str:
    """Returns DRAFTER: the longest existing path at the start, which may hold colons, else the text up to a colon."""
    ends = [*(colon.start() for colon in re.finditer(":", text[:_LONGEST_PATH])), len(text)]
    return text[: next((end for end in reversed(ends) if exists(text[:end])), ends[0])]


def _value(text: str, reads_files: bool) -> Any:
    """Parses a value: the JSON in `@FILE`, else JSON, else text."""
    is_file = text.startswith("@")
    try:
        return json.loads(_read(text, reads_files) if is_file else text)
    except (ValueError, RecursionError) as err:
        if not is_file:
            return text
        raise ConfigError(
            f"'{text[1:]}' is not valid JSON: {err}. Expected a value such as [[0], [1], [0, 0]]."
        ) from err


def _from_json(text: str) -> Setup:
    """Parses a `speculative_config` in JSON."""
    example = """Expected for example ngram or {"method": "ngram"}."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"speculative_config is not valid JSON: {err}. {example}") from err
    if not isinstance(config, dict):
        raise ConfigError(f"speculative_config is {shown(config)}. {example}")
    if config.get("drafters") is not None:
        return Setup(_names(config["drafters"]), config)
    details = [f"{key}={json.dumps(value)}" for key, value in config.items() if key not in ("method", "model")]
    return Setup(" ".join([_name(config), *details]), config)


def _name(config: Mapping[str, Any]) -> str:
    """Returns the name of a drafter: its method, or its directory without a method."""
    if config.get("method") is None and isinstance(config.get("model"), str):
        return Path(config["model"]).name
    return str(config.get("method", "ngram"))


def _names(drafters: Any) -> str:
    """Returns the names of several drafters; `parse_speculative_config` reports what is wrong with them."""
    each = drafters if isinstance(drafters, list) else []
    names = [one if isinstance(one, str) else _name(one) if isinstance(one, dict) else "?" for one in each]
    return "+".join(names) or "drafters"


def _read(text: str, reads_files: bool) -> str:
    """Returns the text of the file in `@FILE`."""
    path = Path(text[1:])
    if not reads_files:
        raise ConfigError(
            f"{shown(text)} names a file, which only the command line reads. Expected what the file holds."
        )
    if not path.exists():
        raise ConfigError(f"there is no file '{path}'. Expected a file with JSON after '@'.")
    try:
        return read_named(path, limit=_MOST_BYTES, error=ConfigError).decode("utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"'{path}' cannot be read: {err}. Expected JSON as UTF-8 text.") from err
