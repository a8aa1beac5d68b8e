"""Writes packed tokens: appends documents to flat files, in a directory that appears whole or not at all."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from foretoken.core.errors import RequestError
from foretoken.core.token_ids import tokenizer_sha
from foretoken.files.atomic_files import OutputDirectory

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from foretoken.training.data.records import Document

FORMAT, VERSION = "foretoken-packed-tokens", 1
META, TOKENS, SUPERVISED = "meta.json", "tokens.bin", "supervised.bin"
_BUFFER_BYTES = 1 << 20
PACKED_TOKENS = OutputDirectory(
    "packed tokens", lambda place: any((place / part / META).is_file() for part in ("", "train"))
)


def largest_id(tokenizer: Any) -> int:
    """Returns the largest token id of a tokenizer; ids may have gaps, so it can exceed their number."""
    return int(max(tokenizer.get_vocab().values()))


class PackedWriter:
    """Appends documents to the files of one directory, which `finish` completes.

    Attributes:
        num_documents, num_tokens, num_supervised: Written so far.
    """

    def __init__(self, directory: Path, tokenizer: Any, vocab_size: int | None = None) -> None:
        """Creates the files; vocab_size: of the target, if it has more ids than its tokenizer."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._tokenizer = directory, tokenizer
        self._vocab_size = max(largest_id(tokenizer) + 1, vocab_size or 0)
        self._eos_id: int | None = tokenizer.eos_token_id
        self._dtype = np.dtype(np.uint16 if self._vocab_size <= 1 << 16 else np.uint32)
        self._digest = hashlib.sha256()
        self._tokens = (directory / TOKENS).open("wb", buffering=_BUFFER_BYTES)
        self._flags = (directory / SUPERVISED).open("wb", buffering=_BUFFER_BYTES)
        self.num_documents = self.num_tokens = self.num_supervised = 0
        self._largest_id = 0

    def __enter__(self) -> PackedWriter:
        """This writer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the files."""
        self._tokens.close()
        self._flags.close()

    def add(self, document: Document) -> int:
        """Appends a document and its EOS.

        Returns:
            Tokens written; 0 for an empty document.

        Raises:
            RequestError: When a token id is outside the vocabulary.
        """
        if not len(document.tokens):
            return 0
        tokens = np.asarray(document.tokens, dtype=np.int64)
        flags = np.ones(len(tokens), dtype=bool) if document.supervised is None else np.array(document.supervised, bool)
        if self._eos_id is not None and tokens[-1] != self._eos_id:
            tokens, flags = np.append(tokens, self._eos_id), np.append(flags, flags[-1])
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            wrong = tokens.min() if tokens.min() < 0 else tokens.max()
            raise RequestError(
                f"document {self.num_documents} holds token id {wrong}. Expected 0..{self._vocab_size - 1}. "
                "Encode it with the target's tokenizer."
            )
        data = tokens.astype(self._dtype).tobytes()
        self._digest.update(data)
        self._tokens.write(data)
        self._largest_id = max(self._largest_id, int(tokens.max()))
        self._flags.write(flags.tobytes())
        self.num_documents += 1
        self.num_tokens += len(tokens)
        self.num_supervised += int(flags.sum())
        return len(tokens)

    def finish(self, **meta: Any) -> dict[str, Any]:
        """Writes `meta.json`; raises `RequestError` when there is no document, or none of its tokens is supervised."""
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
            "vocab_size": self._vocab_size,
            "largest_token_id": self._largest_id,
            "eos_id": self._eos_id,
            "tokenizer_sha": tokenizer_sha(self._tokenizer),
            "tokens_sha256": self._digest.hexdigest(),
            **meta,
        }
        (self._directory / META).write_text(json.dumps(facts, indent=2), encoding="utf-8")
        return facts
