"""How many bytes of text one token may stand for, so that text of too many tokens is refused before it is encoded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from foretoken.drafters.models.token_bytes import byte_alphabet

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
