"""Prompts to measure on: the bundled held-out set or the user's own files."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from foretoken.core.errors import RequestError

HELD_OUT = "heldout"


def load_prompts(source: str = HELD_OUT, *, limit: int | None = None) -> list[str]:
    """Reads prompts.

    Args:
        source: "heldout" for the bundled prompts (Python files that the reference model never saw), a `.jsonl` file
            with a `prompt` string in every line, or any other text file, taken whole as one prompt.
        limit: At most this many.

    Raises:
        RequestError: When the file is missing, empty or not of that form.
    """
    if source == HELD_OUT:
        text = (resources.files("foretoken.bench") / "prompts" / "tinycode_heldout.jsonl").read_text(encoding="utf-8")
        return _from_jsonl(text, source)[:limit]
    path = Path(source)
    if not path.is_file():
        raise RequestError(f"there is no prompt file '{source}'. Expected 'heldout', a .jsonl or a text file.")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as err:
        raise RequestError(f"'{source}' is not UTF-8 text: {err}.") from err
    prompts = _from_jsonl(text, source) if path.suffix == ".jsonl" else [text]
    if not any(prompts):
        raise RequestError(f"'{source}' holds no prompt. Expected at least one.")
    return prompts[:limit]


def _from_jsonl(text: str, source: str) -> list[str]:
    """The `prompt` of every line."""
    prompts = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (json.JSONDecodeError, KeyError, TypeError) as err:
            raise RequestError(f'{source}:{number} is not an object with "prompt".') from err
        if not isinstance(prompt, str):
            raise RequestError(f'{source}:{number}: "prompt" is not a string.')
        prompts.append(prompt)
    return prompts
