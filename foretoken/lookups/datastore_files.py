"""The files of a datastore: a corpus of token ids and its sorted suffixes, written whole or not at all.

A directory holds `index.json`, `tokens.bin` (the corpus, integers of 2 or 4 bytes, the most significant byte first, so
that runs of tokens compare as bytes do) and `suffixes.bin` (where suffixes begin in their order, 4 bytes each, the
least significant first).

Letters: N tokens.
"""

from __future__ import annotations

import json
import mmap
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from foretoken.core.checks import check_integer
from foretoken.core.errors import ConfigError, RequestError
from foretoken.core.validation import validated
from foretoken.files.atomic_files import OutputDirectory
from foretoken.files.bounded_reads import check_regular, read_json_object
from foretoken.lookups.suffix_array import BYTES_A_TOKEN, MOST_TOKENS, sorted_suffixes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

INDEX, TOKENS, SUFFIXES = "index.json", "tokens.bin", "suffixes.bin"
FORMAT: Literal["foretoken-datastore"] = "foretoken-datastore"
SORTED_DEPTH = 64  # tokens by which suffixes are sorted: the longest match and what is drafted after it
ADVICE = "Make it with `foretoken data index`."
_READ_AT_ONCE = 1 << 22
DATASTORE = OutputDirectory("a datastore", lambda place: (place / INDEX).is_file() and (place / SUFFIXES).is_file())


class DatastoreIndex(BaseModel):
    """What `index.json` holds.

    Attributes:
        num_tokens: N.
        vocab_size: All token ids are below.
        dtype: Of the token ids.
        eos_id: Token between documents, after which nothing is continued; None without one.
        depth: Tokens by which suffixes are sorted.
        tokenizer_sha: Of the tokenizer that the ids are of, see `foretoken.core.token_ids`.
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
    """Sorts a corpus and writes its datastore, whole or not at all.

    Args:
        directory: Where to; its parents are made.
        tokens: (N,) token ids, documents one after another.
        vocab_size: All ids are below.
        eos_id: See `DatastoreIndex`, like the next two.
        tokenizer_sha: Likewise.
        tokens_sha256: Likewise.
        force: Replaces a datastore that is there.
        on_round: See `sorted_suffixes`.

    Raises:
        RequestError: When the place is taken, the tokens are too many or none, or an id is out of range. Nothing is
            written then.
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
    """`sorted_suffixes`; raises `RequestError` where memory is short."""
    try:
        return sorted_suffixes(tokens, SORTED_DEPTH, on_round=on_round)
    except MemoryError as err:
        raise RequestError(
            f"sorting {len(tokens)} tokens takes {len(tokens) * BYTES_A_TOKEN / 2**30:.1f} GiB of memory, and there is "
            "less. Expected fewer tokens, or more memory."
        ) from err


def read_index(directory: Path) -> DatastoreIndex:
    """The checked `index.json`."""
    path = directory / INDEX
    if not path.exists():
        raise ConfigError(f"'{directory}' holds no datastore. Expected {INDEX}, {TOKENS} and {SUFFIXES}. {ADVICE}")
    values = read_json_object(path, error=ConfigError, advice=ADVICE)
    if values.get("format") != FORMAT:
        raise ConfigError(f"'{path}' is of another kind. Expected the format '{FORMAT}'. {ADVICE}")
    return validated(DatastoreIndex, values, f"the datastore '{path}'", advice=ADVICE)


def mapped(path: Path, size: int) -> mmap.mmap:
    """A file of a known size, mapped into memory to be read.

    Raises:
        ConfigError: When it is missing, no regular file, or of another size.
    """
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
    """The largest of some numbers, read in parts: they may be a file."""
    return max(int(values[at : at + _READ_AT_ONCE].max()) for at in range(0, len(values), _READ_AT_ONCE))
