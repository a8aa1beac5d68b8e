"""Prompt lookup: finds an earlier occurrence of the last few tokens and proposes the tokens that followed it.

Source: Saxena 2023, "Prompt Lookup Decoding". The longest match wins, the most recent one among equals. With
`tree="tree"` the continuations of several earlier occurrences share one tree: the four most recent of the longest
match, then the four most recent of each shorter length, while nodes are left.

A continuation that reaches the end of the text repeats itself, as the text did so far. For a run of one token, where
the last match ends one token before the text, the draft is that token as often as asked for.

Scores use the length m of the agreement before the match, at most 32 tokens: the next d tokens agree with probability
(m + 1) / (m + 1 + d), Laplace's rule of succession. Scores do not decide which match is taken.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.drafters.base import LookupOptions, TargetReads
from foretoken.trees.merge import Trie

if TYPE_CHECKING:
    from foretoken.drafters.base import Committed, DraftContext, Drafter, DraftRequest, TargetHandle

MOST_MATCHES = 4  # per length


class NgramIndex:
    """Ends of each run of tokens of a growing sequence.

    Memory grows by one number and at most one dictionary entry per token and match length. A look-up takes the same
    time for any tokens.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._last: dict[tuple[int, ...], int] = {}
        # For each match length and each end of a run: the end of its previous occurrence; 0 for none.
        self._before = {length: array("q", [0]) for length in self._lengths}
        self._num_tokens = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds the runs that end in new tokens; `tokens` is the whole sequence."""
        last = self._last
        for end in range(self._num_tokens + 1, len(tokens) + 1):
            for length in self._lengths:
                before = 0
                if length <= end:
                    run = tuple(tokens[end - length : end])
                    before = last.get(run, 0)
                    last[run] = end
                self._before[length].append(before)
        self._num_tokens = len(tokens)

    def last_end(self, tail: Sequence[int], num_added: int) -> int | None:
        """Returns the first end of `matches` that the index would have with some tokens added; None without a match.

        `tail`: the `num_added` tokens, at least one, and before them the sequence's last tokens: as many as the longest
        run has, or all.
        """
        size, first = self._num_tokens + num_added, len(tail) - num_added
        for length in self._lengths:
            if length > len(tail):
                continue
            run = list(tail[len(tail) - length :])
            for end in range(len(tail) - 1, max(first, length - 1), -1):
                if list(tail[end - length : end]) == run:
                    return size - len(tail) + end
            if found := self._last.get(tuple(run)):
                return found
        return None

    def matches(self) -> Iterator[int]:
        """Yields ends of earlier occurrences of the sequence's last tokens, each once.

        The `MOST_MATCHES` most recent of the longest match come first, most recent first, then those of each shorter
        length. An end of a longer match is not repeated.
        """
        found: set[int] = set()
        for length in self._lengths:
            ends = self._before[length]
            end = ends[self._num_tokens]
            for _ in range(MOST_MATCHES):
                if not end:
                    break
                if end not in found:
                    found.add(end)
                    yield end
                end = ends[end]


_LONGEST_AGREEMENT = 32  # tokens before a match that are compared


class Options(LookupOptions):
    """Options of prompt lookup, with vLLM's names: longest and shortest match, in tokens."""

    prompt_lookup_max: int = Field(default=4, ge=1, le=32)
    prompt_lookup_min: int = Field(default=2, ge=1, le=32)

    @model_validator(mode="after")
    def _ordered(self) -> Options:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(f"prompt_lookup_min must not be above prompt_lookup_max, {self.prompt_lookup_max}")
        return self


class NgramDrafter:
    """Proposes what followed the current tokens earlier in the same sequence."""

    name = "ngram"
    reads = TargetReads(is_last_enough=True)

    def __init__(self, options: Options) -> None:
        self._options, self._longest = options, options.chain_len
        self._num_matches = 1 if options.tree == "chain" else None  # that are drafted; None for all
        self.nodes_by_depth = options.nodes_by_depth
        self._indices: dict[int, NgramIndex] = {}

    def attach(self, target: TargetHandle) -> None:
        """Stores the device on which trees are made."""
        self._device = target.device

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Indexes the prompt."""
        index = self._indices[slot] = NgramIndex(self._options.prompt_lookup_min, self._options.prompt_lookup_max)
        index.extend(request.prompt)

    def propose(self, context: DraftContext) -> TokenTree:
        """Returns the continuation of the best match, or of several matches in one tree."""
        each = zip(context.slots, context.tokens, context.max_depth, context.max_nodes, strict=True)
        drafts = [
            self._draft(self._indices[slot], tokens, min(depth, self._longest), min(nodes, self.nodes_by_depth[-1]))
            for slot, tokens, depth, nodes in each
        ]
        rows, scores = zip(*drafts, strict=True)
        return TokenTree.from_rows(rows, scores=scores, device=self._device)

    def continue_from(self, slot: int, tokens: Sequence[int], path: Sequence[int], depth: int) -> list[int]:
        """See `Lookup`."""
        index, longest = self._indices[slot], self._options.prompt_lookup_max
        index.extend(tokens)
        end = index.last_end([*tokens[-longest:], *path], len(path))
        if end is None:
            return []
        return _repeated([*tokens[end : end + depth], *path[max(end - len(tokens), 0) :]], depth)

    def commit(self, committed: Committed) -> None:
        """Learns nothing: `propose` indexes the committed tokens."""

    def release(self, slot: int) -> None:
        """Forgets the index."""
        self._indices.pop(slot, None)

    def _draft(
        self, index: NgramIndex, tokens: Sequence[int], depth: int, max_nodes: int
    ) -> tuple[TreeRow, list[float]]:
        index.extend(tokens)
        trie, scores = Trie(tokens[-1]), [0.0]
        for end in islice(index.matches(), self._num_matches) if depth > 0 else ():
            nodes = trie.add_path(_repeated(tokens[end : end + depth], depth), max_nodes)
            seen = _agreement(tokens, end) + 1
            scores += [-math.inf] * (len(trie.tokens) - len(scores))
            for below, node in enumerate(nodes, start=1):
                scores[node] = max(scores[node], math.log(seen / (seen + below)))
            if len(trie.tokens) >= max_nodes:
                break
        return trie.row(), scores


def _agreement(tokens: Sequence[int], end: int) -> int:
    """Returns how many tokens before the end of a match equal the text's last tokens, at most 32."""
    most, size = min(end, _LONGEST_AGREEMENT), len(tokens)
    for back in range(most):
        if tokens[end - 1 - back] != tokens[size - 1 - back]:
            return back
    return most


def _repeated(following: Sequence[int], depth: int) -> list[int]:
    """Returns `depth` tokens: a continuation of at least one token, repeated from its beginning."""
    return list(islice(cycle(following), depth))


create: Callable[[Options], Drafter] = NgramDrafter  # see `foretoken.drafters.registry`
