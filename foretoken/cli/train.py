"""`foretoken train` trains heads and draft models; `foretoken tune` finds the best static tree and stop rules."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options, terminal
from foretoken.cli.terminal import ProgressBar, step_progress
from foretoken.core.errors import ConfigError
from foretoken.files.processes import keep_freed_memory

if TYPE_CHECKING:
    from foretoken.bench.workload import TokenProgress, Workload
    from foretoken.drafters.base import DrafterOptions
    from foretoken.models.loaded import LoadedModel
    from foretoken.training.evaluation import TunedTree

_head = partial(typer.Option, rich_help_panel="What the head is")
_learning = partial(typer.Option, rich_help_panel="How it learns")
_run = partial(typer.Option, rich_help_panel="The run")
_SIZES = (8, 16, 32, 64)  # nodes of the trees in the report; a choice
_DEEPEST = 64  # levels; a choice: no head drafts deeper, and longer chains are hardly ever accepted
_TREE_ADVICE = "Expected a new file in a directory that may be written to."
_DEPTH_OF_MODEL = 8  # of draft models, which draft to any depth; a choice
_FEW_PROMPTS = options.PromptOptions(num_prompts=16)
_MANY_PROMPTS = options.PromptOptions(prompts="all", num_prompts=96, max_tokens=96)


def train(
    method: Annotated[
        str,
        typer.Argument(
            help="medusa, hydra, mlp_speculator, eagle, hass (trains eagle heads), eagle3, mtp, spire or falcon; "
            "or draft_model, a whole language model."
        ),
    ],
    model: options.Model,
    data: Annotated[Path, typer.Option(help="Packed tokens, as `foretoken data` writes them.")],
    out: Annotated[Path, typer.Option(help="Directory of the head or draft model; must not exist.")],
    sizes: Annotated[
        list[str] | None,
        _head(
            "--set",
            metavar="KEY=JSON",
            help="A size of the head, e.g. num_heads=4. For draft_model num_layers=N alone keeps N of the target's "
            "layers; further sizes, named as in config.json, make a model with random weights. May be repeated.",
        ),
    ] = None,
    init: Annotated[
        str | None,
        _head(
            parser=options.local_path,
            help="Start from this head or draft model, as MODEL is named, instead of new weights. A draft "
            "model needs the target's tokenizer.",
        ),
    ] = None,
    draft_vocab: Annotated[
        Path | None,
        _head(
            help="Learn and draft these tokens alone: a file of `foretoken data vocab`. For heads that share the "
            "target's LM head, for eagle3 and medusa.",
        ),
    ] = None,
    objective: Annotated[
        list[str] | None,
        _learning(
            "--objective",
            metavar="KEY=X",
            help="A weight of the objective: ce_weight, kl_weight, tv_weight, rkl_weight, jsd_weight with jsd_beta; "
            "for heads also feature_weight, head_decay and noise; for the EAGLE family passes and stride; for hass "
            "num_top and top_weight; for falcon glancing and glancing_floor; for draft_model on_policy, teacher, "
            "temperature, refresh_steps, prompt_share, supervise_all and target_temperature. May be repeated.",
        ),
    ] = None,
    steps: Annotated[int, _learning(min=1, help="Optimiser steps; with --seconds at most.")] = 1000,
    seconds: Annotated[
        float | None,
        _learning(help="End after these seconds of steps, with the learning rate at its lowest. Default: no bound."),
    ] = None,
    lr: Annotated[float, _learning(help="Highest learning rate.")] = 1e-3,
    warmup_steps: Annotated[int, _learning(min=0, help="Linear warm-up.")] = 50,
    lr_floor: Annotated[float, _learning(help="Last learning rate as a part of the highest, above 0.")] = 0.05,
    batch_size: Annotated[int, _learning(min=1, help="Windows of a global batch, over all processes.")] = 8,
    micro_batch_size: Annotated[int | None, _learning(min=1, help="Windows computed at once by a process.")] = None,
    length: Annotated[int, _learning(min=4, help="Tokens of a window.")] = 512,
    max_offset: Annotated[
        int | None,
        _learning(
            min=0,
            help="Largest random offset of the positions in a window, so that the head or draft model drafts in texts "
            "longer than a window; 0 for none. Default: the whole context.",
        ),
    ] = None,
    repeat_windows: Annotated[
        bool,
        _learning(
            "--repeat-windows",
            help="Cut the data at the same places in all epochs: with --cache only the first one runs the target.",
        ),
    ] = False,
    weight_decay: Annotated[float, _learning(help="Of AdamW.")] = 0.01,
    clip_norm: Annotated[float, _learning(help="Greatest gradient norm.")] = 1.0,
    precision: Annotated[str, _learning(metavar="NAME", help="float32, or bfloat16 by autocast.")] = "float32",
    seed: Annotated[int, _learning(min=0, help="Of batches and fresh weights.")] = 0,
    joint: Annotated[
        list[str] | None,
        _learning(
            "--joint",
            metavar="KEY=VALUE",
            help="Train the target too (Medusa-2): backbone=lora or full, head_weight, head_warmup, warmup_part, "
            "rate_factor, self_distillation, lora_rank, lora_alpha, lora_dropout. May be repeated.",
        ),
    ] = None,
    target_out: Annotated[Path | None, _run(help="With --joint: directory of the new target.")] = None,
    run_dir: Annotated[Path | None, _run(help="Checkpoints and curves. Default: OUT-run.")] = None,
    save_every_s: Annotated[float, _run(help="Seconds between checkpoints.")] = 120.0,
    cache: Annotated[Path | None, _run(help="Keep the target's features here between runs.")] = None,
    cache_gib: Annotated[float, _run(help="Most GiB of that.")] = 8.0,
    eval_every: Annotated[
        int,
        _run(
            min=0,
            help="Steps between simulations of drafting on held-out tokens, for the curves; 0 for none. Weights stay "
            "the same.",
        ),
    ] = 0,
    eval_data: Annotated[Path | None, _run(help="Packed tokens for that. Default: held_out/ beside train/.")] = None,
    prompts: options.Prompts = "heldout",
    num_prompts: Annotated[int, _run(min=0, help="Held-out prompts of the last report; 0 for none.")] = 16,
    save_dtype: Annotated[str, typer.Option(metavar="NAME", help="Of the saved weights; auto: the target's.")] = "auto",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    as_json: options.AsJson = False,
) -> None:
    """Train a draft head, or a whole draft model, on a frozen target.

    The same command continues a run that a signal or a crash stopped; the result is the same. Under `accelerate launch`
    or `torchrun` all processes share the batch (on CPUs: ACCELERATE_USE_CPU=true accelerate launch --multi_gpu
    --num_processes 2 -m foretoken train ...). At the end the head decodes held-out prompts through the engine, and its
    acceptance rates are stored with it: drafting chooses its tree by them.

    `draft_model` distils the target into a smaller language model (DistillSpec). The result is an ordinary model
    directory. With --objective on_policy=0.7 the draft model writes the text of 0.7 of the batches itself, and with
    teacher=0.3 the target writes that of 0.3.
    """
    arguments = dict(locals())
    arguments |= {"sizes": _pairs(sizes, "--set"), "objective": _pairs(objective, "--objective")}
    arguments |= {"joint": None if joint is None else _pairs(joint, "--joint")}
    del arguments["threads"], arguments["as_json"]
    from foretoken.training.run import Interrupted
    from foretoken.training.train import train as trained

    keep_freed_memory()
    options.use_threads(threads)
    with step_progress(steps) as on_step, ProgressBar("held-out tokens") as on_held_out:
        try:
            result = trained(
                **arguments, on_step=on_step, on_held_out=on_held_out, command=f"$ {options.command_line()}"
            )
        except Interrupted as err:
            terminal.print_note(f"stopped; the same command continues from '{err.directory}'")
            raise typer.Exit(128 + err.number) from err
    if not result.facts:  # another process saves
        return
    if as_json:
        options.print_json({**options.run_header(result.target), **result.facts})
        return
    _print_facts(result.facts)
    target = model if target_out is None else str(target_out)
    terminal.print_line(f"next: {_bench_command(target, result.facts['method'], out)}")


def _print_facts(facts: dict[str, Any]) -> None:
    rows = []
    for prefix, tree in (("", "static"), ("dynamic_", "dynamic")):
        for name in [name for name in facts if name.startswith(f"{prefix}tau_at_temperature_")]:
            temperature = name.removeprefix(f"{prefix}tau_at_temperature_")
            by_depth = terminal.percent_by_depth(facts[f"{prefix}acceptance_by_depth_at_temperature_{temperature}"])
            rows.append([tree, str(facts[f"{prefix}tree_nodes"]), temperature, f"{facts[name]:.2f}", by_depth])
    for key, value in facts.items():
        if key == "acceptance_of_first_candidate":
            terminal.fact("first candidate right, %", terminal.percent_by_depth(value), 24)
        elif not key.endswith("tree_nodes") and "_at_temperature_" not in key:
            terminal.fact(key, value, 24)
    if rows:
        terminal.print_table(["tree", "nodes", "temperature", "tau", "% accepted at depth 1, 2, ..."], rows)


def _bench_command(target: str, method: str, head: Path) -> str:
    from foretoken.entrypoints.config import parse_setup

    config, words = {"method": method, "model": str(head)}, f"{method}:model={head}"
    if parse_setup(words, target=target).config != config:  # a name such as `1` or `a:b=c`
        words = json.dumps(config)
    return shlex.join(["foretoken", "bench", target, "-s", words])


_EXAMPLES = {"--set": "num_heads=4", "--objective": "ce_weight=1", "--joint": "backbone=lora"}


def _pairs(texts: list[str] | None, option: str) -> dict[str, Any]:
    result = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{option} {text!r} is not KEY=VALUE. Expected for example {_EXAMPLES[option]}.")
        try:
            result[key] = json.loads(value)
        except json.JSONDecodeError:
            result[key] = value
    return result


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
    *,
    asked: options.PromptOptions,
    seed: options.Seed = 0,
    loading: Annotated[options.LoadOptions, ("dtype", "device", "threads")],
    as_json: options.AsJson = False,
) -> None:
    """Measure how often a drafter's candidates are right, and find the static tree with the most tokens a target pass.

    The target continues prompts. The rate of candidate r at depth d is how often it equals the target's token, given
    that the tokens before it were right. The tree holds the nodes with the greatest products of rates along their
    paths.
    """
    from foretoken.core.token_tree import MAX_NODES
    from foretoken.files.atomic_files import check_writable, told_as, write_file
    from foretoken.training.evaluation import measured_acceptance, tuned_tree

    name, drafter_options = _one_drafter(speculative_config, model)
    if nodes > MAX_NODES:
        raise ConfigError(f"--nodes is {nodes}. Expected at most {MAX_NODES}.")
    if out is not None:
        options.check_absent(out, "file")
        check_writable(out, ConfigError, _TREE_ADVICE)
    rows = asked.rows()
    loaded, tokenizer = loading.load(model, unpacks=True)
    workload = asked.workload(rows, loaded, tokenizer, seed=seed)
    drafter, deepest = _drafter(drafter_options, loaded, tokenizer)
    if depth is not None and depth > (deepest or _DEEPEST):
        raise ConfigError(f"--depth is {depth}, but drafts are {deepest or _DEEPEST} deep at most. Expected no more.")
    with _counted_tokens(workload) as counter:
        measured = measured_acceptance(drafter, loaded, tokenizer, workload, progress=counter)
    table = measured[:depth] if deepest is not None else measured * (depth or _DEPTH_OF_MODEL)
    tuned = tuned_tree(table, max_nodes=nodes, sizes=_SIZES)
    choices = [list(choice) for choice in tuned.shape.choices]
    if out is not None:
        with told_as(ConfigError, f"'{out}'", _TREE_ADVICE):
            write_file(out, json.dumps(choices) + "\n")
    header = _header(loaded, name, workload)
    if as_json:
        expected = {str(size): tokens for size, tokens in tuned.tokens_by_nodes.items()}
        options.print_json({**header, "acceptance": measured, "tokens_by_nodes": expected, "tree": choices})
        return
    terminal.conditions(header)
    _print(measured, tuned, choices, out)


def acceptance(
    model: options.Model,
    head: Annotated[str, typer.Argument(help="A head that `foretoken train` made: a directory or a hub id.")],
    out: Annotated[Path, typer.Option(help="Directory of the head with the results; must not exist.")],
    *,
    asked: Annotated[options.PromptOptions, ("prompts", "num_prompts")] = _FEW_PROMPTS,
    loading: Annotated[options.LoadOptions, ("dtype", "device", "threads")],
    as_json: options.AsJson = False,
) -> None:
    """Measure a head on held-out prompts as `foretoken train` does at its end, and write it with the results.

    For heads that were trained with --num-prompts 0, perhaps on another machine. Drafting chooses its tree by the
    acceptance rates that are stored with a head.
    """
    from dataclasses import replace

    from foretoken.formats.checkpoint import TargetFingerprint
    from foretoken.formats.files import local_head
    from foretoken.formats.registry import read_head
    from foretoken.training.report import held_out_workload, saved_head

    options.check_absent(out, "directory")
    checkpoint = read_head(local_head(head))[1]
    if "settings" not in checkpoint.notes:
        raise ConfigError(
            f"'{head}' does not say how it was trained. Expected a head of `foretoken train`. Measure other heads with "
            "`foretoken tune tree`."
        )
    loaded, tokenizer = loading.load(model, unpacks=True)
    checkpoint.check_target(TargetFingerprint.of(loaded), what=head)
    stored = next(value.dtype for value in checkpoint.weights.values() if value.is_floating_point())
    with ProgressBar("held-out tokens") as on_progress:
        facts = saved_head(
            replace(checkpoint, target=checkpoint.target or TargetFingerprint.of(loaded)), out, target=loaded,
            tokenizer=tokenizer, dtype=str(stored).removeprefix("torch."),
            workload=held_out_workload(asked.prompts, asked.num_prompts, loaded, tokenizer), on_progress=on_progress,
        )  # fmt: skip
    assert facts is not None, "there is one process"
    if as_json:
        options.print_json({**options.run_header(loaded), **facts})
        return
    _print_facts(facts)


def stop(
    model: options.Model,
    speculative_config: options.Drafter = None,
    depth: Annotated[
        int | None,
        typer.Option(min=2, max=64, help="Most tokens of a draft. Default: all of a head; 16 for a draft model."),
    ] = None,
    *,
    asked: options.PromptOptions = _MANY_PROMPTS,
    seed: options.Seed = 0,
    loading: Annotated[options.LoadOptions, ("dtype", "device", "threads")],
    as_json: options.AsJson = False,
) -> None:
    """Train the stop rules DISCO and SpecDec++ of a drafter, and keep them beside its weights.

    The target continues prompts, and the drafter guesses at every position. A small network learns which guesses are
    accepted. On a quarter of the texts the threshold and the greatest length are chosen that give most tokens a second,
    by passes and drafts that are timed here. Use a rule as -s METHOD:control=disco, or control=specdec_pp.
    """
    from foretoken.drafters.base import LONGEST_CHAIN
    from foretoken.training import stopping
    from foretoken.trees.stopping import TRAINED, check_rule_path

    name, drafter_options = _one_drafter(speculative_config, model)
    rows = asked.rows()
    if len(rows) < 2:
        raise ConfigError("there is one prompt. Expected two at least, to train on and to choose thresholds by.")
    loaded, tokenizer = loading.load(model, unpacks=True)
    workload = asked.workload(rows, loaded, tokenizer, temperatures=(0.0,), seed=seed)
    drafter, deepest = _drafter(drafter_options, loaded, tokenizer)
    path, depth = Path(str(drafter_options.model)), min(depth or LONGEST_CHAIN, deepest or _DEEPEST)
    if not path.exists():
        raise ConfigError(f"'{path}' is no directory here. Expected one, to keep the rules in. Download the drafter.")
    check_rule_path(path)
    seconds = stopping.iteration_seconds(
        loaded, tokenizer, workload.prompts, options=drafter_options, controls=("fixed", *TRAINED), depth=depth
    )
    with _counted_tokens(workload) as counter:
        log = stopping.log_drafts(drafter, loaded, tokenizer, workload, depth=depth, progress=counter)
    trained = stopping.train_rules(log, seconds)
    length, best = stopping.best_length(log[:: stopping.HELD_BACK], seconds["fixed"])
    fixed = {"control": "fixed", "max_depth": length, "tokens_per_s": best.rate, "tau": best.tokens / best.passes}
    rules = [fixed, *_kept_rules(trained, path)]
    header = _header(loaded, name, workload)
    if as_json:
        options.print_json({**header, "rules": rules})
        return
    terminal.conditions(header)
    columns = ["control", "threshold", "max_depth", "tokens_per_s", "tau", "calibration_error"]
    cells = [[_cell(rule.get(column)) for column in columns] for rule in rules]
    terminal.print_table([column.replace("_", " ") for column in columns], cells, title="replayed on held-back texts")
    terminal.print_line(f"wrote {', '.join(TRAINED)} to {path / 'control'}: pass -s METHOD:control=NAME")


def _kept_rules(trained: Mapping[str, tuple[Any, Any, float]], path: Path) -> list[dict[str, Any]]:
    """Writes trained rules beside the weights of a drafter; returns what is printed of them."""
    from foretoken.trees.stopping import write_rule

    for control, (rule, _, _) in trained.items():
        write_rule(rule, path, control)
    return [
        {
            "control": control, "threshold": round(rule.threshold, 3), "max_depth": rule.max_depth,
            "tokens_per_s": replayed.rate, "tau": replayed.tokens / replayed.passes, "calibration_error": error,
        }
        for control, (rule, replayed, error) in trained.items()
    ]  # fmt: skip


@contextmanager
def _counted_tokens(workload: Workload) -> Iterator[TokenProgress]:
    from foretoken.bench.workload import TokenProgress

    with ProgressBar("tokens") as on_progress:
        yield TokenProgress(workload, len(workload.temperatures), report=on_progress)


def _header(loaded: LoadedModel, drafter: str, workload: Workload) -> dict[str, Any]:
    return options.run_header(
        loaded, drafter=drafter, prompts=len(workload.prompts), max_tokens=workload.max_tokens,
        temperatures=list(workload.temperatures), seed=workload.seed,
    )  # fmt: skip


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def _one_drafter(texts: list[str] | None, model: str) -> tuple[str, DrafterOptions]:
    from foretoken.entrypoints.config import checked_setups, parse_speculative_config

    setups = checked_setups(texts or [], target=model)
    configs = [setup.config for setup in setups if setup.config is not None]
    each = [one for config in configs for one in parse_speculative_config(config, target=model).options]
    if len(each) != 1:
        raise ConfigError(f"-s names {len(each)} drafters. Expected one head or draft model, as -s hydra.")
    return setups[0].name, each[0]


def _drafter(config: DrafterOptions, target: LoadedModel, tokenizer: Any) -> tuple[Any, int | None]:
    """Loads a head in float32 with its depth, or a draft model with None."""
    import torch

    from foretoken.drafters import draft_model
    from foretoken.drafters.head_drafter import HeadOptions, checked_head
    from foretoken.drafters.vocabularies import DraftModelFiles
    from foretoken.models.smaller import unpacked_model

    if isinstance(config, HeadOptions):
        head = checked_head(config, target).module(dtype=torch.float32)
        return head, head.config.steps
    if isinstance(config, draft_model.Options) and config.model is not None:
        files = DraftModelFiles(config.model, config.revision)
        model, own = unpacked_model(files.model(target)), files.tokenizer()
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
    terminal.print_line(f"tree of {tuned.shape.num_nodes} nodes, {tuned.shape.depth} deep:")
    terminal.prose(json.dumps(choices))
    if out is not None:
        terminal.print_line(f"wrote {out}: pass it as -s METHOD:tree=@{out}")
