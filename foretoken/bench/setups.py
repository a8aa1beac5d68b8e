"""What is compared: a drafter's configuration under a short name, built on a target that is loaded once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.core.bounded_reads import MIB, read_named
from foretoken.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from foretoken.core.results import RequestOutput

PLAIN = "plain"
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


def parse_setup(text: str) -> Setup:
    """Reads a setup from the command line.

    Args:
        text: A method's name, a method and a tree as `METHOD:tree`, JSON, or `@FILE` holding JSON; `plain` for none.

    Raises:
        ConfigError: When the JSON is malformed or not an object.
    """
    if text == PLAIN:
        return Setup(PLAIN, None)
    if not text.lstrip().startswith(("@", "{", "[", '"')):
        method, _, tree = text.partition(":")
        return Setup(text, {"method": method, **({"tree": tree} if tree else {})})
    if text.startswith("@"):
        text = _read(Path(text[1:]))
    example = 'Expected for example {"method": "ngram"}.'
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"speculative config is not valid JSON: {err}. {example}") from err
    if not isinstance(config, dict):
        raise ConfigError(f"speculative config is a JSON {type(config).__name__}, not an object. {example}")
    details = [f"{key}={json.dumps(value)}" for key, value in config.items() if key not in ("method", "model")]
    return Setup(" ".join([str(config.get("method")), *details]), config)


def _read(path: Path) -> str:
    """The text of a file that a command line names."""
    if not path.exists():
        raise ConfigError(f"there is no file '{path}'. Expected a file with JSON after '@'.")
    try:
        return read_named(path, limit=_MOST_BYTES, error=ConfigError).decode("utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"'{path}' cannot be read: {err}. Expected JSON as UTF-8 text.") from err
