"""Where the last tokens of a text occurred in a suffix tree, and how often each token followed them.

The tree counts the suffixes of an open sequence with a delay. If the text is such a sequence, its last suffixes are
searched here, so that counts are exact and short repetitions are found at once.
"""

from __future__ import annotations

from functools import lru_cache
from heapq import heappop, heappush
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from foretoken.drafters.lookups.suffix_tree import Node, count_of

if TYPE_CHECKING:
    from array import array
    from collections.abc import Collection, Sequence

    from foretoken.drafters.lookups.suffix_tree import Branch, SuffixTree


class Match:
    """All occurrences of a run of tokens.

    Attributes:
        branch: Occurrences in the tree; None for none.
        depth: Tokens of the run.
        count: Number of occurrences.
        ends: Ends of occurrences in the text itself that the tree does not count yet.
    """

    __slots__ = ("branch", "count", "depth", "ends")

    def __init__(self, branch: Branch | None, depth: int, count: int, ends: Sequence[int] = ()) -> None:
        self.branch, self.depth, self.count, self.ends = branch, depth, count, ends

    def longer(self, more: int) -> Match:
        """Returns the match with `more` further tokens, which followed all its occurrences."""
        return Match(self.branch, self.depth + more, self.count)


class SuffixMatches:
    """Matches of the end of one text with one tree. Valid until either changes.

    Attributes:
        longest: Tokens of the longest end of the text that has a match, below the depth of the tree.
    """

    def __init__(self, tree: SuffixTree, text: array[int], num_counted: int | None = None) -> None:
        """Finds the longest match.

        Args:
            tree: The tree to search.
            text: Any text.
            num_counted: Suffixes of the text that the tree counts, if the text is one of the tree's open sequences or
                begins with one; else None.
        """
        self._tree, self._text, self._first = tree, text, num_counted
        self._ends: list[int] = []  # where the last token occurs among the suffixes that are not counted
        if num_counted is not None and text:
            last = text[-1]
            self._ends = [end for end in range(num_counted + 1, len(text) + 1) if text[end - 1] == last]
        self.longest = self._longest(min(tree.max_depth - 1, len(text)))

    def match(self, length: int) -> Match | None:
        """Returns occurrences of the last `length` tokens; None if there are none besides the end of the text.

        The end of the text is among them if the tree counts it.
        """
        run = self._text[len(self._text) - length :]
        branch = self._tree.find(run)
        count = 0 if branch is None else count_of(branch)
        if self._first is None:
            return Match(branch, length, count) if count else None
        least = self._first + length
        ends = [end for end in self._ends if end >= least and self._text[end - length : end] == run]
        count += len(ends)
        return Match(branch, length, count, ends) if count > 1 else None

    def followed(self, match: Match) -> int:
        """Returns how many occurrences of a match something may have followed: all but the end of the text."""
        return match.count - (bool(match.ends) and match.ends[-1] == len(self._text))

    def run(self, match: Match, most: int) -> array[int] | None:
        """Returns up to `most` tokens that followed every occurrence of a match.

        None if a look at one edge does not tell, because a node or the end of the text is reached.
        """
        branch, depth = match.branch, match.depth
        if branch is None or match.ends:
            return None
        tokens, start, end = self._tree.edge(branch)
        return tokens[start + depth : start + min(end, depth + most)] if depth < end else None

    def most_frequent(self, match: Match, least: float) -> tuple[int, Match] | None:
        """Returns the first of `following`, in less time; None if there is none."""
        found = self._found(match, least)
        ends = self._ends_in_text(match)
        if ends or not found:
            return next(iter(self._with_ends(found, ends, match.depth + 1)), None)
        best = best_token = best_count = -1
        best_branch: Branch = 0
        for token, branch in found:
            count, place = (1, branch) if isinstance(branch, int) else (branch.count, branch.place)
            if count > best_count or (count == best_count and place > best):
                best, best_token, best_count, best_branch = place, token, count, branch
        return best_token, Match(best_branch, match.depth + 1, best_count)

    def following(self, match: Match, least: float) -> list[tuple[int, Match]]:
        """Returns what followed a match: tokens with the longer matches that they make.

        Args:
            match: Of this object.
            least: Count that is wanted; others may be among them.

        Returns:
            By falling count, the more recent first among equals.
        """
        return self._with_ends(self._found(match, least), self._ends_in_text(match), match.depth + 1)

    def _found(self, match: Match, least: float) -> Collection[tuple[int, Branch]]:
        depth, branch = match.depth, match.branch
        if branch is None:
            return ()
        if isinstance(branch, Node) and depth == branch.depth:
            # Occurrences outside the tree may make up for a missing count.
            return self._tree.likely_children(branch, least - len(match.ends))
        tokens, start, end = self._tree.edge(branch)
        return ((tokens[start + depth], branch),) if depth < end else ()

    def _ends_in_text(self, match: Match) -> list[int]:
        """Returns where a match continues in the end of the text, at most as deep as the tree.

        Uncounted suffixes are shorter than that, unless the text continues behind the tree's sequence.
        """
        if match.depth >= self._tree.max_depth:
            return []
        return [end for end in match.ends if end < len(self._text)]

    def _with_ends(
        self, found: Collection[tuple[int, Branch]], ends: Sequence[int], depth: int
    ) -> list[tuple[int, Match]]:
        """Returns what followed in the tree and at the end of the text, in order."""
        places: dict[int, list[int]] = {}
        for end in ends:
            places.setdefault(self._text[end], []).append(end + 1)
        in_tree: dict[int, Branch] = dict(found)
        each = []
        for token in {**in_tree, **places}:
            branch, own = in_tree.get(token), places.get(token, ())
            count, place = (0, -1) if branch is None else (count_of(branch), _place(branch))
            order = (count + len(own), own[-1] if own else -1, place)
            each.append((order, token, Match(branch, depth, count + len(own), own)))
        each.sort(key=itemgetter(0), reverse=True)
        return [(token, longer) for _, token, longer in each]

    def _longest(self, most: int) -> int:
        """Bisects: if a run occurs, its end occurs too. May miss the last counted suffix of another open sequence."""
        if most and self.match(most) is not None:  # usual while a text is repeated
            return most
        least, most = 0, most - 1
        while least < most:
            middle = (least + most + 1) // 2
            if self.match(middle) is None:
                most = middle - 1
            else:
                least = middle
        return least


