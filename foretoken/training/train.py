"""Trains a head or draft model on a frozen target and measures it: `foretoken.train`, for `foretoken train` too."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foretoken.bench.workload import no_progress
from foretoken.core.checks import validated
from foretoken.core.errors import ConfigError, nearest_name_hint
from foretoken.core.token_ids import tokenizer_sha
from foretoken.entrypoints.model_arguments import load_target
from foretoken.files.atomic_files import check_writable, is_begun
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint
from foretoken.formats.draft_vocabulary import DraftVocabulary
from foretoken.formats.files import local_head
from foretoken.formats.registry import holds_own_head, read_head
from foretoken.heads.base import HeadConfig, build_head
from foretoken.models.loaded import DTYPES, LoadedModel
from foretoken.training.data.packed import PackedTokens, check_token
from foretoken.training.draft_model import Distillation, new_student
from foretoken.training.evaluation import EvaluationConfig
from foretoken.training.joint import JointConfig
from foretoken.training.objectives import DRAFT_MODEL, head_config, objective_config, trained_method
from foretoken.training.report import (
    ADVICE,
    TrainingResult,
    held_out_seconds,
    held_out_workload,
    save_target,
    saved_draft_model,
    saved_head,
    trained_notes,
)
from foretoken.training.run import HeadSettings, ModelSettings, train_head, train_model
from foretoken.training.run_state import read_curve
from foretoken.training.trainer import StepReport, train_config

if TYPE_CHECKING:
    PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A training with checked arguments and a loaded target.

    `settings` are the fields of `RunSettings`, `saving` the arguments of `saved_head` and `saved_draft_model`.
    """

    method: str
    target: LoadedModel
    tokenizer: Any
    packed: PackedTokens
    settings: dict[str, Any]
    saving: dict[str, Any]
    out: Path
    command: str
    on_step: Callable[[StepReport], None] | None

    def draft_model(self, init: str | None, sizes: Mapping[str, Any], max_offset: int | None) -> dict[str, Any] | None:
        """Trains, measures and saves a draft model; returns the facts of `saved_draft_model`."""
        target, train = self.target, self.settings["train"]
        student = new_student(target, self.tokenizer, init=init, sizes=sizes, seed=train.seed)
        context_len = min(_checked_context(student.model, self.packed, train.length), target.context_len)
        train = train.model_copy(update={"max_offset": _max_offset(max_offset, train.length, context_len)})
        settings = ModelSettings(**{**self.settings, "train": train}, origin=student.origin)
        notes = train_model(target, student.model, self.packed, settings, on_step=self.on_step)
        notes = trained_notes(notes, settings.directory, self.command)
        return saved_draft_model(student.model, notes, self.out, target=target, **self.saving)

    def head(
        self, init: str | None, sizes: Mapping[str, Any], vocabulary: tuple[int, ...] | None, target_out: Path | None
    ) -> tuple[dict[str, Any] | None, LoadedModel]:
        """Trains, measures and saves a head; returns the facts of `saved_head`, and the target, which may be new.

        `vocabulary` are the tokens of --draft-vocab.
        """
        target, is_joint = self.target, self.settings["joint"] is not None
        if init is None and not sizes and holds_own_head(Path(target.name), self.method):
            init = target.name
        initial = None if init is None else _initial_head(init, self.method, target)
        config, drafted = _head_to_train(self.method, target, initial, sizes, vocabulary, is_joint=is_joint)
        settings = HeadSettings(**self.settings, head=config, draft_vocab=drafted)
        checkpoint, target = train_head(target, self.packed, settings, initial=initial, on_step=self.on_step)
        if target_out is not None:
            target = save_target(target, target_out, tokenizer=self.tokenizer, like=self.target.name)
        checkpoint = replace(checkpoint, notes=trained_notes(checkpoint.notes, settings.directory, self.command))
        return saved_head(checkpoint, self.out, target=target, **self.saving), target


