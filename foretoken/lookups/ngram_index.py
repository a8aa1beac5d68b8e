"""Where the last few tokens of a growing sequence occurred before."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MOST_MATCHES = 4  # of each length


class NgramIndex:
    """Where each run of tokens of a growing sequence ended.

    Memory grows by one number and at most one dictionary entry for a token and match length, whatever the tokens are;
    a look-up takes the same time whatever they are.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        """An empty index of runs of `shortest` to `longest` tokens."""
        self._lengths = range(longest, shortest - 1, -1)
        self._last: dict[tuple[int, ...], int] = {}
        # For each match length and each end of a run, where the same run ended before; 0 where it never did.
        self._before = {length: array("q", [0]) for length in self._lengths}
        self._num_tokens = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds the runs that end after tokens not seen yet; `tokens` is the whole sequence."""
        last = self._last
        for end in range(self._num_tokens + 1, len(tokens) + 1):
            for length in self._lengths:
                before = 0
                if length <= end:
                    run = tuple(tokens[end - length : end])
                    before = last.get(run, 0)
                    last[run] = end
                self._before[length].append(before)
        self._num_tokens = len(tokens)

    def last_end(self, tail: Sequence[int], num_added: int) -> int | None:
        """Where the end of a text occurred last before: the sequence with some tokens added that the index lacks.

        Args:
            tail: The added tokens, and before them the sequence's last ones: as many as the longest run has, or all.
            num_added: How many are added, at least one.

        Returns:
            End in the text of the first of `matches` that the index would have with the tokens added; None for none.
        """
        size, first = self._num_tokens + num_added, len(tail) - num_added
        for length in self._lengths:
            if length > len(tail):
                continue
            run = list(tail[len(tail) - length :])
            for end in range(len(tail) - 1, max(first, length - 1), -1):
                if list(tail[end - length : end]) == run:
                    return size - len(tail) + end
            if found := self._last.get(tuple(run)):
                return found
        return None

    def matches(self) -> Iterator[int]:
        """Ends of earlier occurrences of the sequence's last tokens, each once.

        Yields:
            Of the longest match the `MOST_MATCHES` most recent ones, the most recent first, then those of the next
            length, down to the shortest; what ended a longer match is not given again.
        """
        found: set[int] = set()
        for length in self._lengths:
            ends = self._before[length]
            end = ends[self._num_tokens]
            for _ in range(MOST_MATCHES):
                if not end:
                    break
                if end not in found:
                    found.add(end)
                    yield end
                end = ends[end]
