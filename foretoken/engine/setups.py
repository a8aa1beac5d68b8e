"""The one syntax for drafters, of the command line and of `speculative_config`: text becomes a configuration."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.core.bounded_reads import MIB, read_named
from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError
from foretoken.drafters.registry import known_methods
from foretoken.engine.drafter_files import exists, head_beside, names_beside, spelled, what_lies_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from foretoken.core.results import RequestOutput

PLAIN = "plain"
_BEFORE_KEY = re.compile(r":(?=[A-Za-z_]\w*=)")
_LONGEST_PATH = 4096  # characters
_MOST_BYTES = 16 * MIB  # of JSON; an oracle's may hold texts


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
        """Whether the drafter has to be told what plain decoding writes."""
        return self.config is not None and self.config.get("method") == "oracle" and "references" not in self.config

    def with_references(self, outputs: Iterable[RequestOutput]) -> Mapping[str, Any] | None:
        """The configuration; an oracle's holds the texts of plain decoding.

        Args:
            outputs: What plain decoding wrote.
        """
        if not self.needs_references or self.config is None:
            return self.config
        texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
        return {**self.config, "references": texts}


def parse_setup(given: str | os.PathLike[str], *, target: str | None = None, reads_files: bool = True) -> Setup:
    """Reads the syntax of drafters; whether a drafter can be had is checked in `foretoken.engine.config`.

    Args:
        given: `DRAFTER`, `DRAFTER:TREE`, either with `:KEY=VALUE` after it as often as needed (values are JSON, `@FILE`
            holding some, or text), several of these with `+` between them for one merged tree, a JSON object, or
            `@FILE` holding one; `plain` for none. DRAFTER is a method, `hass` for the head in `TARGET-hass`, a
            directory or file of weights, or a hub id, which has a slash.
        target: The target's directory or hub id; None where it does not matter yet.
        reads_files: Whether `@FILE` is allowed, as on the command line.

    Raises:
        ConfigError: When it is nothing of the kind.
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
    """The parts of a sum of drafters.

    A plus separates unless it belongs to a path. In a value it does so only before a name or an existing path.
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
    """A setup from `DRAFTER:TREE:KEY=VALUE`."""
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
    """What stands before the tree and the keys: the longest path that exists, which may hold colons, or up to one."""
    ends = [*(colon.start() for colon in re.finditer(":", text[:_LONGEST_PATH])), len(text)]
    return text[: next((end for end in reversed(ends) if exists(text[:end])), ends[0])]


def _value(text: str, reads_files: bool) -> Any:
    """What stands after a key: JSON, text where it is none, or the JSON that `@FILE` holds."""
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
    """A setup from vLLM's `speculative_config`."""
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
    """Of a method, or of the files that tell it."""
    if config.get("method") is None and isinstance(config.get("model"), str):
        return Path(config["model"]).name
    return str(config.get("method", "ngram"))


def _names(drafters: Any) -> str:
    """The methods of several configurations; what is wrong with them is said where they are read."""
    each = drafters if isinstance(drafters, list) else []
    names = [one if isinstance(one, str) else _name(one) if isinstance(one, dict) else "?" for one in each]
    return "+".join(names) or "drafters"


def _read(text: str, reads_files: bool) -> str:
    """The text of the file that `@FILE` names."""
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
