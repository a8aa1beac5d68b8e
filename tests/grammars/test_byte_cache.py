"""A cache bounded in bytes."""

from __future__ import annotations

from foretoken.grammars.compiling import ByteCache


def test_what_was_not_used_for_longest_goes_first() -> None:
    cache = ByteCache[str](100)
    for key in "abc":
        cache.put(key, key.upper(), 30)
    assert cache.get("a") == "A"
    cache.put("d", "D", 35)
    assert [cache.get(key) for key in "abcd"] == ["A", None, "C", "D"]
    assert cache.num_bytes == 95
    cache.put("e", "E", 70)
    assert [cache.get(key) for key in "acde"] == [None, None, None, "E"]
    assert cache.num_bytes == 70


def test_a_key_is_counted_once() -> None:
    cache = ByteCache[int](100)
    for value in range(10):
        cache.put("a", value, 60)
    assert (cache.get("a"), cache.num_bytes) == (9, 60)


def test_what_is_larger_than_the_cache_is_not_kept() -> None:
    cache = ByteCache[int](100)
    cache.put("a", 1, 60)
    cache.put("b", 2, 101)
    assert (cache.get("a"), cache.get("b"), cache.num_bytes) == (1, None, 60)
    cache.put("a", 3, 101)
    assert (cache.get("a"), cache.num_bytes) == (None, 0), "the former value is not kept either"
