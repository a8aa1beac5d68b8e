"""Retrieval from a datastore: proposes what followed the last few tokens in a corpus of the user's.

It finds the longest suffix of the context in the corpus, and drafts the most frequent beginnings of its continuations
as a tree. A datastore is a corpus of token ids with its sorted suffixes, in files mapped into memory; `foretoken data
index` makes it. Files are refused if their sizes or any number in them are out of range. Any other damage gives bad
continuations, which cost speed and do not change the output.

Source: He et al. 2023, "REST: Retrieval-Based Speculative Decoding" (arXiv 2311.08252).

Letters: N tokens of the corpus, R continuations, D tokens of each, P beginnings of these.
"""

from __future__ import annotations

import json
import math
import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from foretoken.core.checks import check_integer, shown, validated
from foretoken.core.errors import ConfigError, RequestError
from foretoken.core.token_ids import tokenizer_sha
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.drafters.base import LookupOptions, TargetReads
from foretoken.files.atomic_files import OutputDirectory
from foretoken.files.bounded_reads import check_regular, read_json_object
from foretoken.trees.merge import Trie, pruned

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from foretoken.drafters.base import Committed, DraftContext, Drafter, DraftRequest, TargetHandle

MOST_TOKENS = (1 << 31) - 1  # two ranks fit one number of 63 bits
BYTES_A_TOKEN = 60  # of memory while sorting; measured: 56 with 16 million tokens


def sorted_suffixes(
    tokens: NDArray[Any], depth: int, *, on_round: Callable[[int], None] | None = None
) -> NDArray[np.uint32]:
    """Returns where the suffixes of a text begin, (N,) uint32, in the order of their first tokens, then of the text.

    Args:
        tokens: (N,) unsigned integers, N from 1 to `MOST_TOKENS`; not modified. Takes `BYTES_A_TOKEN` of memory.
        depth: Fewest tokens that are compared; a suffix that ends sooner comes before those that continue.
        on_round: Called after every round with the number of tokens that suffixes are sorted by so far.
    """
    keys, length = _first_keys(tokens, depth)
    while True:
        order = np.argsort(keys, kind="stable")
        if on_round is not None:
            on_round(length)
        if length >= depth:
            break
        ranks, num_ranks = _ranks(keys, order)
        if num_ranks == len(tokens):
            break
        keys = ranks * (num_ranks + 1)
        if length < len(ranks):
            keys[: len(ranks) - length] += ranks[length:]
        length *= 2
    return order.astype(np.uint32)


