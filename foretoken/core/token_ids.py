"""Compares texts of token ids, and tells whose ids they are."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def common_prefix_len(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens with which two texts begin alike.

    >>> common_prefix_len([5, 6, 7, 8], [5, 6, 9])
    2
    """
    # Slices are compared in C: for texts of thousands of tokens a dozen of these cost less than a loop over all.
    most = min(len(first), len(second))
    return bisect_left(range(most), True, key=lambda at: first[: at + 1] != second[: at + 1])


def tokenizer_sha(tokenizer: Any) -> str:
    """What token ids mean: SHA-256 over the vocabulary with its ids, as hexadecimal digits."""
    entries = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(entries, ensure_ascii=True).encode()).hexdigest()
