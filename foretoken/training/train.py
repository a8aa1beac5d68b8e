"""Trains a head or draft model on a frozen target and measures it: `foretoken.train`, for `foretoken train` too."""

from __future__ import annotations

import inspect
import io
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from foretoken.bench.plots import LIGHT, distinct_look, load_matplotlib, page_style
from foretoken.bench.workload import no_progress
from foretoken.core.checks import validated
from foretoken.core.errors import ConfigError, nearest_name_hint
from foretoken.core.token_ids import tokenizer_sha
from foretoken.entrypoints.model_arguments import load_target
from foretoken.files.atomic_files import check_writable, is_begun
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint
from foretoken.formats.draft_vocabulary import DraftVocabulary
from foretoken.formats.files import local_head
from foretoken.formats.registry import read_head
from foretoken.heads.base import build_head
from foretoken.models.loaded import DTYPES
from foretoken.training.data.packed import PackedTokens
from foretoken.training.draft_model import Distillation, new_student
from foretoken.training.evaluation import EvaluationConfig
from foretoken.training.joint import JointConfig
from foretoken.training.objectives import DRAFT_MODEL, head_config, objective_config, trained_method
from foretoken.training.report import (
    ADVICE,
    held_out_seconds,
    held_out_workload,
    save_target,
    saved_draft_model,
    saved_head,
    trained_notes,
)
from foretoken.training.run import HeadSettings, ModelSettings, train_head, train_jointly, train_model
from foretoken.training.run_state import read_curve
from foretoken.training.trainer import train_config

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from foretoken.heads.base import HeadConfig
    from foretoken.models.loaded import LoadedModel
    from foretoken.training.trainer import StepReport

    Place = str | os.PathLike[str]

_SIZE = (8.4, 3.3)  # inches


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """The result of `foretoken.train`.

    Attributes:
        directory: The directory of the head or draft model, as `speculative_config` of `LLM` takes it.
        run_dir: Directory of the checkpoints and of `metrics.jsonl`.
        target: The target that the head belongs to; with `joint` the new one.
        losses: Training loss of each step, from step 1.
        acceptance: For each evaluated step, the acceptance rate at depths 1, 2, …: the share of drafts on held-out
            text with d right first tokens, by the target's choice at temperature 0.
        facts: What was measured on held-out prompts, and the head's size, as `foretoken train --json` prints them.
            Empty in every process but the first, as `losses` and `acceptance` are.
    """

    directory: Path
    run_dir: Path
    target: LoadedModel
    losses: list[float]
    acceptance: dict[int, list[float]]
    facts: dict[str, Any]

    @property
    def tau(self) -> dict[int, float]:
        """Acceptance length at each evaluated step: tokens a target pass of a chain, the target's own included."""
        return {step: 1.0 + sum(by_depth) for step, by_depth in self.acceptance.items()}

    def plot(self, file: str | os.PathLike[str] | IO[str] | None = None) -> Any:
        """Draws loss and acceptance rate at each depth over the steps; returns the `matplotlib.figure.Figure`.

        `file` takes the picture, in the format of the name's suffix; an open file gets SVG. Raises `ConfigError` when
        matplotlib is not installed (`pip install '.[report]'`).
        """
        mpl = load_matplotlib()
        from matplotlib.figure import Figure

        with mpl.rc_context({**page_style(LIGHT, "training"), "svg.fonttype": "none"}):  # text as text: a small file
            figure: Any = Figure(figsize=_SIZE, layout="constrained")
            loss, acceptance = figure.subplots(1, 2)
            loss.plot(range(1, len(self.losses) + 1), self.losses, color=distinct_look(1).light, lw=1.4)
            loss.set_title("training loss", loc="left")
            self._draw_acceptance(acceptance)
            for axes in (loss, acceptance):
                axes.set_xlabel("optimizer step")
                axes.spines[["top", "right"]].set_visible(False)
                axes.grid(visible=True, color=LIGHT.grid, lw=0.6)
                axes.set_xlim(0, 1.02 * max(len(self.losses), 1))
                axes.set_ylim(bottom=0)
            if file is not None:
                is_svg = hasattr(file, "write") or str(file).endswith(".svg")
                dateless = {"metadata": {"Date": None}, "format": "svg"} if is_svg else {}
                figure.savefig(file, **dateless)
        return figure

    def _repr_svg_(self) -> str:
        picture = io.StringIO()
        self.plot(picture)
        return picture.getvalue()

    def _draw_acceptance(self, axes: Any) -> None:
        by_step = list(self.acceptance.values())
        for depth, rates in enumerate(zip(*by_step, strict=True)):
            look = distinct_look(depth)
            percents = [100 * rate for rate in rates]
            axes.plot(list(self.acceptance), percents, color=look.light, marker=look.marker, ms=4, label=depth + 1)
        taus = list(self.tau.values())
        ending = f", tau {taus[0]:.2f} to {taus[-1]:.2f}" if taus else ""
        axes.set_title(f"acceptance on held-out text{ending}", loc="left")
        axes.set_ylabel("drafts accepted, %")
        if taus:
            axes.legend(title="to depth", frameon=False)


