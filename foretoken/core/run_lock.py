"""Holds a directory for one long run at a time; the system gives it back when the process ends, however it ends."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from foretoken.core.file_lock import file_lock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_LOCK = "run.lock"


@contextmanager
def run_lock(directory: Path, *, option: str) -> Iterator[None]:
    """The directory for this run alone while the block lasts; it is made where it is missing.

    Args:
        directory: Of the run.
        option: That named it, for the message.

    Raises:
        ConfigError: When another run is at work there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    refusal = (
        f"another run is at work in '{directory}'. Expected one at a time. Wait for it, or choose another {option}."
    )
    with file_lock(directory / _LOCK, refusal=refusal):
        yield
