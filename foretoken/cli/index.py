"""`foretoken data index`: a corpus sorted for look-ups, which the method `rest` drafts from."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from foretoken.cli import options, terminal


def index(
    data: Annotated[Path, typer.Argument(help="Packed tokens, as `foretoken data` writes them.")],
    out: Annotated[Path, typer.Option(help="Directory to make, which `-s rest:datastore=DIR` drafts from.")],
    force: Annotated[bool, typer.Option("--force", help="Replace a datastore in OUT.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Sort the suffixes of packed tokens, so that what followed any run of them is found at once.

    Sorting takes 60 bytes of memory a token, the files 6 (8 where the vocabulary has more than 65536 tokens). Drafts
    come from the corpus as long as it was made with the target's tokenizer; they never change the text. The files are
    mapped into memory where they are drafted from: do not change them meanwhile.
    """
    from foretoken.cli.data import ending_cleanly
    from foretoken.core.errors import RequestError
    from foretoken.drafters.lookups.datastore import DATASTORE, SORTED_DEPTH, write_datastore
    from foretoken.training.data.packed import PackedTokens

    DATASTORE.check(out, force=force)
    packed = PackedTokens.open(data)
    missing = {"vocab_size", "eos_id", "tokenizer_sha", "tokens_sha256"} - packed.meta.keys()
    if missing:
        raise RequestError(f"'{data}' does not tell its {', '.join(sorted(missing))}. It is damaged: make it again.")
    begin = time.perf_counter()

    def show(num_sorted: int) -> None:
        terminal.note(
            f"{len(packed.tokens)} suffixes sorted by {num_sorted} of {SORTED_DEPTH} tokens, "
            f"{time.perf_counter() - begin:.1f} s"
        )

    terminal.note(f"sorting the suffixes of {len(packed.tokens)} tokens")
    with ending_cleanly():
        made = write_datastore(
            out,
            packed.tokens,
            vocab_size=packed.meta["vocab_size"],
            eos_id=packed.meta["eos_id"],
            tokenizer_sha=packed.meta["tokenizer_sha"],
            tokens_sha256=packed.meta["tokens_sha256"],
            force=force,
            on_round=show,
        )
    seconds = time.perf_counter() - begin
    if as_json:
        options.print_json({
            "out": str(out), "tokens": made.num_tokens, "vocab_size": made.vocab_size, "seconds": seconds,
            "tokens_sha256": made.tokens_sha256,
        })  # fmt: skip
        return
    terminal.prose(f"{out}: {made.num_tokens} tokens in {seconds:.1f} s. Draft from it with -s rest:datastore={out}")
