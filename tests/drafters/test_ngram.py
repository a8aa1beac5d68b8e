"""Prompt lookup against a search of the whole text."""

from typing import Any

import numpy as np
import pytest
from drafting_contexts import attached, begin, context, continued
from hypothesis import given
from hypothesis import strategies as st

from foretoken.drafters.ngram import MOST_MATCHES, NgramDrafter, NgramIndex, Options, create
from tests.tree_checks import check_tree

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def drafter(**options: Any) -> NgramDrafter:
    """A drafter with the given options."""
    made = attached(create(Options(method="ngram", **options)))
    assert isinstance(made, NgramDrafter)
    return made


def brute_force(tokens: list[int], shortest: int, longest: int) -> list[int]:
    """Ends of earlier occurrences of the last tokens: longest match first, then the four most recent."""
    found: list[int] = []
    for length in range(longest, shortest - 1, -1):
        ends = [
            end
            for end in range(len(tokens) - 1, length - 1, -1)
            if tokens[end - length : end] == tokens[len(tokens) - length :]
        ]
        found += [end for end in ends[:4] if end not in found]
    return found


def following(tokens: list[int], end: int, depth: int) -> list[int]:
    """What follows a match, the text's end being followed by what followed its last occurrence."""
    text = list(tokens)
    for _ in range(end + depth - len(tokens)):
        text.append(text[end - len(tokens)])
    return text[end : end + depth]


@given(tokens=TOKENS, shortest=st.integers(1, 3), more=st.integers(0, 3), steps=st.lists(st.integers(1, 5)))
def test_matches_are_those_of_a_search(tokens: list[int], shortest: int, more: int, steps: list[int]) -> None:
    """However the sequence grew: all at once, or by accepted paths of any length."""
    index = NgramIndex(shortest, shortest + more)
    length = 0
    for step in steps:
        length = min(length + step, len(tokens))
        index.extend(tokens[:length])
    index.extend(tokens)
    assert list(index.matches()) == brute_force(tokens, shortest, shortest + more)


def test_a_repeated_token_costs_no_more_than_others() -> None:
    """Neither in entries that are kept nor in matches that are looked at."""
    index, size = NgramIndex(2, 4), 5000
    index.extend([7] * size)
    assert len(index._last) == 3
    assert [len(ends) for ends in index._before.values()] == [size + 1] * 3
    assert list(index.matches()) == [size - 1, size - 2, size - 3, size - 4]
    assert MOST_MATCHES == 4


@given(tokens=TOKENS, depth=st.integers(0, 6))
def test_a_chain_is_what_followed_the_first_match(tokens: list[int], depth: int) -> None:
    tree = drafter(prompt_lookup_min=1, prompt_lookup_max=3).propose(context([tokens], max_depth=depth))
    check_tree(tree)
    ends = brute_force(tokens, 1, 3)
    wanted = following(tokens, ends[0], depth) if ends else []
    ids, parents = tree.rows()[0]
    assert ids == [tokens[-1], *wanted]
    assert parents == list(range(-1, len(wanted)))


@pytest.mark.parametrize("tree", ["chain", "tree"])
@pytest.mark.parametrize("period", [[7], [7, 8, 9]])
def test_what_repeats_itself_is_drafted_as_long_as_may_be(tree: str, period: list[int]) -> None:
    tokens = [1, 2, *period * 9]
    drafted = drafter(tree=tree).propose(context([tokens], max_depth=12)).rows()[0]
    assert drafted.tokens[1:13] == (period * 12)[:12]
    assert drafted.parents[1:13] == list(range(12))


@given(tokens=TOKENS, path=TOKENS, depth=st.integers(1, 6), shortest=st.integers(1, 3), more=st.integers(0, 3))
def test_a_path_is_continued_as_if_it_were_committed(
    tokens: list[int], path: list[int], depth: int, shortest: int, more: int
) -> None:
    sizes = {"prompt_lookup_min": shortest, "prompt_lookup_max": shortest + more}
    found = continued(drafter(**sizes), tokens, path, depth)
    assert found == drafter(**sizes).propose(context([[*tokens, *path]], max_depth=depth)).rows()[0].tokens[1:]


