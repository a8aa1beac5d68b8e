"""Collects SIGTERM and SIGINT, so that long work ends at a point of its own choosing."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collects signals instead of dying of them, in the main thread; elsewhere the list stays empty.

    Yields:
        The numbers of those that came, which grows while the block lasts.
    """
    received: list[int] = []
    try:
        before = {number: signal.signal(number, lambda got, _: received.append(got)) for number in STOP_SIGNALS}
    except ValueError:  # not the main thread: the program that started it handles signals
        before = {}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
