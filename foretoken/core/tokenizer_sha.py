"""The fingerprint of a tokenizer, by which files of token ids tell whose ids they hold."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def tokenizer_sha(tokenizer: Any) -> str:
    """What token ids mean: SHA-256 over the vocabulary with its ids, as hexadecimal digits."""
    entries = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(entries, ensure_ascii=True).encode()).hexdigest()
