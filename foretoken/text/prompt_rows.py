"""Reads rows of prompt sets, as the field's benchmarks publish them: text to continue, instructions, conversations.

The first field that a row has decides; this is the whole rule:

    messages, conversations     a conversation: role and content, or from and value
    turns                       a user's turns; each follows the model's own answers to the turns before
    test_list                   a user's turn: the task of MBPP, in `text` or `prompt`, with its tests
    instruction                 a user's turn, with `input` below it
    question                    a user's turn
    prompt, text                text to continue as it stands

A model with a chat template gets conversations through the template. Another model gets their text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretoken.core.checks import check_text, shown
from foretoken.core.errors import RequestError, nearest_name_hint
from foretoken.text.codec import Codec
from foretoken.text.prompts import ChatFormat, chat_prompts

if TYPE_CHECKING:
    JsonRow = tuple[Any, str, int]  # a row, its place for messages, and its bytes

Message = dict[str, str]
_ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
_SHAREGPT_ROLES = {**_ROLES, "human": "user", **dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant")}
_FIELDS = ("messages", "conversations", "turns", "test_list", "instruction", "question", "prompt", "text")
_ANSWERS = ("completion", "response", "output", "answer")  # of a row that has one; the first that it has counts
_BETWEEN = "\n\n"  # turns of a conversation as plain text
_TESTS = "\n\nYour code should pass these tests:\n\n"  # as Austin et al. 2021 (arXiv 2108.07732) ask, figure 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One row of a prompt set.

    Attributes:
        where: File and line, for messages: "questions.jsonl:12".
        raw: Text to continue as it stands; "" for a conversation.
        messages: The turns of a conversation, each with `role` and `content`, recorded answers included.
        later_turns: The user's further turns, which follow the model's own answers.
        answer: The answer that the row has to `raw`; None if `raw` is a document, not a prompt.
        category: What the row's `category`, else `task`, says; "" without both.
    """

    where: str
    raw: str = ""
    messages: tuple[Message, ...] = ()
    later_turns: tuple[str, ...] = ()
    answer: str | None = None
    category: str = ""

    @property
    def asked(self) -> tuple[Message, ...]:
        """The conversation up to the last message that is not an answer."""
        last = max((at for at, each in enumerate(self.messages) if each["role"] != "assistant"), default=-1)
        return self.messages[: last + 1]

    @property
    def text(self) -> str:
        """The prompt for a model without a chat template."""
        return self.raw or _BETWEEN.join(message["content"] for message in self.asked)

    def token_ids(self, tokenizer: Any, vocab_size: int, context_len: int) -> list[int] | None:
        """Returns the prompt by the tokenizer's chat template; None for raw text, and without a template.

        Raises `RequestError`, which names the row, if the template refuses it or the prompt exceeds the context.
        """
        if not self.asked or not getattr(tokenizer, "chat_template", None):
            return None
        try:
            (prompt,) = chat_prompts(
                list(self.asked), tokenizer, Codec(tokenizer, vocab_size), ChatFormat(), context_len
            )
        except RequestError as err:
            raise RequestError(f"{self.where}: {err}") from err
        ids: list[int] = prompt["prompt_token_ids"]
        if len(ids) >= context_len:
            raise RequestError(
                f"{self.where}: the conversation has {len(ids)} tokens. Expected at most {context_len - 1}, one less "
                "than the context length. Remove the row."
            )
        return ids

    def followed(self, answer: str) -> PromptRow | None:
        """Returns the row's next turn, after the model's own answer to this one; None if there is no further turn."""
        if not self.later_turns:
            return None
        said = (*self.asked, {"role": "assistant", "content": answer}, _user(self.later_turns[0]))
        return PromptRow(where=self.where, messages=said, later_turns=self.later_turns[1:], category=self.category)


def read_prompt_row(row: Any, where: str) -> PromptRow:
    """Returns a row by the rule at the top of this file; its text may be empty.

    Raises `RequestError` when the row has no known field, a value is not of its type, or a role is unknown.
    """
    if not isinstance(row, Mapping):
        raise RequestError(f"{where} is {type(row).__name__}. Expected an object with {_known()}.")
    found = next((name for name in _FIELDS if row.get(name) is not None), None)
    found = found or next((name for name in _FIELDS if name in row), None)  # a field without a value is an empty text
    if found is None:
        hint = nearest_name_hint(str(next(iter(row), "")), _FIELDS)
        raise RequestError(
            f"{where} has the columns {shown(list(row))}, none that is known. Expected {_known()}. {hint}"
        )
    category = _string(row, "category" if row.get("category") is not None else "task", where)
    if found in ("messages", "conversations"):
        return PromptRow(where=where, messages=_messages(row[found], found, where), category=category)
    if found == "turns":
        first, *later = _turns(row["turns"], where)
        return PromptRow(where=where, messages=_said(first), later_turns=tuple(later), category=category)
    answer = _string(row, next((name for name in _ANSWERS if isinstance(row.get(name), str)), ""), where)
    if found in ("prompt", "text"):
        raw = _string(row, found, where)
        return PromptRow(where=where, raw=raw, answer=answer if found == "prompt" else None, category=category)
    return PromptRow(where=where, messages=_said(_instruction(row, found, where), answer), category=category)


def json_lines(lines: Iterable[bytes], name: str) -> Iterator[JsonRow]:
    """Yields the rows of JSON lines with their places and sizes; raises `RequestError` for a line that is not JSON."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as err:  # UnicodeDecodeError too
            raise RequestError(f"{name}:{number} is not valid JSON: {err}. Expected one object a line.") from err
        yield row, f"{name}:{number}", len(line)


def _known() -> str:
    return f"{', '.join(map(repr, _FIELDS[:-1]))} or '{_FIELDS[-1]}'"


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _said(content: str, answer: str = "") -> tuple[Message, ...]:
    """Returns a user's turn, with the answer if there is one; nothing for an empty turn."""
    asked = (_user(content),) if content.strip() else ()
    return (*asked, {"role": "assistant", "content": answer}) if asked and answer else asked


def _instruction(row: Mapping[str, Any], found: str, where: str) -> str:
    if found == "question":
        return _string(row, "question", where)
    if found == "instruction":
        return _BETWEEN.join(filter(None, (_string(row, name, where) for name in ("instruction", "input"))))
    tests = row["test_list"]
    if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
        raise RequestError(f"{where}: 'test_list' is {shown(tests)}. Expected a list of texts.")
    return _string(row, "text" if row.get("text") is not None else "prompt", where) + _TESTS + "\n".join(tests)


def _string(row: Mapping[str, Any], column: str, where: str) -> str:
    value = row.get(column)
    if value is None:
        return ""
    check_text(f"{where}: '{column}'", value)
    return str(value)


def _turns(turns: Any, where: str) -> Sequence[str]:
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise RequestError(f"{where}: 'turns' is {shown(turns)}. Expected a list of texts that are not empty.")
    for turn in turns:
        check_text(f"{where}: 'turns'", turn)
    return turns


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
            expected = "Expected 'role' and 'content', or 'from', 'value'."
            raise RequestError(f"{place} has the keys {shown(list(turn))}. {expected}")
        role = turn[names[0]]
        if not isinstance(role, str) or role not in roles:
            raise RequestError(f"{place} has the role {shown(role)}. {nearest_name_hint(shown(role), roles)}")
        found.append({"role": roles[role], "content": _string(turn, names[1], place)})
    while column == "conversations" and found and found[0]["role"] == "assistant":
        del found[0]
    return tuple(found)
