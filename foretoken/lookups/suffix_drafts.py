"""What probably follows a text, by what followed its last tokens before: a path, or a tree of the likeliest nodes.

A token is as probable as the share of a match's occurrences after which it came; the end of the text itself, which
nothing has followed yet, is none of them. Every length of match gives a draft; a longer match may have as many tokens
more. The draft with the greatest score
wins: the sum of its nodes' path probabilities, which is how many of its tokens are expected to be accepted.

Source: Oliaro et al. 2024 (arXiv 2411.04975), section 4, and ArcticInference's choice between trees.
"""

from __future__ import annotations

from functools import lru_cache
from heapq import heappop, heappush
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.lookups.suffix_matches import Match, SuffixMatches

_ROUNDING = 1e-9  # of a product of shares


class Draft(NamedTuple):
    """Nodes below a root that is not among them.

    Attributes:
        tokens: Of each node.
        parents: Node 0 is the root, so node i + 1 is entry i.
        probs: Estimate that the path down to each node is accepted.
    """

    tokens: list[int]
    parents: list[int]
    probs: list[float]

    @property
    def score(self) -> float:
        """Tokens expected to be accepted."""
        return sum(self.probs)


NO_DRAFT = Draft([], [], [])


class DraftLimits(NamedTuple):
    """How large a draft may be.

    Attributes:
        most_nodes: Without the root.
        most_depth: Levels below it.
        spec_factor: Nodes for each token of a match.
        least_prob: Of a node's path.
        is_path: Whether nodes have one child at most.
    """

    most_nodes: int
    most_depth: int
    spec_factor: float
    least_prob: float
    is_path: bool

    def least_count(self, prob: float, followed: int) -> float:
        """Returns the least occurrences of a token after a path, by the path's probability."""
        return self.least_prob / prob * followed * (1 - _ROUNDING)


def best_draft(sources: Sequence[SuffixMatches], max_depth: int, limits: DraftLimits) -> Draft:
    """The draft with the greatest score; among equals that of the earlier source, then that of the longer match.

    Args:
        sources: Matches of one text with several trees.
        max_depth: Of the trees.
        limits: Of the draft.
    """
    best = NO_DRAFT
    for matches in sources:
        best = _better_draft(matches, max_depth, limits, best)
    return best


def _better_draft(matches: SuffixMatches, max_depth: int, limits: DraftLimits, known: Draft) -> Draft:
    """The best draft of one source, or `known` where none is better."""
    best, best_score, best_length = known, known.score, max_depth
    tried: dict[int, int] = {}  # greatest size by number of occurrences: as many are the same ones
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
    """Lengths of matches whose drafts may have nodes, with their number and a bound of the score, the greatest first.

    No score is above the depth: the probabilities of a level sum to one at most.
    """
    found = []
    for length in range(longest, 0, -1):
        room = min(int(limits.spec_factor * length), limits.most_nodes)
        bound = min(room, limits.most_depth, max_depth - length)
        if bound > 0:
            found.append((length, room, bound))
    return sorted(found, key=itemgetter(2), reverse=True)


def _likely_path(matches: SuffixMatches, match: Match, room: int, limits: DraftLimits, to_beat: float) -> Draft:
    """The most frequent continuation, token by token; given up where its score must stay below `to_beat`."""
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
    return Draft(tokens, list(range(len(tokens))), probs)


def _likely_tree(matches: SuffixMatches, match: Match, room: int, limits: DraftLimits, to_beat: float) -> Draft:
    """The nodes with the greatest path probabilities; given up where the score must stay below `to_beat`.

    Of nodes with equal probabilities those come first that followed every occurrence of their parent.
    """
    draft = _Growing(limits.most_depth)
    heap: list[tuple[float, int, int, int, Match]] = []  # less the probability, order of arrival, parent, token
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
            return Draft(draft.tokens, draft.parents, draft.probs)
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
        """A new node's number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.probs.append(prob)
        self.depths.append(self.depths[parent] + 1)
        self.score += prob
        return len(self.tokens)

    def depth_below(self, node: int) -> int:
        """Levels that there may be below a node."""
        return self.most_depth - self.depths[node]
