"""Makes cost twins: a small trained model and its drafters, padded to the cost of a larger model.

No drafter is cheap beside a model with passes of a fraction of a millisecond. The twin has the function of that model
(its text, the drafts of its heads, their acceptance) and another size. Hidden size, attention heads and MLP grow by a
power of four. Further layers add nothing, but every number is read and multiplied. Draft heads grow with the target's
hidden size and keep their number of layers, those of SPiRe too. The draft model also grows in depth, so that its share
of the cost stays the same.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from foretoken.bench.cost_twin.heads import padded_head
from foretoken.bench.cost_twin.model import (
    Fill,
    Padding,
    SmallModel,
    exactly,
    fingerprint,
    growth,
    open_model,
    padded_tensors,
    write_all_but_weights,
    write_model,
)
from foretoken.bench.workload import no_progress
from foretoken.core.errors import ConfigError, ModelError
from foretoken.files.bounded_reads import read_json_object
from foretoken.formats import native
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint, TargetInfo
from foretoken.formats.files import open_files, whole_files
from foretoken.formats.registry import holds_head, read_head
from foretoken.models.config_checks import TWIN_KEY, TwinRecord
from foretoken.models.loading import LoadedModel, fill_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


_SUFFIXES = {".json", ".safetensors", ".txt", ".model", ".jinja"}  # of files in twins


def drafter_place(source: Path, model: Path, out: Path) -> Path:
    """Returns the path of a drafter's twin: `OUT-medusa` for `MODEL-medusa`."""
    return out.with_name(f"{out.name}-{source.resolve().name.removeprefix(f'{model.resolve().name}-')}")


