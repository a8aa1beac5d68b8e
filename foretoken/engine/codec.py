"""A tokenizer with what it gives checked: one that a caller brings may be any object with `__call__` and `decode`.

Any number of threads may use it. Fast tokenizers of transformers encode and decode in many at once, so that the engine
never waits while a long text is encoded; others, which may keep state of their own, are called by one at a time.

Knows, besides, what text each token adds to others, so that most text is decoded many tokens at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

from foretoken.core.checks import checked_token_ids, shown
from foretoken.core.errors import RequestError, foreign_errors_as, one_line
from foretoken.engine.text_bounds import longest_token_bytes
from foretoken.files.locks import ForkLock

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_SHORT_TOKEN = 16  # characters a token below which no text is looked at
REPLACEMENT = "\ufffd"  # what decoding shows for bytes that do not make a character


class Codec:
    """Text to token ids and back, with a tokenizer."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """Takes the tokenizer; vocab_size: V of the target."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock: AbstractContextManager[None] = ForkLock()
        if getattr(tokenizer, "is_fast", False) is True:
            with suppress(Exception):  # what it raises is told where text is encoded
                tokenizer("")  # switches off truncation and padding, which later calls leave alone then
            self._lock = nullcontext()
        self._alone: dict[tuple[int, bool], str] = {}
        self._added: dict[tuple[int, bool], str | None] = {}
        self._longest: int | None = None  # bytes of one token; found when a text is long

    def check_length(self, text: str, where: str, most: int, limit: str) -> None:
        """Refuses text that makes too many tokens for certain, by its bytes: encoding it would hold up all others.

        Args:
            text: What is to be encoded.
            where: What holds the text, for the message.
            most: Most tokens that it may make.
            limit: What that number is, for the message.

        Raises:
            RequestError: When no text of so many bytes is within the limit.
        """
        if len(text) <= _SHORT_TOKEN * most:
            return
        if self._longest is None:
            self._longest = longest_token_bytes(self._tokenizer) or sys.maxsize
        num_bytes = len(text.encode())
        if num_bytes > most * self._longest:
            raise RequestError(
                f"{where} has {num_bytes} bytes, which are more than {most} tokens of at most {self._longest} bytes. "
                f"Expected at most {most} tokens, {limit}. Shorten it."
            )

    def encode(self, text: str, where: str, **options: Any) -> list[int]:
        """Token ids of text.

        Args:
            text: What to encode.
            where: What holds the text, for messages.
            options: Of the tokenizer, such as `add_special_tokens`.

        Raises:
            RequestError: When the tokenizer fails or gives anything but ids of the target's vocabulary.
        """
        expected = "a call that gives a mapping with 'input_ids', as transformers tokenizers do"
        with _telling(f"encode {where}", expected), self._lock:
            encoding = self._tokenizer(text, **options)
            ids = encoding["input_ids"]
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        if not isinstance(ids, Sequence) or isinstance(ids, str | bytes) or any(isinstance(i, Sequence) for i in ids):
            raise RequestError(
                f"what the tokenizer gives as input_ids of {where} is {shown(ids)}. Expected a flat list of token ids."
            )
        return checked_token_ids(ids, self._vocab_size, where)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of tokens.

        Raises:
            RequestError: When the tokenizer fails or gives no text.
        """
        with _telling("decode token ids", "what transformers tokenizers take and give"), self._lock:
            text = self._tokenizer.decode(
                tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        if not isinstance(text, str):
            raise RequestError(f"what the tokenizer decodes is {shown(text)}. Expected text.")
        return text

    def alone(self, token: int, *, skip_special_tokens: bool) -> str:
        """Text of one token; decoded once."""
        key = token, skip_special_tokens
        if key not in self._alone:
            self._alone[key] = self.decode([token], skip_special_tokens=skip_special_tokens)
        return self._alone[key]

    def added(self, token: int, *, skip_special_tokens: bool) -> str | None:
        """What a token adds to the text of another, found by decoding it twice in a row; decoded once.

        Returns:
            None where it adds nothing, or bytes that make no character by themselves.
        """
        key = token, skip_special_tokens
        if key not in self._added:
            first = self.alone(token, skip_special_tokens=skip_special_tokens)
            both = self.decode([token, token], skip_special_tokens=skip_special_tokens)
            added = both.removeprefix(first)
            self._added[key] = added if added and both.startswith(first) and REPLACEMENT not in both else None
        return self._added[key]


def _telling(what: str, expected: str) -> AbstractContextManager[None]:
    """Turns whatever a tokenizer raises into a `RequestError` that says what it cannot do."""
    return foreign_errors_as(
        RequestError,
        lambda err: f"the tokenizer cannot {what}: {type(err).__name__}: {one_line(err)}. Expected {expected}.",
    )
