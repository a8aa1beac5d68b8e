"""The pool: its bounds, who leaves first, and what salts keep apart."""

from __future__ import annotations

import random
from array import array

from foretoken.drafters.suffix import Member, SuffixPool
from foretoken.drafters.suffix_tree import count_of

DEPTH = 6


def count(pool: SuffixPool, salt: str | None, *run: int) -> int:
    """How often a run was written under a salt."""
    tree = pool.tree(salt)
    branch = None if tree is None else tree.find(array("i", run))
    return 0 if branch is None else count_of(branch)


def written(pool: SuffixPool, salt: str | None, *tokens: int) -> Member:
    """A whole output."""
    member = pool.add(salt, tokens)
    pool.close(member)
    return member


def test_the_oldest_of_all_salts_leaves_first() -> None:
    pool = SuffixPool(DEPTH, max_sequences=2, max_bytes=1 << 20)
    first = written(pool, "a", 1, 2)
    written(pool, "b", 1, 2)
    assert (count(pool, "a", 1, 2), count(pool, "b", 1, 2), count(pool, None, 1, 2)) == (1, 1, 0)
    written(pool, "b", 1, 2)
    assert not first.is_present
    assert (pool.tree("a"), count(pool, "b", 1, 2), len(pool)) == (None, 2, 2)
    written(pool, "a", 3)
    assert (count(pool, "b", 1, 2), count(pool, "a", 3)) == (1, 1)


def test_what_has_left_does_not_come_back() -> None:
    """A sequence that still grows may leave; its place in a new tree with its salt is another's."""
    pool = SuffixPool(DEPTH, max_sequences=1, max_bytes=1 << 20)
    left = pool.add("a", [1, 2])
    other = pool.add("a", [3, 4])
    pool.extend(left, [9, 9, 9, 9, 9, 9, 9])
    pool.close(left)
    pool.close(other)
    assert (count(pool, "a", 9), count(pool, "a", 3, 4), len(pool)) == (0, 1, 1)


def test_bytes_are_bounded_over_many_outputs() -> None:
    """Thousands of outputs, several at a time: the bound holds after each call, and none is kept twice."""
    draw = random.Random(0)
    pool, limit = SuffixPool(DEPTH, max_sequences=1000, max_bytes=100_000), 100_000
    running: list[Member] = []
    most = 0
    for number in range(2000):
        salt = draw.choice([None, "a", "b" * 40])
        running.append(pool.add(salt, [draw.randrange(50) for _ in range(draw.randrange(1, 12))]))
        pool.extend(draw.choice(running), [draw.randrange(50) for _ in range(4)])
        if len(running) > 5 or number > 1990:
            pool.close(running.pop(draw.randrange(len(running))))
        assert pool.num_bytes <= limit
        most = max(most, pool.num_bytes)
        trees = {salt: pool.tree(salt) for salt in (None, "a", "b" * 40)}
        assert sum(len(tree) for tree in trees.values() if tree) == len(pool)
        assert sum(tree.num_bytes for tree in trees.values() if tree) <= pool.num_bytes
    assert most > 0.9 * limit, "the bound is made use of"
    assert 20 < len(pool) < 1000


def test_an_output_that_does_not_fit_leaves_nothing() -> None:
    pool = SuffixPool(DEPTH, max_sequences=10, max_bytes=20_000)
    small = written(pool, None, 1, 2, 3)
    large = pool.add(None, range(5000))
    assert (small.is_present, large.is_present, len(pool), pool.num_bytes) == (False, False, 0, 0)
    pool.extend(large, [1])
    written(pool, None, 1, 2, 3)
    assert count(pool, None, 1, 2, 3) == 1
