"""One record of a source, still text: a plain document, a prompt with its completion, or a conversation.

Reads the row forms of common data sets; needs no tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretoken.core.checks import check_text, shown
from foretoken.core.errors import RequestError, nearest_name_hint

if TYPE_CHECKING:
    from collections.abc import Sequence

Message = dict[str, str]
_ROLES = {"system": "system", "developer": "developer", "user": "user", "assistant": "assistant", "tool": "tool"}
_SHAREGPT_ROLES = {
    **_ROLES,
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}
_COMPLETIONS = ("completion", "response")
_CHATS = ("messages", "conversations")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One document before its tokens.

    Attributes:
        where: Its place, for messages: "notes.txt", "chats.jsonl:12".
        text: The document, or the completion of `prompt`.
        prompt: The text before the completion; None for a plain document.
        messages: The turns of a conversation, each with `role` and `content`; None for the other forms.
        size: The part of its source's total that this record took.
    """

    where: str
    text: str = ""
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    size: int = 0

    @property
    def key(self) -> str:
        """SHA-256 of the content, without `where`, as hexadecimal digits."""
        content = json.dumps([self.text, self.prompt, self.messages], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def share(self) -> float:
        """A number in 0..1 from a hash of the content, spread evenly over contents."""
        return int(self.key[:12], 16) / 16**12


def read_row(row: Any, where: str, *, text_column: str = "text", size: int = 0) -> Record | None:
    """Returns a record from a row; the first form that fits counts: conversation, prompt, text.

    Args:
        row: With `messages` (role, content) or `conversations` (from, value), `prompt` with `completion` or
            `response`, or `text`.
        where: Its place, for messages.
        text_column: The column of plain text; a name other than "text" comes before all other forms.
        size: See `Record`.

    Returns:
        None if the row holds no text.

    Raises:
        RequestError: When no form fits, a value is not of its type, or a role is unknown.
    """
    if not isinstance(row, Mapping):
        raise RequestError(f"{where} is {type(row).__name__}. Expected an object with columns.")
    if text_column == "text":
        for column in _CHATS:
            if row.get(column) is not None:
                messages = _messages(row[column], column, where)
                return Record(where=where, messages=messages, size=size) if messages else None
        if "prompt" in row:
            completion = next((column for column in _COMPLETIONS if row.get(column) is not None), None)
            text = "" if completion is None else _string(row[completion], completion, where)
            prompt = _string(row["prompt"], "prompt", where)
            return Record(where=where, text=text, prompt=prompt, size=size) if prompt or text else None
    if text_column not in row:
        known = [*_CHATS, "prompt", "text"] if text_column == "text" else list(map(str, row))
        raise RequestError(
            f"{where} has the columns {list(row)}, none that is known. Expected 'messages', 'conversations', 'prompt' "
            f"with 'completion' or 'response', or '{text_column}'. "
            f"{nearest_name_hint(str(next(iter(row), '')) if text_column == 'text' else text_column, known)}"
        )
    text = _string(row[text_column], text_column, where)
    return Record(where=where, text=text, size=size) if text.strip() else None


def _string(value: Any, column: str, where: str) -> str:
    if value is None:
        return ""
    check_text(f"{where}: '{column}'", value)
    return str(value)


def _messages(turns: Any, column: str, where: str) -> tuple[Message, ...]:
    """Returns checked turns, without assistant turns before the first user turn (as some ShareGPT data has)."""
    if not isinstance(turns, list):
        raise RequestError(f"{where}: '{column}' is {type(turns).__name__}. Expected a list of turns.")
    roles = _ROLES if column == "messages" else _SHAREGPT_ROLES
    found: list[Message] = []
    for number, turn in enumerate(turns):
        place = f"{where}: turn {number} of '{column}'"
        if not isinstance(turn, Mapping):
            raise RequestError(f"{place} is {type(turn).__name__}. Expected an object with role and content.")
        names = ("role", "content") if "role" in turn else ("from", "value")
        if not set(names) <= set(turn):
            raise RequestError(
                f"{place} has the keys {shown(list(turn))}. Expected 'role' and 'content', or 'from', 'value'."
            )
        role = turn[names[0]]
        if not isinstance(role, str) or role not in roles:
            raise RequestError(f"{place} has the role {shown(role)}. {nearest_name_hint(shown(role), roles)}")
        found.append({"role": roles[role], "content": _string(turn[names[1]], names[1], place)})
    while column == "conversations" and found and found[0]["role"] == "assistant":
        del found[0]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Document:
    """One document as tokens.

    Attributes:
        tokens: Token ids, special ones included.
        supervised: Whether each token counts as a label; None for all.
    """

    tokens: Sequence[int]
    supervised: Sequence[bool] | None = None

    def __post_init__(self) -> None:
        if self.supervised is not None and len(self.supervised) != len(self.tokens):
            raise RequestError(
                f"a document has {len(self.tokens)} tokens and {len(self.supervised)} flags. Expected one flag a token."
            )
