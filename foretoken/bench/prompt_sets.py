"""Loads prompts to measure on: the bundled held-out set or the user's own files."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from foretoken.core.checks import check_text, shown
from foretoken.core.errors import RequestError
from foretoken.files.bounded_reads import MIB, read_named

HELD_OUT = "heldout"
_BUNDLED = (HELD_OUT, "edit", "prose")
_MOST_BYTES = 512 * MIB


def load_prompts(source: str = HELD_OUT, *, limit: int | None = None) -> list[str]:
    """Reads prompts.

    Args:
        source: The name of a bundled set, cut from Python files that the reference model never saw: "heldout" (code to
            be completed), "edit" (functions to be repeated with a name changed) or "prose" (docstrings to be
            completed). Or a `.jsonl` file with a `prompt` string in every line, or any other text file, taken whole as
            one prompt.
        limit: At most this many.

    Raises:
        RequestError: When the file is missing, empty, too large or not of that form.
    """
    if source in _BUNDLED:
        text = (resources.files("foretoken.bench") / "prompts" / f"tinycode_{source}.jsonl").read_text(encoding="utf-8")
        return _from_jsonl(text, source)[:limit]
    path = Path(source)
    if not path.exists():
        raise RequestError(
            f"there is no prompt file '{source}'. Expected {', '.join(map(repr, _BUNDLED))}, a .jsonl or a text file."
        )
    try:
        text = read_named(path, limit=_MOST_BYTES).decode("utf-8")
    except UnicodeDecodeError as err:
        raise RequestError(f"'{source}' is not UTF-8 text: {err}. Expected UTF-8. Convert it first.") from err
    except OSError as err:
        raise RequestError(f"'{source}' cannot be read: {err.strerror}. Expected a .jsonl or a text file.") from err
    prompts = _from_jsonl(text, source) if path.suffix == ".jsonl" else [text]
    if not any(prompts):
        raise RequestError(f"'{source}' holds no prompt. Expected at least one that is not empty.")
    return prompts[:limit]


def _from_jsonl(text: str, source: str) -> list[str]:
    """The `prompt` of every line."""
    prompts = []
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines would cut strings at U+2028
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError, RecursionError) as err:
            raise RequestError(f'{source}:{number} is not an object with "prompt". Expected one a line.') from err
        if not isinstance(prompt, str) or not prompt:
            raise RequestError(f'{source}:{number}: "prompt" is {shown(prompt)}. Expected a string that is not empty.')
        check_text(f'"prompt" of {source}:{number}', prompt)
        prompts.append(prompt)
    return prompts
