"""The suffix tree against counting by hand, and its bound of memory against what Python says."""

from __future__ import annotations

import random
import sys
from array import array
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from foretoken.drafters.suffix_tree import Node, SuffixTree, count_of


@dataclass
class Plain:
    """A sequence as a list."""

    tokens: list[int] = field(default_factory=list)
    is_open: bool = True

    def suffixes(self, max_depth: int) -> list[tuple[int, ...]]:
        """The suffixes that are counted, cut to the depth."""
        stop = len(self.tokens) - max_depth + 1 if self.is_open else len(self.tokens)
        return [tuple(self.tokens[start : start + max_depth]) for start in range(stop)]


def counts_by_hand(sequences: list[Plain], max_depth: int) -> Counter[tuple[int, ...]]:
    """How often every run begins a counted suffix."""
    counts: Counter[tuple[int, ...]] = Counter()
    for sequence in sequences:
        for suffix in sequence.suffixes(max_depth):
            counts.update(suffix[:length] for length in range(len(suffix) + 1))
    return counts


def runs(tree: SuffixTree) -> dict[tuple[int, ...], int]:
    """Every run in the tree and its count, read edge by edge; checks what nodes promise."""
    found: dict[tuple[int, ...], int] = {}
    stack: list[tuple[Node, int]] = [(tree.root, 0)]
    while stack:
        node, depth = stack.pop()
        below = [count_of(child) for child in node.children.values()]
        assert node is tree.root or node.count >= 2
        assert node is tree.root or len(below) != 1 or below[0] < node.count, "such a node is no node"
        assert sum(below) <= node.count
        for token, child in node.children.items():
            tokens, start, end = tree.edge(child)
            assert tokens[start + depth] == token
            assert depth < end <= tree.max_depth
            for stop in range(depth + 1, end + 1):
                found[tuple(tokens[start : start + stop])] = count_of(child)
            if isinstance(child, Node):
                stack.append((child, end))
    return found


def measured_bytes(tree: SuffixTree) -> int:
    """What the parts of a tree take, each object once, as `sys.getsizeof` tells it."""
    seen: dict[int, int] = {}
    stack: list[object] = [tree.root, tree._texts]
    while stack:
        part = stack.pop()
        if id(part) in seen:
            continue
        seen[id(part)] = sys.getsizeof(part)
        if isinstance(part, dict):
            stack += [*part.keys(), *part.values()]
        elif isinstance(part, set):
            stack += part
        elif hasattr(part, "__slots__"):
            stack += [getattr(part, name) for name in part.__slots__]
    return sum(seen.values())


class Growing(RuleBasedStateMachine):
    """Sequences over three symbols come, grow, close and leave."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = SuffixTree(5)
        self.sequences: dict[int, Plain] = {}

    @rule(tokens=st.lists(st.integers(0, 2), max_size=12), is_open=st.booleans())
    def come(self, tokens: list[int], is_open: bool) -> None:
        sequence = self.tree.begin()
        self.sequences[sequence] = Plain()
        self._extend(sequence, tokens)
        if not is_open:
            self._close(sequence)

    @precondition(lambda self: any(each.is_open for each in self.sequences.values()))
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 2), max_size=6))
    def grow(self, data: st.DataObject, tokens: list[int]) -> None:
        self._extend(self._some_open(data), tokens)

    @precondition(lambda self: any(each.is_open for each in self.sequences.values()))
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self._close(self._some_open(data))

    @precondition(lambda self: self.sequences)
    @rule()
    def leave(self) -> None:
        oldest = min(self.sequences)
        assert self.tree.drop_oldest() == oldest
        del self.sequences[oldest]

    @invariant()
    def counts_are_right(self) -> None:
        counts = counts_by_hand(list(self.sequences.values()), 5)
        assert self.tree.root.count == counts.pop((), 0)
        assert runs(self.tree) == counts
        for run, count in counts.items():
            branch = self.tree.find(array("i", run))
            assert branch is not None
            assert count_of(branch) == count
        assert self.tree.find(array("i", [3])) is None

    @invariant()
    def bytes_are_bounded(self) -> None:
        measured = measured_bytes(self.tree)
        assert measured <= self.tree.num_bytes
        assert len(self.tree) == len(self.sequences)

    def _some_open(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from([key for key, each in self.sequences.items() if each.is_open]))

    def _extend(self, sequence: int, tokens: list[int]) -> None:
        self.tree.extend(sequence, tokens)
        self.sequences[sequence].tokens += tokens

    def _close(self, sequence: int) -> None:
        self.tree.close(sequence)
        self.sequences[sequence].is_open = False


TestGrowing = Growing.TestCase
TestGrowing.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("num_symbols", [2, 40, 5000])
def test_the_claimed_bytes_are_near_the_measured_ones(num_symbols: int) -> None:
    """Never below what Python says of the parts, and at most twice that; also after half have left."""
    draw = random.Random(num_symbols)
    tree = SuffixTree(24)
    once = [draw.randrange(num_symbols) for _ in range(300)]
    for number in range(20):
        sequence = tree.begin()
        tree.extend(sequence, once if number % 4 == 0 else [draw.randrange(num_symbols) for _ in range(300)])
        if number % 5:
            tree.close(sequence)
    for _ in range(2):
        measured = measured_bytes(tree)
        assert measured <= tree.num_bytes <= 2 * measured
        for _ in range(10 * (len(tree) > 10)):
            tree.drop_oldest()
    assert len(tree) == 10