def _place(branch: Branch) -> int:
    """Returns where the youngest suffix of a branch begins."""
    return branch.place if isinstance(branch, Node) else branch


_ROUNDING = 1e-9  # of a product of shares


class SuffixDraft(NamedTuple):
    """Nodes below a root, without the root.

    Attributes:
        tokens: Of each node.
        parents: Node 0 is the root, so node i + 1 is entry i.
        probs: Estimated probability that the path down to each node is accepted.
    """

    tokens: list[int]
    parents: list[int]
    probs: list[float]

    @property
    def score(self) -> float:
        """Expected number of accepted tokens."""
        return sum(self.probs)


NO_DRAFT = SuffixDraft([], [], [])


class DraftLimits(NamedTuple):
    """Bounds of a draft.

    Attributes:
        most_nodes: Without the root.
        most_depth: Levels below it.
        spec_factor: Nodes for each token of a match.
        least_prob: Of a node's path.
        is_path: Whether nodes have at most one child.
    """

    most_nodes: int
    most_depth: int
    spec_factor: float
    least_prob: float
    is_path: bool

    def least_count(self, prob: float, followed: int) -> float:
        """Returns the least occurrences of a token after a path, by the path's probability."""
        return self.least_prob / prob * followed * (1 - _ROUNDING)


def best_draft(sources: Sequence[SuffixMatches], max_depth: int, limits: DraftLimits) -> SuffixDraft:
    """Returns the draft with the greatest score; among equals that of the earlier source, then of the longer match."""
    best = NO_DRAFT
    for matches in sources:
        best = _better_draft(matches, max_depth, limits, best)
    return best


def _better_draft(matches: SuffixMatches, max_depth: int, limits: DraftLimits, known: SuffixDraft) -> SuffixDraft:
    """Returns the best draft of one source, or `known` if none is better."""
    best, best_score, best_length = known, known.score, max_depth
    tried: dict[int, int] = {}  # greatest size by number of occurrences: as many occurrences are the same ones
    draw = _likely_path if limits.is_path else _likely_tree
    for length, room, bound in _lengths(matches.longest, max_depth, limits):
        if bound < best_score:
            break
        match = matches.match(length) if bound > best_score or length > best_length else None
        if match is None:
            continue
        size = bound if limits.is_path else room
        if size <= tried.get(match.count, 0):
            continue
        tried[match.count] = size
        draft = draw(matches, match, room, limits, best_score)
        if (draft.score, length) > (best_score, best_length):
            best, best_score, best_length = draft, draft.score, length
    return best


