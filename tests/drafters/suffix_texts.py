"""Suffix trees of small texts, and the same texts searched by hand."""

from __future__ import annotations

from array import array

from hypothesis import strategies as st

from foretoken.drafters.suffix_tree import SuffixMatches, SuffixTree

DEPTH = 6
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def open_matches(tokens: list[int], depth: int = DEPTH) -> SuffixMatches:
    """The end of a text that is still growing, in its own tree."""
    tree = SuffixTree(depth)
    text = tree.text(tree.begin())
    tree.extend(0, tokens)
    return SuffixMatches(tree, text.tokens, text.num_counted)


def pool_matches(outputs: list[list[int]], tokens: list[int], depth: int = DEPTH) -> SuffixMatches:
    """The end of a text in the tree of others."""
    tree = SuffixTree(depth)
    for output in outputs:
        sequence = tree.begin()
        tree.extend(sequence, output)
        tree.close(sequence)
    return SuffixMatches(tree, array("i", tokens))


def occurrences(texts: list[list[int]], run: list[int]) -> list[tuple[int, int]]:
    """Where a run begins: text and offset."""
    return [
        (number, start)
        for number, text in enumerate(texts)
        for start in range(len(text) - len(run) + 1)
        if text[start : start + len(run)] == run
    ]


def children_by_hand(texts: list[list[int]], run: list[int]) -> list[tuple[int, int]]:
    """What followed a run how often: by falling count, then by the most recent occurrence."""
    found: dict[int, list[tuple[int, int]]] = {}
    for number, start in occurrences(texts, run):
        if start + len(run) < len(texts[number]):
            found.setdefault(texts[number][start + len(run)], []).append((number, start))
    by_hand = sorted(found.items(), key=lambda one: (len(one[1]), max(one[1])), reverse=True)
    return [(token, len(places)) for token, places in by_hand]
