"""Compares sequences of token ids, identifies a tokenizer by its vocabulary, and has the table of byte-level ones."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def common_prefix_len(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the length of the common prefix of two texts."""
    # Bisection: a dozen comparisons of slices in C are faster than a Python loop over thousands of tokens.
    most = min(len(first), len(second))
    return bisect_left(range(most), True, key=lambda at: first[: at + 1] != second[: at + 1])


def tokenizer_sha(tokenizer: Any) -> str:
    """Returns the SHA-256 of a tokenizer's vocabulary with its ids, as hexadecimal digits."""
    entries = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(entries, ensure_ascii=True).encode()).hexdigest()


def byte_alphabet() -> dict[str, int]:
    """Returns the byte of each character that byte-level tokenizers write (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
