"""Suffix decoding by hand: what is proposed from the own text and from others', and the bounds of the pool."""

import math
import random
from array import array
from typing import Any

import pytest
from drafting_contexts import GREEDY, attached, context, continued
from hypothesis import given
from hypothesis import strategies as st

from foretoken.core.errors import ForetokenError
from foretoken.drafters.base import Committed, DraftRequest
from foretoken.drafters.registry import drafter_options
from foretoken.drafters.suffix import Member, Options, SuffixDrafter, SuffixPool, create
from foretoken.drafters.suffix_tree import count_of
from tests.tree_checks import check_tree

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def drafter(**options: Any) -> SuffixDrafter:
    """A drafter with short names for its own options."""
    long = {key if key in Options.model_fields else f"suffix_decoding_{key}": value for key, value in options.items()}
    made = attached(create(Options(method="suffix", **long)))
    assert isinstance(made, SuffixDrafter)
    return made


def request(lookup: SuffixDrafter, prompt: list[int], slot: int = 0, salt: str | None = None) -> None:
    """A request whose prompt is in the KV cache."""
    lookup.begin(slot, DraftRequest(request_id="r", prompt=prompt, params=GREEDY, cache_salt=salt))
    if prompt:
        commit(lookup, 0, prompt, slot)


def commit(lookup: SuffixDrafter, start: int, tokens: list[int], slot: int = 0) -> None:
    """Positions entered the KV cache."""
    lookup.commit(Committed(slots=[slot], starts=[start], tokens=[tokens], features=None))


def write(lookup: SuffixDrafter, prompt: list[int], output: list[int], salt: str | None = None) -> None:
    """A whole request, in the last slot."""
    request(lookup, prompt, slot=7, salt=salt)
    commit(lookup, len(prompt), output, slot=7)
    lookup.release(7)


def drafted(lookup: SuffixDrafter, tokens: list[int], slot: int = 0, **bounds: Any) -> list[int]:
    """Tokens that are proposed after a text."""
    tree = lookup.propose(context([tokens], slots=[slot], **bounds))
    check_tree(tree)
    return list(tree.rows()[0].tokens[1:])


def test_what_followed_in_the_own_text() -> None:
    lookup = drafter(max_spec_factor=2.0)
    request(lookup, [1, 2, 3, 9, 7, 1, 2, 3, 9, 8, 4])
    text = [1, 2, 3, 9, 7, 1, 2, 3, 9, 8, 4, 1, 2, 3]
    tree = lookup.propose(context([text]))
    assert tree.rows()[0].tokens == [3, 9, 8, 4, 1, 2, 3], "six tokens for a match of three"
    assert tree.scores is not None
    # Two occurrences before the end of the text: both go on with 9, one of them with 8. A match of three goes on for d
    # tokens with probability 4 / (4 + d).
    shares = [1, *[1 / 2] * 5]
    expected = [share * 4 / (4 + d) for d, share in enumerate(shares, start=1)]
    assert tree.scores[0].tolist() == pytest.approx([0.0, *map(math.log, expected)])


def test_a_longer_match_is_surer() -> None:
    """Also where the draft is so deep that the tree has no room for the whole match."""

    def first_prob(num_known: int) -> float:
        lookup = drafter(max_tree_depth=6)
        request(lookup, [*range(20), 99, *range(20 - num_known, 20)][:-1])
        tree = lookup.propose(context([[*range(20), 99, *range(20 - num_known, 20)][:-1]]))
        assert tree.scores is not None
        return math.exp(tree.scores[0, 1])

    assert [first_prob(n) for n in (2, 3, 4, 9)] == pytest.approx([2 / 3, 3 / 4, 4 / 5, 6 / 7])


@pytest.mark.parametrize(("factor", "expected"), [(1.0, 2), (3.0, 6), (0.4, 0), (0.0, 0)])
def test_a_longer_match_is_trusted_with_more_tokens(factor: float, expected: int) -> None:
    lookup = drafter(max_spec_factor=factor)
    write(lookup, [0], [5, 6, 7, 8, 9, 10, 11, 12])
    request(lookup, [1, 5])
    assert drafted(lookup, [1, 5, 6]) == [7, 8, 9, 10, 11, 12][:expected]


@given(
    tokens=TOKENS, path=TOKENS, depth=st.integers(1, 8), factor=st.sampled_from([0.5, 1.0, 4.0]),
    tree_depth=st.sampled_from([3, 4, 10]),
)  # fmt: skip
def test_a_path_is_continued_as_if_it_were_committed(
    tokens: list[int], path: list[int], depth: int, factor: float, tree_depth: int
) -> None:
    """By the own text, whether or not the tree is as deep as the path is long."""
    options = {"max_spec_factor": factor, "max_cached_requests": 0, "max_tree_depth": tree_depth}
    lookup, other = drafter(**options), drafter(**options)
    request(lookup, [])
    request(other, [])
    found = continued(lookup, tokens, path, depth)
    assert found == drafted(other, [*tokens, *path], max_depth=depth)


