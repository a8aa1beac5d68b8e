"""What a prompt begins with, as a short key by which requests with a common beginning find the same engine."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def prefix_key(body: bytes, length: int) -> str | None:
    """The same for requests whose prompts share their first characters, and whose `cache_salt` is the same.

    Of a conversation counts what comes up to the first message of the user, so that all its turns have one key.

    Args:
        body: Of a request to one of the paths that generate.
        length: Characters that count; of prompts of token ids, tokens.

    Returns:
        Hexadecimal digits that tell nothing of the prompt; None where there is no prompt.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):  # the engine's server says what is wrong
        return None
    beginning = _beginning(asked, length) if isinstance(asked, dict) else None
    if not beginning:
        return None
    told = json.dumps([asked.get("cache_salt"), beginning])
    return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


def _beginning(asked: dict[str, Any], length: int) -> Any:
    """What counts of the prompt."""
    messages = asked.get("messages", asked.get("input"))
    if isinstance(messages, list) and messages and isinstance(messages[0], dict):
        at = next((at for at, each in enumerate(messages) if isinstance(each, dict) and each.get("role") == "user"), 0)
        opening = [asked.get("instructions"), asked.get("tools"), messages[: at + 1]]
        return json.dumps(opening, ensure_ascii=False)[:length]
    prompt = asked.get("prompt", messages)
    while isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
        prompt = prompt[0]  # several prompts go together
    if isinstance(prompt, str) and isinstance(asked.get("instructions"), str):
        prompt = asked["instructions"] + prompt
    return prompt[:length] if isinstance(prompt, str | list) else None
