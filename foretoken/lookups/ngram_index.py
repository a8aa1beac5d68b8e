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

    def last_end(self, run: Sequence[int]) -> int | None:
        """Where the longest of the runs that end some tokens occurred last; None where none did.

        Args:
            run: Tokens, the last of which count; they need not be the sequence's.
        """
        for length in self._lengths:
            if length <= len(run) and (end := self._last.get(tuple(run[-length:]))):
                return end
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