def train(  # noqa: PLR0913 - one argument for each option of the command
    method: str,
    model: PathLike,
    *,
    data: PathLike,
    out: PathLike,
    sizes: Mapping[str, Any] | None = None,
    init: str | None = None,
    draft_vocab: PathLike | None = None,
    objective: Mapping[str, Any] | None = None,
    steps: int = 1000,
    seconds: float | None = None,
    lr: float = 1e-3,
    warmup_steps: int = 50,
    lr_floor: float = 0.05,
    batch_size: int = 8,
    micro_batch_size: int | None = None,
    length: int = 512,
    max_offset: int | None = None,
    repeat_windows: bool = False,
    weight_decay: float = 0.01,
    clip_norm: float = 1.0,
    precision: str = "float32",
    seed: int = 0,
    joint: Mapping[str, Any] | None = None,
    target_out: PathLike | None = None,
    run_dir: PathLike | None = None,
    save_every_s: float = 120.0,
    cache: PathLike | None = None,
    cache_gib: float = 8.0,
    eval_every: int = 0,
    eval_data: PathLike | None = None,
    prompts: str = "heldout",
    num_prompts: int = 16,
    save_dtype: str = "auto",
    dtype: str = "auto",
    device: str = "auto",
    on_step: Callable[[StepReport], None] | None = None,
    on_held_out: Callable[[int, int], None] = no_progress,
    command: str | None = None,
) -> TrainingResult:
    """Trains a draft head or a draft model on a frozen target, measures it on held-out prompts and saves it.

    The arguments are the options of `foretoken train`: `eval_every` is `--eval-every`. Messages name the options. A
    run that was stopped goes on with the same call, to the same weights.

    Args:
        method: "medusa", "hydra", "mlp_speculator", "eagle", "hass" (trains EAGLE heads), "eagle3", "mtp", "spire"
            or "falcon"; or "draft_model", which trains a whole language model and saves a model directory.
        model: Directory or hub id of the target.
        data: Packed tokens, the output of `foretoken data`.
        out: Directory of the head or draft model; must not exist.
        sizes: Sizes of the head that differ from the method's defaults, such as `{"num_heads": 3}`. For a draft model
            `{"num_layers": N}` keeps N of the target's layers; further sizes, named as in `config.json`, make a model
            with random weights.
        init: Directory or hub id of a head, or a draft model with the target's tokenizer, to begin from; None for
            first weights of the method. Without `sizes`, "mtp" then begins from the head in the target's own files.
        draft_vocab: File of `foretoken data vocab` with the tokens that the head drafts; None for all.
        objective: Weights of the loss that differ from the method's defaults, such as `{"ce_weight": 1.0}`. For a draft
            model also the fields of `Distillation`.
        steps: Optimiser steps; with `seconds` at most.
        seconds: Seconds of steps after which the run ends, with the learning rate at its lowest; None for no bound. The
            weights then depend on the machine's speed.
        lr: Highest learning rate of AdamW.
        warmup_steps: Steps of linear warm-up.
        lr_floor: Last learning rate of the cosine schedule as a fraction of `lr`, above 0.
        batch_size: Windows of the global batch, over all processes.
        micro_batch_size: Windows that one process computes at once; None for all of its share.
        length: Tokens of a window.
        max_offset: Largest random offset of the positions in a window, in tokens, so that the head or draft model
            drafts in texts that are longer than a window; 0 for none, None for all positions of the context.
        repeat_windows: Whether all epochs cut the data at the same places, so that from the second one on `cache` holds
            the features.
        clip_norm: Greatest norm of the gradient.
        precision: "float32", or "bfloat16" for autocast.
        seed: Seed of the order of the data, of new weights and of dropout.
        joint: Settings for training the target along (Medusa-2), such as `{"backbone": "lora"}`; None for a frozen
            target.
        target_out: With `joint`, the directory of the new target.
        run_dir: Directory of checkpoints and curves; None for `out` with "-run" at its end.
        save_every_s: Seconds between checkpoints.
        cache: Directory in which the target's features are kept between runs; None for none.
        cache_gib: Greatest size of `cache`, in GiB.
        eval_every: Steps between evaluations on held-out tokens; 0 for none. Evaluations change no weight.
        eval_data: Packed tokens for evaluations; None for `held_out/` beside `train/` in `data`.
        prompts: Held-out prompts for the last measurement: "heldout", "edit", "prose" or a file.
        num_prompts: Number of these prompts; 0 for no measurement.
        save_dtype: Dtype of the saved weights; "auto" for that of the target's files.
        dtype: Dtype of the target while training; "auto" as of `load_model`.
        device: Device of the target and the head; "auto" for an accelerator where there is one.
        on_step: Called with a `StepReport` after each step.
        on_held_out: Called with the number of held-out tokens decoded and of all such tokens.
        command: Command with its prompt, as "$ foretoken train …", for the head's card; None for this call.

    Returns:
        Where the head is, the loss of each step, and the acceptance at each evaluation.

    Raises:
        ConfigError: When an argument is out of range or does not fit the others, when `out` exists, or when another
            run is at work in `run_dir`.
        ModelError: When the target cannot be loaded, or the loss is not finite.
        RequestError: When the data cannot be read, or is smaller than one window.
        Interrupted: After SIGTERM or SIGINT; the state is saved in `run_dir`.
    """
    command = command or _call_text(locals())
    is_joint = joint is not None
    name, out, target_out, cache = os.fspath(model), Path(out), _path(target_out), _path(cache)
    run_dir = _path(run_dir) or out.with_name(f"{out.name}-run")
    if method == DRAFT_MODEL:
        _check_no_head_options(joint=joint, draft_vocab=draft_vocab, cache=cache)
    _check_paths(out, target_out, run_dir, cache, is_joint=is_joint)
    if init is not None and sizes:
        raise ConfigError("--init sets the sizes, so --set cannot change them. Leave one of them out.")
    if seconds is not None and is_joint:
        raise ConfigError("--seconds bounds the training of a head alone, and --joint trains two. Leave one out.")
    held_out = _held_out(eval_every, _path(eval_data), Path(data), is_joint=is_joint)
    _check_values(save_every_s, cache_gib, save_dtype, num_prompts)
    weights = (
        validated(Distillation, objective or {}, "the objective of draft_model")
        if method == DRAFT_MODEL
        else objective_config(method, objective or {})
    )
    joint_config = None if joint is None else validated(JointConfig, joint, "joint training")
    settings = train_config({
        "schedule": {"peak": lr, "num_steps": steps, "warmup_steps": warmup_steps, "floor": lr_floor,
                     "seconds": seconds},
        "batch_size": batch_size, "micro_batch_size": micro_batch_size, "length": length, "seed": seed,
        "max_offset": max_offset or 0, "repeats_windows": repeat_windows,
        "weight_decay": weight_decay, "clip_norm": clip_norm, "precision": precision,
    })  # fmt: skip
    packed = replace(PackedTokens.open(Path(data)), repeats_windows=repeat_windows)
    target, tokenizer = load_target(name, dtype=dtype, device=device, unpacks=True)
    settings = settings.model_copy(update={"max_offset": _max_offset(max_offset, length, target.context_len)})
    _check_data(packed, tokenizer, target.vocab_size, data=str(data), model=name)
    packed.batch(0, batch_size=batch_size, length=length, seed=seed)  # reports too little data before the work
    evaluation = None
    if held_out is not None:
        tokens = PackedTokens.open(held_out)
        _check_data(tokens, tokenizer, target.vocab_size, data=str(held_out), model=name)
        evaluation = EvaluationConfig.of_held_out(tokens, every=eval_every, length=length)
    workload = held_out_workload(prompts, num_prompts, target, tokenizer)
    if on_step is not None:
        on_step = _with_seconds_after(on_step, held_out_seconds(target, tokenizer, workload))
    run = _Run(
        method=method, target=target, tokenizer=tokenizer, packed=packed, out=out, command=command, on_step=on_step,
        settings={
            "objective": weights, "train": settings, "data": str(packed.meta["tokens_sha256"]), "directory": run_dir,
            "save_every_s": save_every_s, "evaluation": evaluation,
        },
        saving={"tokenizer": tokenizer, "dtype": save_dtype, "workload": workload, "on_progress": on_held_out},
    )  # fmt: skip
    if method == DRAFT_MODEL:
        facts = run.draft_model(init, sizes or {}, max_offset)
    else:
        vocabulary = _drafted_tokens(_path(draft_vocab), packed, target.vocab_size)
        run.settings.update(cache=cache, cache_bytes=int(cache_gib * 2**30), joint=joint_config)
        facts, target = run.head(init, sizes or {}, vocabulary, target_out)
    curve = [] if facts is None else read_curve(run_dir)  # None in every process but the first
    return TrainingResult(
        directory=out,
        run_dir=run_dir,
        target=target,
        losses=[point["loss"] for point in curve],
        acceptance={point["step"]: point["held_out_acceptance"] for point in curve if "held_out_acceptance" in point},
        facts=facts or {},
    )


