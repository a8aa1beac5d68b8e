"""`foretoken train`: from a frozen target and text to a draft head that can be served."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from foretoken.cli import options, terminal, train_options
from foretoken.cli.progress import progress, step_progress
from foretoken.core.atomic_files import is_begun
from foretoken.core.errors import ConfigError, nearest_name_hint
from foretoken.core.freed_memory import keep_freed_memory


def train(
    method: train_options.Method,
    model: options.Model,
    data: train_options.Data,
    out: train_options.Out,
    sizes: train_options.Sizes = None,
    init: train_options.Init = None,
    draft_vocab: train_options.DraftVocab = None,
    weights: train_options.Weights = None,
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
    run_dir = run_dir or out.with_name(f"{out.name}-run")
    _check_places(out, target_out, run_dir, cache)
    if init is not None:
        _check_begun_from(sizes, draft_vocab)
    held_out = _held_out(eval_every, eval_data, data, is_joint=joint is not None)
    if (joint is None) != (target_out is None):
        raise ConfigError("--joint and --target-out go together: the target that learns along is a new one. Pass both.")
    _check_values(save_every_s, cache_gib, save_dtype)
    from foretoken.training.config import head_config, joint_config, objective_config, train_config
    from foretoken.training.data.packed import PackedTokens
    from foretoken.training.run import RunSettings

    objective = objective_config(method, _pairs(weights, "--objective"))
    settings = train_config({
        "schedule": {"peak": lr, "num_steps": steps, "warmup_steps": warmup_steps, "floor": lr_floor},
        "batch_size": batch_size, "micro_batch_size": micro_batch_size, "length": length, "seed": seed,
        "weight_decay": weight_decay, "clip_norm": clip_norm, "precision": precision,
    })  # fmt: skip
    keep_freed_memory()
    packed = PackedTokens.open(data)
    loaded, tokenizer = options.load_target(model, dtype, device, threads)
    _check_data(packed, tokenizer, loaded.vocab_size, data=str(data), model=model)
    packed.batch(0, batch_size=batch_size, length=length, seed=seed)  # too little data: said before the work
    from foretoken.formats.hub import local_head
    from foretoken.formats.registry import read_head
    from foretoken.training.report import held_out_seconds, held_out_workload, save_target, saved_head

    workload = held_out_workload(prompts, num_prompts)
    initial = None if init is None else read_head(local_head(init))[1]
    drafted = None if draft_vocab is None else _drafted_tokens(draft_vocab, packed, loaded.vocab_size)
    values = _with_vocabulary(_pairs(sizes, "--set"), method, drafted)
    run = RunSettings(
        head=initial.config if initial is not None else head_config(method, loaded, values),
        objective=objective,
        train=settings,
        data=str(packed.meta["tokens_sha256"]),
        directory=run_dir,
        save_every_s=save_every_s,
        cache=cache,
        cache_bytes=int(cache_gib * 2**30),
        joint=None if joint is None else joint_config(_pairs(joint, "--joint")),
        draft_vocab=drafted,
        evaluation=None
        if held_out is None
        else _evaluation(held_out, eval_every, length, tokenizer, loaded.vocab_size, model=model),
    )
    if initial is not None and init is not None:
        _check_initial(initial, method, loaded, init)
    seconds_after = held_out_seconds(loaded, tokenizer, workload)
    checkpoint, loaded = _trained(loaded, packed, run, initial, seconds_after)
    if target_out is not None:
        loaded = save_target(loaded, target_out, tokenizer=tokenizer, like=model)
    with progress("held-out tokens") as on_progress:
        facts = saved_head(
            checkpoint,
            out,
            target=loaded,
            tokenizer=tokenizer,
            dtype=save_dtype,
            workload=workload,
            run=run.directory,
            command=shlex.join(["foretoken", *sys.argv[1:]]),
            on_progress=on_progress,
        )
    if facts is None:  # another process saves
        return
    if as_json:
        options.print_json({**options.run_header(loaded), **facts})
        return
    _print_facts(facts)
    terminal.say(f"next: {_bench_command(model if target_out is None else str(target_out), facts['method'], out)}")


def _trained(
    loaded: Any, packed: Any, run: Any, initial: Any, seconds_after: Callable[[float], float]
) -> tuple[Any, Any]:
    """The trained head, and the target as it is then: another one where it learned along.

    Args:
        loaded: The target.
        packed: Training tokens.
        run: Settings.
        initial: A head to begin from, or None.
        seconds_after: See `step_progress`.

    Raises:
        Exit: When the run is stopped by a signal.
    """
    from foretoken.training.run import Interrupted, train_head, train_jointly

    with step_progress(run.train.schedule.num_steps, seconds_after) as on_step:
        try:
            if run.joint is None:
                return train_head(loaded, packed, run, initial=initial, on_step=on_step), loaded
            return train_jointly(loaded, packed, run, initial=initial, on_step=on_step)
        except Interrupted as err:
            terminal.note(f"stopped; the same command goes on from '{run.directory}'")
            raise typer.Exit(128 + err.number) from err


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
    from foretoken.engine.setups import parse_setup

    config, words = {"method": method, "model": str(head)}, f"{method}:model={head}"
    if parse_setup(words, target=target).config != config:  # a name such as `1` or `a:b=c`
        words = json.dumps(config)
    return shlex.join(["foretoken", "bench", target, "-s", words])


def _check_begun_from(sizes: list[str] | None, draft_vocab: Path | None) -> None:
    """Raises `ConfigError` where what --init brings is given once more."""
    if sizes:
        raise ConfigError("--init sets the sizes of the head, so --set cannot change them. Leave one of them out.")
    if draft_vocab is not None:
        raise ConfigError("--init brings a vocabulary of its own, so --draft-vocab cannot change it. Pass one of them.")


def _check_values(save_every_s: float, cache_gib: float, save_dtype: str) -> None:
    """Raises `ConfigError` for values that would end a run after the work."""
    from foretoken.hf.placement import DTYPES

    for option, value in (("--save-every-s", save_every_s), ("--cache-gib", cache_gib)):
        if not math.isfinite(value) or value < 0:
            raise ConfigError(f"{option} is {value}. Expected a finite number, at least 0.")
    known = ("auto", *DTYPES)
    if save_dtype not in known:
        raise ConfigError(f"--save-dtype '{save_dtype}' does not exist. {nearest_name_hint(save_dtype, known)}")


def _check_places(out: Path, target_out: Path | None, directory: Path, cache: Path | None) -> None:
    """Raises `ConfigError` where files would be replaced, or those of a run mixed with others."""
    for place in (out, target_out):
        if place is not None and (place.exists() or place.is_symlink()):
            raise ConfigError(f"'{place}' exists already. Expected a new directory. Choose another or remove it.")
    for option, place in (("--run-dir", directory), ("--cache", cache)):
        if place is not None and place.exists() and not place.is_dir():
            raise ConfigError(f"{option} '{place}' is a file. Expected a new directory, or that of an earlier run.")
    if directory.is_dir() and not (directory / "settings.json").is_file():
        files = [path for path in directory.iterdir() if path.name != "run.lock"]
        others = sorted(path.name for path in files if not is_begun(path, "settings.json"))
        if others:
            raise ConfigError(
                f"'{directory}' holds other files ({others[0]}), no training run. Expected a new directory or that of "
                "a run to go on with. Pass another --run-dir."
            )


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


def _check_data(packed: Any, tokenizer: Any, vocab_size: int, *, data: str, model: str) -> None:
    """Raises `ConfigError` when tokens were made with another tokenizer."""
    from foretoken.core.tokenizer_sha import tokenizer_sha

    if packed.meta["tokenizer_sha"] != tokenizer_sha(tokenizer) or packed.meta["largest_token_id"] >= vocab_size:
        raise ConfigError(
            f"'{data}' was not packed with the tokenizer of '{model}'. Expected data for this target: make it with "
            f"`foretoken data {model}`."
        )


def _held_out(every: int, given: Path | None, data: Path, *, is_joint: bool) -> Path | None:
    """Where tokens for evaluations lie; None where none are asked for. Raises `ConfigError` where there are none."""
    if not every:
        if given is not None:
            raise ConfigError("--eval-data is for evaluations, and there are none. Pass --eval-every too.")
        return None
    if is_joint:
        raise ConfigError("--eval-every simulates drafts of a frozen target, and --joint changes it. Leave one out.")
    if given is not None:
        return given
    beside = (data if (data / "train").is_dir() else data.resolve().parent) / "held_out"
    if not beside.is_dir():
        raise ConfigError(
            f"--eval-every needs held-out tokens, and there is no '{beside}'. Expected packed tokens there, as "
            "`foretoken data --held-out-fraction` makes them. Pass --eval-data."
        )
    return beside


def _evaluation(place: Path, every: int, length: int, tokenizer: Any, vocab_size: int, *, model: str) -> Any:
    """Windows of held-out tokens; raises `ForetokenError` when they are of another tokenizer, or damaged."""
    from foretoken.training.data.packed import PackedTokens
    from foretoken.training.evaluation import EvaluationConfig

    packed = PackedTokens.open(place)
    _check_data(packed, tokenizer, vocab_size, data=str(place), model=model)
    return EvaluationConfig.of(packed, every=every, length=length)


def _drafted_tokens(path: Path, packed: Any, vocab_size: int) -> tuple[int, ...]:
    """The ids of a draft vocabulary; raises `ConfigError` when it is of another tokenizer than data or target."""
    from foretoken.training.data.vocabulary import DraftVocabulary

    drafted = DraftVocabulary.read(path)
    if drafted.tokenizer_sha != packed.meta["tokenizer_sha"] or drafted.token_ids[-1] >= vocab_size:
        raise ConfigError(
            f"--draft-vocab '{path}' is of another tokenizer than the data. Expected tokens of this target. Make it "
            "from the data with `foretoken data vocab`."
        )
    return drafted.token_ids


def _with_vocabulary(sizes: dict[str, Any], method: str, drafted: tuple[int, ...] | None) -> dict[str, Any]:
    """Sizes of a head that drafts some tokens alone, or all of them.

    Raises:
        ConfigError: When heads of the method always draft all tokens, or the sizes say another number.
    """
    from foretoken.training.config import has_size

    if drafted is None:
        return sizes
    if not has_size(method, "draft_vocab_size"):
        raise ConfigError(
            f"--draft-vocab is not for {method} heads, which draft all tokens. Expected eagle3, or medusa with "
            "own_lm_head=true. Leave it out."
        )
    stated = sizes.get("draft_vocab_size", len(drafted))
    if stated != len(drafted):
        raise ConfigError(
            f"--set draft_vocab_size={stated} does not fit --draft-vocab, which names {len(drafted)} tokens. Expected "
            "the same number. Leave the first one out."
        )
    return {**sizes, "draft_vocab_size": len(drafted)}


def _check_initial(initial: Any, method: str, loaded: Any, name: str) -> None:
    """Raises `ConfigError` when a head to begin from is of another method or target."""
    from foretoken.formats.checkpoint import TargetFingerprint
    from foretoken.training.config import trained_head

    wanted = trained_head(method)
    if initial.config.method != wanted:
        raise ConfigError(f"'{name}' is a {initial.config.method} head. Expected a {wanted} head to begin from.")
    initial.check_target(TargetFingerprint.of(loaded), what=name)
