"""The pool of n-grams against lists that are searched."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foretoken.drafters.lookahead import NgramPool

NGRAMS = st.tuples(st.integers(0, 3), st.tuples(st.integers(0, 1), st.integers(0, 1)))


@given(seen=st.lists(NGRAMS, max_size=60), per_key=st.integers(1, 3), room=st.integers(0, 4))
def test_it_keeps_what_was_seen_last(seen: list[tuple[int, tuple[int, int]]], per_key: int, room: int) -> None:
    pool, model = NgramPool(per_key=per_key, max_ngrams=per_key + room), list[tuple[int, tuple[int, int]]]()
    for entry in seen:
        pool.add(*entry)
        model = [entry, *(other for other in model if other != entry)]  # the most recent first
        same_key = [other for other in model if other[0] == entry[0]]
        model = [other for other in model if other not in same_key[per_key:]]
        while len(model) > per_key + room:  # the key that was seen longest ago goes with all it has
            stale = list(dict.fromkeys(key for key, _ in model))[-1]
            model = [other for other in model if other[0] != stale]
        for key in range(4):
            assert list(pool.after(key)) == [ngram for other, ngram in model if other == key]
        assert pool.num_ngrams == len(model) <= per_key + room
