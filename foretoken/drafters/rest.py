"""Retrieval from a datastore: proposes what followed the last few tokens in a corpus of the user's.

Source: He et al. 2023, "REST: Retrieval-Based Speculative Decoding" (arXiv 2311.08252). It finds the longest suffix of
the context in the corpus, and drafts the most frequent beginnings of its continuations as a tree. `foretoken data
index` sorts the corpus once; it is mapped into memory.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from foretoken.core.errors import ConfigError
from foretoken.core.token_ids import tokenizer_sha
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.drafters.base import DrafterOptions, TargetReads
from foretoken.drafters.datastore import Datastore
from foretoken.trees.merge import Trie, pruned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from foretoken.drafters.base import Committed, DraftContext, Drafter, DraftRequest, TargetHandle


class FrequentPaths(NamedTuple):
    """Nodes of a tree without its root; every node comes after its parent.

    Attributes:
        tokens: Token of each node.
        parents: Index of its parent among the nodes; -1 for the children of the root.
        counts: Continuations that begin with the path down to the node.
    """

    tokens: list[int]
    parents: list[int]
    counts: list[int]


class _Prefixes(NamedTuple):
    """All beginnings of continuations, by length and then in ascending order.

    Attributes:
        places: (P,) int64, R times (its length less 1), plus its first row.
        counts: (P,) int64, rows that begin with it.
        number: (D * R,) int64, the beginning at each place.
    """

    places: NDArray[np.int64]
    counts: NDArray[np.int64]
    number: NDArray[np.int64]


def most_frequent(rows: NDArray[np.int64], most: int) -> FrequentPaths:
    """Returns the most frequent beginnings, at most `most`; among equals the shorter, then the first in order.

    `rows` are (R, D) token ids, equal beginnings together, -1 from where a continuation ends.
    """
    num_rows, depth = rows.shape
    if not (num_rows and depth and most > 0):
        return FrequentPaths([], [], [])
    places, counts, number = _prefixes(rows)
    tokens = rows.T.reshape(-1)[places]
    chosen = np.argsort(-counts, kind="stable")
    chosen = chosen[tokens[chosen] >= 0][:most]
    # No beginning is more frequent than a shorter one of its own, which comes first among equals.
    at = places[chosen]
    parents = number[np.maximum(at - num_rows, 0)]
    node_of = np.full(len(places), -1)
    node_of[chosen] = np.arange(len(chosen))
    nodes = np.where(at < num_rows, -1, node_of[parents])
    return FrequentPaths(tokens[chosen].tolist(), nodes.tolist(), counts[chosen].tolist())


def likeliest_path(rows: NDArray[np.int64]) -> FrequentPaths:
    """Returns the path that takes the most frequent next token each time; see `most_frequent`."""
    num_rows, depth = rows.shape
    if not (num_rows and depth):
        return FrequentPaths([], [], [])
    places, counts, _ = _prefixes(rows)
    next_tokens = rows.T.reshape(-1)[places]
    counts[next_tokens < 0] = 0  # a continuation that ends is never extended
    tokens: list[int] = []
    path_counts: list[int] = []
    first, count = 0, num_rows
    for level in range(depth):
        if count == 1:
            rest = [token for token in rows[first, level:].tolist() if token >= 0]
            tokens += rest
            path_counts += [1] * len(rest)
            break
        begin, end = places.searchsorted((level * num_rows + first, level * num_rows + first + count)).tolist()
        best = begin + int(counts[begin:end].argmax())
        first, count = int(places[best]) - level * num_rows, int(counts[best])
        if not count:
            break
        tokens.append(int(next_tokens[best]))
        path_counts.append(count)
    return FrequentPaths(tokens, list(range(-1, len(tokens) - 1)), path_counts)


def _prefixes(rows: NDArray[np.int64]) -> _Prefixes:
    """Returns all beginnings of rows in which equal beginnings are adjacent."""
    num_rows, depth = rows.shape
    is_new = np.ones((depth, num_rows), dtype=bool)  # whether a row begins differently from the row before, by length
    np.logical_or.accumulate((rows[1:] != rows[:-1]).T, axis=0, out=is_new[:, 1:])
    flat = is_new.reshape(-1)
    places = flat.nonzero()[0]
    counts = np.empty_like(places)
    counts[:-1] = places[1:] - places[:-1]
    counts[-1] = len(flat) - places[-1]
    return _Prefixes(places, counts, flat.cumsum() - 1)


class Options(DrafterOptions):
    """Options of retrieval from a datastore.

    Attributes:
        datastore: Directory that `foretoken data index` made with the target's tokenizer.
        rest_max_match: Longest suffix of the context to look for, in tokens.
        rest_min_match: Shortest suffix.
        rest_max_matches: Most continuations read; of more, as many at even distances in their order.
    """

    is_trusted: ClassVar[bool] = True
    can_prune_tree: ClassVar[bool] = True
    prunable_by: ClassVar[frozenset[str]] = frozenset({"token_probability", "path_probability"})

    datastore: str | None = None
    rest_max_match: int = Field(default=16, ge=1, le=32)
    rest_min_match: int = Field(default=2, ge=1, le=32)
    rest_max_matches: int = Field(default=128, ge=1, le=5000)

    @model_validator(mode="after")
    def _ordered(self) -> Options:
        if self.rest_min_match > self.rest_max_match:
            raise ValueError(f"rest_min_match must not be above rest_max_match, {self.rest_max_match}")
        return self


class RestDrafter:
    """Proposes what followed the current tokens in a corpus."""

    name = "rest"
    reads = TargetReads(is_last_enough=True)

    def __init__(self, options: Options) -> None:
        """Opens the datastore; raises `ConfigError` when no datastore is named, or it is missing or damaged."""
        if options.datastore is None:
            raise ConfigError(
                "method 'rest' needs a datastore. Set 'datastore' to a directory that `foretoken data index` made."
            )
        self._options = options
        self._is_chain = options.tree == "chain"
        self.nodes_by_depth: Sequence[int] = range(1, options.chain_len + 2)
        if not self._is_chain:
            self.nodes_by_depth = (1, *[options.max_nodes] * options.chain_len)
        self._store = Datastore.open(Path(options.datastore))

    def attach(self, target: TargetHandle) -> None:
        """Raises `ConfigError` if the datastore was made with another tokenizer than the target's.

        If the target's tokenizer does not list its vocabulary, ids only have to be below the target's vocabulary size.
        """
        index, tokenizer = self._store.index, target.tokenizer
        is_other = hasattr(tokenizer, "get_vocab") and tokenizer_sha(tokenizer) != index.tokenizer_sha
        if is_other or self._store.largest_id >= target.vocab_size:
            raise ConfigError(
                f"the datastore '{self._options.datastore}' was not made with the tokenizer of '{target.name}'. "
                "Expected token ids of this target: make it with `foretoken data` and `foretoken data index`."
            )
        self._device = target.device

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Keeps nothing: each proposal looks the context up."""

    def propose(self, context: DraftContext) -> TokenTree:
        """Returns the most frequent continuation, or several in one tree."""
        each = zip(context.tokens, context.max_depth, context.max_nodes, strict=True)
        drafts = [
            self._draft(tokens, min(depth, self._options.chain_len), min(nodes, self.nodes_by_depth[-1]))
            for tokens, depth, nodes in each
        ]
        rows, scores = zip(*drafts, strict=True)
        tree = TokenTree.from_rows(rows, scores=scores, device=self._device)
        return tree if self._options.pruning is None else pruned(tree, self._options.pruning)

    def continue_from(self, slot: int, tokens: Sequence[int], path: Sequence[int], depth: int) -> list[int]:
        """See `Lookup`."""
        del slot
        rows = self._following([*tokens[-self._options.rest_max_match :], *path], depth)
        return [] if rows is None else likeliest_path(rows).tokens

    def commit(self, committed: Committed) -> None:
        """Learns nothing."""

    def release(self, slot: int) -> None:
        """Forgets nothing."""

    def _draft(self, tokens: Sequence[int], depth: int, max_nodes: int) -> tuple[TreeRow, list[float]]:
        """Returns one sequence's tree, scored by the share of continuations that begin with each path."""
        trie, scores = Trie(tokens[-1]), [0.0]
        rows = self._following(tokens, depth) if depth > 0 and max_nodes > 1 else None
        if rows is None:
            return trie.row(), scores
        paths = likeliest_path(rows[:, : max_nodes - 1]) if self._is_chain else most_frequent(rows, max_nodes - 1)
        nodes: list[int] = []
        for token, parent, count in zip(*paths, strict=True):
            node = trie.add(0 if parent < 0 else nodes[parent], token)  # a damaged datastore may repeat siblings
            nodes.append(node)
            if node == len(scores):
                scores.append(math.log(count / len(rows)))
        return trie.row(), scores

    def _following(self, tokens: Sequence[int], depth: int) -> NDArray[np.int64] | None:
        options = self._options
        found = self._store.longest_match(tokens, shortest=options.rest_min_match, longest=options.rest_max_match)
        return None if found is None else self._store.continuations(found, depth, options.rest_max_matches)


def create(options: Options) -> Drafter:
    """See `foretoken.drafters.registry`."""
    return RestDrafter(options)
