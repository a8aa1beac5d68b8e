"""`foretoken inspect`: describes a model or drafter directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli import options, terminal


def inspect(
    place: Annotated[str, typer.Argument(help="A model's or head's directory, a head's file of weights, or a hub id.")],
    target: Annotated[
        str | None,
        typer.Option(help="Directory of a head's target: completes the head's facts, and is compared with it."),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read all tensors, and report faults.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Print what a directory holds: a target's architecture, sizes, dtype, tokenizer; or a head's format and sizes.

    With --verify (or --target, or in a foreign format) a head is read completely: numbers that are not finite, and
    tensors that are missing, unknown or of a wrong shape, are errors. With --verify a target's tensors are compared
    with its architecture, and their numbers are read.
    """
    directory = _local(place)
    facts = None if target is not None or verify else _quick_facts(directory)
    if facts is None:
        facts = _head_facts(directory, target, verify=verify)
    if facts is None:
        from foretoken.models.describe import describe_directory

        facts = describe_directory(directory)
        if verify:
            from foretoken.models.weight_findings import weight_findings

            found = weight_findings(directory)
            facts |= {**({"warnings": found.warnings} if found.warnings else {}), "findings": found.findings}
    has_findings = bool(facts.get("findings"))
    if as_json:
        options.print_json(facts)
    else:
        _print(facts)
    if has_findings:
        raise typer.Exit(1)


def _local(place: str) -> Path:
    """Returns the local directory, downloaded for a hub id; see `local_head`."""
    if Path(place).exists():
        return Path(place)  # importing the hub's client takes half a second
    from foretoken.formats.files import is_hub_id, local_head

    return local_head(place, what="model or head") if is_hub_id(place) else Path(place)


def _quick_facts(directory: Path) -> dict[str, Any] | None:
    """Returns the facts that configuration and headers give without torch, if any."""
    from foretoken.formats.describe import native_facts
    from foretoken.models.describe import describe_plain

    head = native_facts(directory)
    return describe_plain(directory) if head is None else {"directory": str(directory), **head}


def _head_facts(directory: Path, target: str | None, *, verify: bool) -> dict[str, Any] | None:
    from foretoken.formats import describe
    from foretoken.formats.checkpoint import TargetInfo
    from foretoken.formats.registry import holds_head, read_head

    if not holds_head(directory):
        return None
    around = TargetInfo() if target is None else TargetInfo.of_directory(target)
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
    lists = {key: facts.pop(key) for key in ("tensors", "warnings", "findings") if key in facts}
    width = max(map(len, facts))
    for key, value in facts.items():
        terminal.fact(key, _shown(key, value), width)
    for row in lists.get("tensors", []):
        terminal.say(
            f"  {row['tensor']}  {row['shape']}  {row['dtype']}  largest {row['largest']:.3g}  norm {row['norm']:.3g}"
        )
    for message in [*lists.get("warnings", []), *lists.get("findings", [])]:
        terminal.prose(f"warning: {message}")
    if lists.get("findings") == []:
        terminal.say("no findings: every tensor is there, of the right shape and finite")


def _shown(key: str, value: Any) -> str:
    if key == "acceptance":
        firsts = [row[0] if isinstance(row, list) and row else row for row in value]
        return "first candidates " + " ".join(map(str, firsts))
    if isinstance(value, dict):
        scalars = {name: part for name, part in value.items() if not isinstance(part, dict | list)}
        return ", ".join(f"{name.replace('_', ' ')} {part}" for name, part in scalars.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
