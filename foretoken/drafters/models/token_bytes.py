"""The bytes of each token of a tokenizer, and bytes as tokens.

Works on bytes, not on decoded text: a token may hold a part of a character, and tokenizers write spaces differently (Ġ,
▁). Encoding adds no special tokens and no space before the text. If a tokenizer still changes text, for example by
Unicode normalisation, the longest tokens that spell the bytes are used instead.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from foretoken.core.errors import ConfigError, described, foreign_errors_as

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NOT_UTF8 = re.compile("([\udc80-\udcff]+)")  # invalid bytes as "surrogateescape" decodes them
_NEUTRAL_DECODERS = {"Fuse", "Strip"}  # these change no token inside a text


class Piece(NamedTuple):
    """A token and its bytes in a text: the token's own bytes, except for `Vocabulary.stand_in`."""

    token: int
    data: bytes


class Vocabulary:
    """The tokens of a tokenizer by their bytes.

    Attributes:
        spellings: Bytes of every id; None for special tokens and ids without a token.
        specials: Content of each special token by id.
        bos: Token that begins texts, or None.
        eos: Token that ends texts, or None.
        ids: Token by bytes; an ordinary token is preferred to a byte token (<0x41>) of the same bytes.
        stand_in: Token for bytes that no token spells, and for missing special tokens.
    """

    def __init__(self, tokenizer: Any, size: int, name: str) -> None:
        """Reads the tokenizer without changing it.

        Args:
            tokenizer: A fast tokenizer of transformers.
            size: V of its model; larger ids are left out.
            name: Of the model, for messages.

        Raises:
            ConfigError: When the bytes of its tokens are unknown.
        """
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        with foreign_errors_as(
            ConfigError,
            lambda err: (
                f"the tokenizer of '{name}' does not tell the bytes of its tokens: {described(err)}. Expected a fast "
                "tokenizer that is byte-level, or marks spaces as SentencePiece does."
            ),
        ):
            parts = json.loads(backend.to_str())
            rules = _Rules.read(parts["decoder"])
            for key in ("normalizer", "pre_tokenizer"):
                parts[key] = _without_prefix(parts[key])
            parts.update(truncation=None, padding=None)
            self._backend = type(backend).from_str(json.dumps(parts))
            self._backend.encode_special_tokens = True  # "</s>" in a text is text
        added = self._backend.get_added_tokens_decoder()
        self.specials: Mapping[int, str] = {
            token: self._backend.id_to_token(token)
            for token in {*tokenizer.all_special_ids, *(token for token, entry in added.items() if entry.special)}
            if token < size
        }
        self.bos, self.eos = (
            token if token in self.specials else None for token in (tokenizer.bos_token_id, tokenizer.eos_token_id)
        )
        spellings: list[bytes | None] = [None] * size
        self.ids: dict[bytes, int] = {}
        for text, token in sorted(self._backend.get_vocab().items(), key=lambda item: item[1]):
            if token < size and token not in self.specials:
                data = text.encode() if token in added else rules.spelling(text)
                spellings[token] = data
                if data and (data not in self.ids or _BYTE_TOKEN.fullmatch(self._text(self.ids[data]))):
                    self.ids[data] = token
        self.spellings: Sequence[bytes | None] = spellings
        self._longest = max(map(len, self.ids), default=0)
        known = (tokenizer.unk_token_id, self.eos, self.bos, 0)
        self.stand_in: int = next(token for token in known if token is not None and token < size)

    def encode(self, data: bytes) -> list[Piece]:
        """Returns tokens that together spell some bytes: the tokenizer's own if the bytes are characters."""
        pieces: list[Piece] = []
        for part in _NOT_UTF8.split(data.decode("utf-8", "surrogateescape")):
            if part:
                raw = part.encode("utf-8", "surrogateescape")
                is_text = not _NOT_UTF8.fullmatch(part)
                pieces += (self._tokenized(part, raw) if is_text else None) or self._longest_tokens(raw)
        return pieces

    def _tokenized(self, text: str, data: bytes) -> list[Piece] | None:
        """Returns the tokenizer's tokens of a text; None if they do not spell it."""
        ids = self._backend.encode(text, add_special_tokens=False).ids
        pieces = [Piece(token, self.spellings[token] or b"" if token < len(self.spellings) else b"") for token in ids]
        return pieces if b"".join(piece.data for piece in pieces) == data and all(p.data for p in pieces) else None

    def _longest_tokens(self, data: bytes) -> Iterator[Piece]:
        """Yields tokens from left to right, each the longest possible."""
        start = 0
        while start < len(data):
            ends = range(min(len(data), start + self._longest), start, -1)
            end = next((end for end in ends if data[start:end] in self.ids), start + 1)
            yield Piece(self.ids.get(data[start:end], self.stand_in), data[start:end])
            start = end

    def _text(self, token: int) -> str:
        """Returns a token as the tokenizer writes it."""
        return str(self._backend.id_to_token(token))


class _Rules(NamedTuple):
    """How a tokenizer writes bytes.

    Attributes:
        alphabet: Byte of each character of byte-level tokenizers; None for others.
        replacements: Replacements of other tokenizers, such as ▁ for a space.
        has_byte_tokens: Whether <0x0A> stands for one byte.
    """

    alphabet: Mapping[str, int] | None
    replacements: Sequence[tuple[str, str]]
    has_byte_tokens: bool

    @classmethod
    def read(cls, decoder: Any) -> _Rules:
        """Reads the rules of a decoder of `tokenizer.json`; raises `ValueError` if it has others."""
        steps = decoder["decoders"] if decoder is not None and decoder["type"] == "Sequence" else [decoder]
        kinds = {"none" if step is None else step["type"] for step in steps}
        replacements = []
        for step in steps:
            if step is not None and step["type"] == "Metaspace":
                replacements.append((step["replacement"], " "))
            elif step is not None and step["type"] == "Replace":
                replacements.append((step["pattern"]["String"], step["content"]))
        other = sorted(kinds - _NEUTRAL_DECODERS - {"ByteLevel", "ByteFallback", "Metaspace", "Replace"})
        if other or not kinds - _NEUTRAL_DECODERS:
            raise ValueError(f"its decoder is of type {', '.join(other or kinds)}")
        return cls(byte_alphabet() if "ByteLevel" in kinds else None, replacements, "ByteFallback" in kinds)

    def spelling(self, text: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(text) if self.has_byte_tokens else None
        if byte:
            return bytes([int(byte[1], 16)])
        if self.alphabet is not None and all(character in self.alphabet for character in text):
            return bytes(self.alphabet[character] for character in text)
        for marker, content in self.replacements:
            text = text.replace(marker, content)
        return text.encode()


def byte_alphabet() -> dict[str, int]:
    """Returns the byte of each character that byte-level tokenizers write (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _without_prefix(step: Any) -> Any:
    """Returns a normaliser or pre-tokenizer of `tokenizer.json` that puts no space before a text."""
    if step is None or step["type"] == "Prepend":
        return None
    changed = dict(step)
    for key in ("normalizers", "pretokenizers"):
        if key in step:
            changed[key] = [part for part in map(_without_prefix, step[key]) if part is not None]
    if "add_prefix_space" in step:
        changed["add_prefix_space"] = False
    if step["type"] == "Metaspace":
        changed["prepend_scheme"] = "never"
    return changed
