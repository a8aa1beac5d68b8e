"""Measured costs from one process to the next: entries of the user's cache, believed only where they can be true."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foretoken.files.user_cache import KeptEntries, is_number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_KEPT = KeptEntries(file="foretoken-costs.json", mark="foretoken_costs", holder="curves", what="measured costs")
FILE = _KEPT.file
_LIKELY_S = (1e-7, 3600.0)  # no pass is faster or slower


def read_points(key: str, widths: Mapping[str, Sequence[int]]) -> dict[str, list[tuple[int, float]]] | None:
    """What was measured in the last month under a key, or None.

    Args:
        key: Names what was measured.
        widths: The curves that have to be there, and the widths that each may have, ascending, the first of which it
            must have.

    Returns:
        (width, seconds) pairs of each curve.
    """
    entry = _KEPT.read(key)
    if entry is None or not all(_is_likely(entry.get(name), allowed) for name, allowed in widths.items()):
        return None
    return {name: list(zip(entry[name]["widths"], entry[name]["seconds"], strict=True)) for name in widths}


def keep_points(key: str, points: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    """Keeps curves as (width, seconds) pairs under a key, beside what the file holds of the last month."""
    curves: dict[str, Any] = {}
    for name, pairs in points.items():
        curves[name] = {"widths": [width for width, _ in pairs], "seconds": [seconds for _, seconds in pairs]}
    _KEPT.keep(key, curves)


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
    if widths[:1] != [*allowed[:1]] or not all(is_number(value) and low <= value <= high for value in seconds):
        return False
    return bool(10 * min(seconds) >= seconds[0])  # a wider pass that is faster is noise, but not so much
