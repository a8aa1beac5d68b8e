"""Which slots sequences get: compared, step by step, with a pool that looks at everything."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.core.token_tree import common_prefix_len
from foretoken.drafters.base import Prefix
from foretoken.engine.scheduler import Held, SlotPool, Taken

SIZE, LEAST = 4, 8


def everything(slot: int, length: int) -> int:
    """A drafter that keeps all."""
    return length


def even(slot: int, length: int) -> int:
    """A drafter that keeps an even number of positions, and none in slot 2."""
    return 0 if slot == 2 else length // 2 * 2


def take(pool: SlotPool, tokens: list[int], salt: str | None = None, running: list[Held] | None = None) -> Taken:
    """A slot for a prompt."""
    return pool.take(tokens, most=len(tokens) - 1, salt=salt, running=running or [], reusable=everything)


def shared(held: Held, tokens: list[int]) -> int:
    """Positions of a prompt whose rows a slot has and whose next token is the same; by looking at each."""
    count = 0
    while count + 1 < min(len(held.tokens), len(tokens)) and held.tokens[: count + 2] == tokens[: count + 2]:
        count += 1
    return min(count, held.length)


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix_is_what_a_loop_counts(first: list[int], second: list[int]) -> None:
    length = common_prefix_len(first, second)
    assert first[:length] == second[:length]
    assert length == min(len(first), len(second)) or first[length] != second[length]


@pytest.mark.parametrize("reusable", [everything, even])
@pytest.mark.parametrize("seed", range(20))
def test_the_longest_prefix_is_found_and_the_oldest_slot_taken(seed: int, reusable: object) -> None:
    dice, pool = random.Random(seed), SlotPool(SIZE)
    texts = [[text, *(dice.randrange(2) for _ in range(40))] for text in range(2)]
    free = [Held(slot, [], 0, None) for slot in range(SIZE)]  # in the order in which they are due
    running: list[Held] = []
    num_found = num_kept = num_copied = 0
    for _ in range(300):
        if not free or (running and dice.random() < 0.5):
            held = running.pop(dice.randrange(len(running)))
            if dice.random() < 0.1:  # it failed
                held = held._replace(length=0)
            pool.give_back(held)
            free.insert(len(free) if held.length else 0, held)
            continue
        tokens = dice.choice(texts)[: dice.randint(1, 36)] + [dice.randrange(2) for _ in range(dice.randrange(6))]
        salt = dice.choice([None, None, "mine"])
        lengths = {}
        for held in (*free, *running):
            length = min(shared(held, tokens), len(tokens) - 1) if held.salt == salt else 0
            length = reusable(held.slot, length) if length >= LEAST else 0  # type: ignore[operator]
            lengths[held.slot] = length if length >= LEAST else 0
        taken = pool.take(tokens, most=len(tokens) - 1, salt=salt, running=running, reusable=reusable)  # type: ignore[arg-type]
        assert taken.slot in [held.slot for held in free]
        if taken.prefix is None:
            assert max(lengths.values()) == 0
        else:
            num_found += 1
            assert taken.prefix.length == max(lengths.values()) == lengths[taken.prefix.slot] >= LEAST
        source = next((held for held in free if taken.prefix is not None and held.slot == taken.prefix.slot), None)
        is_copied = source is None or source.length - taken.prefix.length > free[0].length  # type: ignore[union-attr]
        assert taken.slot == (free[0].slot if source is None or is_copied else source.slot), "what loses the fewer rows"
        num_copied += taken.prefix is not None and is_copied
        num_kept += not is_copied
        free = [held for held in free if held.slot != taken.slot]
        running.append(Held(taken.slot, tokens, dice.randint(0, len(tokens)), salt))
        assert pool.free == [held.slot for held in free]
    assert num_found == num_copied + num_kept
    assert min(num_copied, num_kept) > 5


def test_a_slot_goes_on_in_place_where_that_loses_nothing() -> None:
    pool, text = SlotPool(3), list(range(30))
    first = take(pool, text)
    assert first == Taken(0, None)
    pool.give_back(Held(0, [*text, 50, 51], 31, None))
    assert take(pool, [*text, 50, 51, 52]) == Taken(0, Prefix(0, 31))
    pool.give_back(Held(0, [*text, 50, 51], 31, None))
    assert take(pool, [*text, 60, 61]) == Taken(1, Prefix(0, 29)), "its last tokens would be lost"


def test_what_is_running_is_copied() -> None:
    pool, text = SlotPool(2), list(range(30))
    slot = take(pool, text).slot
    running = [Held(slot, text, 12, "mine")]
    assert take(pool, text, None, running).prefix is None
    pool.give_back(Held(1, (), 0, None))
    assert take(pool, text, "mine", running) == Taken(1, Prefix(0, 12))


def test_short_prefixes_are_left_alone() -> None:
    pool, text = SlotPool(1), list(range(30))
    for length in (LEAST, LEAST + 1):
        slot = take(pool, text).slot
        pool.give_back(Held(slot, text, 29, None))
        found = take(pool, [*text[:length], 99, 99]).prefix
        assert found == (None if length == LEAST else Prefix(0, LEAST))
        pool.give_back(Held(slot, (), 0, None))


def test_a_pool_that_keeps_nothing_gives_the_last_slot_first() -> None:
    pool, text = SlotPool(3, keeps_prefixes=False), list(range(30))
    assert [pool.take_oldest(), pool.take_oldest()] == [0, 1]
    pool.give_back(Held(0, text, 29, None))
    pool.give_back(Held(1, text, 29, None))
    assert pool.free == [1, 0, 2]
    assert take(pool, text) == Taken(1, None)