def _with_seconds_after(
    on_step: Callable[[StepReport], None], seconds_after: Callable[[float], float]
) -> Callable[[StepReport], None]:
    return lambda report: on_step(replace(report, seconds_after=seconds_after(report.tau)))


def _call_text(arguments: Mapping[str, Any]) -> str:
    given = {
        name: arguments[name]
        for name, each in inspect.signature(train).parameters.items()
        if arguments[name] != each.default and not callable(arguments[name])
    }
    texts = {name: os.fspath(each) if isinstance(each, os.PathLike) else each for name, each in given.items()}
    return f">>> foretoken.train({', '.join(f'{name}={each!r}' for name, each in texts.items())})"


def _path(given: PathLike | None) -> Path | None:
    return None if given is None else Path(given)


def _check_no_head_options(**given: Any) -> None:
    """Raises `ConfigError` for options of heads, by name, that are set for a draft model."""
    name = next((name for name, value in given.items() if value), None)
    if name is not None:
        option = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{option} is for heads, and draft_model trains a whole model. Leave it out.")


def _checked_context(model: LoadedModel, packed: PackedTokens, length: int) -> int:
    """Returns the context of a draft model that fits the data."""
    if length > model.context_len:
        raise ConfigError(
            f"--length is {length}, and the draft model has a context of {model.context_len}. Expected at most that."
        )
    if packed.meta["largest_token_id"] >= model.vocab_size:
        raise ConfigError(
            f"the data holds token {packed.meta['largest_token_id']}, and the draft model has {model.vocab_size} "
            "tokens. Expected a draft model with all tokens of the data. Begin from another one."
        )
    return model.context_len