def test_a_path_is_continued_by_what_others_wrote() -> None:
    lookup = drafter(max_spec_factor=2.0)
    write(lookup, [0], [5, 6, 7, 8, 9, 10, 11, 12])
    request(lookup, [1, 2])
    assert continued(lookup, [1, 2], [6, 7], 9) == [8, 9, 10, 11]
    assert continued(lookup, [1, 2], [6, 7], 2) == [8, 9]
    assert continued(lookup, [1, 2], [7, 6], 2) == [7, 8]
    assert continued(lookup, [1, 2], [3], 2) == []


@pytest.mark.parametrize("tree", ["chain", "tree"])
def test_a_run_of_one_token_is_drafted_on(tree: str) -> None:
    lookup = drafter(tree=tree)
    request(lookup, [])
    assert drafted(lookup, [1, *[7] * 16]) == [7] * 8


def test_a_tree_holds_the_frequent_continuations_and_no_rare_ones() -> None:
    lookup = drafter(tree="tree", max_spec_factor=8.0)
    for last, times in ((3, 6), (4, 3), (5, 1)):
        for _ in range(times):
            write(lookup, [0], [1, 2, last])
    tree = lookup.propose(context([[9, 1, 2]]))
    assert tree.rows()[0] == ([2, 3, 4, 5], [-1, 0, 0, 0])
    assert tree.scores is not None
    assert tree.scores.exp()[0].tolist() == pytest.approx([1.0, *(share * 3 / 4 for share in (0.6, 0.3, 0.1))])
    strict = drafter(tree="tree", max_spec_factor=8.0, min_token_prob=0.2)
    for last, times in ((3, 6), (4, 3), (5, 1)):
        for _ in range(times):
            write(strict, [0], [1, 2, last])
    assert drafted(strict, [9, 1, 2]) == [3, 4]
    assert drafted(strict, [9, 1, 2], max_nodes=2) == [3]


def test_outputs_are_shared_and_prompts_are_not() -> None:
    lookup = drafter()
    write(lookup, [1, 2, 3, 4], [5, 6, 7])
    assert drafted(lookup, [9, 1, 2, 3]) == []
    request(lookup, [9])
    assert drafted(lookup, [9, 5, 6]) == [7]


def test_running_outputs_are_shared_once_they_are_deep_enough() -> None:
    lookup = drafter(max_tree_depth=4)
    request(lookup, [0], slot=0)
    commit(lookup, 1, [5, 6, 7], slot=0)
    assert drafted(lookup, [9, 5, 6], slot=1) == []
    commit(lookup, 4, [8, 9], slot=0)
    assert drafted(lookup, [9, 5, 6], slot=1) == [7, 8]


def test_salts_separate() -> None:
    """What a request proposes is the same as if those with other salts had never been."""
    lookup = drafter()
    write(lookup, [0], [1, 2, 3], salt="a")
    write(lookup, [0], [1, 2, 4], salt=None)
    for salt, expected in (("a", [3]), (None, [4]), ("b", []), ("", [])):
        request(lookup, [9], slot=1, salt=salt)
        assert drafted(lookup, [9, 1, 2], slot=1) == expected


@pytest.mark.parametrize("options", [{"max_cached_requests": 0}, {"max_cached_bytes": 1}])
def test_nothing_is_shared_where_nothing_may_be(options: dict[str, int]) -> None:
    lookup = drafter(**options)
    write(lookup, [0], [1, 2, 3])
    assert drafted(lookup, [9, 1, 2]) == []
    assert (lookup.pool is None) == ("max_cached_requests" in options)
    assert lookup.pool is None or lookup.pool.num_bytes == 0


def test_what_is_aborted_is_an_output_of_its_length() -> None:
    """However far a request came: the pool holds what it wrote, whole, and its slot starts anew."""
    lookup = drafter()
    request(lookup, [1, 2])
    lookup.release(0)  # before anything was written
    assert lookup.pool is not None
    assert (len(lookup.pool), lookup.pool.num_bytes) == (0, 0)
    request(lookup, [1, 2])
    drafted(lookup, [1, 2, 3, 4])
    commit(lookup, 2, [3, 4, 5])
    lookup.begin(0, DraftRequest(request_id="next", prompt=[8], params=GREEDY))  # the slot was never released
    whole = drafter()
    write(whole, [7], [3, 4, 5])
    assert whole.pool is not None
    assert lookup.pool.num_bytes == whole.pool.num_bytes
    assert drafted(lookup, [8, 3, 4]) == [5]
    lookup.release(0)
    lookup.release(0)


