"""The suffix tree, its matches and the best draft of them, against counting and trying everything by hand."""

import random
import sys
from array import array
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from foretoken.drafters.suffix import DraftLimits, SuffixDraft, best_draft
from foretoken.drafters.suffix_tree import Node, SuffixMatches, SuffixTree, count_of


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


def check_matches(matches: SuffixMatches, texts: list[list[int]], tokens: list[int], least: int) -> None:
    """Every length has the matches that the texts have, and each goes on as they do."""
    lengths = range(1, min(len(tokens), DEPTH - 1) + 1)
    known = [length for length in lengths if len(occurrences(texts, tokens[-length:])) >= least]
    assert matches.longest == max(known, default=0)
    for length in lengths:
        match = matches.match(length)
        assert (match is not None) == (length in known)
        run = tokens[-length:]
        while match is not None:
            assert match.count == len(occurrences(texts, run))
            following = matches.following(match, 0.0)
            by_hand = children_by_hand(texts, run) if len(run) < DEPTH else []
            assert [(token, longer.count) for token, longer in following] == by_hand
            first = matches.most_frequent(match, 0.0)
            assert (first and first[0]) == (by_hand[0][0] if by_hand else None)
            forced = list(matches.run(match, 3) or [])
            assert len(forced) <= 3
            for number, start in occurrences(texts, run) if forced else ():
                assert texts[number][start + len(run) : start + len(run) + len(forced)] == forced
            if not following:
                break
            token, match = following[len(run) % len(following)]
            run = [*run, token]


@given(tokens=TOKENS)
def test_a_growing_text_knows_all_it_holds(tokens: list[int]) -> None:
    check_matches(open_matches(tokens), [tokens], tokens, least=2)


@given(outputs=st.lists(TOKENS, max_size=4), tokens=TOKENS)
def test_a_pool_knows_all_that_was_written(outputs: list[list[int]], tokens: list[int]) -> None:
    check_matches(pool_matches(outputs, tokens), outputs, tokens, least=1)


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