@given(tokens=TOKENS, depth=st.integers(0, 6), max_nodes=st.integers(2, 20))
def test_a_tree_holds_what_followed_every_match(tokens: list[int], depth: int, max_nodes: int) -> None:
    """Continuations enter in the order of matches, as far as nodes allow; siblings differ."""
    tree = drafter(tree="tree", max_nodes=max_nodes, prompt_lookup_min=1).propose(context([tokens], max_depth=depth))
    check_tree(tree)
    ids, parents = tree.rows()[0]
    assert tree.width <= max_nodes
    assert tree.max_depth <= depth
    assert len(set(zip(parents[1:], ids[1:], strict=True))) == len(ids) - 1
    paths = {tuple(path_of(node, ids, parents)) for node in range(1, len(ids))}
    wanted = [following(tokens, end, depth) for end in brute_force(tokens, 1, 4)]
    prefixes = {tuple(path[:length]) for path in wanted for length in range(1, len(path) + 1)}
    assert paths <= prefixes
    assert len(paths) == min(len(prefixes), max_nodes - 1)
    assert not wanted or tuple(wanted[0][: max_nodes - 1]) in {*paths, ()}


def path_of(node: int, ids: list[int], parents: list[int]) -> list[int]:
    """Tokens from below the root to a node."""
    return [*path_of(parents[node], ids, parents), ids[node]] if node else []


@given(tokens=TOKENS, depth=st.integers(1, 6), kind=st.sampled_from(["chain", "tree"]))
def test_scores_say_how_far_back_the_text_agrees(tokens: list[int], depth: int, kind: str) -> None:
    tree = drafter(tree=kind, prompt_lookup_min=1, prompt_lookup_max=3).propose(context([tokens], max_depth=depth))
    assert tree.scores is not None
    (ids, parents), scores = tree.rows()[0], tree.scores[0].tolist()
    ends = brute_force(tokens, 1, 3)
    best = dict.fromkeys(range(1, len(ids)), 0.0)
    for end in ends[:1] if kind == "chain" else ends:
        longest = next(n for n in range(end, 0, -1) if tokens[end - n : end] == tokens[len(tokens) - n :])
        agreement = min(longest, 32)
        for node in best:
            path = path_of(node, ids, parents)
            if following(tokens, end, depth)[: len(path)] == path:
                best[node] = max(best[node], (agreement + 1) / (agreement + 1 + len(path)))
    assert scores[0] == 0
    assert np.exp(scores[1:]) == pytest.approx(list(best.values()), rel=1e-5)
    assert all(scores[node] <= scores[parents[node]] for node in best)


def test_the_longest_match_wins_over_a_more_recent_one() -> None:
    tokens = [1, 2, 3, 9, 7, 2, 3, 8, 1, 2, 3]
    assert drafter().propose(context([tokens], max_depth=2)).rows()[0].tokens == [3, 9, 7]
    assert drafter(prompt_lookup_max=2).propose(context([tokens], max_depth=2)).rows()[0].tokens == [3, 8, 1]


def test_rows_are_independent_and_ragged() -> None:
    repeating, fresh = [4, 5, 6, 4, 5, 6, 4, 5], [1, 2, 3]
    tree = drafter(num_speculative_tokens=3).propose(context([repeating, fresh, repeating], max_depth=[5, 5, 1]))
    check_tree(tree)
    assert [row.tokens for row in tree.rows()] == [[5, 6, 4, 5], [3], [5, 6]]


def test_a_released_slot_starts_anew() -> None:
    lookup = drafter()
    lookup.propose(context([[1, 2, 3, 1, 2]]))
    lookup.release(0)
    begin(lookup, 0)
    assert lookup.propose(context([[7, 8, 9, 1, 2]])).rows()[0].tokens == [2]


def test_a_proposal_may_be_thrown_away() -> None:
    lookup = drafter()
    tokens = [1, 2, 3, 1, 2]
    first, second = (lookup.propose(context([tokens])) for _ in range(2))
    assert first.rows() == second.rows()
    tokens += [3, 9]
    assert lookup.propose(context([tokens])).rows() == drafter().propose(context([tokens])).rows()


@pytest.mark.parametrize(("options", "width"), [({}, 17), ({"num_speculative_tokens": 5}, 6), ({"max_nodes": 4}, 4)])
def test_no_tree_is_wider_than_announced(options: dict[str, Any], width: int) -> None:
    lookup = drafter(**options)
    assert lookup.nodes_by_depth[-1] == width
    tokens = list(range(30)) + list(range(4))
    assert lookup.propose(context([tokens], max_depth=1000)).width == width