@lru_cache(maxsize=4096)
def _lengths(longest: int, max_depth: int, limits: DraftLimits) -> list[tuple[int, int, int]]:
    """Returns lengths of matches that may give nodes, with their node and score bounds, the greatest score first.

    No score is above the depth: the probabilities of a level sum to at most 1.
    """
    found = []
    for length in range(longest, 0, -1):
        room = min(int(limits.spec_factor * length), limits.most_nodes)
        bound = min(room, limits.most_depth, max_depth - length)
        if bound > 0:
            found.append((length, room, bound))
    return sorted(found, key=itemgetter(2), reverse=True)


def _likely_path(matches: SuffixMatches, match: Match, room: int, limits: DraftLimits, to_beat: float) -> SuffixDraft:
    """Returns the most frequent continuation, token by token; stops if its score must stay below `to_beat`."""
    tokens: list[int] = []
    probs: list[float] = []
    prob, score, room = 1.0, 0.0, min(room, limits.most_depth)
    while len(tokens) < room:
        run = matches.run(match, room - len(tokens))
        if run:
            tokens.extend(run)
            probs.extend([prob] * len(run))
            score += prob * len(run)
            match = match.longer(len(run))
            continue
        followed = matches.followed(match)
        found = matches.most_frequent(match, limits.least_count(prob, followed))
        if found is None:
            break
        token, longer = found
        prob *= longer.count / followed
        if prob < limits.least_prob * (1 - _ROUNDING):
            break
        if score + prob * (room - len(tokens)) < to_beat * (1 - _ROUNDING):
            return NO_DRAFT
        tokens.append(token)
        probs.append(prob)
        score += prob
        match = longer
    return SuffixDraft(tokens, list(range(len(tokens))), probs)


def _likely_tree(matches: SuffixMatches, match: Match, room: int, limits: DraftLimits, to_beat: float) -> SuffixDraft:
    """Returns the nodes with the greatest path probabilities; stops if the score must stay below `to_beat`.

    Among equal probabilities, nodes that followed every occurrence of their parent come first.
    """
    draft = _Growing(limits.most_depth)
    heap: list[tuple[float, int, int, int, Match]] = []  # negative probability, order of arrival, parent, token
    num_offered, node, prob = 0, 0, 1.0
    while True:
        run = matches.run(match, min(room - len(draft.tokens), draft.depth_below(node)))
        for token in run or ():
            node = draft.add(node, token, prob)
        if draft.depth_below(node):
            match = match.longer(len(run)) if run else match
            followed = matches.followed(match)
            following = matches.following(match, limits.least_count(prob, followed))
            for token, longer in following[: room - len(draft.tokens)]:
                value = prob * (longer.count / followed)
                if value < limits.least_prob * (1 - _ROUNDING):
                    break
                num_offered += 1
                heappush(heap, (-value, num_offered, node, token, longer))
        if not heap or len(draft.tokens) >= room:
            return SuffixDraft(draft.tokens, draft.parents, draft.probs)
        negative, _, parent, token, match = heappop(heap)
        prob = -negative
        if draft.score + prob * (room - len(draft.tokens)) < to_beat * (1 - _ROUNDING):
            return NO_DRAFT
        node = draft.add(parent, token, prob)


class _Growing:
    """A draft to which nodes are added, and the depth of each."""

    __slots__ = ("depths", "most_depth", "parents", "probs", "score", "tokens")

    def __init__(self, most_depth: int) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.probs: list[float] = []
        self.depths, self.most_depth, self.score = [0], most_depth, 0.0

    def add(self, parent: int, token: int, prob: float) -> int:
        """Returns the new node's number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.probs.append(prob)
        self.depths.append(self.depths[parent] + 1)
        self.score += prob
        return len(self.tokens)

    def depth_below(self, node: int) -> int:
        """Returns the levels that a node may have below it."""
        return self.most_depth - self.depths[node]
