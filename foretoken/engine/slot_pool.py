"""Which slot a sequence gets, and which rows it need not fill: those of a text that begins as its own.

A slot that is given back keeps its rows until another sequence takes it. One whose prompt begins alike goes on behind
them: in the same slot, which loses the rest of its rows, or, where these are more than the slot holds that is due, in
that one, to which they are copied. Rows of slots that are in use are copied as well. Knows neither caches nor drafters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from foretoken.core.token_ids import common_prefix_len
from foretoken.drafters.base import Prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

LEAST_PREFIX = 8  # positions of a prefix that is used; shorter ones are read as fast as they are copied


class Held(NamedTuple):
    """What a slot holds.

    Attributes:
        slot: Which.
        tokens: Of a text whose first ones fill its rows.
        length: Rows that are filled; 0 where nobody may use them.
        salt: Of the text's request: only those with the same one use them.
    """

    slot: int
    tokens: Sequence[int]
    length: int
    salt: str | None


class Taken(NamedTuple):
    """A slot for a sequence, and the prefix that need not be read, where there is one."""

    slot: int
    prefix: Prefix | None


class SlotPool:
    """Free slots and what they hold.

    Attributes:
        num_slots: Free and in use.
        keeps_prefixes: Whether free slots hold anything.
    """

    def __init__(self, num_slots: int, *, keeps_prefixes: bool = True) -> None:
        """All slots are free and empty."""
        self.num_slots, self.keeps_prefixes = num_slots, keeps_prefixes
        # What was given back first comes first, behind slots that hold nothing.
        self._free = [Held(slot, (), 0, None) for slot in range(num_slots)]

    @property
    def free(self) -> list[int]:
        """The free slots, in the order in which they are taken."""
        return [held.slot for held in self._free]

    def take_oldest(self) -> int:
        """The free slot that has been free for longest, an empty one first; there must be one."""
        return self._free.pop(0).slot

    def take(
        self,
        tokens: Sequence[int],
        *,
        most: int,
        salt: str | None,
        running: Iterable[Held],
        reusable: Callable[[int, int], int],
    ) -> Taken:
        """A free slot for a text, and the longest prefix of it that any slot holds; there must be a free one.

        Args:
            tokens: Of the text.
            most: Longest prefix that is of use.
            salt: Of its request.
            running: What the slots hold that are in use.
            reusable: See `Drafting.reusable`.
        """
        prefix, num_lost = self.longest_prefix(tokens, most=most, salt=salt, running=running, reusable=reusable)
        free = self.free
        if prefix is None or prefix.slot not in free or num_lost > self._free[0].length:
            return Taken(self.take_oldest(), prefix)
        del self._free[free.index(prefix.slot)]
        return Taken(prefix.slot, prefix)

    def longest_prefix(
        self,
        tokens: Sequence[int],
        *,
        most: int,
        salt: str | None,
        running: Iterable[Held],
        reusable: Callable[[int, int], int],
    ) -> tuple[Prefix | None, int]:
        """The longest prefix of a text that any slot holds, and rows of that slot behind it; arguments as `take`'s."""
        prefix, num_lost = None, 0
        for held in (*self._free, *running):
            if held.salt != salt or min(held.length, most) < LEAST_PREFIX:
                continue
            shared = common_prefix_len(held.tokens, tokens)
            length = min(shared - 1, held.length, most)  # the token after them is the same, too
            length = reusable(held.slot, length) if length >= LEAST_PREFIX else 0
            if length >= LEAST_PREFIX and (prefix is None or length > prefix.length):
                prefix, num_lost = Prefix(held.slot, length), held.length - length
        return prefix, num_lost

    def forget_oldest(self, *, but: int | None = None) -> int | None:
        """Gives up what the free slot holds that has held it for longest.

        Args:
            but: A slot that keeps what it holds.

        Returns:
            Which slot, or None where no other one holds anything.
        """
        for at, held in enumerate(self._free):
            if held.length and held.slot != but:
                del self._free[at]
                self._free.insert(0, Held(held.slot, (), 0, None))
                return held.slot
        return None

    def give_back(self, held: Held) -> None:
        """A slot is free; its tokens are not to be changed any more."""
        if self.keeps_prefixes and held.length:
            self._free.append(held)
        else:
            self._free.insert(0, Held(held.slot, (), 0, None))