def check_place(path: Path) -> None:
    """Raises `ConfigError` if a path holds anything but a twin or an empty directory."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise ConfigError(f"'{path}' is no directory. Expected a new one.")
    content = sorted(path.iterdir()) if path.is_dir() else []
    foreign = [file.name for file in content if not file.is_file() or file.suffix not in _SUFFIXES]
    if content and (foreign or not _is_twin(path)):
        what = f": it holds '{foreign[0]}'" if foreign else ""
        raise ConfigError(
            f"'{path}' is not empty, and no cost twin that could be replaced{what}. Expected a new directory, or that "
            "of a twin. Name another place."
        )


def _is_twin(path: Path) -> bool:
    try:
        config = read_json_object(path / "config.json")
    except ModelError:
        return False
    notes = config.get("notes")
    return TWIN_KEY in config or (isinstance(notes, dict) and TWIN_KEY in notes)


TARGET, DRAFT_MODEL = "target", "draft_model"
_EXAMPLES = 4  # sizes that a message names; a choice


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinPlan:
    """The settings of a twin.

    Attributes:
        model: Directory of the trained target.
        out: Directory of its twin; drafters go to directories named after it, such as `OUT-medusa` and `OUT-draft`.
        num_layers: Layers of the twin, at least the target's.
        hidden_size: Hidden size of the twin: the target's times a power of four.
        heads: Directories of heads; None for all `MODEL-…` beside the target.
        draft_model: "pad" for a padded `MODEL-draft`, "keep" for its size, "none" for no copy.
        fill: Values of added weights; see `Padding`.
        dtype: Dtype of all weights; None keeps theirs.
    """

    model: Path
    out: Path
    num_layers: int
    hidden_size: int
    heads: Sequence[Path] | None = None
    draft_model: Literal["pad", "keep", "none"] = "pad"
    fill: Fill = "zeros"
    dtype: torch.dtype | None = None
    seed: int = 0
    device: str = "cpu"


class TwinPart(NamedTuple):
    """One directory of a twin.

    Attributes:
        role: "target", "draft_model", or a head's method.
        num_parameters: Numbers in its files.
        num_bytes: Bytes of its weights.
    """

    role: str
    source: Path
    path: Path
    num_parameters: int
    num_bytes: int


class PlannedHead(NamedTuple):
    """A head to pad, and its new directory."""

    source: Path
    path: Path
    checkpoint: HeadCheckpoint


class PlannedModel(NamedTuple):
    """A model to pad, its new sizes, and its new directory."""

    role: str
    small: SmallModel
    path: Path
    factor: int
    num_layers: int
    record: TwinRecord


class PlannedParts(NamedTuple):
    """All parts of a twin, before any is made: the target, then the draft model if there is one; and the heads."""

    models: Sequence[PlannedModel]
    heads: Sequence[PlannedHead]


def _nothing() -> None:
    pass


def make_twin(plan: TwinPlan, on_progress: Callable[[int, int], None] = no_progress) -> list[TwinPart]:
    """Writes the twin of a target and of its drafters; returns the parts, the target first.

    Every directory is written whole or not at all. Sizes, heads, directories, disk and memory are checked first. An
    existing twin is replaced. `on_progress` is called with tensors written and tensors in all.

    Raises:
        ConfigError: When sizes do not fit, disk or memory is too small, a directory holds anything but a twin, or a
            file cannot be written.
        ModelError: When a model or head is missing, damaged or cannot be padded.
    """
    planned = planned_parts(plan)
    _check_room(planned, plan)
    total = sum(len(model.small.origins(model.num_layers)) for model in planned.models)
    total += sum(len(head.checkpoint.weights) for head in planned.heads)
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        on_progress(done, total)

    generator = torch.Generator(plan.device).manual_seed(plan.seed)
    for model in planned.models:
        write_planned_model(model, plan, generator, advance)
    target = planned.models[0]
    write_heads(planned, fingerprint(target.path, str(plan.out)), plan, generator, advance)
    return [
        *(_written(model.role, model.small.path, model.path) for model in planned.models),
        *(_written(head.checkpoint.config.method, head.source, head.path) for head in planned.heads),
    ]


def planned_parts(plan: TwinPlan) -> PlannedParts:
    """Returns the parts of a plan and writes nothing; raises as `make_twin`."""
    target = _planned(TARGET, open_model(plan.model), plan.out, plan)
    heads = _heads(plan)
    models = [target, *_draft_models(plan, target)]
    paths = [*(model.path for model in models), *(head.path for head in heads)]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(f"two drafters would be written to '{path}'. Expected heads whose directories differ.")
        check_place(path)
    return PlannedParts(models, heads)


def write_planned_model(
    model: PlannedModel, plan: TwinPlan, generator: torch.Generator, on_tensor: Callable[[], None] = _nothing
) -> None:
    """Writes the directory of one model; `generator`, on the plan's device, is for random weights."""
    padding = Padding(model.factor, plan.fill, generator)
    with whole_files(model.path, replaces=True) as new:
        write_model(
            model.small, padding, model.record, new,
            num_layers=model.num_layers, dtype=plan.dtype, on_tensor=on_tensor,
        )  # fmt: skip


def write_heads(
    planned: PlannedParts,
    of_twin: TargetFingerprint,
    plan: TwinPlan,
    generator: torch.Generator,
    on_tensor: Callable[[], None] = _nothing,
) -> None:
    """Writes the directories of all heads, like `write_planned_model`; `of_twin` is the target of the twin's heads."""
    target = planned.models[0]
    padding = Padding(target.factor, plan.fill, generator)
    for head in planned.heads:
        native.write_checkpoint(padded_head(head.checkpoint, padding, target.record, of_twin), head.path, replaces=True)
        for _ in head.checkpoint.weights:
            on_tensor()


