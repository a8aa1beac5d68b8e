"""Packed tokens: documents one after another in one memory-mapped array, read as shuffled windows.

Batches are a pure function of (seed, step), so a resumed training run needs no state of its data. Windows ignore the
borders of documents: one may start or end inside a document, and the first document follows the last.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from foretoken.core.checks import validated
from foretoken.core.errors import RequestError
from foretoken.core.token_ids import tokenizer_sha
from foretoken.files.atomic_files import OutputDirectory
from foretoken.files.bounded_reads import read_json_object
from foretoken.formats.draft_vocabulary import DraftVocabulary
from foretoken.sampling.noise import derive_seed, mix

FORMAT, VERSION = "foretoken-packed-tokens", 1
META, TOKENS, SUPERVISED = "meta.json", "tokens.bin", "supervised.bin"
_BUFFER_BYTES = 1 << 20  # of a file that is written; a choice: few system calls for little memory
PACKED_TOKENS = OutputDirectory(
    "packed tokens", lambda path: any((path / part / META).is_file() for part in ("", "train"))
)
# Of the Feistel network; a choice: four suffice in theory if the round function is random, more cost little.
_ROUNDS = 8
_COUNTED_AT_ONCE = 1 << 22  # labels; a choice: bounds the memory of a count
_DAMAGED = "It is damaged: make the data again."
MOST_TOKENS = 1 << 24  # of a vocabulary; a choice: the largest ones have 2^18


def shuffled(positions: np.ndarray, count: int, key: int) -> np.ndarray:
    """Returns (n,) int64: the images of (n,) int64 positions under a permutation of 0..count-1; key: chooses it."""
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    keys = [derive_seed(key, number) for number in range(1, _ROUNDS + 1)]
    values = _encrypted(torch.from_numpy(np.asarray(positions, dtype=np.int64)), half, keys)
    outside = values >= count
    while bool(outside.any()):
        values = torch.where(outside, _encrypted(values, half, keys), values)
        outside = values >= count
    result: np.ndarray = values.numpy()
    return result


def _encrypted(values: Tensor, half: int, keys: list[int]) -> Tensor:
    """Permutes the `2 * half`-bit numbers; int64 in and out."""
    mask = (1 << half) - 1
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (mix(right + key) & mask)
    return (left << half) | right


@dataclass(frozen=True)
class PackedTokens:
    """Documents packed one after another. `meta` has the contents of `meta.json`, see `PackedWriter.finish`."""

    tokens: np.ndarray  # (N,) uint16 or uint32, memory-mapped when opened from disk
    supervised: np.ndarray | None  # (N,) bool, tokens that count as labels; None for all
    meta: dict[str, Any]
    repeats_windows: bool = False  # whether all epochs have the windows of the first one, each in its own order

    @classmethod
    def open(cls, directory: Path) -> PackedTokens:
        """Opens packed tokens or their `train/` without reading them; raises `RequestError` if they are incomplete."""
        directory = Path(directory)
        if not (directory / META).is_file() and (directory / "train" / META).is_file():
            directory = directory / "train"
        meta = _read_meta(directory)
        size = meta["num_tokens"]
        tokens = _mapped(directory / TOKENS, np.dtype(meta["dtype"]), size)
        is_partial = meta["num_supervised"] != size
        return cls(tokens, _mapped(directory / SUPERVISED, np.dtype(bool), size) if is_partial else None, meta)

    def num_windows(self, length: int) -> int:
        """Returns the windows of an epoch: as many of `length` tokens as fit side by side."""
        return len(self.tokens) // length

    def batch(self, step: int, *, batch_size: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
        """Returns the batch of a training step, a pure function of (seed, step): tokens and labels.

        The tokens are (B, S) int64, B = `batch_size` over all processes and S = `length`. The labels are (B, S) bool:
        whether the token itself counts as one. Each epoch takes every window of a grid once, in its own order. The grid
        starts at a random token of the epoch, or of the first one with `repeats_windows`, and continues from the last
        token to the first. A batch may span two epochs. Steps count from 0.

        Raises `RequestError` when the data is shorter than one window or damaged, or a number is out of range.
        """
        if step < 0 or batch_size < 1 or length < 1:
            raise RequestError(
                f"step {step}, batch_size {batch_size}, length {length} give no batch. Expected step 0 or more and the "
                "others at least 1."
            )
        size, count = len(self.tokens), self.num_windows(length)
        if count == 0:
            raise RequestError(
                f"the data has {size} tokens and a window {length}. Expected at least one window. Use more text or "
                "shorter windows."
            )
        first = step * batch_size
        rows = np.arange(first, first + batch_size, dtype=np.int64)
        starts = np.empty_like(rows)
        for epoch in range(first // count, (first + batch_size - 1) // count + 1):
            inside = rows // count == epoch
            key = derive_seed(seed, epoch + 1)
            offset = ((derive_seed(seed, 1) if self.repeats_windows else key) & (2**63 - 1)) % size
            starts[inside] = shuffled(rows[inside] % count, count, key) * length + offset
        windows = (starts[:, None] + np.arange(length)) % size
        tokens = torch.from_numpy(self.tokens[windows].astype(np.int64))
        if int(tokens.max()) > self.meta.get("largest_token_id", math.inf):
            raise RequestError(f"the data holds token {int(tokens.max())}, but {META} has none so large. {_DAMAGED}")
        if self.supervised is None:
            return tokens, torch.ones_like(tokens, dtype=torch.bool)
        return tokens, torch.from_numpy(np.array(self.supervised[windows]))


class _Meta(BaseModel):
    model_config = ConfigDict(strict=True)

    num_documents: int = Field(ge=1)
    num_tokens: int = Field(ge=1)
    num_supervised: int = Field(ge=1)
    dtype: Literal["uint16", "uint32"]
    vocab_size: int = Field(ge=1, le=MOST_TOKENS)
    largest_token_id: int = Field(ge=0, lt=MOST_TOKENS)
    eos_id: int | None = Field(ge=0)
    tokenizer_sha: str
    tokens_sha256: str


def _read_meta(directory: Path) -> dict[str, Any]:
    if not (directory / META).exists():
        raise RequestError(
            f"'{directory}' holds no packed tokens. Expected {META} and {TOKENS}. Make them with `foretoken data`."
        )
    meta = read_json_object(directory / META, error=RequestError, advice="Make the data again.")
    if (meta.get("format"), meta.get("version")) != (FORMAT, VERSION):
        raise RequestError(
            f"'{directory / META}' is of another kind. Expected format '{FORMAT}', version {VERSION}. Make it again "
            "with `foretoken data`."
        )
    validated(_Meta, meta, f"'{directory / META}'", error=RequestError, advice=_DAMAGED)
    return meta


def _mapped(path: Path, dtype: np.dtype[Any], size: int) -> np.ndarray:
    found = path.stat().st_size if path.is_file() else 0
    if found != size * dtype.itemsize:
        raise RequestError(
            f"'{path}' has {found} bytes. Expected {size * dtype.itemsize}. It is damaged: make the data again."
        )
    return np.memmap(path, dtype=dtype, mode="r", shape=(size,))


class PackedForm(NamedTuple):
    """What all packed tokens of one tokenizer share."""

    vocab_size: int
    eos_id: int | None
    tokenizer_sha: str

    @classmethod
    def of(cls, tokenizer: Any, vocab_size: int | None = None) -> PackedForm:
        """Reads a tokenizer; vocab_size: of the target, None if unknown."""
        # Ids may have gaps, so the largest can exceed their number.
        most = vocab_size or max(tokenizer.get_vocab().values()) + 1
        return cls(most, tokenizer.eos_token_id, tokenizer_sha(tokenizer))


def check_token(token: int, vocab_size: int, what: str) -> None:
    """Raises `RequestError` for a token id that the target does not have; what: the text that holds it."""
    if not 0 <= token < vocab_size:
        raise RequestError(
            f"{what} holds token id {token}. Expected 0..{vocab_size - 1}, the target's tokens. Copy the files of the "
            "tokenizer that the target was trained with into its directory again."
        )


@dataclass(frozen=True, slots=True)
class Document:
    """One document as tokens, special ones included; `supervised`: which count as labels, None for all."""

    tokens: Sequence[int]
    supervised: Sequence[bool] | None = None

    def __post_init__(self) -> None:
        if self.supervised is not None and len(self.supervised) != len(self.tokens):
            raise RequestError(
                f"a document has {len(self.tokens)} tokens and {len(self.supervised)} flags. Expected one flag a token."
            )


class PackedWriter:
    """Appends documents to the files of one directory, which `finish` completes; counts what is written."""

    def __init__(self, directory: Path, form: PackedForm) -> None:
        """Creates the files."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._form = directory, form
        self._dtype = np.dtype(np.uint16 if form.vocab_size <= 1 << 16 else np.uint32)
        self._digest = hashlib.sha256()
        self._tokens = (directory / TOKENS).open("wb", buffering=_BUFFER_BYTES)
        self._flags = (directory / SUPERVISED).open("wb", buffering=_BUFFER_BYTES)
        self.num_documents = self.num_tokens = self.num_supervised = 0
        self._largest_id = 0

    def close(self) -> None:
        """Closes the files."""
        self._tokens.close()
        self._flags.close()

    def add(self, document: Document) -> int:
        """Appends a document and its EOS; returns the tokens written. Raises `RequestError` for an unknown id."""
        if not len(document.tokens):
            return 0
        tokens = np.asarray(document.tokens, dtype=np.int64)
        flags = np.ones(len(tokens), dtype=bool) if document.supervised is None else np.array(document.supervised, bool)
        vocab_size, eos_id, _ = self._form
        if eos_id is not None and tokens[-1] != eos_id:
            tokens, flags = np.append(tokens, eos_id), np.append(flags, flags[-1])
        for token in (tokens.min(), tokens.max()):
            check_token(token, vocab_size, f"document {self.num_documents}")
        data = tokens.astype(self._dtype).tobytes()
        self._digest.update(data)
        self._tokens.write(data)
        self._largest_id = max(self._largest_id, int(tokens.max()))
        self._flags.write(flags.tobytes())
        self.num_documents += 1
        self.num_tokens += len(tokens)
        self.num_supervised += int(flags.sum())
        return len(tokens)

    def finish(self, **meta: Any) -> None:
        """Writes `meta.json` with facts of the tokens and the entries `meta`.

        Raises `RequestError` when there is no document, or none of its tokens is supervised.
        """
        if not self.num_documents:
            raise RequestError("there is no document. Expected at least one that is not empty.")
        if not self.num_supervised:
            raise RequestError(
                f"none of {self.num_tokens} tokens is supervised. Expected assistant turns or completions to learn."
            )
        self._tokens.flush()
        self._flags.flush()
        if self.num_supervised == self.num_tokens:
            (self._directory / SUPERVISED).unlink()
        facts = {
            "format": FORMAT,
            "version": VERSION,
            "num_documents": self.num_documents,
            "num_tokens": self.num_tokens,
            "num_supervised": self.num_supervised,
            "dtype": self._dtype.name,
            "largest_token_id": self._largest_id,
            **self._form._asdict(),
            "tokens_sha256": self._digest.hexdigest(),
            **meta,
        }
        (self._directory / META).write_text(json.dumps(facts, indent=2), encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedVocabulary:
    """A new vocabulary; `num_filled` of its tokens are not labels, and fill it to its size."""

    vocabulary: DraftVocabulary
    num_labels: int
    num_filled: int


def count_vocabulary(packed: PackedTokens, size: int) -> CountedVocabulary:
    """Returns the `size` most frequent labels of packed tokens; of equally frequent ones the lower id.

    If fewer tokens are labels, the lowest other ids fill the vocabulary. Raises `RequestError` when the tokenizer has
    fewer tokens, or the data is damaged.
    """
    total = packed.meta["vocab_size"]
    if not 1 <= size <= total:
        raise RequestError(f"a draft vocabulary of {size} tokens was asked for. Expected 1 to {total}.")
    counts = np.zeros(total, dtype=np.int64)
    for begin in range(0, len(packed.tokens), _COUNTED_AT_ONCE):
        part = slice(begin, begin + _COUNTED_AT_ONCE)
        tokens = packed.tokens[part]
        if int(tokens.max()) >= total:
            raise RequestError(
                f"the data holds token {int(tokens.max())}. Expected ids below {total}. It is damaged: make it again."
            )
        counts += np.bincount(tokens if packed.supervised is None else tokens[packed.supervised[part]], minlength=total)
    chosen = np.argsort(-counts, kind="stable")[:size]
    found, labels = counts[chosen], int(counts.sum())
    vocabulary = DraftVocabulary(
        token_ids=tuple(np.sort(chosen).tolist()),
        coverage=float(found.sum() / max(labels, 1)),
        tokenizer_sha=packed.meta["tokenizer_sha"],
        tokens_sha256=packed.meta["tokens_sha256"],
    )
    return CountedVocabulary(vocabulary=vocabulary, num_labels=labels, num_filled=int((found == 0).sum()))
