"""Where an output stands in a text that it repeats in part: followed token by token, and found again after a change.

The place depends on the tokens alone, and not on how many of them came at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from copy import copy
from itertools import islice
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MOST_REPLACED = 4  # tokens after a change for which as many tokens of the text are taken for replaced
_NEAREST = 8  # matches looked at on each side of the last place


class FollowedText:
    """A text, and the place in it where an output goes on.

    While the output repeats the text, the place moves along. A token that differs ends that: the place is then sought
    among the matches of the output's last tokens nearest to where it was lost, until one is found. Meanwhile the first
    few tokens are taken to stand for as many tokens of the text, as after a name that was replaced.
    """

    def __init__(self, text: Sequence[int], *, shortest: int, longest: int) -> None:
        """An output that begins with the text.

        Args:
            text: Token ids. Not copied, and not to be changed.
            shortest: Tokens that a match has at least.
            longest: Tokens of a match that are compared at most.
        """
        self._text, self._shortest, self._longest = text, shortest, longest
        self._ends: dict[tuple[int, ...], list[int]] | None = None  # of each run of `shortest` tokens; made when needed
        self._place = 0  # of the token that comes next, or came next when the place was lost
        self._num_lost = 0  # output tokens since the place was lost; 0 while the text is followed
        self._num_seen = 0

    def branch(self) -> Self:
        """One that stands at the same place and may follow another output from here on; both share what is known."""
        if self._ends is None:
            self._ends = _ends_of_runs(self._text, self._shortest)
        return copy(self)

    def follow(self, output: Sequence[int], begin: int = 0) -> None:
        """Moves on by the tokens not seen yet.

        Args:
            output: The whole output so far, perhaps with a prompt before it; or its end, from `longest` tokens before
                those not seen yet on.
            begin: Where the output begins in it; what is before is matched with nothing. Below 0 where its first
                tokens are missing.
        """
        for size in range(begin + self._num_seen + 1, len(output) + 1):
            expected = self._expected()
            if expected is not None and self._text[expected] == output[size - 1]:
                self._place, self._num_lost = expected + 1, 0
                continue
            self._num_lost += 1
            found = next(self._matches(output, begin, size), None)
            if found is not None:
                self._place, self._num_lost = found, 0
        self._num_seen = len(output) - begin

    def places(self, output: Sequence[int], begin: int = 0) -> Iterator[int]:
        """Places at which the output may go on, the most likely first, each once.

        Args:
            output: What was last followed.
            begin: Where the output begins in it.

        Yields:
            Indices into the text, less than its length: where it is followed or taken to be; then where the output's
            last tokens are found, the longest match first, of equally long ones the nearest ahead, then the nearest
            before.
        """
        expected = self._expected()
        if expected is not None:
            yield expected
        for place in self._matches(output, begin, len(output)):
            if place not in (expected, len(self._text)):
                yield place

    def _expected(self) -> int | None:
        """Place of the token that comes next if the text is followed, or was changed in a few tokens; None if not."""
        place = self._place + self._num_lost
        return place if self._num_lost <= _MOST_REPLACED and place < len(self._text) else None

    def _matches(self, output: Sequence[int], begin: int, size: int) -> Iterator[int]:
        """Ends in the text of matches of the last of `size` tokens, in the order of `places`."""
        shortest = self._shortest
        if size - begin < shortest:
            return
        if self._ends is None:
            self._ends = _ends_of_runs(self._text, shortest)
        ends = self._ends.get(tuple(output[size - shortest : size]), [])
        nearest = bisect_left(ends, self._place)
        near = [*islice(ends, nearest, nearest + _NEAREST), *reversed(ends[max(0, nearest - _NEAREST) : nearest])]
        most = min(self._longest, size - begin)
        yield from sorted(near, key=lambda end: -self._match_len(output, size, end, most))

    def _match_len(self, output: Sequence[int], size: int, end: int, most: int) -> int:
        """Tokens before `end` in the text that are the last ones of `size` tokens, `most` at most."""
        length, most = self._shortest, min(most, end)
        while length < most and self._text[end - length - 1] == output[size - length - 1]:
            length += 1
        return length


def _ends_of_runs(text: Sequence[int], length: int) -> dict[tuple[int, ...], list[int]]:
    """Where each run of so many tokens ends, ascending; as many numbers as the text has tokens at most."""
    ends: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for end in range(length, len(text) + 1):
        ends[tuple(text[end - length : end])].append(end)
    return ends
