"""A cache bounded in bytes: what was not used for longest goes first."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from foretoken.files.locks import ForkLock

if TYPE_CHECKING:
    from collections.abc import Hashable

T = TypeVar("T")


class _Entry(NamedTuple, Generic[T]):
    """A value and its size."""

    value: T
    num_bytes: int


class ByteCache(Generic[T]):
    """Values by key, for any number of threads.

    Attributes:
        num_bytes: Of all values together.
    """

    def __init__(self, most_bytes: int) -> None:
        """An empty cache.

        Args:
            most_bytes: Of all values together; a larger one is not kept.
        """
        self.num_bytes = 0
        self._most_bytes = most_bytes
        self._entries: OrderedDict[Hashable, _Entry[T]] = OrderedDict()
        self._lock = ForkLock()

    def get(self, key: Hashable) -> T | None:
        """The value of a key, which is used now; None where there is none."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key].value

    def put(self, key: Hashable, value: T, num_bytes: int) -> None:
        """Keeps a value, in place of those that were not used for longest."""
        with self._lock:
            if key in self._entries:
                self.num_bytes -= self._entries.pop(key).num_bytes
            if num_bytes > self._most_bytes:
                return
            self._entries[key] = _Entry(value, num_bytes)
            self.num_bytes += num_bytes
            while self.num_bytes > self._most_bytes:
                self.num_bytes -= self._entries.popitem(last=False)[1].num_bytes
