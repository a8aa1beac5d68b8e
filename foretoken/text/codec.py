"""Converts text to token ids and back, with checks, and decodes tokens as they come: text that was shown stays."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import copy
from typing import Any, Self

from foretoken.core.checks import checked_token_ids, shown
from foretoken.core.errors import RequestError, foreign_errors_as, one_line
from foretoken.core.token_ids import byte_alphabet
from foretoken.files.processes import ForkLock

# Upper bounds of how much normalizers shorten a text, in bytes. NFC: the longest text that becomes one character has at
# most 3.5 times the character's bytes.
_MOST_SHRINKING = {"NFC": 4, "Prepend": 1, "ByteLevel": 1}
_KEEPING = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"}  # pre-tokenizers that drop nothing
_KEEPING_BY_BEHAVIOR = {"Split", "Punctuation"}
_BYTES = [*range(0x80), *range(0x80, 0xC0), *range(0xC2, 0xF5)]  # bytes that occur in UTF-8


def longest_token_bytes(tokenizer: Any) -> int | None:
    """Returns an upper bound of the bytes of text in one token; None if unknown.

    The bound is known for fast tokenizers that encode every byte, and drop or shorten no part of a text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    try:
        return _longest(json.loads(backend.to_str()), backend.get_vocab())
    except Exception:  # noqa: BLE001 - an unknown form of file, or any object of the caller
        return None


def _longest(parts: Mapping[str, Any], vocabulary: Mapping[str, int]) -> int | None:
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
    # In a byte-level token each character is a byte.
    sizes = (len(text) if is_byte_level and text not in added else len(text.encode()) for text in vocabulary)
    return shrinking * max(sizes)


def _shrinking(normalizer: Any) -> int | None:
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
    return step["type"] in _KEEPING or (step["type"] in _KEEPING_BY_BEHAVIOR and step["behavior"] != "Removed")


def _steps(step: Any, inner: str) -> Iterator[Mapping[str, Any]]:
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
        return
    for each in step[inner]:
        yield from _steps(each, inner)


_SHORT_TOKEN = 16  # characters for each token; a choice: shorter text is not checked, its encoding is fast
REPLACEMENT = "\ufffd"  # decoding gives it for bytes that make no character


