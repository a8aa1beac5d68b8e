"""Reading a JSON file of a model, a head or a data set: bounded, and damage named in one sentence."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from foretoken.core.bounded_reads import read_regular
from foretoken.core.errors import ForetokenError, ModelError, one_line

if TYPE_CHECKING:
    from pathlib import Path


def read_json_object(
    path: Path, *, error: type[ForetokenError] = ModelError, advice: str = "Copy or download it again."
) -> dict[str, Any]:
    """A JSON file that holds an object.

    Args:
        path: A regular file of at most `MOST_JSON_BYTES`.
        error: What to raise.
        advice: How to mend a damaged file, a sentence.

    Raises:
        ForetokenError: Of type `error`, when it is missing, no regular file, too large, damaged, or holds something
            else.
    """
    try:
        value = json.loads(read_regular(path, error=error).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as err:
        raise error(f"{path} is not valid JSON: {one_line(err)}. {advice}") from err
    if not isinstance(value, dict):
        raise error(f"{path} holds a JSON {type(value).__name__}. Expected an object. {advice}")
    return value
