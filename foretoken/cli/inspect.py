"""`foretoken inspect`: what a model or drafter directory is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli import options


def inspect(
    directory: Annotated[Path, typer.Argument(help="A model or drafter directory, or a head's file of weights.")],
    target: Annotated[
        str | None, typer.Option(help="Directory of a head's target: for what the head leaves out, and to compare.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="List a head's tensors and what is wrong. Exit code 1: something is.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Say what a directory holds: a target's architecture, sizes, dtype, tokenizer; or a head's format and sizes.

    Exit code 2: it cannot be read. A head is read whole: numbers that are not finite, and tensors that are missing,
    unknown or of a wrong shape, are errors with and without --verify.
    """
    facts = _head_facts(directory, target, verify=verify)
    if facts is None:
        from foretoken.target.describe import describe_directory

        facts = describe_directory(directory)
    has_findings = bool(facts.get("findings"))
    if as_json:
        options.print_json(facts)
    else:
        _print(facts)
    if has_findings:
        raise typer.Exit(1)


def _head_facts(directory: Path, target: str | None, *, verify: bool) -> dict[str, Any] | None:
    """Facts about a head; None when the directory holds none."""
    from foretoken.formats import describe
    from foretoken.formats.registry import holds_head, read_head
    from foretoken.formats.surroundings import Surroundings

    if not holds_head(directory):
        return None
    around = Surroundings() if target is None else Surroundings.of_directory(target)
    with describe.kept_warnings() as warnings:
        name, checkpoint = read_head(
            directory,
            target=around.fingerprint,
            base_config=around.config,
            weights=None if target is None else around.loaded,
        )
    facts = {"directory": str(directory), **describe.describe_head(name, checkpoint)}
    if around.fingerprint is not None and checkpoint.target is not None:
        warnings += checkpoint.target.differences(around.fingerprint)
    if not verify:
        return facts | ({"warnings": warnings} if warnings else {})
    tensors = describe.describe_tensors(checkpoint)
    return facts | {"tensors": tensors, "findings": [*warnings, *describe.suspicious_tensors(tensors)]}


def _print(facts: dict[str, Any]) -> None:
    """One line a fact; tensors and findings below."""
    lists = {key: facts.pop(key) for key in ("tensors", "warnings", "findings") if key in facts}
    width = max(map(len, facts))
    for key, value in facts.items():
        print(f"{key.replace('_', ' '):{width}}  {value}")
    for row in lists.get("tensors", []):
        print(
            f"  {row['tensor']}  {row['shape']}  {row['dtype']}  largest {row['largest']:.3g}  norm {row['norm']:.3g}"
        )
    for message in [*lists.get("warnings", []), *lists.get("findings", [])]:
        print(f"warning: {message}")
    if lists.get("findings") == []:
        print("no findings: every tensor is there, of the right shape and finite")
