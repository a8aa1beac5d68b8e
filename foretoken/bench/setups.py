"""What is compared: a drafter's configuration under a short name, built on a target that is loaded once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Setup:
    """One way to decode.

    Attributes:
        name: Shown in tables.
        config: `speculative_config`, or None for plain decoding.
    """

    name: str
    config: Mapping[str, Any] | None


def parse_setup(text: str) -> Setup:
    """Reads a setup from the command line.

    Args:
        text: A method's name, a method and a tree as `METHOD:tree`, JSON, or `@FILE` holding JSON; `plain` for none.

    Raises:
        ConfigError: When the JSON is malformed or not an object.
    """
    if text == PLAIN:
        return Setup(PLAIN, None)
    if text.startswith("@"):
        path = Path(text[1:])
        if not path.is_file():
            raise ConfigError(f"there is no file '{path}'. Expected a file with JSON after '@'.")
        text = path.read_text(encoding="utf-8")
    if not text.lstrip().startswith("{"):
        method, _, tree = text.partition(":")
        return Setup(text, {"method": method, **({"tree": tree} if tree else {})})
    try:
        config = json.loads(text)
    except json.JSONDecodeError as err:
        raise ConfigError(
            f'speculative config is not valid JSON: {err}. Expected for example {{"method": "ngram"}}.'
        ) from err
    details = [f"{key}={json.dumps(value)}" for key, value in config.items() if key not in ("method", "model")]
    return Setup(" ".join([str(config.get("method")), *details]), config)
