"""Packs documents of tests into one directory, with the parts that `foretoken data` uses."""

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from foretoken.training.data.packed import PACKED_TOKENS, Document, PackedForm, PackedTokens, PackedWriter


def write_packed(
    directory: Path,
    documents: Iterable[Document],
    tokenizer: Any,
    *,
    vocab_size: int | None = None,
    force: bool = False,
    **meta: Any,
) -> PackedTokens:
    """Returns packed documents; after an error nothing is written."""
    with (
        PACKED_TOKENS.new(directory, force=force) as building,
        closing(PackedWriter(building, PackedForm.of(tokenizer, vocab_size))) as writer,
    ):
        for document in documents:
            writer.add(document)
        writer.finish(**meta)
    return PackedTokens.open(directory)
