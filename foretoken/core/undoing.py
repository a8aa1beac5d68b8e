"""Undoes what a block began when it does not end well, be it by Ctrl-C."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def undone_on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Calls `undo` when the block raises anything, which then goes on; does nothing after a block that ends well."""
    try:
        yield
    except BaseException:
        undo()
        raise
