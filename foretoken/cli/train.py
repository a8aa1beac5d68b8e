"""`foretoken train`: trains a draft head on a frozen target and text."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli import options, terminal
from foretoken.cli.progress import progress, step_progress
from foretoken.core.errors import ConfigError
from foretoken.files.processes import keep_freed_memory

_HEAD = "What the head is"
_LEARNING = "How it learns"
_RUN = "The run"

Method = Annotated[
    str,
    typer.Argument(help="medusa, hydra, mlp_speculator, eagle, hass (trains eagle heads), eagle3 or falcon."),
]
Data = Annotated[Path, typer.Option(help="Packed tokens, as `foretoken data` writes them.")]
Out = Annotated[Path, typer.Option(help="Directory of the head; must not exist.")]
Sizes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=JSON",
        help="A size of the head, e.g. num_heads=4. May be repeated.",
        rich_help_panel=_HEAD,
    ),
]
Init = Annotated[
    str | None,
    typer.Option(
        help="Start from this head, a directory or a hub id, instead of neutral weights.", rich_help_panel=_HEAD
    ),
]
DraftVocab = Annotated[
    Path | None,
    typer.Option(
        help="Draft these tokens alone: a file of `foretoken data vocab`. For eagle3, and for medusa with "
        "own_lm_head=true.",
        rich_help_panel=_HEAD,
    ),
]
Weights = Annotated[
    list[str] | None,
    typer.Option(
        "--objective",
        metavar="KEY=X",
        help="A weight of the objective: ce_weight, kl_weight, tv_weight, feature_weight, head_decay or noise; for the "
        "EAGLE family also passes and stride; for hass also num_top and top_weight; for falcon glancing and "
        "glancing_floor. May be repeated.",
        rich_help_panel=_LEARNING,
    ),
]
Steps = Annotated[int, typer.Option(min=1, help="Optimiser steps.", rich_help_panel=_LEARNING)]
LearningRate = Annotated[float, typer.Option(help="Highest learning rate.", rich_help_panel=_LEARNING)]
WarmupSteps = Annotated[int, typer.Option(min=0, help="Linear warm-up.", rich_help_panel=_LEARNING)]
LearningRateFloor = Annotated[
    float, typer.Option(help="Last learning rate as a part of the highest, above 0.", rich_help_panel=_LEARNING)
]
BatchSize = Annotated[
    int, typer.Option(min=1, help="Windows of a global batch, over all processes.", rich_help_panel=_LEARNING)
]
MicroBatchSize = Annotated[
    int | None, typer.Option(min=1, help="Windows computed at once by a process.", rich_help_panel=_LEARNING)
]
Length = Annotated[int, typer.Option(min=4, help="Tokens of a window.", rich_help_panel=_LEARNING)]
WeightDecay = Annotated[float, typer.Option(help="Of AdamW.", rich_help_panel=_LEARNING)]
ClipNorm = Annotated[float, typer.Option(help="Greatest gradient norm.", rich_help_panel=_LEARNING)]
Precision = Annotated[
    str, typer.Option(metavar="NAME", help="float32, or bfloat16 by autocast.", rich_help_panel=_LEARNING)
]
Seed = Annotated[int, typer.Option(min=0, help="Of batches and fresh weights.", rich_help_panel=_LEARNING)]
Joint = Annotated[
    list[str] | None,
    typer.Option(
        "--joint",
        metavar="KEY=VALUE",
        help="Train the target too (Medusa-2): backbone=lora or full, head_weight, head_warmup, warmup_part, "
        "rate_factor, self_distillation, lora_rank, lora_alpha, lora_dropout. May be repeated.",
        rich_help_panel=_LEARNING,
    ),
]
TargetOut = Annotated[
    Path | None, typer.Option(help="With --joint: directory of the new target.", rich_help_panel=_RUN)
]
RunDir = Annotated[Path | None, typer.Option(help="Checkpoints and curves. Default: OUT-run.", rich_help_panel=_RUN)]
SaveEvery = Annotated[float, typer.Option(help="Seconds between checkpoints.", rich_help_panel=_RUN)]
Cache = Annotated[Path | None, typer.Option(help="Keep the target's features here between runs.", rich_help_panel=_RUN)]
CacheGib = Annotated[float, typer.Option(help="Most GiB of that.", rich_help_panel=_RUN)]
EvalEvery = Annotated[
    int,
    typer.Option(
        min=0,
        help="Steps between simulations of drafting on held-out tokens, for the curves; 0 for none. Weights stay "
        "the same.",
        rich_help_panel=_RUN,
    ),
]
EvalData = Annotated[
    Path | None,
    typer.Option(help="Packed tokens for that. Default: held_out/ beside train/.", rich_help_panel=_RUN),
]
NumPrompts = Annotated[
    int, typer.Option(min=0, help="Held-out prompts of the last report; 0 for none.", rich_help_panel=_RUN)
]
SaveDtype = Annotated[str, typer.Option(metavar="NAME", help="Of the saved weights; auto: the target's.")]


def train(
    method: Method,
    model: options.Model,
    data: Data,
    out: Out,
    sizes: Sizes = None,
    init: Init = None,
    draft_vocab: DraftVocab = None,
    objective: Weights = None,
    steps: Steps = 1000,
    lr: LearningRate = 1e-3,
    warmup_steps: WarmupSteps = 50,
    lr_floor: LearningRateFloor = 0.05,
    batch_size: BatchSize = 8,
    micro_batch_size: MicroBatchSize = None,
    length: Length = 512,
    weight_decay: WeightDecay = 0.01,
    clip_norm: ClipNorm = 1.0,
    precision: Precision = "float32",
    seed: Seed = 0,
    joint: Joint = None,
    target_out: TargetOut = None,
    run_dir: RunDir = None,
    save_every_s: SaveEvery = 120.0,
    cache: Cache = None,
    cache_gib: CacheGib = 8.0,
    eval_every: EvalEvery = 0,
    eval_data: EvalData = None,
    prompts: options.Prompts = "heldout",
    num_prompts: NumPrompts = 16,
    save_dtype: SaveDtype = "auto",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    as_json: options.AsJson = False,
) -> None:
    """Train a draft head on a frozen target.

    The same command continues a run that a signal or a crash stopped; the result is the same. Under `accelerate launch`
    or `torchrun` all processes share the batch (on CPUs: ACCELERATE_USE_CPU=true accelerate launch --multi_gpu
    --num_processes 2 -m foretoken train ...). At the end the head decodes held-out prompts through the engine, and its
    acceptance rates are stored with it: drafting chooses its tree by them.
    """
    arguments = dict(locals())
    arguments |= {"sizes": _pairs(sizes, "--set"), "objective": _pairs(objective, "--objective")}
    arguments |= {"joint": None if joint is None else _pairs(joint, "--joint")}
    del arguments["threads"], arguments["as_json"]
    from foretoken.decoder.lean.threads import set_num_threads
    from foretoken.training.run import Interrupted
    from foretoken.training.train import train as trained

    keep_freed_memory()
    if threads is not None:
        set_num_threads(threads)
    with step_progress(steps) as on_step, progress("held-out tokens") as on_held_out:
        command = f"$ {shlex.join(['foretoken', *sys.argv[1:]])}"
        try:
            result = trained(**arguments, on_step=on_step, on_held_out=on_held_out, command=command)
        except Interrupted as err:
            terminal.note(f"stopped; the same command continues from '{err.directory}'")
            raise typer.Exit(128 + err.number) from err
    if not result.facts:  # another process saves
        return
    if as_json:
        options.print_json({**options.run_header(result.target), **result.facts})
        return
    _print_facts(result.facts)
    target = model if target_out is None else str(target_out)
    terminal.say(f"next: {_bench_command(target, result.facts['method'], out)}")


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


def _pairs(texts: list[str] | None, option: str) -> dict[str, Any]:
    """Returns KEY=JSON options as a dictionary; a value that is not JSON is text."""
    result = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{option} {text!r} is not KEY=VALUE. Expected for example num_heads=4.")
        try:
            result[key] = json.loads(value)
        except json.JSONDecodeError:
            result[key] = value
    return result
