"""A tokenizer with what it gives checked: one that a caller brings may be any object with `__call__` and `decode`.

Any number of threads may use it. Fast tokenizers of transformers encode and decode in many at once, so that the engine
never waits while a long text is encoded; others, which may keep state of their own, are called by one at a time.

Knows, besides, what text each token adds to others, so that most text is decoded many tokens at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

from foretoken.core.checks import checked_token_ids, shown
from foretoken.core.errors import RequestError, foreign_errors_as, one_line
from foretoken.drafters.models.token_bytes import byte_alphabet
from foretoken.files.locks import ForkLock

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

# By what normalizers divide the bytes of a text at most. Of all characters in NFC none has more than 3.5 times as many
# bytes in the longest text that becomes it.
_MOST_SHRINKING = {"NFC": 4, "Prepend": 1, "ByteLevel": 1}
_KEEPING = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"}  # pre-tokenizers that drop nothing
_KEEPING_BY_BEHAVIOR = {"Split", "Punctuation"}
_BYTES = [*range(0x80), *range(0x80, 0xC0), *range(0xC2, 0xF5)]  # those that occur in UTF-8


def longest_token_bytes(tokenizer: Any) -> int | None:
    """Most bytes of a text that a tokenizer makes one token of.

    Args:
        tokenizer: Any object.

    Returns:
        An upper bound; None where none is known: for other tokenizers than fast ones of transformers, those that do not
        spell every byte, and those that drop or shorten parts of a text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    try:
        return _longest(json.loads(backend.to_str()), backend.get_vocab())
    except Exception:  # noqa: BLE001 - a file of a form that is not known, or any object of the caller's
        return None


def _longest(parts: Mapping[str, Any], vocabulary: Mapping[str, int]) -> int | None:
    """See `longest_token_bytes`; parts: as `tokenizer.json` has them."""
    model, splitting = parts["model"], list(_steps(parts["pre_tokenizer"], "pretokenizers"))
    added = {token["content"]: token["lstrip"] or token["rstrip"] for token in parts["added_tokens"]}
    shrinking = _shrinking(parts["normalizer"])
    if shrinking is None or any(added.values()) or not all(map(_keeps, splitting)):
        return None
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    is_byte_level = model["type"] == "BPE" and any(step["type"] == "ByteLevel" for step in splitting)
    if not is_byte_level and not model.get("byte_fallback"):
        return None
    alphabet = {byte: character for character, byte in byte_alphabet().items()}
    if not all((alphabet[byte] if is_byte_level else f"<0x{byte:02X}>") in vocabulary for byte in _BYTES):
        return None
    # A character of a byte-level token is a byte.
    sizes = (len(text) if is_byte_level and text not in added else len(text.encode()) for text in vocabulary)
    return shrinking * max(sizes)


def _shrinking(normalizer: Any) -> int | None:
    """By what a normalizer divides the bytes of a text at most; None where that is not known."""
    product = 1
    for step in _steps(normalizer, "normalizers"):
        kind = step["type"]
        if kind == "Replace" and "String" in step["pattern"]:
            if len(step["content"].encode()) < len(step["pattern"]["String"].encode()):
                return None
        elif kind in _MOST_SHRINKING:
            product *= _MOST_SHRINKING[kind]
        else:
            return None
    return product


def _keeps(step: Mapping[str, Any]) -> bool:
    """Whether a pre-tokenizer drops no part of a text."""
    return step["type"] in _KEEPING or (step["type"] in _KEEPING_BY_BEHAVIOR and step["behavior"] != "Removed")


def _steps(step: Any, inner: str) -> Iterator[Mapping[str, Any]]:
    """The steps of a normalizer or pre-tokenizer as `tokenizer.json` has it; inner: where a sequence has its own."""
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
        return
    for each in step[inner]:
        yield from _steps(each, inner)


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
