"""The best draft against trying everything, and the likely children of nodes that have many."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from suffix_texts import DEPTH, TOKENS, children_by_hand, occurrences, open_matches, pool_matches

from foretoken.drafters.suffix import DraftLimits, SuffixDraft, best_draft
from foretoken.drafters.suffix_tree import SuffixMatches, SuffixTree


def num_followed(texts: list[list[int]], run: list[int], *, is_own: bool) -> int:
    """Occurrences of a run; the end of the text that is drafted for is none."""
    return len(occurrences(texts, run)) - (is_own and texts[0][-len(run) :] == run)


def draft_by_hand(texts: list[list[int]], tokens: list[int], limits: DraftLimits, *, is_own: bool) -> float:
    """The score of the best draft, every length of match tried and nothing left out."""
    best = 0.0
    for length in range(1, min(len(tokens), DEPTH - 1) + 1):
        run = tokens[-length:]
        if len(occurrences(texts, run)) < 1 + is_own:
            break
        room, depth = min(int(limits.spec_factor * length), limits.most_nodes), min(limits.most_depth, DEPTH - length)
        open_nodes, probs = [(1.0, run)], []
        while open_nodes:
            open_nodes.sort(key=lambda node: node[0], reverse=True)
            prob, path = open_nodes.pop(0)
            if len(path) > length:
                probs.append(prob)
            if len(path) - length < depth:
                total = num_followed(texts, path, is_own=is_own)
                nodes = [(prob * count / total, [*path, token]) for token, count in children_by_hand(texts, path)]
                nodes = nodes[:1] if limits.is_path else nodes
                open_nodes += [node for node in nodes if node[0] >= limits.least_prob * (1 - 1e-9)]
        best = max(best, sum(probs[:room]))
    return best


LIMITS = st.builds(
    DraftLimits,
    most_nodes=st.integers(1, 8),
    most_depth=st.integers(1, 7),
    spec_factor=st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0]),
    least_prob=st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]),
    is_path=st.booleans(),
)


def check_draft(
    draft: SuffixDraft, texts: list[list[int]], tokens: list[int], limits: DraftLimits, *, is_own: bool = False
) -> None:
    """A draft is a tree within its limits whose probabilities some match gives."""
    assert len(draft.tokens) <= limits.most_nodes
    paths: list[list[int]] = [[]]
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        assert parent <= node
        assert not limits.is_path or parent == node
        paths.append([*paths[parent], token])
    assert max(map(len, paths)) <= limits.most_depth
    assert len({tuple(path) for path in paths}) == len(paths)
    fits = []
    for length in range(1, min(len(tokens), DEPTH - 1) + 1):
        run, probs = tokens[-length:], []
        for path in paths[1:]:
            prob = 1.0
            for depth in range(len(path)):
                total = num_followed(texts, run + path[:depth], is_own=is_own)
                prob *= len(occurrences(texts, run + path[: depth + 1])) / total if total else 0.0
            probs.append(prob)
        fits.append(probs == pytest.approx(draft.probs))
    assert not draft.tokens or any(fits)


@settings(max_examples=200)
@given(tokens=TOKENS, limits=LIMITS)
def test_the_best_draft_of_a_growing_text(tokens: list[int], limits: DraftLimits) -> None:
    """What is left out to save time never has a better score."""
    draft = best_draft([open_matches(tokens)], DEPTH, limits)
    assert draft.score == pytest.approx(draft_by_hand([tokens], tokens, limits, is_own=True))
    check_draft(draft, [tokens], tokens, limits, is_own=True)


@pytest.mark.parametrize("is_path", [True, False])
def test_a_request_and_the_pool_estimate_alike(is_path: bool) -> None:
    """Where both know the same occurrences, as two of "1 2 3" and one of "1 2 4", scores are the same."""
    known, end = [1, 2, 3, 5, 1, 2, 4, 6, 1, 2, 3, 5, 9, 8], [1, 2]
    limits = DraftLimits(most_nodes=4, most_depth=3, spec_factor=4.0, least_prob=0.1, is_path=is_path)
    own = best_draft([open_matches([*known, *end])], DEPTH, limits)
    pool = best_draft([pool_matches([known], [7, *end])], DEPTH, limits)
    assert sorted(zip(own.tokens, own.probs, strict=True)) == sorted(zip(pool.tokens, pool.probs, strict=True))
    assert own.probs[:2] == [2 / 3, 2 / 3]


@settings(max_examples=200)
@given(outputs=st.lists(TOKENS, min_size=1, max_size=4), tokens=TOKENS, limits=LIMITS)
def test_the_best_draft_of_a_pool(outputs: list[list[int]], tokens: list[int], limits: DraftLimits) -> None:
    draft = best_draft([pool_matches(outputs, tokens)], DEPTH, limits)
    assert draft.score == pytest.approx(draft_by_hand(outputs, tokens, limits, is_own=False))
    check_draft(draft, outputs, tokens, limits)


@given(outputs=st.lists(TOKENS, min_size=1, max_size=3), tokens=TOKENS, limits=LIMITS)
def test_the_better_source_wins(outputs: list[list[int]], tokens: list[int], limits: DraftLimits) -> None:
    sources = [open_matches(tokens), pool_matches(outputs, tokens)]
    alone = [best_draft([source], DEPTH, limits) for source in sources]
    both = best_draft(sources, DEPTH, limits)
    assert both.score == max(draft.score for draft in alone)
    if alone[0].score >= alone[1].score:
        assert both == alone[0], "the text's own draft among equals"


def test_a_wide_node_finds_its_frequent_children() -> None:
    """Hundreds of tokens followed; those with enough of a share are known, also after others were forgotten."""
    outputs = [[7, 100 + number] for number in range(300)] + [[7, 1]] * 40 + [[7, 2]] * 60
    tree = SuffixTree(4)
    for output in outputs:
        sequence = tree.begin()
        tree.extend(sequence, output)
        tree.close(sequence)
        if sequence in {150, 320}:  # such nodes remember what they were asked
            matches = SuffixMatches(tree, array("i", [7]))
            match = matches.match(1)
            assert match is not None
            matches.following(match, match.count / 10)
    limits = DraftLimits(most_nodes=8, most_depth=3, spec_factor=4.0, least_prob=0.1, is_path=False)
    draft = best_draft([SuffixMatches(tree, array("i", [7]))], 4, limits)
    assert (draft.tokens, draft.probs) == ([2, 1], [60 / 400, 40 / 400])
    for _ in range(250):
        tree.drop_oldest()
    draft = best_draft([SuffixMatches(tree, array("i", [7]))], 4, limits)
    assert (draft.tokens, draft.probs) == ([2, 1], [60 / 150, 40 / 150])
    for _ in range(85):
        tree.drop_oldest()
    assert best_draft([SuffixMatches(tree, array("i", [7]))], 4, limits).probs == [60 / 65]


def test_a_child_may_become_frequent_because_others_left() -> None:
    tree = SuffixTree(4)
    for output in [[7, 1]] * 400 + [[7, 2]] * 8 + [[7, 100 + number] for number in range(40)]:
        sequence = tree.begin()
        tree.extend(sequence, output)
        tree.close(sequence)
    limits = DraftLimits(most_nodes=8, most_depth=3, spec_factor=4.0, least_prob=0.1, is_path=False)
    assert best_draft([SuffixMatches(tree, array("i", [7]))], 4, limits).tokens == [1]
    for _ in range(400):
        tree.drop_oldest()
    assert best_draft([SuffixMatches(tree, array("i", [7]))], 4, limits).tokens == [2]


def test_a_longer_match_of_the_same_places_may_have_the_better_tree() -> None:
    """It has more nodes, in fewer levels."""
    source = pool_matches([[0, 1, 2, 3, 5, 6, 5], [0, 1, 2, 3, 7, 8, 7]], [0, 1, 2, 3])
    limits = DraftLimits(most_nodes=8, most_depth=7, spec_factor=1.0, least_prob=0.1, is_path=False)
    draft = best_draft([source], DEPTH, limits)
    assert (sorted(draft.tokens), draft.probs) == ([5, 6, 7, 8], [0.5] * 4)
