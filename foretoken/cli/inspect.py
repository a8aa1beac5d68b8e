"""`foretoken inspect`: what a model or drafter directory is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretoken.cli import options


def inspect(
    directory: Annotated[Path, typer.Argument(help="A model or drafter directory.")], as_json: options.AsJson = False
) -> None:
    """Say what a directory holds: architecture, sizes, dtype, tokenizer, whether it can be a target."""
    from foretoken.target.describe import describe_directory

    facts = describe_directory(directory)
    if as_json:
        options.print_json(facts)
        return
    width = max(map(len, facts))
    for key, value in facts.items():
        print(f"{key.replace('_', ' '):{width}}  {value}")
