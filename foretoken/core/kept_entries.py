"""A file of the user's cache that holds entries by key, each as old as a month at most.

A file that is damaged, or cannot be read or written, is done without; one of that name that foretoken did not write
stays as it is.
"""

from __future__ import annotations

import json
import logging
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretoken.core.user_cache import may_replace, open_cache, read_kept, say_nothing_is_kept, write_kept

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_FORMAT = 1
_LARGEST_FILE = 1 << 20  # bytes; the oldest entries go when there are more
_LONGEST_AGE_S = 30 * 24 * 3600  # drivers, clocks, texts and the machine's other users change
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptEntries:
    """A kind of entries.

    Attributes:
        file: Name of their file in the cache directory.
        mark: The first key of the file, by which it is known as ours.
        holder: The key under which the entries stand.
        what: What they are, for messages.
    """

    file: str
    mark: str
    holder: str
    what: str

    def read(self, key: str) -> dict[str, Any] | None:
        """The entry under a key as it was kept, whatever it holds; None where there is none of the last month."""
        directory = open_cache()
        return None if directory is None else self._entries(directory / self.file).get(key)

    def keep(self, key: str, entry: Mapping[str, Any]) -> None:
        """Keeps an entry beside what the file holds of the last month; the file is replaced in one move."""
        directory = open_cache()
        if directory is None:
            return
        path = directory / self.file
        if not may_replace(path, mark=self._beginning):
            _log.warning(
                "%s are not kept: '%s' is not a file that foretoken wrote, and stays as it is. Move it away, or set "
                "FORETOKEN_CACHE to another directory.", self.what, path,
            )  # fmt: skip
            return
        entries = {**self._entries(path), key: {"measured": time.time(), **entry}}
        try:
            write_kept(path, self._as_bytes(entries))
        except OSError as err:
            say_nothing_is_kept(str(err))

    @property
    def _beginning(self) -> bytes:
        """What the file begins with."""
        return f'{{"{self.mark}":'.encode()

    def _as_bytes(self, entries: dict[str, Any]) -> bytes:
        """The file, without the oldest entries where it would be too large to be read again."""
        while True:
            data = json.dumps({self.mark: _FORMAT, self.holder: entries}).encode()
            if len(data) <= _LARGEST_FILE or len(entries) < 2:
                return data
            oldest_first = sorted(entries, key=lambda key: float(entries[key]["measured"]))
            entries = {key: entries[key] for key in oldest_first[(len(entries) + 3) // 4 :]}

    def _entries(self, path: Path) -> dict[str, Any]:
        """Entries of the last month; nothing where there is no file of ours or it is damaged."""
        data = read_kept(path, limit=_LARGEST_FILE)
        if data is None or not data.startswith(self._beginning):
            return {}
        try:
            known = json.loads(data).get(self.holder)
        except (ValueError, RecursionError):  # no JSON, no UTF-8; nested beyond what the parser bears
            return {}
        now = time.time()
        return {key: entry for key, entry in known.items() if _is_recent(entry, now)} if isinstance(known, dict) else {}


def is_number(value: Any) -> bool:
    """Whether a value of JSON, which may be a truth value, NaN or an integer of any size, is a finite number."""
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _is_recent(entry: Any, now: float) -> bool:
    """Whether an entry of the file was made in the last month."""
    measured: Any = entry.get("measured") if isinstance(entry, dict) else None
    return is_number(measured) and now - _LONGEST_AGE_S < measured <= now
