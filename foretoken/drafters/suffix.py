"""Suffix decoding: proposes what followed the last tokens before, in the request's own text and in other outputs.

Every request has a suffix tree of its prompt and output. Requests with the same cache salt share a pool of outputs,
finished and running, without prompts. Both count how often each continuation followed. Drafts are frequent paths, or
trees of them, with estimates of their acceptance.

Source: Oliaro et al. 2024 (arXiv 2411.04975); options and choices as in ArcticInference and vLLM's `suffix`.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from pydantic import Field

from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.drafters.base import LookupOptions, TargetReads
from foretoken.drafters.suffix_tree import Match, SuffixMatches, SuffixTree
from foretoken.trees.merge import pruned

if TYPE_CHECKING:
    from foretoken.drafters.base import Committed, DraftContext, Drafter, DraftRequest, TargetHandle

_SALT_BYTES = 256  # of a tree's entry, without the salt's characters
_Result = TypeVar("_Result")


@dataclass(slots=True, eq=False)
class Member:
    """A sequence of the pool: the salt of its request, and its number in the tree of that salt."""

    salt: str | None
    sequence: int
    is_present: bool = True


class SuffixPool:
    """Sequences by salt, `num_bytes` in all (see `SuffixTree.num_bytes`); the oldest make room for new ones."""

    def __init__(self, max_depth: int, *, max_sequences: int, max_bytes: int) -> None:
        """Makes an empty pool; `max_bytes` bounds `num_bytes` after every call."""
        self._max_depth, self._max_sequences, self._max_bytes = max_depth, max_sequences, max_bytes
        self._trees: dict[str | None, SuffixTree] = {}
        self._members: deque[Member] = deque()  # oldest first
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._members)

    def tree(self, salt: str | None) -> SuffixTree | None:
        """Returns the tree of a salt; None if there is none."""
        return self._trees.get(salt)

    def add(self, salt: str | None, tokens: Sequence[int]) -> Member:
        """Adds a sequence."""
        if salt not in self._trees:
            tree = self._trees[salt] = SuffixTree(self._max_depth)
            self.num_bytes += tree.num_bytes + _salt_bytes(salt)
        member = Member(salt, self._changed(self._trees[salt], SuffixTree.begin))
        self._members.append(member)
        self.extend(member, tokens)
        return member

    def extend(self, member: Member, tokens: Sequence[int]) -> None:
        """Appends tokens to a sequence; does nothing if it was removed."""
        if member.is_present:
            self._changed(self._trees[member.salt], SuffixTree.extend, member.sequence, tokens)
            self._make_room()

    def close(self, member: Member) -> None:
        """Ends the growth of a sequence; does nothing if it was removed."""
        if member.is_present:
            self._changed(self._trees[member.salt], SuffixTree.close, member.sequence)
            self._make_room()

    def _changed(self, tree: SuffixTree, change: Callable[..., _Result], *arguments: Any) -> _Result:
        """Changes a tree and counts the bytes; returns the result of the change."""
        before = tree.num_bytes
        result = change(tree, *arguments)
        self.num_bytes += tree.num_bytes - before
        return result

    def _make_room(self) -> None:
        while self._members and (len(self._members) > self._max_sequences or self.num_bytes > self._max_bytes):
            member = self._members.popleft()
            member.is_present = False
            tree = self._trees[member.salt]
            self._changed(tree, SuffixTree.drop_oldest)
            if not len(tree):
                del self._trees[member.salt]
                self.num_bytes -= tree.num_bytes + _salt_bytes(member.salt)


def _salt_bytes(salt: str | None) -> int:
    return _SALT_BYTES + 4 * len(salt or "")


_ROUNDING = 1e-9  # of a product of shares


class SuffixDraft(NamedTuple):
    """Nodes below a root, without the root.

    Attributes:
        tokens: Of each node.
        parents: Node 0 is the root, so node i + 1 is entry i.
        probs: Share of the match's occurrences that the path down to each node followed.
        agreement: Last tokens of the text that occur in the source of the draft, at most as many as its tree is deep.
    """

    tokens: list[int]
    parents: list[int]
    probs: list[float]
    agreement: int = 0

    @property
    def score(self) -> float:
        """Expected number of accepted tokens, if a longer match is no surer."""
        return sum(self.probs)

    def log_probs(self) -> list[float]:
        """Returns the log-probability that the path down to each node is accepted, of the root first.

        A match of m tokens goes on for d tokens with probability (m + 1) / (m + 1 + d), Laplace's rule of succession;
        prompt lookup estimates the same.
        """
        found, depths, seen = [0.0], [0], self.agreement + 1
        for parent, prob in zip(self.parents, self.probs, strict=True):
            depths.append(depths[parent] + 1)
            found.append(math.log(prob * seen / (seen + depths[-1])))
        return found


NO_DRAFT = SuffixDraft([], [], [])


class DraftLimits(NamedTuple):
    """Bounds of a draft.

    Attributes:
        most_nodes: Without the root.
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
    return best if best is known else best._replace(agreement=matches.longest)


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
    __slots__ = ("depths", "most_depth", "parents", "probs", "score", "tokens")

    def __init__(self, most_depth: int) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.probs: list[float] = []
        self.depths, self.most_depth, self.score = [0], most_depth, 0.0

    def add(self, parent: int, token: int, prob: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.probs.append(prob)
        self.depths.append(self.depths[parent] + 1)
        self.score += prob
        return len(self.tokens)

    def depth_below(self, node: int) -> int:
        return self.most_depth - self.depths[node]


class Options(LookupOptions):
    """Options of suffix decoding: vLLM's names and defaults, and a bound in bytes.

    Attributes:
        suffix_decoding_max_tree_depth: Longest match and its draft together, in tokens.
        suffix_decoding_max_cached_requests: Most outputs of the pool, running ones included; the oldest leave first. 0
            for no pool.
        suffix_decoding_max_cached_bytes: Most bytes of the pool.
        suffix_decoding_max_spec_factor: Drafted tokens per token of the match.
        suffix_decoding_min_token_prob: Least estimated probability of a drafted token's whole path.
    """

    has_static_trees: ClassVar[bool] = False  # "tree" has the most frequent continuations
    prunable_by: ClassVar[frozenset[str]] = frozenset({"token_probability", "path_probability"})

    suffix_decoding_max_tree_depth: int = Field(default=24, ge=2, le=256)
    suffix_decoding_max_cached_requests: int = Field(default=10_000, ge=0, le=10**9)
    suffix_decoding_max_cached_bytes: int = Field(default=256 << 20, ge=1, le=1 << 50)
    suffix_decoding_max_spec_factor: float = Field(default=1.0, ge=0.0, le=1000.0)
    suffix_decoding_min_token_prob: float = Field(default=0.1, ge=0.0, le=1.0)


class _Sequence:
    """One request's text; `member` is the output in the pool, None before the first output."""

    def __init__(self, request: DraftRequest, max_depth: int) -> None:
        self.tree = SuffixTree(max_depth)
        self.text = self.tree.text(self.tree.begin())
        self.salt, self.num_prompt = request.cache_salt, len(request.prompt)
        self.member: Member | None = None


class SuffixDrafter:
    """Proposes the most frequent continuations of the longest matches.

    `pool` is shared by all requests; None if nothing is shared.
    """

    name = "suffix"
    reads = TargetReads()

    def __init__(self, options: Options) -> None:
        self._options = options
        self._depth = options.suffix_decoding_max_tree_depth
        self._most_depth = min(options.chain_len, self._depth - 1)
        self._is_chain = options.tree == "chain"
        self.nodes_by_depth = options.nodes_by_depth[: self._most_depth + 1]
        self.pool: SuffixPool | None = None
        if options.suffix_decoding_max_cached_requests:
            self.pool = SuffixPool(
                self._depth,
                max_sequences=options.suffix_decoding_max_cached_requests,
                max_bytes=options.suffix_decoding_max_cached_bytes,
            )
        self._sequences: dict[int, _Sequence] = {}

    def attach(self, target: TargetHandle) -> None:
        """Stores the device on which trees are made."""
        self._device = target.device

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Starts an empty tree; `commit` adds the prompt."""
        self.release(slot)
        self._sequences[slot] = _Sequence(request, self._depth)

    def propose(self, context: DraftContext) -> TokenTree:
        """Returns the best draft of each sequence's own tree and of the pool's."""
        each = zip(context.slots, context.tokens, context.max_depth, context.max_nodes, strict=True)
        drafts = [self._draft(slot, tokens, depth, nodes) for slot, tokens, depth, nodes in each]
        rows = [
            TreeRow([root, *draft.tokens], [-1, *draft.parents])
            for root, draft in zip(context.roots, drafts, strict=True)
        ]
        scores = [draft.log_probs() for draft in drafts]
        tree = TokenTree.from_rows(rows, scores=scores, device=self._device)
        return tree if self._options.pruning is None else pruned(tree, self._options.pruning)

    def continue_from(self, slot: int, tokens: Sequence[int], path: Sequence[int], depth: int) -> list[int]:
        """See `Lookup`; the pool does not count the path."""
        sequence = self._known(slot, tokens)
        text = sequence.text.tokens + array("i", path)
        limits = self._limits(depth, depth + 1)._replace(is_path=True)
        return best_draft(self._sources(sequence, text), self._depth, limits).tokens

    def commit(self, committed: Committed) -> None:
        """Adds what entered the KV cache, also at the end of an output, after which nothing is drafted."""
        for slot, start, tokens in zip(committed.slots, committed.starts, committed.tokens, strict=True):
            sequence = self._sequences[slot]
            self._extend(sequence, tokens[max(len(sequence.text.tokens) - start, 0) :])

    def release(self, slot: int) -> None:
        """Forgets the sequence; its output stays in the pool, finished or not."""
        sequence = self._sequences.pop(slot, None)
        if sequence is not None and sequence.member is not None and self.pool is not None:
            self.pool.close(sequence.member)

    def _draft(self, slot: int, tokens: Sequence[int], depth: int, max_nodes: int) -> SuffixDraft:
        sequence = self._known(slot, tokens)
        limits = self._limits(depth, min(max_nodes, self.nodes_by_depth[-1]))
        return best_draft(self._sources(sequence, sequence.text.tokens), self._depth, limits)

    def _known(self, slot: int, tokens: Sequence[int]) -> _Sequence:
        sequence = self._sequences[slot]
        num_known = len(sequence.text.tokens)
        if len(tokens) > num_known:
            self._extend(sequence, list(islice(tokens, num_known, None)))
        return sequence

    def _sources(self, sequence: _Sequence, text: array[int]) -> list[SuffixMatches]:
        """Returns the matches of a text's end in the text itself and in the pool; the text begins with the sequence."""
        sources = [SuffixMatches(sequence.tree, text, sequence.text.num_counted)]
        shared = None if self.pool is None else self.pool.tree(sequence.salt)
        return sources if shared is None else [*sources, SuffixMatches(shared, text)]

    def _limits(self, depth: int, max_nodes: int) -> DraftLimits:
        return DraftLimits(
            most_nodes=max_nodes - 1,
            most_depth=min(depth, self._most_depth),
            spec_factor=self._options.suffix_decoding_max_spec_factor,
            least_prob=self._options.suffix_decoding_min_token_prob,
            is_path=self._is_chain,
        )

    def _extend(self, sequence: _Sequence, tokens: Sequence[int]) -> None:
        first = max(sequence.num_prompt - len(sequence.text.tokens), 0)  # the first new token that is no prompt token
        sequence.tree.extend(0, tokens)
        output = tokens[first:]
        if self.pool is None or not output:
            return
        if sequence.member is None:
            sequence.member = self.pool.add(sequence.salt, output)
        else:
            self.pool.extend(sequence.member, output)


create: Callable[[Options], Drafter] = SuffixDrafter  # see `foretoken.drafters.registry`
