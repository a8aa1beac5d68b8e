"""Parses the setups that are compared: a drafter's configuration under a short name."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.bench.setup_checks import check_model_of, check_place_of_method, spelled, what_lies_at
from foretoken.core.bounded_reads import MIB, read_named
from foretoken.core.errors import ConfigError
from foretoken.drafters.registry import known_methods

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from foretoken.core.results import RequestOutput

PLAIN = "plain"
_BEFORE_KEY = re.compile(r":(?=[A-Za-z_]\w*=)")
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


def parse_setup(text: str, *, target: str | None = None) -> Setup:
    """Reads a setup from the command line.

    Args:
        text: `METHOD`, `METHOD:TREE`, either with `:KEY=VALUE` after it as often as needed (values are JSON, `@FILE`
            holding some, or text), several of these with `+` between them for one merged tree, a JSON object, or
            `@FILE` holding one; `plain` for none. METHOD may be the name of a head beside the target, `hass` of
            `TARGET-hass`.
        target: The target's directory or hub id; None where it does not matter yet.

    Raises:
        ConfigError: When it is nothing of the kind, or names weights that are not the method's.
    """
    if text == PLAIN:
        return Setup(PLAIN, None)
    if text.lstrip().startswith(("@", "{", "[", '"')):
        setup = _from_json(_read(Path(text[1:])) if text.startswith("@") else text)
    else:
        parts = [_from_words(part) for part in _between_drafters(target).split(text)]
        setup = parts[0]
        if len(parts) > 1:
            setup = Setup("+".join(part.name for part in parts), {"drafters": [part.config for part in parts]})
    for config in () if setup.config is None else setup.config.get("drafters") or [setup.config]:
        if isinstance(config, dict) and isinstance(config.get("method"), str):
            check_model_of(config, target)
    return setup


def _between_drafters(target: str | None) -> re.Pattern[str]:
    """What stands between two drafters: a plus before a name, as values may hold a plus too.

    Names are those of methods and of what lies beside the target, as `hass` of `TARGET-hass`.
    """
    names = [*known_methods(), *([] if target is None else _names_beside(Path(target)))]
    return re.compile(rf"\+(?=(?:{'|'.join(map(re.escape, names))})(?:[:+]|$))")


def _names_beside(target: Path) -> list[str]:
    """What directories beside a target are called after its own name."""
    begin = f"{target.name}-"
    around = sorted(target.parent.iterdir()) if target.is_dir() else []
    return [path.name.removeprefix(begin) for path in around if path.name.startswith(begin) and path.is_dir()]


def _from_words(text: str) -> Setup:
    """A setup from `METHOD:TREE:KEY=VALUE`; values are JSON, `@FILE` holding some, or text where they are neither."""
    words, *pairs = _BEFORE_KEY.split(text)
    method, _, tree = words.partition(":")
    check_place_of_method(method, text)
    config: dict[str, Any] = {"method": method, **({"tree": tree} if tree else {})}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key in config:
            raise ConfigError(f"-s {text} gives '{key}' twice. Expected it once.")
        config[key] = _value(value)
    found = what_lies_at(tree) if tree else None
    if found is not None:
        raise ConfigError(f"'{tree}' is {found.name}, and -s {text} takes it for a tree. Write {spelled(found, tree)}.")
    details = [pair for pair in pairs if not pair.startswith("model=")]
    return Setup(" ".join([words, *details]), config)


def _value(text: str) -> Any:
    """What stands after a key.

    Raises:
        ConfigError: When it is `@FILE` and there is no JSON in the file.
    """
    if text.startswith("@"):
        try:
            return json.loads(_read(Path(text[1:])))
        except (ValueError, RecursionError) as err:
            raise ConfigError(
                f"'{text[1:]}' is not valid JSON: {err}. Expected a value such as [[0], [1], [0, 0]]."
            ) from err
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _from_json(text: str) -> Setup:
    """A setup from vLLM's `speculative_config`."""
    example = """Expected for example -s ngram or -s '{"method": "ngram"}'."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"speculative config is not valid JSON: {err}. {example}") from err
    if not isinstance(config, dict):
        raise ConfigError(f"speculative config is a JSON {type(config).__name__}, not an object. {example}")
    if config.get("drafters") is not None:
        return Setup(_names(config["drafters"]), config)
    if (
        config.get("method") is None
        and config.get("model") is None
        and not any("prompt_lookup" in key for key in config)
    ):
        raise ConfigError(f"speculative config has no 'method'. {example}")
    details = [f"{key}={json.dumps(value)}" for key, value in config.items() if key not in ("method", "model")]
    return Setup(" ".join([str(config.get("method")), *details]), config)


def _names(drafters: Any) -> str:
    """The methods of several configurations; what is wrong with them is said where they are read."""
    each = drafters if isinstance(drafters, list) else []
    names = [one if isinstance(one, str) else str(one.get("method")) if isinstance(one, dict) else "?" for one in each]
    return "+".join(names) or "drafters"


def _read(path: Path) -> str:
    """The text of a file that a command line names."""
    if not path.exists():
        raise ConfigError(f"there is no file '{path}'. Expected a file with JSON after '@'.")
    try:
        return read_named(path, limit=_MOST_BYTES, error=ConfigError).decode("utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"'{path}' cannot be read: {err}. Expected JSON as UTF-8 text.") from err