def _check_values(save_every_s: float, cache_gib: float, save_dtype: str, num_prompts: int) -> None:
    """Raises `ConfigError` for values that would fail only after the training."""
    counts = (("--save-every-s", save_every_s), ("--cache-gib", cache_gib), ("--num-prompts", num_prompts))
    for option, value in counts:
        if not math.isfinite(value) or value < 0:
            raise ConfigError(f"{option} is {value}. Expected a finite number, at least 0.")
    known = ("auto", *DTYPES)
    if save_dtype not in known:
        raise ConfigError(f"--save-dtype '{save_dtype}' does not exist. {nearest_name_hint(save_dtype, known)}")


def _check_paths(out: Path, target_out: Path | None, run_dir: Path, cache: Path | None, *, is_joint: bool) -> None:
    if is_joint != (target_out is not None):
        raise ConfigError("--joint and --target-out go together: the target that learns along is a new one. Pass both.")
    for new in filter(None, (out, target_out)):
        if new.exists() or new.is_symlink():
            raise ConfigError(f"'{new}' exists already. Expected a new directory. Choose another or remove it.")
        check_writable(new, ConfigError, ADVICE)
    for option, path in (("--run-dir", run_dir), ("--cache", cache)):
        if path is not None and path.exists() and not path.is_dir():
            raise ConfigError(f"{option} '{path}' is a file. Expected a new directory, or that of an earlier run.")
    if run_dir.is_dir() and not (run_dir / "settings.json").is_file():
        files = [path for path in run_dir.iterdir() if path.name != "run.lock"]
        others = sorted(path.name for path in files if not is_begun(path, "settings.json"))
        if others:
            raise ConfigError(
                f"'{run_dir}' holds other files ({others[0]}), no training run. Expected a new directory or that of "
                "a run to go on with. Pass another --run-dir."
            )


