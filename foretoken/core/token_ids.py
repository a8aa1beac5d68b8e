"""Identifies a tokenizer by its vocabulary, and has the table of byte-level tokenizers."""

import hashlib
import json
from typing import Any


def tokenizer_sha(tokenizer: Any) -> str:
    """Returns the SHA-256 of a tokenizer's vocabulary with its ids, as hexadecimal digits."""
    entries = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(entries, ensure_ascii=True).encode()).hexdigest()


def byte_alphabet() -> dict[str, int]:
    """Returns the byte of each character that byte-level tokenizers write (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
