"""`foretoken data vocab`: the tokens that heads with a draft vocabulary draft."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretoken.cli import options, terminal
from foretoken.core.errors import ConfigError


def vocab(
    data: Annotated[Path, typer.Argument(help="Packed tokens, as `foretoken data` writes them.")],
    size: Annotated[int, typer.Option(min=1, help="Tokens of the draft vocabulary.")],
    out: Annotated[Path, typer.Option(help="File to make, JSON, which `foretoken train` takes.")],
    as_json: options.AsJson = False,
) -> None:
    """Choose the tokens that a head drafts: the most frequent labels of packed tokens.

    An LM head over a part of the vocabulary is read in a part of the time. What it cannot draft, the target writes
    alone: the text stays what it is. Coverage is the share of the labels that can be drafted.
    """
    from foretoken.training.data.packed import PackedTokens
    from foretoken.training.data.vocabulary import count_vocabulary

    if out.exists() or out.is_symlink():
        raise ConfigError(f"'{out}' exists already. Expected a new file. Choose another or remove it.")
    counted = count_vocabulary(PackedTokens.open(data), size)
    counted.vocabulary.write(out)
    if counted.num_filled:
        terminal.note(
            f"{counted.num_filled} of {size} tokens are no label in '{data}': the lowest ids that were left make up "
            "the number"
        )
    if as_json:
        options.print_json({
            "out": str(out), "size": size, "coverage": counted.vocabulary.coverage, "labels": counted.num_labels,
            "filled": counted.num_filled,
        })  # fmt: skip
        return
    terminal.say(f"{out}: {size} tokens, coverage {counted.vocabulary.coverage:.2%} of {counted.num_labels} labels")