def train(  # noqa: PLR0913 - one argument for each option of the command
    method: str,
    model: Place,
    *,
    data: Place,
    out: Place,
    sizes: Mapping[str, Any] | None = None,
    init: str | None = None,
    draft_vocab: Place | None = None,
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
    target_out: Place | None = None,
    run_dir: Place | None = None,
    save_every_s: float = 120.0,
    cache: Place | None = None,
    cache_gib: float = 8.0,
    eval_every: int = 0,
    eval_data: Place | None = None,
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
        method: "medusa", "hydra", "mlp_speculator", "eagle", "hass" (trains EAGLE heads), "eagle3", "spire" or
            "falcon"; or "draft_model", which trains a whole language model and saves a model directory.
        model: Directory or hub id of the target.
        data: Packed tokens, the output of `foretoken data`.
        out: Directory of the head or draft model; must not exist.
        sizes: Sizes of the head that differ from the method's defaults, such as `{"num_heads": 3}`. For a draft model
            `{"num_layers": N}` keeps N of the target's layers; further sizes, named as in `config.json`, make a model
            with random weights.
        init: Directory or hub id of a head, or a draft model with the target's tokenizer, to begin from; None for
            first weights of the method.
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
    is_model = method == DRAFT_MODEL
    if is_model:
        _check_no_head_options(joint=joint, draft_vocab=draft_vocab, cache=cache)
    name, out, target_out, cache = os.fspath(model), Path(out), _path(target_out), _path(cache)
    run_dir = _path(run_dir) or out.with_name(f"{out.name}-run")
    _check_places(out, target_out, run_dir, cache, is_joint=joint is not None)
    if init is not None and sizes:
        raise ConfigError("--init sets the sizes, so --set cannot change them. Leave one of them out.")
    if seconds is not None and joint is not None:
        raise ConfigError("--seconds bounds the training of a head alone, and --joint trains two. Leave one out.")
    held_out = _held_out(eval_every, _path(eval_data), Path(data), is_joint=joint is not None)
    _check_values(save_every_s, cache_gib, save_dtype, num_prompts)
    weights = (
        validated(Distillation, objective or {}, "the objective of draft_model")
        if is_model
        else objective_config(method, objective or {})
    )
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
    evaluation = _evaluation(held_out, eval_every, length, tokenizer, target.vocab_size, model=name)
    workload = held_out_workload(prompts, num_prompts, target, tokenizer)
    if on_step is not None:
        on_step = _with_seconds_after(on_step, held_out_seconds(target, tokenizer, workload))
    common: dict[str, Any] = {
        "objective": weights, "train": settings, "data": str(packed.meta["tokens_sha256"]), "directory": run_dir,
        "save_every_s": save_every_s, "evaluation": evaluation,
    }  # fmt: skip
    report = {"tokenizer": tokenizer, "dtype": save_dtype, "workload": workload, "on_progress": on_held_out}
    if is_model:
        student = new_student(target, tokenizer, init=init, sizes=sizes or {}, seed=seed)
        context_len = min(_checked_context(student.model, packed, length), target.context_len)
        common["train"] = settings.model_copy(update={"max_offset": _max_offset(max_offset, length, context_len)})
        notes = train_model(
            target, student.model, packed, ModelSettings(**common, origin=student.origin), on_step=on_step
        )
        notes = trained_notes(notes, run_dir, command)
        facts = saved_draft_model(student.model, notes, out, target=target, **report)
    else:
        initial = None if init is None else _initial_head(init, method, target)
        drafted = _drafted_tokens(_path(draft_vocab), packed, target.vocab_size, initial)
        config = initial.config if initial is not None else _new_head(method, target, dict(sizes or {}), drafted)
        if drafted is not None:
            _check_vocabulary(config, is_new=initial is None, is_joint=joint is not None)
        run = HeadSettings(
            **common, head=config, cache=cache,
            cache_bytes=int(cache_gib * 2**30), draft_vocab=drafted,
            joint=None if joint is None else validated(JointConfig, joint, "joint training"),
        )  # fmt: skip
        if run.joint is None:
            checkpoint = train_head(target, packed, run, initial=initial, on_step=on_step)
        else:
            checkpoint, target = train_jointly(target, packed, run, initial=initial, on_step=on_step)
        if target_out is not None:
            target = save_target(target, target_out, tokenizer=tokenizer, like=name)
        checkpoint = replace(checkpoint, notes=trained_notes(checkpoint.notes, run_dir, command))
        facts = saved_head(checkpoint, out, target=target, **report)
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


def _path(place: Place | None) -> Path | None:
    return None if place is None else Path(place)


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


def _check_places(out: Path, target_out: Path | None, directory: Path, cache: Path | None, *, is_joint: bool) -> None:
    if is_joint != (target_out is not None):
        raise ConfigError("--joint and --target-out go together: the target that learns along is a new one. Pass both.")
    for place in (out, target_out):
        if place is not None and (place.exists() or place.is_symlink()):
            raise ConfigError(f"'{place}' exists already. Expected a new directory. Choose another or remove it.")
        if place is not None:
            check_writable(place, ConfigError, ADVICE)
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


def _check_data(packed: PackedTokens, tokenizer: Any, vocab_size: int, *, data: str, model: str) -> None:
    if packed.meta["tokenizer_sha"] != tokenizer_sha(tokenizer) or packed.meta["largest_token_id"] >= vocab_size:
        raise ConfigError(
            f"'{data}' was not packed with the tokenizer of '{model}'. Expected data for this target: make it with "
            f"`foretoken data {model}`."
        )


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


def _evaluation(
    place: Path | None, every: int, length: int, tokenizer: Any, vocab_size: int, *, model: str
) -> EvaluationConfig | None:
    if place is None:
        return None
    packed = PackedTokens.open(place)
    _check_data(packed, tokenizer, vocab_size, data=str(place), model=model)
    return EvaluationConfig.of_held_out(packed, every=every, length=length)


def _drafted_tokens(
    path: Path | None, packed: PackedTokens, vocab_size: int, initial: HeadCheckpoint | None
) -> tuple[int, ...] | None:
    if path is None:
        own = None if initial is None else initial.draft_vocab
        return None if own is None else tuple(own)
    drafted = DraftVocabulary.read(path)
    if drafted.tokenizer_sha != packed.meta["tokenizer_sha"] or drafted.token_ids[-1] >= vocab_size:
        raise ConfigError(
            f"--draft-vocab '{path}' is of another tokenizer than the data. Expected tokens of this target. Make it "
            "from the data with `foretoken data vocab`."
        )
    return drafted.token_ids


def _new_head(method: str, target: LoadedModel, sizes: dict[str, Any], drafted: tuple[int, ...] | None) -> HeadConfig:
    """Returns the configuration of a new head; one with an LM head of its own has rows for the drafted tokens."""
    stated = sizes.get("draft_vocab_size")
    if drafted is not None and stated not in (None, len(drafted)):
        raise ConfigError(
            f"--set draft_vocab_size={stated} does not fit --draft-vocab, which names {len(drafted)} tokens. Expected "
            "the same number. Leave the first one out."
        )
    config = head_config(method, target, sizes)
    if drafted is None or "draft_vocab_size" not in type(config).model_fields or _shares_lm_head(config):
        return config
    return head_config(method, target, {**sizes, "draft_vocab_size": len(drafted)})


def _check_vocabulary(config: HeadConfig, *, is_new: bool, is_joint: bool) -> None:
    if _shares_lm_head(config):
        if is_joint:
            raise ConfigError(
                f"--joint trains the LM head that {config.method} heads share, over all tokens. Expected no "
                "--draft-vocab. Leave one of them out."
            )
    elif "draft_vocab_size" not in type(config).model_fields:
        raise ConfigError(
            f"--draft-vocab is not for {config.method} heads, which draft all tokens with LM heads of their own. "
            "Expected a head that shares the target's LM head, eagle3, or medusa. Leave it out."
        )
    elif not is_new:
        raise ConfigError("--init brings a vocabulary of its own, so --draft-vocab cannot change it. Pass one of them.")


def _shares_lm_head(config: HeadConfig) -> bool:
    return build_head(config, device=torch.device("meta"), dtype=torch.float32).has_target_lm_head


def _initial_head(name: str, method: str, target: LoadedModel) -> HeadCheckpoint:
    initial, wanted = read_head(local_head(name))[1], trained_method(method).config.method
    if initial.config.method != wanted:
        raise ConfigError(f"'{name}' is a {initial.config.method} head. Expected a {wanted} head to begin from.")
    initial.check_target(TargetFingerprint.of(target), what=name)
    return initial