def _check_room(planned: PlannedParts, plan: TwinPlan) -> None:
    sizes = [model.small.num_bytes(model.num_layers, model.factor, plan.dtype) for model in planned.models]
    place = next(above for above in plan.out.absolute().parents if above.is_dir())
    wanted = {f"free on the disk of '{place}'": (sum(sizes), shutil.disk_usage(place).free)}
    if hasattr(os, "sysconf"):
        wanted["of memory"] = (sizes[0], os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for where, (needed, there) in wanted.items():
        if needed > there:
            raise ConfigError(
                f"a twin of {plan.num_layers} layers of {plan.hidden_size} takes {needed / 2**30:,.1f} GiB, and there "
                f"are {there / 2**30:,.1f} GiB {where}. Expected fewer layers or a smaller hidden size."
            )


def _planned(role: str, small: SmallModel, path: Path, plan: TwinPlan) -> PlannedModel:
    factor = growth(small.hidden_size, plan.hidden_size)
    if factor is None:
        sizes = ", ".join(str(small.hidden_size * 4**power) for power in range(_EXAMPLES))
        raise ConfigError(
            f"the hidden size {plan.hidden_size} is not the {small.hidden_size} of '{small.path}' times a power of "
            f"four. Expected one of {sizes}, …"
        )
    if plan.num_layers < small.num_layers:
        raise ConfigError(
            f"{plan.num_layers} layers are asked for, and '{small.path}' has {small.num_layers}, which are all needed. "
            f"Expected at least {small.num_layers}."
        )
    record = TwinRecord(of=small.name, layers=plan.num_layers, hidden_size=plan.hidden_size)
    return PlannedModel(role, small, path, factor, plan.num_layers, record)


def _draft_models(plan: TwinPlan, target: PlannedModel) -> list[PlannedModel]:
    path = plan.model.with_name(f"{plan.model.name}-draft")
    if plan.draft_model == "none" or not path.is_dir():
        return []
    small = open_model(path)
    is_padded = plan.draft_model == "pad"
    factor = target.factor if is_padded else 1
    deeper = -(-small.num_layers * target.num_layers // target.small.num_layers)  # rounded up
    num_layers = deeper if is_padded else small.num_layers
    record = TwinRecord(of=small.name, layers=num_layers, hidden_size=small.hidden_size * factor)
    return [PlannedModel(DRAFT_MODEL, small, drafter_place(path, plan.model, plan.out), factor, num_layers, record)]


def _heads(plan: TwinPlan) -> list[PlannedHead]:
    sources = plan.heads
    if sources is None:
        beside = sorted(plan.model.parent.glob(f"{plan.model.name}-*"))
        sources = [path for path in beside if path.is_dir() and holds_head(path)]
    if not sources:
        return []
    info = TargetInfo.of_directory(str(plan.model))
    own = fingerprint(plan.model, str(plan.model))
    heads = []
    for source in sources:
        _, checkpoint = read_head(source, target=own, base_config=info.config, weights=info.loaded)
        checkpoint.check_target(own, what=str(source))
        weights = {key: exactly(part, plan.dtype, f"'{source}'") for key, part in checkpoint.weights.items()}
        checkpoint = replace(checkpoint, weights=weights)
        heads.append(PlannedHead(source, drafter_place(source, plan.model, plan.out), checkpoint))
    return heads


def _written(role: str, source: Path, path: Path) -> TwinPart:
    shapes = open_files(path).weights.shapes
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return TwinPart(role, source, path, sum(map(prod, shapes.values())), size)


def make_twin_in_memory(plan: TwinPlan) -> LoadedModel:
    """Makes a twin's target on the plan's device, without files of its weights; its drafters get files.

    A target of 32 layers of 4096 would be 13 GB of files. Its added weights, zeros or random numbers, are made in
    place, around the few megabytes of the small model. `plan.out` gets configuration and tokenizer alone. Returns the
    target, named `plan.out`.

    Raises:
        ConfigError, ModelError: See `make_twin`.
        torch.OutOfMemoryError: When the device has too little memory.
    """
    planned = planned_parts(plan)
    generator = torch.Generator(plan.device).manual_seed(plan.seed)
    target, *draft_models = planned.models
    padding = Padding(target.factor, plan.fill, generator)
    with whole_files(target.path, replaces=True) as new:
        write_all_but_weights(target.small, padding, target.record, new, num_layers=target.num_layers, dtype=plan.dtype)
    tensors = padded_tensors(target.small, padding, num_layers=target.num_layers, dtype=plan.dtype)
    model = fill_model(str(target.path), tensors, device=torch.device(plan.device))
    for draft_model in draft_models:
        write_planned_model(draft_model, plan, generator)
    write_heads(planned, TargetFingerprint.of(model), plan, generator)
    return model
