"""Runs one training of a head or a draft model from its settings: starts or resumes, trains, evaluates, keeps curves.

A run keeps its checkpoints, settings and curves in a directory of its own. The result appears in the output
directory only at the end of the run.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.core.errors import ConfigError
from foretoken.files.atomic_files import told_as, write_file
from foretoken.files.bounded_reads import read_json_object
from foretoken.files.processes import STOP_SIGNALS, run_lock, stop_signals
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint
from foretoken.heads.base import Head, HeadConfig, build_head
from foretoken.models.loading import wrap_model
from foretoken.models.parts import TargetParts, target_parts
from foretoken.training.draft_model import Distillation, ModelTrainer
from foretoken.training.evaluation import EvaluationConfig, model_evaluator
from foretoken.training.joint import JointConfig, JointTrainer
from foretoken.training.run_state import MetricsLog, weights_sha
from foretoken.training.teacher import FeatureCache, Teacher
from foretoken.training.trainer import Batches, HeadTrainer, Processes, StepReport, Trainer, training_processes

if TYPE_CHECKING:
    from foretoken.models.loaded import LoadedModel
    from foretoken.training.objective_base import Divergences, Objective
    from foretoken.training.trainer import TrainConfig

_SETTINGS = "settings.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings that determine a run's weights, and its directory; those of a head, or of a draft model."""

    objective: Divergences
    train: TrainConfig
    data: str  # identifies the training tokens, such as a hash of them
    directory: Path  # of checkpoints, settings and curves
    save_every_s: float = 120.0
    evaluation: EvaluationConfig | None = None  # held-out text, with a frozen target; changes no weights

    def as_dict(self, target: TargetFingerprint) -> dict[str, Any]:
        """Returns the settings that a resumed run must share, JSON-ready; null equals a missing key."""
        return {
            "objective": self.objective.model_dump(mode="json"),
            "train": self.train.model_dump(mode="json"),
            "data": self.data,
            "target": target.model_dump(mode="json", exclude={"name"}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings(RunSettings):
    """The settings of a head's run.

    `draft_vocab` has the ascending ids of a draft vocabulary. A head that shares the target's LM head learns over these
    tokens alone, and drafts them unless told otherwise.
    """

    head: HeadConfig
    objective: Objective
    cache: Path | None = None  # directory of features that are kept between steps and runs
    cache_bytes: int = 8 << 30  # most bytes of the cache
    joint: JointConfig | None = None  # settings of the target's training, if it learns along
    draft_vocab: tuple[int, ...] | None = None

    def as_dict(self, target: TargetFingerprint) -> dict[str, Any]:
        """See `RunSettings`."""
        drafted = hashlib.sha256(str(self.draft_vocab).encode()).hexdigest()[:16]
        return {
            "method": self.head.method,
            "head": self.head.model_dump(mode="json"),
            "joint": None if self.joint is None else self.joint.model_dump(mode="json"),
            "draft_vocab": None if self.draft_vocab is None else drafted,
            **RunSettings.as_dict(self, target),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings(RunSettings):
    """The settings of a draft model's run; `origin` is that of `Student`."""

    objective: Distillation
    origin: dict[str, Any]

    def as_dict(self, target: TargetFingerprint) -> dict[str, Any]:
        """See `RunSettings`."""
        return {"method": "draft_model", "origin": self.origin, **RunSettings.as_dict(self, target)}


class Interrupted(Exception):
    """A signal stopped the run after its state was saved in `directory`."""

    def __init__(self, number: int, directory: Path) -> None:
        super().__init__(f"training was stopped by signal {number}; the same call goes on from '{directory}'")
        self.number, self.directory = number, directory


def train_head(
    target: LoadedModel,
    batches: Batches,
    settings: HeadSettings,
    *,
    initial: HeadCheckpoint | None = None,
    on_step: Callable[[StepReport], None] | None = None,
) -> tuple[HeadCheckpoint, LoadedModel]:
    """Starts a run, or resumes the one in its directory, and trains to the last step.

    Returns the trained head and its target: `target` itself, or with `settings.joint` the new one. `initial` are
    initial weights; None for the first ones of the method.

    Raises:
        ConfigError: When the directory holds a run with other settings.
        ModelError: When the loss is not finite, or a checkpoint is damaged.
        Interrupted: After SIGTERM or SIGINT; the state is saved.
    """
    fingerprint = TargetFingerprint.of(target)
    with _claimed(settings, target, _begun_from(settings, initial)) as processes:
        head, parts = _new_head(target, settings, initial)
        objective, train, joint = settings.objective, settings.train, settings.joint
        if joint is not None:
            together = JointTrainer(head, target, objective, train, batches, joint, processes=processes)
            notes = _train_to_the_end(together, settings, fingerprint, on_step)
            name = f"{target.name} trained with {head.config.method} heads"
            target = wrap_model(together.merged_target(), name=name)
            return HeadCheckpoint.of_head(head, target=TargetFingerprint.of(target), notes=notes), target
        trainer = HeadTrainer(
            head, parts, objective, train, batches, _features(target, settings), processes=processes,
            is_new=initial is None,
        )  # fmt: skip
        evaluate = None
        if settings.evaluation is not None and processes.process_index == 0:
            precision = train.compute_dtype
            whole = parts if parts.head_rows is None else target_parts(target, dtype=precision)
            evaluate = settings.evaluation.evaluator(target, head, whole, precision=precision)
        notes = _train_to_the_end(trainer, settings, fingerprint, on_step, evaluate)
    return HeadCheckpoint.of_head(head, target=fingerprint, notes=notes), target


def train_model(
    target: LoadedModel,
    student: LoadedModel,
    batches: Batches,
    settings: ModelSettings,
    *,
    on_step: Callable[[StepReport], None] | None = None,
) -> dict[str, Any]:
    """Trains a draft model in place, see `train_head`; returns notes on the run."""
    with _claimed(settings, target) as processes:
        trainer = ModelTrainer(student, target, settings.objective, settings.train, batches, processes=processes)
        evaluate = None
        if settings.evaluation is not None and processes.process_index == 0:
            precision = settings.train.compute_dtype
            evaluate = model_evaluator(settings.evaluation, student, target, precision=precision)
        notes = _train_to_the_end(trainer, settings, TargetFingerprint.of(target), on_step, evaluate)
    student.module.requires_grad_(requires_grad=False).eval()
    tokens, seconds = trainer.written
    speeds = {"trained_tokens_per_s": round(notes["tokens"] / max(notes["seconds"] - seconds, 0.1))}
    if tokens:
        speeds |= {"written_tokens": tokens, "written_tokens_per_s": round(tokens / seconds)}
    return {**notes, **speeds}


def _new_head(target: LoadedModel, settings: HeadSettings, initial: HeadCheckpoint | None) -> tuple[Head, TargetParts]:
    torch.manual_seed(settings.train.seed)
    head = build_head(settings.head, device=target.device, dtype=torch.float32)
    drafted = None if settings.draft_vocab is None else torch.tensor(settings.draft_vocab, device=target.device)
    if head.has_target_lm_head:
        head.draft_vocab = settings.draft_vocab
    elif drafted is not None:
        head.token_map = drafted
    shared = drafted if head.has_target_lm_head else None
    parts = target_parts(target, dtype=settings.train.compute_dtype, head_tokens=shared)
    head.initialize(parts)
    if initial is not None:
        head.load_state_dict({key: value.to(target.device) for key, value in initial.weights.items()})
    return head, parts


def _train_to_the_end(
    trainer: Trainer,
    settings: RunSettings,
    fingerprint: TargetFingerprint,
    on_step: Callable[[StepReport], None] | None,
    evaluate: Callable[[], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Trains, saves and keeps curves; returns notes on the run.

    `evaluate` returns fields of `StepReport`; None for no evaluations, and in every process but the first.
    """
    processes = trainer.processes
    # Every process has its own dropout; weights are the same in all.
    torch.manual_seed(settings.train.seed + 1 + processes.process_index)
    is_begun = trainer.resume(settings.directory)
    log = MetricsLog(settings.directory, trainer.progress.step) if processes.process_index == 0 else None
    saved = time.monotonic()
    with nullcontext() if log is None else closing(log), stop_signals() as received:
        if not is_begun:
            trainer.begin()
        for trained in trainer.steps():
            is_due = settings.evaluation is not None and trained.step % settings.evaluation.every == 0
            report = replace(trained, **evaluate()) if evaluate is not None and is_due else trained
            if log is not None:
                values = {key: value for key, value in asdict(report).items() if value is not None and key != "step"}
                log.write(report.step, values)
            if on_step is not None:
                on_step(report)
            number = _told_to_stop(received, trainer)
            if number is not None:
                trainer.save(settings.directory)
                raise Interrupted(number, settings.directory)
            if time.monotonic() - saved > settings.save_every_s:
                trainer.save(settings.directory)
                saved = time.monotonic()
        trainer.save(settings.directory)
    return {
        "settings": settings.as_dict(fingerprint),
        "steps": trainer.progress.step,
        "tokens": trainer.progress.tokens,
        "seconds": round(trainer.progress.seconds, 1),
        "skipped_steps": trainer.progress.skipped,
        "torch": torch.__version__,
    }


def _begun_from(settings: HeadSettings, initial: HeadCheckpoint | None) -> str | None:
    """Returns a hash of the initial weights; raises `ConfigError` for settings that do not fit the head."""
    heads, length = settings.head.steps, settings.train.length
    if length < heads + 2:
        raise ConfigError(
            f"windows of {length} tokens have nothing to learn for the last of {heads} heads. "
            f"Expected at least {heads + 2}."
        )
    drafted = getattr(settings.head, "draft_vocab_size", None)
    if drafted is not None and initial is None and len(settings.draft_vocab or ()) != drafted:
        raise ConfigError(
            f"the head drafts {drafted} tokens of the vocabulary, and {len(settings.draft_vocab or ())} are named. "
            "Expected as many. Choose them with `foretoken data vocab`, and pass that file with --draft-vocab."
        )
    return None if initial is None else weights_sha(initial.weights)


@contextmanager
def _claimed(settings: RunSettings, target: LoadedModel, begun_from: str | None = None) -> Iterator[Processes]:
    """Locks the run's directory and checks the settings; the system releases the lock with the process."""
    processes = training_processes()
    dtype = str(target.dtype).removeprefix("torch.")
    ours = {**settings.as_dict(TargetFingerprint.of(target)), "target_dtype": dtype, "initial": begun_from}
    is_first = processes.process_index == 0  # which holds the lock for all
    with run_lock(settings.directory, option="--run-dir") if is_first else nullcontext():
        if is_first or (settings.directory / _SETTINGS).is_file():
            _compare(settings.directory, ours)
        yield processes


def _compare(directory: Path, ours: dict[str, Any]) -> None:
    path = directory / _SETTINGS
    if not path.is_file():
        with told_as(ConfigError, f"'{path}'", "Expected a writable directory. Pass another --run-dir, or make room."):
            write_file(path, json.dumps(ours, indent=1) + "\n")
        return
    theirs = read_json_object(path, error=ConfigError, advice="Expected the settings of a run. Remove the run.")
    differing = sorted(_flat(ours).items() ^ _flat(theirs).items())
    if differing:
        names = ", ".join(dict.fromkeys(key for key, _ in differing))
        raise ConfigError(
            f"'{directory}' holds a run with other settings; they differ in {names}. Expected the same command to go "
            "on. Choose another --run-dir, or remove this one."
        )


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    if not isinstance(value, dict):
        return {} if value is None else {prefix or _SETTINGS: json.dumps(value)}
    return {k: v for key, part in value.items() for k, v in _flat(part, f"{prefix}.{key}" if prefix else key).items()}


def _features(target: LoadedModel, settings: HeadSettings) -> Callable[[int, Tensor], Tensor]:
    train, taps = settings.train, settings.head.taps
    teacher = Teacher(target, taps)

    def compute(tokens: Tensor) -> Tensor:
        size = train.micro_batch_size or len(tokens)
        return torch.cat([teacher.read_features(part) for part in tokens.split(max(size, 1))])

    if settings.cache is None:
        return lambda _, tokens: compute(tokens).float()
    dtype = (target.stored or target).dtype  # holds the features exactly
    key = json.dumps([teacher.digest(), str(dtype), list(taps), "weights" if target.stored is None else "integers"])
    cache = FeatureCache(settings.cache, key=key, max_bytes=settings.cache_bytes)

    def cached(_: int, tokens: Tensor) -> Tensor:
        names = [hashlib.sha256(row.numpy().tobytes()).hexdigest()[:24] for row in tokens.cpu()]
        known = [each for each in map(cache.get, names) if each is not None and len(each) == tokens.shape[1]]
        if len(known) < len(names):
            known = [*compute(tokens)]
            for name, features in zip(names, known, strict=True):
                cache.put(name, features.to(dtype))
        return torch.stack([each.to(target.device) for each in known]).float()

    return cached


def _told_to_stop(received: list[int], trainer: Trainer) -> int | None:
    """Returns the signal that any process got: all stop after the same step, since none may wait for a stopped one."""
    if trainer.processes.num_processes == 1:  # without a wait for the device
        return next((number for number in STOP_SIGNALS if number in received), None)
    told = torch.tensor([float(number in received) for number in STOP_SIGNALS], device=trainer.device)
    counts = trainer.processes.sum(told).tolist()
    return next((number for number, count in zip(STOP_SIGNALS, counts, strict=True) if count), None)
