"""`foretoken train`: from a frozen target and text to a draft head that can be served."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import typer

from foretoken.cli import options, terminal, train_options
from foretoken.cli.progress import progress, step_progress
from foretoken.core.errors import ConfigError
from foretoken.files.processes import keep_freed_memory


def train(
    method: train_options.Method,
    model: options.Model,
    data: train_options.Data,
    out: train_options.Out,
    sizes: train_options.Sizes = None,
    init: train_options.Init = None,
    draft_vocab: train_options.DraftVocab = None,
    objective: train_options.Weights = None,
    steps: train_options.Steps = 1000,
    lr: train_options.LearningRate = 1e-3,
    warmup_steps: train_options.WarmupSteps = 50,
    lr_floor: train_options.LearningRateFloor = 0.05,
    batch_size: train_options.BatchSize = 8,
    micro_batch_size: train_options.MicroBatchSize = None,
    length: train_options.Length = 512,
    weight_decay: train_options.WeightDecay = 0.01,
    clip_norm: train_options.ClipNorm = 1.0,
    precision: train_options.Precision = "float32",
    seed: train_options.Seed = 0,
    joint: train_options.Joint = None,
    target_out: train_options.TargetOut = None,
    run_dir: train_options.RunDir = None,
    save_every_s: train_options.SaveEvery = 120.0,
    cache: train_options.Cache = None,
    cache_gib: train_options.CacheGib = 8.0,
    eval_every: train_options.EvalEvery = 0,
    eval_data: train_options.EvalData = None,
    prompts: options.Prompts = "heldout",
    num_prompts: train_options.NumPrompts = 16,
    save_dtype: train_options.SaveDtype = "auto",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    as_json: options.AsJson = False,
) -> None:
    """Train a draft head on a frozen target.

    The same command goes on where it was stopped, by a signal or a crash; the result is the same. Under `accelerate
    launch` or `torchrun` all processes share the batch (on CPUs: ACCELERATE_USE_CPU=true accelerate launch --multi_gpu
    --num_processes 2 -m foretoken train ...). At the end the head decodes held-out prompts through the engine, and its
    acceptance is stored with it: drafting chooses its tree by that.
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
            terminal.note(f"stopped; the same command goes on from '{err.directory}'")
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
    """Prints the facts about a head, one a line, and its acceptance as a table."""
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
    """Returns the shell command that measures a head."""
    from foretoken.entrypoints.config import parse_setup

    config, words = {"method": method, "model": str(head)}, f"{method}:model={head}"
    if parse_setup(words, target=target).config != config:  # a name such as `1` or `a:b=c`
        words = json.dumps(config)
    return shlex.join(["foretoken", "bench", target, "-s", words])


def _pairs(texts: list[str] | None, option: str) -> dict[str, Any]:
    """KEY=JSON options as a dictionary; a value that is no JSON is text."""
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
