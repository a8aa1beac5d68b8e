"""`foretoken verify`: decodes prompts plainly and with drafters, and compares the texts."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli import options, terminal
from foretoken.cli.terminal import progress
from foretoken.core.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.bench.verify import Comparison


def verify(
    model: options.Model,
    *,
    drafters: options.DrafterChoices,
    prompts: options.Prompts = "heldout",
    num_prompts: options.NumPrompts = 8,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperatures = None,
    batch_size: Annotated[list[int] | None, typer.Option(min=1, help="May be repeated. Default: 1.")] = None,
    transformers: Annotated[
        bool, typer.Option("--transformers", help="Also compare greedy plain decoding with transformers' generate.")
    ] = False,
    seed: options.Seed = 0,
    loading: options.LoadOptions,
    as_json: options.AsJson = False,
) -> None:
    """Decode prompts plainly and with each drafter, and compare token by token.

    Greedy and seeded sampled texts must be identical. A difference is a near-tie when the two tokens' scores agree to
    rounding, and a bug otherwise. Each row is printed as soon as it is known.
    """
    from foretoken.bench.verify import verify_setups
    from foretoken.bench.workload import make_workload, read_prompts
    from foretoken.entrypoints.config import checked_setups, parse_speculative_config

    setups, temperatures = checked_setups(drafters.texts or ["ngram"], target=model), temperature or [0.0, 0.8]
    for setup in setups:
        options.check_has_target_text("verify", setup)
        policy = parse_speculative_config(setup.config, target=model).policy
        if any(temperatures) and not policy.is_lossy and not policy.keeps_seeded_text:
            raise ConfigError(
                f"the rule '{policy.rule}' of '{setup.name}' gives a seeded request another text of the same "
                "distribution, which cannot be compared. Pass --temperature 0, or leave the rule out."
            )
    rows = read_prompts(prompts, limit=num_prompts)
    (loaded, tokenizer), runner = loading.load(model), loading.runner
    options.check_max_tokens(max_tokens, loaded)
    workload = make_workload(
        rows, loaded, tokenizer, runner=runner, temperatures=temperatures, max_tokens=max_tokens, seed=seed
    )
    header = options.run_header(loaded, prompts=len(workload.prompts), max_tokens=max_tokens, seed=seed)
    names = [*(["transformers generate"] if transformers else []), *(setup.name for setup in setups)]
    widest = [max(names, key=len), "0.8", *["12345"] * 3, "1.00", *["12345"] * 3]
    checks: list[Comparison] = []
    with progress("tokens") as bar, terminal.growing_table(_COLUMNS, widest) as add:
        for found in verify_setups(
            loaded, tokenizer, setups, workload, batch_sizes=batch_size or [1], with_transformers=transformers,
            runner=runner, on_progress=bar,
        ):  # fmt: skip
            bar.pause()
            header.setdefault("runner", found[0].runner)
            if not as_json:
                if not checks:
                    terminal.conditions(header)
                add(_row(found))
            checks += found
    if as_json:
        options.print_json({**header, "checks": [asdict(check) for check in checks]})
    else:
        _print_differences(checks)
    if any(not check.is_proof for check in checks):
        raise typer.Exit(1)


_COLUMNS = ["drafter", "T", "batch", "texts", "tokens", "tau", "identical", "near-tie", "bug"]


def _row(group: list[Comparison]) -> list[str]:
    """Returns the cells of one setup at one temperature and batch size."""
    first, verdicts = group[0], [check.verdict for check in group]
    tau = sum(check.mean_acceptance_length for check in group) / len(group)
    counts = (str(verdicts.count(verdict)) for verdict in ("identical", "near-tie", "bug"))
    return [
        first.setup, f"{first.temperature:g}", str(first.batch_size), str(len(group)),
        str(sum(check.num_tokens for check in group)), f"{tau:.2f}", *counts,
    ]  # fmt: skip


def _print_differences(checks: list[Comparison]) -> None:
    for check in checks:
        if check.verdict != "identical":
            gap = "lengths differ" if check.gap is None else f"relative score gap {check.gap:.1e}"
            terminal.print_line(
                f"{check.verdict}: {check.setup}, temperature {check.temperature:g}, batch {check.batch_size}, prompt "
                f"{check.prompt}, output token {check.divergence}: {gap}"
            )
