"""What earlier and running requests wrote: suffix trees that requests with the same salt share, within two bounds.

Sequences leave in the order in which they came, whatever their salt and whether they still grow. One thread calls it,
that of the engine's loop.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretoken.lookups.suffix_tree import SuffixTree

if TYPE_CHECKING:
    from collections.abc import Sequence

_SALT_BYTES = 256  # of a tree's entry, besides the salt's characters


@dataclass(slots=True, eq=False)
class Member:
    """A sequence of the pool.

    Attributes:
        salt: Of its request.
        sequence: Its number in the tree of that salt.
        is_present: Whether it has not left yet.
    """

    salt: str | None
    sequence: int
    is_present: bool = True


class SuffixPool:
    """Sequences by salt, the oldest of which make room for new ones.

    Attributes:
        num_bytes: What all trees take, see `SuffixTree.num_bytes`.
    """

    def __init__(self, max_depth: int, *, max_sequences: int, max_bytes: int) -> None:
        """An empty pool.

        Args:
            max_depth: Of its trees.
            max_sequences: Most sequences, those that still grow among them.
            max_bytes: `num_bytes` is at most this whenever a call returns.
        """
        self._max_depth, self._max_sequences, self._max_bytes = max_depth, max_sequences, max_bytes
        self._trees: dict[str | None, SuffixTree] = {}
        self._members: deque[Member] = deque()  # the oldest first
        self.num_bytes = 0

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self._members)

    def tree(self, salt: str | None) -> SuffixTree | None:
        """What is shared under a salt; None where nothing is."""
        return self._trees.get(salt)

    def add(self, salt: str | None, tokens: Sequence[int]) -> Member:
        """A new sequence."""
        if salt not in self._trees:
            tree = self._trees[salt] = SuffixTree(self._max_depth)
            self.num_bytes += tree.num_bytes + _salt_bytes(salt)
        tree = self._trees[salt]
        before = tree.num_bytes
        member = Member(salt, tree.begin())
        self.num_bytes += tree.num_bytes - before
        self._members.append(member)
        self.extend(member, tokens)
        return member

    def extend(self, member: Member, tokens: Sequence[int]) -> None:
        """Appends tokens to a sequence; nothing happens where it has left."""
        if member.is_present:
            tree = self._trees[member.salt]
            before = tree.num_bytes
            tree.extend(member.sequence, tokens)
            self.num_bytes += tree.num_bytes - before
            self._make_room()

    def close(self, member: Member) -> None:
        """A sequence grows no further; nothing happens where it has left."""
        if member.is_present:
            tree = self._trees[member.salt]
            before = tree.num_bytes
            tree.close(member.sequence)
            self.num_bytes += tree.num_bytes - before
            self._make_room()

    def _make_room(self) -> None:
        """Removes the oldest sequences until both bounds hold."""
        while self._members and (len(self._members) > self._max_sequences or self.num_bytes > self._max_bytes):
            member = self._members.popleft()
            member.is_present = False
            tree = self._trees[member.salt]
            before = tree.num_bytes
            tree.drop_oldest()
            self.num_bytes += tree.num_bytes - before
            if not len(tree):
                del self._trees[member.salt]
                self.num_bytes -= tree.num_bytes + _salt_bytes(member.salt)


def _salt_bytes(salt: str | None) -> int:
    """Bytes of an entry for a salt."""
    return _SALT_BYTES + 4 * len(salt or "")
