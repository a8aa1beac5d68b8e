"""`foretoken doctor`: finds why a head does not draft, or whether one can be trained on this target."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options, terminal
from foretoken.core.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.training.doctor.checks import Check

_COLOURS = {"ok": "green", "warning": "yellow", "fault": "red", "skipped": "dim"}


def doctor(
    model: options.Model,
    head: Annotated[
        str | None,
        typer.Argument(
            help="A trained head, in any format that can be read: a directory, its file of weights, or a hub id."
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Try the training of a fresh head: medusa, hydra, mlp_speculator, eagle, hass, eagle3 or falcon.",
        ),
    ] = None,
    train_check: Annotated[
        bool, typer.Option("--train-check", help="Try training with the sizes of HEAD too; HEAD stays as it is.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help="Packed tokens to try training on. Default: the target's own texts.")
    ] = None,
    prompts: options.Prompts = "heldout",
    num_prompts: options.NumPrompts = 16,
    max_tokens: options.MaxTokens = 64,
    allow_other_target: Annotated[
        bool, typer.Option("--allow-other-target", help="Continue with a head for another target of the same sizes.")
    ] = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    runner: options.RunnerName = "auto",
    threads: options.Threads = None,
    as_json: options.AsJson = False,
) -> None:
    """Find out why a head does not draft: each check names a cause and a remedy.

    The target continues prompts. The head is compared with the target's text: with the right feature and with features
    that are mistaken for it, at the right token and at its neighbours, and through the engine. Warnings are not faults.
    """
    if head is None and method is None:
        raise ConfigError("there is nothing to examine. Expected a head, or --method to train one.")
    if train_check and head is None:
        raise ConfigError("--train-check takes the sizes of a head. Expected one. Pass HEAD, or --method alone.")
    from foretoken.bench.workload import load_prompts
    from foretoken.entrypoints.drafter_files import check_is_no_model
    from foretoken.formats.files import local_head, open_files
    from foretoken.formats.registry import holds_head
    from foretoken.training.data.packed import PackedTokens
    from foretoken.training.doctor.examine import Examination, examine

    place = None if head is None else local_head(head)
    if place is not None and not holds_head(place):
        check_is_no_model(place)
        open_files(place)  # a damaged file gives a better message than a missing head
        raise ConfigError(f"'{head}' holds no draft head. Expected a directory or file of weights with one.")
    texts = load_prompts(prompts, limit=num_prompts)
    packed = None if data is None else PackedTokens.open(data)
    loaded, tokenizer = options.load_target(model, dtype, device, threads)
    options.check_max_tokens(max_tokens, loaded)
    case = Examination(
        head=place,
        method=method,
        train_check=train_check,
        prompts=texts,
        max_tokens=max_tokens,
        data=packed,
        runner=runner,
        allow_other_target=allow_other_target,
    )
    checks = examine(loaded, tokenizer, case)
    header = options.run_header(loaded, head=head, prompts=len(texts))
    if as_json:
        options.print_json({**header, "checks": [asdict(check) for check in checks]})
    else:
        terminal.conditions(header)
        _print_table(checks)
    if any(check.verdict == "fault" for check in checks):
        raise typer.Exit(1)


def _print_table(checks: list[Check]) -> None:
    rows = [[check.name, check.verdict, _shown(check.value), check.message] for check in checks]
    columns = ["check", "verdict", "found", "what it means"]
    terminal.print_table(columns, rows, texts=columns, colours=_COLOURS)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_shown(part)}" for key, part in value.items())
    if isinstance(value, list | tuple):
        is_nested = any(isinstance(part, list) for part in value)
        return ("\n" if is_nested else " ").join(_shown(part) for part in value)
    return "" if value is None else str(value)