def _check_data(packed: PackedTokens, tokenizer: Any, vocab_size: int, *, data: str, model: str) -> None:
    if packed.meta["tokenizer_sha"] != tokenizer_sha(tokenizer):
        raise ConfigError(
            f"'{data}' was not packed with the tokenizer of '{model}'. Expected data for this target: make it with "
            f"`foretoken data {model}`."
        )
    check_token(packed.meta["largest_token_id"], vocab_size, f"'{data}'")


def _max_offset(given: int | None, length: int, context_len: int) -> int:
    most = max(context_len - length, 0)
    if given is not None and not 0 <= given <= most:
        raise ConfigError(
            f"--max-offset is {given}. Expected 0 to {most}: windows of {length} tokens within the target's context "
            f"of {context_len}. Pass another number, or leave it out."
        )
    return most if given is None else given


def _held_out(every: int, given: Path | None, data: Path, *, is_joint: bool) -> Path | None:
    if every < 0:
        raise ConfigError(f"--eval-every is {every}. Expected a number of steps, or 0 for no evaluations.")
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


def _drafted_tokens(path: Path | None, packed: PackedTokens, vocab_size: int) -> tuple[int, ...] | None:
    if path is None:
        return None
    drafted = DraftVocabulary.read(path)
    if drafted.tokenizer_sha != packed.meta["tokenizer_sha"] or drafted.token_ids[-1] >= vocab_size:
        raise ConfigError(
            f"--draft-vocab '{path}' is of another tokenizer than the data. Expected tokens of this target. Make it "
            "from the data with `foretoken data vocab`."
        )
    return drafted.token_ids


def _head_to_train(
    method: str,
    target: LoadedModel,
    initial: HeadCheckpoint | None,
    sizes: Mapping[str, Any],
    drafted: tuple[int, ...] | None,
    *,
    is_joint: bool,
) -> tuple[HeadConfig, tuple[int, ...] | None]:
    """Returns the configuration of the head, and the tokens of its draft vocabulary; None for all.

    `drafted` are those of --draft-vocab. A new head with an LM head of its own has rows for these tokens alone.
    """
    if drafted is None and initial is not None and initial.draft_vocab is not None:
        drafted = tuple(initial.draft_vocab)
    stated = sizes.get("draft_vocab_size")
    if drafted is not None and stated not in (None, len(drafted)):
        raise ConfigError(
            f"--set draft_vocab_size={stated} does not fit --draft-vocab, which names {len(drafted)} tokens. Expected "
            "the same number. Leave the first one out."
        )
    config = head_config(method, target, sizes) if initial is None else initial.config
    if drafted is None:
        return config, None
    if build_head(config, device=torch.device("meta"), dtype=torch.float32).has_target_lm_head:
        if is_joint:
            raise ConfigError(
                f"--joint trains the LM head that {config.method} heads share, over all tokens. Expected no "
                "--draft-vocab. Leave one of them out."
            )
        return config, drafted
    if "draft_vocab_size" not in type(config).model_fields:
        raise ConfigError(
            f"--draft-vocab is not for {config.method} heads, which draft all tokens with LM heads of their own. "
            "Expected a head that shares the target's LM head, eagle3, or medusa. Leave it out."
        )
    if initial is not None:
        raise ConfigError("--init brings a vocabulary of its own, so --draft-vocab cannot change it. Pass one of them.")
    return head_config(method, target, {**sizes, "draft_vocab_size": len(drafted)}), drafted


def _initial_head(name: str, method: str, target: LoadedModel) -> HeadCheckpoint:
    initial, wanted = read_head(local_head(name))[1], trained_method(method).config.method
    if initial.config.method != wanted:
        raise ConfigError(f"'{name}' is a {initial.config.method} head. Expected a {wanted} head to begin from.")
    initial.check_target(TargetFingerprint.of(target), what=name)
    return initial