class Codec:
    """Converts text to token ids and back; `lock`: for calls of the tokenizer, unless any thread may make them."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self.lock: AbstractContextManager[None] = ForkLock()
        if getattr(tokenizer, "is_fast", False) is True:
            with suppress(Exception):  # `encode` reports errors
                tokenizer("")  # switches off truncation and padding for later calls
            self.lock = nullcontext()
        self._alone: dict[tuple[int, bool], str] = {}  # by token and `skip_special_tokens`
        self._added: dict[tuple[int, bool], str | None] = {}
        self._longest: int | None = None  # bytes of one token; found when a text is long

    def check_length(self, text: str, where: str, most: int, limit: str) -> None:
        """Raises `RequestError` for text of more than `most` tokens: encoding it would delay other requests."""
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
        """Returns the token ids of text; options of the tokenizer, such as `add_special_tokens`, pass through.

        `where` names the text in messages. Raises `RequestError` when the tokenizer fails, or returns anything but ids
        of the target's vocabulary.
        """
        expected = "a call that gives a mapping with 'input_ids', as transformers tokenizers do"
        with _telling(f"encode {where}", expected), self.lock:
            encoding = self._tokenizer(text, **options)
            ids = encoding["input_ids"]
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        is_list = isinstance(ids, Sequence) and not isinstance(ids, str | bytes)
        if not is_list or any(issubclass(kind, Sequence) for kind in set(map(type, ids))):  # fast for long lists
            raise RequestError(
                f"what the tokenizer gives as input_ids of {where} is {shown(ids)}. Expected a flat list of token ids."
            )
        return checked_token_ids(ids, self._vocab_size, where)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Returns the text of tokens; raises `RequestError` if the tokenizer fails or returns no text."""
        with _telling("decode token ids", "what transformers tokenizers take and give"), self.lock:
            text = self._tokenizer.decode(
                tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        if not isinstance(text, str):
            raise RequestError(f"what the tokenizer decodes is {shown(text)}. Expected text.")
        return text

    def alone(self, token: int, *, skip_special_tokens: bool) -> str:
        """Returns the text of one token; caches it."""
        key = token, skip_special_tokens
        if key not in self._alone:
            self._alone[key] = self.decode([token], skip_special_tokens=skip_special_tokens)
        return self._alone[key]

    def added(self, token: int, *, skip_special_tokens: bool) -> str | None:
        """Returns the text that a token adds after another token; None for no text, or a part of a character.

        The codec decodes the token twice, and keeps the result.
        """
        key = token, skip_special_tokens
        if key not in self._added:
            first = self.alone(token, skip_special_tokens=skip_special_tokens)
            both = self.decode([token, token], skip_special_tokens=skip_special_tokens)
            added = both.removeprefix(first)
            self._added[key] = added if added and both.startswith(first) and REPLACEMENT not in both else None
        return self._added[key]


def _telling(what: str, expected: str) -> AbstractContextManager[None]:
    return foreign_errors_as(
        RequestError,
        lambda err: f"the tokenizer cannot {what}: {type(err).__name__}: {one_line(err)}. Expected {expected}.",
    )


_TOGETHER = 32  # tokens that are decoded at once; a choice: fewer calls against tokens decoded again


class Detokenizer:
    """Decodes one sequence's output incrementally.

    A token's text can depend on the tokens before it, so a few of them are decoded again. Text that ends inside a
    character is held back until the character is whole. The text does not depend on how many tokens come at once.

    Attributes:
        text: The certain text so far.
        ends: For each token the number of certain characters.
    """

    def __init__(self, codec: Codec, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        self._codec, self._skip = codec, skip_special_tokens
        self._tokens = list(prompt[-5:])  # context for the first token
        self._read = len(self._tokens)
        self._prefix = 0
        self.text = ""
        self.ends: list[int] = []

    def copy(self) -> Self:
        """Returns another one with the same text, to look ahead."""
        other = copy(self)
        other._tokens, other.ends = list(self._tokens), list(self.ends)
        return other

    def push(self, token: int) -> str:
        """Adds a token; returns the text that became certain, which may be empty."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._prefix : self._read])
        now = self._decode(self._tokens[self._prefix :])
        new = "" if now.endswith(REPLACEMENT) else now[len(before) :]
        if new:
            self._prefix, self._read = self._read, len(self._tokens)
            self.text += new
        self.ends.append(len(self.text))
        return new

    def push_all(self, tokens: Sequence[int]) -> None:
        """Adds several tokens; the result is that of `push` for each, in less time for most text."""
        for start in range(0, len(tokens), _TOGETHER):
            some = tokens[start : start + _TOGETHER]
            if not self._push_together(some):
                for token in some:
                    self.push(token)

    def _push_together(self, tokens: Sequence[int]) -> bool:
        """Adds tokens if each adds its own text alone, which decoding them together confirms; returns whether so."""
        added = [self._codec.added(token, skip_special_tokens=self._skip) for token in tokens]
        text = "".join(part for part in added if part is not None)
        if len(tokens) < 2 or None in added:
            return False
        window = self._tokens[self._prefix :]
        if self._decode([*window, *tokens]) != self._decode(window[: self._read - self._prefix]) + text:
            return False
        self._tokens.extend(tokens)
        self._prefix, self._read = len(self._tokens) - 1, len(self._tokens)
        for part in filter(None, added):
            self.text += part
            self.ends.append(len(self.text))
        return True

    def flush(self) -> str:
        """Returns the held-back text, incomplete characters included."""
        before = self._decode(self._tokens[self._prefix : self._read])
        rest = self._decode(self._tokens[self._prefix :])[len(before) :]
        self._prefix = self._read = len(self._tokens)
        self.text += rest
        return rest

    def parts(self, text: str) -> list[str]:
        """Splits a text, which a stop string may have cut, by token; returns one part for each token."""
        ends = [*self.ends[:-1], len(text)] if self.ends else []
        return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def _decode(self, tokens: list[int]) -> str:
        if len(tokens) == 1:
            return self._codec.alone(tokens[0], skip_special_tokens=self._skip)
        return self._codec.decode(tokens, skip_special_tokens=self._skip)


class StopStrings:
    """Finds stop strings in growing text, and tells how much of the text can be shown."""

    def __init__(self, stops: Sequence[str], *, keep: bool) -> None:
        """Looks for `stops`; `keep` leaves the stop string in the text."""
        self._stops, self._keep = stops, keep
        self.is_empty = not stops
        self._held_back = max((len(stop) for stop in stops), default=1) - 1

    def find(self, text: str, num_new: int) -> tuple[str, int] | None:
        """Returns the first stop string that ends in the last `num_new` characters, and where to cut; else None."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            at = text.find(stop, max(0, len(text) - num_new - len(stop) + 1))
            if at >= 0 and (best is None or at < best[0]):
                best = (at, stop)
        if best is None:
            return None
        at, stop = best
        return stop, at + len(stop) * self._keep

    def showable(self, text: str) -> int:
        """Returns the number of characters that no stop string can cut any more."""
        return len(text) - min(self._held_back, len(text))
