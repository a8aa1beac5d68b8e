"""Self-tests that a decoder passed, remembered for a month with all that they depend on."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from foretoken.files.user_cache import KeptEntries
from foretoken.runner.facts import as_key, facts_of_passes

if TYPE_CHECKING:
    from foretoken.decoder.slot_cache import SlotCache
    from foretoken.models.loading import LoadedModel

# Weights of a model that is always tested; a choice: that takes some 0.1 s.
_SMALL = 10_000_000
_FORMAT = 1
_KEPT = KeptEntries(file="foretoken-proofs.json", mark="foretoken_proofs", holder="proofs", what="passed self-tests")
FILE = _KEPT.file


def key_of_proof(model: LoadedModel, decoder: str, cache: SlotCache, *, context_len: int) -> str | None:
    """Returns what names the self-test of a decoder on a model; None if it is not remembered.

    Models in memory are not, as their weights may be any, nor are small ones.
    """
    if model.files is None or model.num_weights < _SMALL:
        return None
    facts = facts_of_passes(model, decoder) | {
        "proof": _FORMAT,
        "files": model.files,
        "code": code_version(),
        "transformers": version("transformers"),
        "rows": [cache.is_rounded, cache.num_slots > 1, cache.num_positions, context_len],
    }
    return as_key(facts)


def is_proven(key: str) -> bool:
    """Whether the self-test was passed in the last month."""
    return _KEPT.read(key) is not None


def keep_proof(key: str) -> None:
    """Remembers a passed self-test."""
    _KEPT.keep(key, {})


@cache
def code_version() -> str:
    """Returns a digest of this package's Python files."""
    root = Path(__file__).parents[1]
    parts = [
        each
        for path in sorted(root.rglob("*.py"))
        for each in (str(path.relative_to(root)).encode(), path.read_bytes())
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
