"""A corpus of token ids with its sorted suffixes, in files mapped into memory, for looking up what followed a run.

Files are refused if their sizes or any number in them are out of range. Any other damage gives bad continuations, which
cost speed and do not change the output.

Letters: N tokens, R continuations, D tokens of each.
"""

from __future__ import annotations

import json
import mmap
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from foretoken.core.checks import check_integer, shown, validated
from foretoken.core.errors import ConfigError, RequestError
from foretoken.files.atomic_files import OutputDirectory
from foretoken.files.bounded_reads import check_regular, read_json_object

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

MOST_TOKENS = (1 << 31) - 1  # two ranks fit one number of 63 bits
BYTES_A_TOKEN = 60  # of memory while sorting; measured: 56 with 16 million tokens


def sorted_suffixes(
    tokens: NDArray[Any], depth: int, *, on_round: Callable[[int], None] | None = None
) -> NDArray[np.uint32]:
    """Returns where the suffixes of a text begin, in the order of their first tokens.

    Args:
        tokens: (N,) unsigned integers, N from 1 to `MOST_TOKENS`; not modified. Takes `BYTES_A_TOKEN` of memory.
        depth: Fewest tokens that are compared; a suffix that ends sooner comes before those that continue.
        on_round: Called after every round with the number of tokens that suffixes are sorted by so far.

    Returns:
        (N,) uint32, each of 0 … N - 1 once. Suffixes that agree in the compared tokens keep the order of the text.
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
DATASTORE = OutputDirectory("a datastore", lambda place: (place / INDEX).is_file() and (place / SUFFIXES).is_file())


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
    """Sorts a corpus and writes its datastore, completely or not at all.

    Args:
        tokens: (N,) token ids, documents one after another.
        vocab_size: All ids are below.
        force: Replaces an existing datastore.

    Raises:
        RequestError: When the directory is taken, there are too many tokens or none, or an id is out of range. Nothing
            is written then.
    """
    if not 1 <= len(tokens) <= MOST_TOKENS:
        raise RequestError(f"the data has {len(tokens)} tokens. Expected 1 to {MOST_TOKENS}.")
    check_integer("vocab_size of the data", vocab_size, 1, 1 << 31)
    if largest_of(tokens) >= vocab_size:
        raise RequestError(
            f"the data holds token {largest_of(tokens)}. Expected ids below {vocab_size}. It is damaged: make it again."
        )
    dtype: Literal["uint16", "uint32"] = "uint16" if vocab_size <= 1 << 16 else "uint32"
    facts = {
        "num_tokens": len(tokens), "vocab_size": vocab_size, "dtype": dtype, "eos_id": eos_id, "depth": SORTED_DEPTH,
        "tokenizer_sha": tokenizer_sha, "tokens_sha256": tokens_sha256,
    }  # fmt: skip
    index = validated(
        DatastoreIndex, facts, "the data", error=RequestError, advice="It is damaged: make it again."
    )  # fmt: skip
    with DATASTORE.new(directory, force=force) as new:
        np.asarray(tokens).astype(f">u{np.dtype(dtype).itemsize}").tofile(new / TOKENS)
        _sorted(tokens, on_round).astype("<u4").tofile(new / SUFFIXES)
        (new / INDEX).write_text(json.dumps(index.model_dump(mode="json"), indent=2) + "\n", encoding="utf-8")
    return index


def _sorted(tokens: NDArray[Any], on_round: Callable[[int], None] | None) -> NDArray[np.uint32]:
    try:
        return sorted_suffixes(tokens, SORTED_DEPTH, on_round=on_round)
    except MemoryError as err:
        raise RequestError(
            f"sorting {len(tokens)} tokens takes {len(tokens) * BYTES_A_TOKEN / 2**30:.1f} GiB of memory, and there is "
            "less. Expected fewer tokens, or more memory."
        ) from err


def read_index(directory: Path) -> DatastoreIndex:
    """Returns the checked `index.json`."""
    path = directory / INDEX
    if not path.exists():
        raise ConfigError(f"'{directory}' holds no datastore. Expected {INDEX}, {TOKENS} and {SUFFIXES}. {ADVICE}")
    values = read_json_object(path, error=ConfigError, advice=ADVICE)
    if values.get("format") != FORMAT:
        raise ConfigError(f"'{path}' has the format {shown(values.get('format'))}. Expected '{FORMAT}'. {ADVICE}")
    return validated(DatastoreIndex, values, f"the datastore '{path}'", advice=ADVICE)


def mapped(path: Path, size: int) -> mmap.mmap:
    """Maps a file for reading; raises `ConfigError` if it is missing, no regular file, or of another size."""
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


def largest_of(values: NDArray[Any]) -> int:
    """Returns the largest number, read in parts: `values` may be a file."""
    return max(int(values[at : at + _READ_AT_ONCE].max()) for at in range(0, len(values), _READ_AT_ONCE))


_COUNTED_AT_ONCE = 1 << 22


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
        index = read_index(directory)
        width = np.dtype(index.dtype).itemsize
        tokens = mapped(directory / TOKENS, index.num_tokens * width)
        suffixes: NDArray[np.uint32] = np.frombuffer(mapped(directory / SUFFIXES, index.num_tokens * 4), dtype="<u4")
        try:
            store = cls(index, tokens, suffixes)
        except ValueError as err:
            raise ConfigError(f"'{directory / TOKENS}' {err}. It is damaged. {ADVICE}") from err
        if largest_of(suffixes) >= index.num_tokens:
            raise ConfigError(
                f"'{directory / SUFFIXES}' holds {largest_of(suffixes)}. Expected places below {index.num_tokens}, the "
                f"number of tokens. It is damaged. {ADVICE}"
            )
        return store

    def __len__(self) -> int:
        return len(self._suffixes)

    def longest_match(self, context: Sequence[int], *, shortest: int, longest: int) -> Found | None:
        """Returns the longest run of last tokens, `shortest` to `longest`, that occurs in the corpus, or None."""
        longest = self._num_known(context, min(longest, len(context)))
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
        """Returns what follows a run of tokens in the corpus.

        Args:
            depth: Most tokens D, at most as many as suffixes are sorted by, so that equal beginnings are adjacent.
            most: Most continuations R; of more occurrences, R at even distances in their order.

        Returns:
            (R, D) token ids in ascending order, -1 after the end of a document and of the corpus.
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

    def _num_known(self, context: Sequence[int], longest: int) -> int:
        """Returns how many of the last `longest` tokens follow the last token that no run of the corpus can hold."""
        length = 0
        while length < longest and context[len(context) - length - 1] <= self.largest_id:
            length += 1
        return length

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
    largest = largest_of(tokens)
    if largest >= vocab_size:
        raise ValueError(f"holds token {largest}, and ids are below {vocab_size}")
    counts = np.zeros(largest + 1, dtype=np.int64)
    for at in range(0, len(tokens), _COUNTED_AT_ONCE):
        counts += np.bincount(tokens[at : at + _COUNTED_AT_ONCE].astype(np.int64), minlength=largest + 1)
    return counts
