"""API keys from the environment and a file, never from a command line, which all users of a machine can read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from foretoken.core.errors import ConfigError
from foretoken.files.bounded_reads import read_named

if TYPE_CHECKING:
    from pathlib import Path

KEY_VARIABLE = "FORETOKEN_API_KEY"


def api_keys(path: Path | None) -> list[str]:
    """Returns the key in `KEY_VARIABLE`, if set, and the keys of a file.

    Args:
        path: A file with one key a line; None for no file.

    Raises:
        ConfigError: When a key is empty or not plain ASCII, or the file cannot be read or has no key.
    """
    given = [os.environ[KEY_VARIABLE]] if KEY_VARIABLE in os.environ else []
    if path is not None:
        given += _keys_of(path)
    for key in given:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"an API key of {KEY_VARIABLE} or --api-key-file is empty or has other than ASCII characters."
            )
    return given


def _keys_of(path: Path) -> list[str]:
    try:
        text = read_named(path, error=ConfigError).decode("utf-8", "replace")  # no ASCII: refused later
    except OSError as err:
        raise ConfigError(f"'{path}' cannot be read: {err.strerror}. Expected a file with one API key a line.") from err
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"'{path}' has no API key. Expected one a line.")
    return lines
