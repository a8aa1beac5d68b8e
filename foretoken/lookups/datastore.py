"""A corpus of token ids with its sorted suffixes, in files that are mapped into memory: what followed a run of tokens.

Files are refused when their sizes or any number in them are out of range; anything else that is wrong with them gives
bad continuations, which cost speed and no text. See `foretoken.lookups.datastore_files` for what they hold.

Letters: N tokens, R continuations, D tokens of each.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from foretoken.core.errors import ConfigError
from foretoken.lookups.datastore_files import ADVICE, SUFFIXES, TOKENS, DatastoreIndex, largest_of, mapped, read_index

if TYPE_CHECKING:
    import mmap
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

_COUNTED_AT_ONCE = 1 << 22


class Found(NamedTuple):
    """A run of tokens in the corpus: suffixes `begin` … `end` - 1 in their order begin with its `length` tokens."""

    length: int
    begin: int
    end: int


class Datastore:
    """An open datastore.

    Attributes:
        index: What `index.json` holds.
        largest_id: Largest token id of the corpus.
    """

    def __init__(self, index: DatastoreIndex, tokens: mmap.mmap | bytes, suffixes: NDArray[np.uint32]) -> None:
        """Takes what the files hold, of the sizes that `index` tells; `open` checks them.

        Raises:
            ValueError: When a token id is out of range.
        """
        self.index, self._bytes, self._suffixes = index, tokens, suffixes
        self._width = np.dtype(index.dtype).itemsize
        self._tokens: NDArray[Any] = np.frombuffer(tokens, dtype=f">u{self._width}")
        counts = _token_counts(self._tokens, index.vocab_size)
        self.largest_id = len(counts) - 1
        self._starts = np.concatenate([[0], np.cumsum(counts)])  # of suffixes by their first token

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Maps a datastore into memory and reads it once, to check it.

        Args:
            directory: What `write_datastore` wrote. Its files may not be changed while it is in use.

        Raises:
            ConfigError: When there is none, or it is damaged.
        """
        index = read_index(directory)
        width = np.dtype(index.dtype).itemsize
        tokens = mapped(directory / TOKENS, index.num_tokens * width)
        suffixes: NDArray[np.uint32] = np.frombuffer(mapped(directory / SUFFIXES, index.num_tokens * 4), dtype="<u4")
        try:
            store = cls(index, tokens, suffixes)
        except ValueError as err:
            raise ConfigError(f"'{directory / TOKENS}' {err}. It is damaged. {ADVICE}") from err
        if largest_of(suffixes) >= index.num_tokens:
            raise ConfigError(
                f"'{directory / SUFFIXES}' holds {largest_of(suffixes)}. Expected places below {index.num_tokens}, the "
                f"number of tokens. It is damaged. {ADVICE}"
            )
        return store

    def __len__(self) -> int:
        """N."""
        return len(self._suffixes)

    def longest_match(self, context: Sequence[int], *, shortest: int, longest: int) -> Found | None:
        """The longest run of last tokens that occurs in the corpus.

        Args:
            context: Token ids.
            shortest: Tokens of a run at least.
            longest: Tokens of a run at most.

        Returns:
            None where not even the shortest run occurs.
        """
        longest = self._num_known(context, min(longest, len(context)))
        found = self._find(context, shortest) if longest >= shortest else None
        if found is None:
            return None
        low, high = shortest, longest  # a run of `low` occurs, none of more than `high` does
        while low < high:
            middle = (low + high + 1) // 2
            longer = self._find(context, middle)
            if longer is None:
                high = middle - 1
            else:
                low, found = middle, longer
        return found

    def continuations(self, found: Found, depth: int, most: int) -> NDArray[np.int64]:
        """What follows a run of tokens in the corpus.

        Args:
            found: The run.
            depth: D at most: no deeper than suffixes are sorted, so that equal beginnings stand together.
            most: R at most; of more occurrences, as many evenly spread over their order.

        Returns:
            (R, D) token ids in ascending order, -1 after the end of a document and of the corpus.
        """
        depth, count = min(depth, self.index.depth - found.length), found.end - found.begin
        places: Any = slice(found.begin, found.end)
        if count > most:
            places = found.begin + np.arange(most, dtype=np.int64) * count // most
        begins = self._suffixes[places].astype(np.int64) + found.length
        at = begins[:, None] + np.arange(max(depth, 0))
        if at.size and int(begins.max()) + depth > len(self):
            rows = np.where(at < len(self), self._tokens[np.minimum(at, len(self) - 1)].astype(np.int64), -1)
        else:
            rows = self._tokens[at].astype(np.int64)
        if self.index.eos_id is not None:
            is_end = rows == self.index.eos_id
            if is_end.any():
                rows[(np.cumsum(is_end, axis=1) - is_end) > 0] = -1
        return rows

    def _num_known(self, context: Sequence[int], longest: int) -> int:
        """How many of the last `longest` tokens come after the last one that no run of the corpus can hold."""
        length = 0
        while length < longest and context[len(context) - length - 1] <= self.largest_id:
            length += 1
        return length

    def _find(self, context: Sequence[int], length: int) -> Found | None:
        """The last `length` tokens in the corpus; None where they do not occur."""
        run = context[len(context) - length :]
        pattern = np.array(run, dtype=self._tokens.dtype).tobytes()
        content, suffixes, width, size = self._bytes, self._suffixes, self._width, len(pattern)

        def first_tokens(place: int) -> bytes:
            begin = int(suffixes[place]) * width
            return content[begin : begin + size]

        low, high = int(self._starts[run[0]]), int(self._starts[run[0] + 1])
        begin = bisect_left(range(len(self)), pattern, low, high, key=first_tokens)
        if begin == high or first_tokens(begin) != pattern:
            return None
        return Found(length, begin, bisect_right(range(len(self)), pattern, begin, high, key=first_tokens))


def _token_counts(tokens: NDArray[Any], vocab_size: int) -> NDArray[np.int64]:
    """How often each token occurs, up to the largest one.

    Raises:
        ValueError: When an id is outside the vocabulary.
    """
    largest = largest_of(tokens)
    if largest >= vocab_size:
        raise ValueError(f"holds token {largest}, and ids are below {vocab_size}")
    counts = np.zeros(largest + 1, dtype=np.int64)
    for at in range(0, len(tokens), _COUNTED_AT_ONCE):
        counts += np.bincount(tokens[at : at + _COUNTED_AT_ONCE].astype(np.int64), minlength=largest + 1)
    return counts