def _first_keys(tokens: NDArray[Any], depth: int) -> tuple[NDArray[np.int64], int]:
    """Returns numbers that order suffixes by as many tokens as 63 bits hold, at most `depth`, and that count."""
    bits = (int(tokens.max()) + 1).bit_length()
    length = max(1, min(63 // bits, depth))
    keys = np.zeros(len(tokens), dtype=np.int64)
    for ahead in range(length):
        keys <<= bits
        if ahead < len(tokens):
            keys[: len(tokens) - ahead] += tokens[ahead:]
            keys[: len(tokens) - ahead] += 1  # 0 is the end of the text
    return keys, length


def _ranks(keys: NDArray[np.int64], order: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """(N,) ranks of suffixes from 1, equal for equal keys, and the greatest rank."""
    ordered = keys[order]
    is_new = np.ones(len(ordered), dtype=np.int64)
    is_new[1:] = ordered[1:] != ordered[:-1]
    ranks = np.empty_like(ordered)
    ranks[order] = np.cumsum(is_new)
    return ranks, int(is_new.sum())


INDEX, TOKENS, SUFFIXES = "index.json", "tokens.bin", "suffixes.bin"
FORMAT: Literal["foretoken-datastore"] = "foretoken-datastore"
SORTED_DEPTH = 64  # tokens that suffixes are sorted by: the longest match and its draft
ADVICE = "Make it with `foretoken data index`."
_READ_AT_ONCE = 1 << 22
DATASTORE = OutputDirectory("a datastore", lambda path: (path / INDEX).is_file() and (path / SUFFIXES).is_file())


class DatastoreIndex(BaseModel):
    """The content of `index.json`.

    Attributes:
        num_tokens: N.
        vocab_size: All token ids are below.
        dtype: Of the token ids.
        eos_id: Token between documents; nothing is continued after it. None without one.
        depth: Tokens by which suffixes are sorted.
        tokenizer_sha: Of the tokenizer of the ids, see `foretoken.core.token_ids`.
        tokens_sha256: Of the packed tokens that it was made from.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    format: Literal["foretoken-datastore"] = FORMAT
    version: Literal[1] = 1
    num_tokens: int = Field(ge=1, le=MOST_TOKENS)
    vocab_size: int = Field(ge=1, le=1 << 31)
    dtype: Literal["uint16", "uint32"]
    eos_id: int | None = Field(default=None, ge=0)
    depth: int = Field(ge=1, le=1 << 16)
    tokenizer_sha: str
    tokens_sha256: str


def write_datastore(
    directory: Path,
    tokens: NDArray[Any],
    *,
    vocab_size: int,
    eos_id: int | None,
    tokenizer_sha: str,
    tokens_sha256: str,
    force: bool = False,
    on_round: Callable[[int], None] | None = None,
) -> DatastoreIndex:
    """Sorts a corpus, (N,) token ids, and writes its datastore, completely or not at all.

    `force` replaces an existing datastore. Raises `RequestError` when the directory is taken, there are too many tokens
    or none, or an id is not below `vocab_size`.
    """
    if not 1 <= len(tokens) <= MOST_TOKENS:
        raise RequestError(f"the data has {len(tokens)} tokens. Expected 1 to {MOST_TOKENS}.")
    check_integer("vocab_size of the data", vocab_size, 1, 1 << 31)
    if (largest := _largest_of(tokens)) >= vocab_size:
        raise RequestError(
            f"the data holds token {largest}. Expected ids below {vocab_size}. It is damaged: make it again."
        )
    facts = {
        "num_tokens": len(tokens), "vocab_size": vocab_size, "dtype": "uint16" if vocab_size <= 1 << 16 else "uint32",
        "eos_id": eos_id, "depth": SORTED_DEPTH, "tokenizer_sha": tokenizer_sha, "tokens_sha256": tokens_sha256,
    }  # fmt: skip
    index = validated(DatastoreIndex, facts, "the data", error=RequestError, advice="It is damaged: make it again.")
    with DATASTORE.new(directory, force=force) as new:
        np.asarray(tokens).astype(f">u{np.dtype(index.dtype).itemsize}").tofile(new / TOKENS)
        try:
            sorted_suffixes(tokens, SORTED_DEPTH, on_round=on_round).astype("<u4").tofile(new / SUFFIXES)
        except MemoryError as err:
            raise RequestError(
                f"sorting {len(tokens)} tokens takes {len(tokens) * BYTES_A_TOKEN / 2**30:.1f} GiB of memory, and "
                "there is less. Expected fewer tokens, or more memory."
            ) from err
        (new / INDEX).write_text(json.dumps(index.model_dump(mode="json"), indent=2) + "\n", encoding="utf-8")
    return index


def _read_index(directory: Path) -> DatastoreIndex:
    path = directory / INDEX
    if not path.exists():
        raise ConfigError(f"'{directory}' holds no datastore. Expected {INDEX}, {TOKENS} and {SUFFIXES}. {ADVICE}")
    values = read_json_object(path, error=ConfigError, advice=ADVICE)
    if values.get("format") != FORMAT:
        raise ConfigError(f"'{path}' has the format {shown(values.get('format'))}. Expected '{FORMAT}'. {ADVICE}")
    return validated(DatastoreIndex, values, f"the datastore '{path}'", advice=ADVICE)


def _mapped(path: Path, size: int) -> mmap.mmap:
    try:
        check_regular(path, error=ConfigError)
        with path.open("rb") as file:
            found = file.seek(0, 2)
            if found != size:
                raise ConfigError(f"'{path}' has {found} bytes. Expected {size}. It is damaged. {ADVICE}")
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except OSError as err:
        raise ConfigError(
            f"'{path}' cannot be read: {err.strerror}. Expected a file of {size} bytes. {ADVICE}"
        ) from err


def _largest_of(values: NDArray[Any]) -> int:
    """Returns the largest number, read in parts: `values` may be a file."""
    return max(int(values[at : at + _READ_AT_ONCE].max()) for at in range(0, len(values), _READ_AT_ONCE))


class Found(NamedTuple):
    """A run of tokens in the corpus: suffixes `begin` … `end` - 1 in their order begin with its `length` tokens."""

    length: int
    begin: int
    end: int


class Datastore:
    """An open datastore; `largest_id` is the largest token id of the corpus."""

    def __init__(self, index: DatastoreIndex, tokens: mmap.mmap | bytes, suffixes: NDArray[np.uint32]) -> None:
        """Takes the files' content, of the sizes in `index`; raises `ValueError` for a token id out of range."""
        self.index, self._bytes, self._suffixes = index, tokens, suffixes
        self._width = np.dtype(index.dtype).itemsize
        self._tokens: NDArray[Any] = np.frombuffer(tokens, dtype=f">u{self._width}")
        counts = _token_counts(self._tokens, index.vocab_size)
        self.largest_id = len(counts) - 1
        self._starts = np.concatenate([[0], np.cumsum(counts)])  # of suffixes by their first token

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Maps a datastore and reads it once; raises `ConfigError` if it is missing or damaged.

        The files must not change while the datastore is in use.
        """
        index = _read_index(directory)
        tokens = _mapped(directory / TOKENS, index.num_tokens * np.dtype(index.dtype).itemsize)
        suffixes: NDArray[np.uint32] = np.frombuffer(_mapped(directory / SUFFIXES, index.num_tokens * 4), dtype="<u4")
        try:
            store = cls(index, tokens, suffixes)
        except ValueError as err:
            raise ConfigError(f"'{directory / TOKENS}' {err}. It is damaged. {ADVICE}") from err
        if (largest := _largest_of(suffixes)) >= index.num_tokens:
            raise ConfigError(
                f"'{directory / SUFFIXES}' holds {largest}. Expected places below {index.num_tokens}, the number of "
                f"tokens. It is damaged. {ADVICE}"
            )
        return store

    def __len__(self) -> int:
        return len(self._suffixes)

    def longest_match(self, context: Sequence[int], *, shortest: int, longest: int) -> Found | None:
        """Returns the longest run of last tokens, `shortest` to `longest`, that occurs in the corpus, or None."""
        most, longest = min(longest, len(context)), 0
        while longest < most and context[len(context) - longest - 1] <= self.largest_id:  # larger ids occur nowhere
            longest += 1
        found = self._find(context, shortest) if longest >= shortest else None
        if found is None:
            return None
        low, high = shortest, longest  # a run of `low` tokens occurs, none of more than `high` does
        while low < high:
            middle = (low + high + 1) // 2
            longer = self._find(context, middle)
            if longer is None:
                high = middle - 1
            else:
                low, found = middle, longer
        return found

    def continuations(self, found: Found, depth: int, most: int) -> NDArray[np.int64]:
        """Returns what follows a run: (R, D) ids in ascending order, -1 after the end of a document and of the corpus.

        Args:
            depth: Most tokens D, at most as many as suffixes are sorted by, so that equal beginnings are adjacent.
            most: Most continuations R; of more occurrences, R at even distances in their order.
        """
        depth, count = min(depth, self.index.depth - found.length), found.end - found.begin
        places: Any = slice(found.begin, found.end)
        if count > most:
            places = found.begin + np.arange(most, dtype=np.int64) * count // most
        begins = self._suffixes[places].astype(np.int64) + found.length
        at = begins[:, None] + np.arange(max(depth, 0))
        if at.size and int(begins.max()) + depth > len(self):
            rows = np.where(at < len(self), self._tokens[np.minimum(at, len(self) - 1)].astype(np.int64), -1)
        else:
            rows = self._tokens[at].astype(np.int64)
        if self.index.eos_id is not None:
            is_end = rows == self.index.eos_id
            if is_end.any():
                rows[(np.cumsum(is_end, axis=1) - is_end) > 0] = -1
        return rows

    def _find(self, context: Sequence[int], length: int) -> Found | None:
        run = context[len(context) - length :]
        pattern = np.array(run, dtype=self._tokens.dtype).tobytes()
        content, suffixes, width, size = self._bytes, self._suffixes, self._width, len(pattern)

        def first_tokens(place: int) -> bytes:
            begin = int(suffixes[place]) * width
            return content[begin : begin + size]

        low, high = int(self._starts[run[0]]), int(self._starts[run[0] + 1])
        begin = bisect_left(range(len(self)), pattern, low, high, key=first_tokens)
        if begin == high or first_tokens(begin) != pattern:
            return None
        return Found(length, begin, bisect_right(range(len(self)), pattern, begin, high, key=first_tokens))


def _token_counts(tokens: NDArray[Any], vocab_size: int) -> NDArray[np.int64]:
    largest = _largest_of(tokens)
    if largest >= vocab_size:
        raise ValueError(f"holds token {largest}, and ids are below {vocab_size}")
    counts = np.zeros(largest + 1, dtype=np.int64)
    for at in range(0, len(tokens), _READ_AT_ONCE):
        counts += np.bincount(tokens[at : at + _READ_AT_ONCE].astype(np.int64), minlength=largest + 1)
    return counts


class FrequentPaths(NamedTuple):
    """Nodes of a tree without its root; every node comes after its parent, -1 for the root.

    `counts`: continuations that begin with the path down to each node.
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


class Options(LookupOptions):
    """Options of retrieval from a datastore.

    Attributes:
        datastore: Directory that `foretoken data index` made with the target's tokenizer.
        rest_max_match: Longest suffix of the context to look for, in tokens.
        rest_min_match: Shortest suffix.
        rest_max_matches: Most continuations read; of more, as many at even distances in their order.
    """

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
        self.nodes_by_depth = options.nodes_by_depth
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


create: Callable[[Options], Drafter] = RestDrafter  # see `foretoken.drafters.registry`
