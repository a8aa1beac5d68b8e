"""`foretoken verify`: checks on given prompts that speculation changes nothing."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli import options, terminal
from foretoken.cli.progress import progress

if TYPE_CHECKING:
    from foretoken.bench.verify import Comparison


def verify(
    model: options.Model,
    speculative_config: options.Drafters = None,
    spec_type: options.SpecType = None,
    prompts: options.Prompts = "heldout",
    num_prompts: options.NumPrompts = 8,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperatures = None,
    batch_size: Annotated[list[int] | None, typer.Option(min=1, help="May be repeated. Default: 1.")] = None,
    transformers: Annotated[
        bool, typer.Option("--transformers", help="Also compare greedy plain decoding with transformers' generate.")
    ] = False,
    seed: options.Seed = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    runner: options.RunnerName = "auto",
    threads: options.Threads = None,
    as_json: options.AsJson = False,
) -> None:
    """Decode prompts plainly and with each drafter, and compare token by token.

    Greedy and seeded sampled texts must be identical. A difference is a near-tie when the two tokens' scores agree to
    rounding, and a bug otherwise.
    """
    from foretoken.bench.verify import verify_setups
    from foretoken.bench.workload import Workload, load_prompts
    from foretoken.entrypoints.config import checked_setup

    drafters = options.drafter_texts(speculative_config, spec_type) or ["ngram"]
    setups = [checked_setup(text, target=model) for text in drafters]
    texts = load_prompts(prompts, limit=num_prompts)
    workload = Workload(prompts=texts, temperatures=temperature or (0.0, 0.8), max_tokens=max_tokens, seed=seed)
    loaded, tokenizer = options.load_target(model, dtype, device, threads)
    options.check_max_tokens(max_tokens, loaded)
    with progress("tokens") as on_progress:
        checks = verify_setups(
            loaded,
            tokenizer,
            setups,
            workload,
            batch_sizes=batch_size or [1],
            with_transformers=transformers,
            runner=runner,
            on_progress=on_progress,
        )
    header = options.run_header(loaded, prompts=len(texts), max_tokens=max_tokens, seed=seed, runner=checks[0].runner)
    if as_json:
        options.print_json({**header, "checks": [asdict(check) for check in checks]})
    else:
        terminal.conditions(header)
        _print_table(checks)
    if any(not check.is_proof for check in checks):
        raise typer.Exit(1)


def _print_table(checks: list[Comparison]) -> None:
    rows = []
    groups: dict[tuple[str, float, int], list[Comparison]] = {}
    for check in checks:
        groups.setdefault((check.setup, check.temperature, check.batch_size), []).append(check)
    for (setup, temperature, batch_size), group in groups.items():
        verdicts = [check.verdict for check in group]
        tau = sum(check.mean_acceptance_length for check in group) / len(group)
        counts = (str(verdicts.count(verdict)) for verdict in ("identical", "near-tie", "bug"))
        tokens = sum(check.num_tokens for check in group)
        rows.append([
            setup, f"{temperature:g}", str(batch_size), str(len(group)), str(tokens), f"{tau:.2f}", *counts
        ])  # fmt: skip
    columns = ["drafter", "T", "batch", "texts", "tokens", "tau", "identical", "near-tie", "bug"]
    terminal.print_table(columns, rows)
    for check in checks:
        if check.verdict != "identical":
            gap = "lengths differ" if check.gap is None else f"relative score gap {check.gap:.1e}"
            terminal.say(
                f"{check.verdict}: {check.setup}, temperature {check.temperature:g}, batch {check.batch_size}, prompt "
                f"{check.prompt}, output token {check.divergence}: {gap}"
            )
