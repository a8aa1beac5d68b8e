"""N-grams by the token before them: the last few that were seen after each token, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class NgramPool:
    """The least recently seen go first: of a token's n-grams its oldest, and of all tokens the one seen longest ago."""

    def __init__(self, *, per_key: int, max_ngrams: int) -> None:
        """An empty pool.

        Args:
            per_key: Most n-grams kept after one token.
            max_ngrams: Most n-grams altogether, no fewer than `per_key`.
        """
        self._per_key, self._max_ngrams = per_key, max_ngrams
        self._by_key: OrderedDict[int, dict[tuple[int, ...], None]] = OrderedDict()  # both: least recently seen first
        self._num_ngrams = 0

    def __len__(self) -> int:
        """How many n-grams there are."""
        return self._num_ngrams

    def add(self, key: int, ngram: tuple[int, ...]) -> None:
        """Notes that an n-gram was seen after a token."""
        ngrams = self._by_key.setdefault(key, {})
        self._by_key.move_to_end(key)
        if ngram in ngrams:
            del ngrams[ngram]
        elif len(ngrams) == self._per_key:
            del ngrams[next(iter(ngrams))]
        else:
            self._num_ngrams += 1
        ngrams[ngram] = None
        while self._num_ngrams > self._max_ngrams:
            _, dropped = self._by_key.popitem(last=False)
            self._num_ngrams -= len(dropped)

    def after(self, key: int) -> Iterator[tuple[int, ...]]:
        """The n-grams seen after a token, the most recent first."""
        return reversed(self._by_key.get(key, {}))
