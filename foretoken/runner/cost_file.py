"""Measured costs from one process to the next: a file in the cache directory, believed only where it can be true.

A file that is damaged, or cannot be read or written, is done without; one of that name that foretoken did not write
stays as it is.
"""

from __future__ import annotations

import json
import logging
import math
import time
from typing import TYPE_CHECKING, Any

from foretoken.core.user_cache import may_replace, open_cache, read_kept, say_nothing_is_kept, write_kept

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

FILE = "foretoken-costs.json"
_FILE_FORMAT = 1
_MARK = b'{"foretoken_costs":'  # what the file begins with
_LARGEST_FILE = 1 << 20  # bytes, of about a thousand models
_LONGEST_AGE_S = 30 * 24 * 3600  # drivers, clocks and the machine's other users change
_LIKELY_S = (1e-7, 3600.0)  # no pass is faster or slower
_log = logging.getLogger(__name__)


def read_points(key: str, widths: Mapping[str, Sequence[int]]) -> dict[str, list[tuple[int, float]]] | None:
    """What was measured in the last month under a key, or None.

    Args:
        key: Names what was measured.
        widths: The curves that have to be there, and the widths that each may have, ascending, the first of which it
            must have.

    Returns:
        (width, seconds) pairs of each curve.
    """
    directory = open_cache()
    entry = None if directory is None else _read(directory / FILE).get(key)
    if entry is None or not all(_is_likely(entry.get(name), allowed) for name, allowed in widths.items()):
        return None
    return {name: list(zip(entry[name]["widths"], entry[name]["seconds"], strict=True)) for name in widths}


def keep_points(key: str, points: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    """Keeps curves as (width, seconds) pairs under a key, beside what the file holds of the last month."""
    directory = open_cache()
    if directory is None:
        return
    path = directory / FILE
    if not may_replace(path, mark=_MARK):
        _log.warning(
            "measured costs are not kept: '%s' is not a file that foretoken wrote, and stays as it is. Move it away, "
            "or set FORETOKEN_CACHE to another directory.", path,
        )  # fmt: skip
        return
    curves: dict[str, Any] = {"measured": time.time()}
    for name, pairs in points.items():
        curves[name] = {"widths": [width for width, _ in pairs], "seconds": [seconds for _, seconds in pairs]}
    try:
        whole = {"foretoken_costs": _FILE_FORMAT, "curves": {**_read(path), key: curves}}
        write_kept(path, json.dumps(whole).encode())
    except OSError as err:
        say_nothing_is_kept(str(err))


def _read(path: Path) -> dict[str, Any]:
    """Entries of the last month; nothing where there is no file of ours or it is damaged."""
    data = read_kept(path, limit=_LARGEST_FILE)
    if data is None or not data.startswith(_MARK):
        return {}
    try:
        known = json.loads(data).get("curves")
    except (ValueError, RecursionError):  # no JSON, no UTF-8; nested beyond what the parser bears
        return {}
    now = time.time()
    return {key: entry for key, entry in known.items() if _is_recent(entry, now)} if isinstance(known, dict) else {}


def _is_recent(entry: Any, now: float) -> bool:
    """Whether an entry of the file was made in the last month."""
    measured: Any = entry.get("measured") if isinstance(entry, dict) else None
    return _is_number(measured) and now - _LONGEST_AGE_S < measured <= now


def _is_likely(curve: Any, allowed: Sequence[int]) -> bool:
    """Whether a curve of the file can be true: some of the widths, from the first one on, and their seconds."""
    if not isinstance(curve, dict):
        return False
    widths: Any = curve.get("widths")
    seconds: Any = curve.get("seconds")
    if not isinstance(widths, list) or not isinstance(seconds, list) or len(widths) != len(seconds):
        return False
    if any(type(width) is not int for width in widths) or widths != [w for w in allowed if w in widths]:
        return False
    low, high = _LIKELY_S
    if widths[:1] != [*allowed[:1]] or not all(_is_number(value) and low <= value <= high for value in seconds):
        return False
    return bool(10 * min(seconds) >= seconds[0])  # a wider pass that is faster is noise, but not so much


def _is_number(value: Any) -> bool:
    """Whether a value of JSON, which may be a truth value, NaN or an integer of any size, is a finite number."""
    return type(value) is int or (type(value) is float and math.isfinite(value))