@given(tokens=TOKENS, output=TOKENS, steps=st.lists(st.integers(1, 6), min_size=1), is_tree=st.booleans())
def test_drafts_follow_from_what_is_committed(
    tokens: list[int], output: list[int], steps: list[int], is_tree: bool
) -> None:
    """Whatever was proposed and thrown away, and in however many parts a text was committed."""
    options = {"tree": "tree" if is_tree else "chain", "max_tree_depth": 6}
    stepwise, at_once = drafter(**options), drafter(**options)
    for lookup in (stepwise, at_once):
        write(lookup, [1], output)
        lookup.begin(3, DraftRequest(request_id="r", prompt=tokens[:2], params=GREEDY))
    position = 0
    for step in steps:
        stop = min(position + step, len(tokens) - 1)
        if stop > position:
            commit(stepwise, position, tokens[position:stop], slot=3)
            position = stop
        one, other = (stepwise.propose(context([tokens[: position + 1]], slots=[3])) for _ in range(2))
        assert one.rows() == other.rows()
    one, other = (lookup.propose(context([tokens], slots=[3])) for lookup in (stepwise, at_once))
    assert one.rows() == other.rows()
    assert one.scores is not None
    assert other.scores is not None
    assert one.scores.equal(other.scores)


def test_rows_are_independent_and_within_their_bounds() -> None:
    lookup = drafter(max_spec_factor=4.0)
    text = [1, 2, 3, 4, 5, 6, 1, 2]
    tree = lookup.propose(context([text, [7, 8], text], max_depth=[9, 9, 1]))
    check_tree(tree)
    assert [row.tokens for row in tree.rows()] == [[2, 3, 4, 5, 6, 1, 2], [8], [2, 3]]
    assert tree.scores is not None
    assert tree.scores[1].tolist() == [0.0] * 7
    assert lookup.propose(context([text, text], slots=[4, 5], max_depth=0)).width == 1


@pytest.mark.parametrize(
    ("options", "width"),
    [
        ({}, 17),
        ({"num_speculative_tokens": 5}, 6),
        ({"max_nodes": 4}, 4),
        ({"max_tree_depth": 8, "num_speculative_tokens": 20}, 8),
        ({"tree": "tree", "max_nodes": 9}, 9),
    ],
)
def test_no_tree_is_wider_than_announced(options: dict[str, Any], width: int) -> None:
    """A draft and its match, of one token here, are together no longer than the tree is deep."""
    lookup = drafter(max_spec_factor=64.0, min_token_prob=0.0, **options)
    assert lookup.nodes_by_depth[-1] >= width
    write(lookup, [0], list(range(40)))
    assert lookup.propose(context([[50, 1, 2, 3, 4]], max_depth=1000)).width == width


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tree": {"widths": [2, 2]}}, "method 'suffix' has no static trees, and 'tree' is"),
        ({"tree": "dynamic"}, "method 'suffix' has no dynamic trees"),
        ({"suffix_decoding_max_tree_depth": 1}, "'suffix_decoding_max_tree_depth' of method 'suffix' is 1"),
        ({"suffix_decoding_max_cached_requests": -1}, "'suffix_decoding_max_cached_requests' of method 'suffix' is -1"),
        ({"suffix_decoding_max_cached_bytes": 0}, "'suffix_decoding_max_cached_bytes' of method 'suffix' is 0"),
        ({"suffix_decoding_min_token_prob": 1.5}, "'suffix_decoding_min_token_prob' of method 'suffix' is 1.5"),
        ({"suffix_decoding_max_spec_factor": -1.0}, "'suffix_decoding_max_spec_factor' of method 'suffix' is -1"),
        ({"suffix_decoding_max_depth": 9}, "Did you mean 'suffix_decoding_max_tree_depth'"),
    ],
)
def test_wrong_options_are_refused_in_a_sentence(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ForetokenError) as refused:
        drafter_options({"method": "suffix", **keys})
    assert message in str(refused.value)


def test_defaults_are_those_of_vllm() -> None:
    options = drafter_options({"method": "suffix"})
    assert isinstance(options, Options)
    assert options.suffix_decoding_max_tree_depth == 24
    assert options.suffix_decoding_max_cached_requests == 10_000
    assert options.suffix_decoding_max_spec_factor == 1.0
    assert options.suffix_decoding_min_token_prob == 0.1


DEPTH = 6  # of the pool


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
