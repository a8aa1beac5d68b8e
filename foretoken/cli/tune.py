"""`foretoken tune tree`: finds the best static tree of a drafter from the acceptance of its candidates on prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options, terminal
from foretoken.cli.progress import progress
from foretoken.core.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.drafters.base import DrafterOptions
    from foretoken.models.loading import LoadedModel
    from foretoken.training.evaluation import TunedTree

_SIZES = (8, 16, 32, 64)
_DEEPEST = 64
_DEPTH_OF_MODEL = 8  # of draft models, which draft to any depth


def tree(
    model: options.Model,
    speculative_config: options.Drafter = None,
    nodes: Annotated[int, typer.Option(min=2, help="Nodes of the tree, root included.")] = 64,
    depth: Annotated[
        int | None,
        typer.Option(min=1, help="Most levels. Default: all of a head; 8 for a draft model."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File to make with the tree, JSON, for -s METHOD:tree=@FILE.")
    ] = None,
    prompts: options.Prompts = "heldout",
    num_prompts: options.NumPrompts = 8,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperatures = None,
    seed: options.Seed = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure how often a drafter's candidates are right, and find the static tree with the most tokens a target pass.

    The target continues prompts. The rate of candidate r at depth d is how often it equals the target's token, given
    that the tokens before it were right. The tree holds the nodes with the greatest products of rates along their
    paths.
    """
    from foretoken.bench.workload import TokenProgress, Workload, load_prompts
    from foretoken.core.token_tree import MAX_NODES
    from foretoken.entrypoints.config import checked_setup, parse_speculative_config
    from foretoken.files.atomic_files import told_as, write_file
    from foretoken.training.evaluation import measured_acceptance, tuned_tree

    setups = [checked_setup(text, target=model) for text in speculative_config or []]
    configs = [setup.config for setup in setups if setup.config is not None]
    each = [one for config in configs for one in parse_speculative_config(config, target=model).options]
    if len(each) != 1:
        raise ConfigError(f"-s names {len(each)} drafters. Expected one head or draft model, as -s hydra.")
    if nodes > MAX_NODES:
        raise ConfigError(f"--nodes is {nodes}. Expected at most {MAX_NODES}.")
    if out is not None and (out.exists() or out.is_symlink()):
        raise ConfigError(f"'{out}' exists already. Expected a new file. Choose another or remove it.")
    texts = load_prompts(prompts, limit=num_prompts)
    workload = Workload(prompts=texts, temperatures=temperature or (0.0, 0.8), max_tokens=max_tokens, seed=seed)
    loaded, tokenizer = options.load_target(model, dtype, device, threads)
    options.check_max_tokens(max_tokens, loaded)
    drafter, deepest = _drafter(each[0], loaded, tokenizer)
    if depth is not None and depth > (deepest or _DEEPEST):
        raise ConfigError(f"--depth is {depth}, but drafts are {deepest or _DEEPEST} deep at most. Expected no more.")
    with progress("tokens") as on_progress:
        counter = TokenProgress(workload, len(workload.temperatures), report=on_progress)
        measured = measured_acceptance(drafter, loaded, tokenizer, workload, progress=counter)
    table = measured[:depth] if deepest is not None else measured * (depth or _DEPTH_OF_MODEL)
    tuned = tuned_tree(table, max_nodes=nodes, sizes=_SIZES)
    choices = [list(choice) for choice in tuned.shape.choices]
    if out is not None:
        with told_as(ConfigError, f"'{out}'", "Expected a new file in a directory that may be written to."):
            write_file(out, json.dumps(choices) + "\n")
    header = options.run_header(
        loaded, drafter=setups[0].name, prompts=len(texts), max_tokens=max_tokens,
        temperatures=list(workload.temperatures), seed=seed,
    )  # fmt: skip
    if as_json:
        expected = {str(size): tokens for size, tokens in tuned.tokens_by_nodes.items()}
        options.print_json({**header, "acceptance": measured, "tokens_by_nodes": expected, "tree": choices})
        return
    terminal.conditions(header)
    _print(measured, tuned, choices, out)


def _drafter(config: DrafterOptions, target: LoadedModel, tokenizer: Any) -> tuple[Any, int | None]:
    """Loads a head in float32 with its depth, or a draft model with None."""
    import torch

    from foretoken.drafters import draft_model
    from foretoken.drafters.heads import HeadOptions, checked_head
    from foretoken.drafters.vocabularies import DraftModelFiles

    if isinstance(config, HeadOptions):
        head = checked_head(config, target, config.method).module(dtype=torch.float32)
        return head, head.config.steps
    if isinstance(config, draft_model.Options) and config.model is not None:
        files = DraftModelFiles(config.model, config.revision)
        model, own = files.model(target), files.tokenizer()
        if own is not None and own.get_vocab() != tokenizer.get_vocab():
            raise ConfigError(
                f"draft model '{model.name}' has another vocabulary than '{target.name}'. Expected the same."
            )
        return model, None
    raise ConfigError(
        f"method '{config.method}' has no ranked candidates. Expected a head or a draft model with its "
        "weights, as -s hydra or -s draft_model:model=DIR."
    )


def _print(acceptance: list[list[float]], tuned: TunedTree, choices: list[list[int]], out: Path | None) -> None:
    ranks = range(min(6, len(acceptance[0])))
    rows = [[str(depth), *(f"{row[rank]:.3f}" for rank in ranks)] for depth, row in enumerate(acceptance, start=1)]
    title = "acceptance by depth and rank" if len(acceptance) > 1 else "acceptance by rank, the same at every depth"
    terminal.print_table(["depth", *(f"rank {rank}" for rank in ranks)], rows, title=title)
    sizes = [[str(size), f"{tokens:.3f}"] for size, tokens in tuned.tokens_by_nodes.items()]
    terminal.print_table(["nodes", "expected tokens a pass"], sizes, title="best trees")
    terminal.say(f"tree of {tuned.shape.num_nodes} nodes, {tuned.shape.depth} deep:")
    terminal.prose(json.dumps(choices))
    if out is not None:
        terminal.say(f"wrote {out}: pass it as -s METHOD:tree=@{out}")
