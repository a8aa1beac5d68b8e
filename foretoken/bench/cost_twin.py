"""Makes cost twins: a small trained model and its drafters, padded to the cost of a larger model; and checks them.

No drafter is cheap beside a model with passes of a fraction of a millisecond. The twin has the function of that model
(its text, the drafts of its heads, their acceptance) and another size. Hidden size, attention heads and MLP grow by a
power of four. Further layers add nothing, but every number is read and multiplied. Draft heads grow with the target's
hidden size and keep their number of layers, those of SPiRe too. The draft model also grows in depth, so that its share
of the cost stays the same. With `recurrent` the further layers are those of a hybrid, see `recurrent_twins`.

The check compares a twin with its original: logits over text, greedy text, and every drafter's drafts. Drafters draft
with weights as they are stored. In int8 the inputs of a twin's matrices are rounded in other groups than those of its
original, so a draft may differ now and then.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from foretoken.bench.padded_heads import padded_head
from foretoken.bench.padding import Fill, PaddedModel, Padding, SmallModel, exactly, fingerprint, growth, open_model
from foretoken.bench.quality import all_logits
from foretoken.bench.recurrent_twins import FAMILIES, Family, RecurrentTwin
from foretoken.bench.workload import counted, no_progress
from foretoken.core.errors import ConfigError, ModelError, nearest_name_hint
from foretoken.core.sampling_params import SamplingParams
from foretoken.drafters.registry import create_drafter, drafter_options
from foretoken.entrypoints.llm import LLM
from foretoken.files.bounded_reads import read_json_object
from foretoken.formats import native
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint, TargetInfo
from foretoken.formats.describe import native_facts
from foretoken.formats.files import open_files, whole_files
from foretoken.formats.registry import holds_head, read_head
from foretoken.models.config import TWIN_KEY, read_twin_record
from foretoken.models.loading import fill_model, load_model
from foretoken.runner.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from foretoken.core.token_tree import TokenTree
    from foretoken.drafters.base import Committed, DraftContext, Drafter, DraftRequest, TargetHandle
    from foretoken.models.loaded import LoadedModel

_SUFFIXES = {".json", ".safetensors", ".txt", ".model", ".jinja"}  # of files in twins
TARGET, DRAFT_MODEL = "target", "draft_model"
_EXAMPLES = 4  # sizes that a message names; a choice


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinPlan:
    """The settings of a twin."""

    model: Path  # directory of the trained target
    out: Path  # directory of its twin; drafters go to directories named after it, such as `OUT-medusa` and `OUT-draft`
    num_layers: int  # layers of the twin, at least the target's
    hidden_size: int  # hidden size of the twin: the target's times a power of four
    recurrent: str | None = None  # kind of the further layers, of `FAMILIES`; None: as the model's last one
    heads: Sequence[Path] | None = None  # directories of heads; None for all `MODEL-…` beside the target
    # "pad" for a padded `MODEL-draft`, "keep" for its size, "none" for no copy.
    draft_model: Literal["pad", "keep", "none"] = "pad"
    fill: Fill = "zeros"  # values of added weights; see `Padding`
    dtype: torch.dtype | None = None  # dtype of all weights; None keeps theirs
    seed: int = 0
    device: str = "cpu"


class TwinPart(NamedTuple):
    """One directory of a twin."""

    role: str  # "target", "draft_model", or a head's method
    source: Path
    path: Path
    num_parameters: int  # numbers in its files
    num_bytes: int  # bytes of its weights


class _PlannedHead(NamedTuple):
    source: Path
    path: Path
    checkpoint: HeadCheckpoint


class _PlannedModel(NamedTuple):
    role: str
    path: Path
    padded: PaddedModel

    def write(self, plan: TwinPlan, generator: torch.Generator, on_tensor: Callable[[], None]) -> None:
        padding = Padding(self.padded.factor, plan.fill, generator)
        with whole_files(self.path, replaces=True) as new:
            self.padded.write(new, padding, on_tensor)


def make_twin(plan: TwinPlan, on_progress: Callable[[int, int], None] = no_progress) -> list[TwinPart]:
    """Writes the twin of a target and of its drafters; returns the parts, the target first.

    Every directory is written whole or not at all. Sizes, heads, directories, disk and memory are checked first. An
    existing twin is replaced. `on_progress` is called with tensors written and tensors in all.

    Raises:
        ConfigError: When sizes do not fit, disk or memory is too small, a directory holds anything but a twin, or a
            file cannot be written.
        ModelError: When a model or head is missing, damaged or cannot be padded.
    """
    models, heads = _planned_parts(plan)
    _check_room(models, plan)
    total = sum(model.padded.num_tensors for model in models) + sum(len(head.checkpoint.weights) for head in heads)
    advance = counted(on_progress, total)
    generator = torch.Generator(plan.device).manual_seed(plan.seed)
    for model in models:
        model.write(plan, generator, advance)
    target = models[0]
    _write_heads(heads, target.padded, fingerprint(target.path, str(plan.out)), plan, generator, advance)
    return [
        *(_written(model.role, model.padded.small.path, model.path) for model in models),
        *(_written(head.checkpoint.config.method, head.source, head.path) for head in heads),
    ]


def make_twin_in_memory(plan: TwinPlan) -> LoadedModel:
    """Makes a twin's target on the plan's device, without files of its weights; its drafters get files.

    A target of 32 layers of 4096 would be 13 GB of files. Its added weights, zeros or random numbers, are made in
    place, around the few megabytes of the small model. `plan.out` gets configuration and tokenizer alone. Returns the
    target, named `plan.out`.

    Raises:
        ConfigError, ModelError: See `make_twin`.
        torch.OutOfMemoryError: When the device has too little memory.
    """
    (target, *draft_models), heads = _planned_parts(plan)
    generator = torch.Generator(plan.device).manual_seed(plan.seed)
    with whole_files(target.path, replaces=True) as new:
        target.padded.write_all_but_weights(new)
    tensors = target.padded.tensors(Padding(target.padded.factor, plan.fill, generator))
    model = fill_model(str(target.path), tensors, device=torch.device(plan.device))
    for draft_model in draft_models:
        draft_model.write(plan, generator, _nothing)
    _write_heads(heads, target.padded, TargetFingerprint.of(model), plan, generator, _nothing)
    return model


def _planned_parts(plan: TwinPlan) -> tuple[list[_PlannedModel], list[_PlannedHead]]:
    """Returns the target, then the draft model if there is one; and the heads. Writes nothing."""
    small = open_model(plan.model)
    factor = growth(small.hidden_size, plan.hidden_size)
    if factor is None:
        sizes = ", ".join(str(small.hidden_size * 4**power) for power in range(_EXAMPLES))
        raise ConfigError(
            f"the hidden size {plan.hidden_size} is not the {small.hidden_size} of '{small.path}' times a power of "
            f"four. Expected one of {sizes}, …"
        )
    fewest = small.num_layers + (plan.recurrent is not None)
    if plan.num_layers < fewest:
        more = "" if plan.recurrent is None else ", and recurrent ones come behind them"
        raise ConfigError(
            f"{plan.num_layers} layers are asked for, and '{small.path}' has {small.num_layers}, which are all "
            f"needed{more}. Expected at least {fewest}."
        )
    family = _family(plan, small)
    recurrent = None if family is None else RecurrentTwin(small, factor, family)
    padded = PaddedModel(small=small, factor=factor, num_layers=plan.num_layers, dtype=plan.dtype, recurrent=recurrent)
    heads = _heads(plan)
    models = [_PlannedModel(TARGET, plan.out, padded), *_draft_models(plan, padded)]
    paths = [*(model.path for model in models), *(head.path for head in heads)]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(f"two drafters would be written to '{path}'. Expected heads whose directories differ.")
        _check_path(path)
    return models, heads


def _family(plan: TwinPlan, small: SmallModel) -> Family | None:
    """Returns the architecture of a hybrid twin; raises `ConfigError` for an unknown one, and float16."""
    if plan.recurrent is None:
        return None
    family = FAMILIES.get(plan.recurrent)
    if family is None:
        raise ConfigError(f"recurrent is '{plan.recurrent}'. {nearest_name_hint(plan.recurrent, FAMILIES)}")
    keys = [] if plan.dtype else [key for key in small.weights.shapes if ".layers.0." in key]
    if torch.float16 in (plan.dtype, *(tensor.dtype for tensor in small.weights.fetch(keys).values())):
        raise ConfigError("twins with recurrent layers have numbers that float16 cannot hold. Pass another dtype.")
    return family


def _drafter_path(source: Path, plan: TwinPlan) -> Path:
    """Returns the path of a drafter's twin: `OUT-medusa` for `MODEL-medusa`."""
    name = source.resolve().name.removeprefix(f"{plan.model.resolve().name}-")
    return plan.out.with_name(f"{plan.out.name}-{name}")


def _check_path(path: Path) -> None:
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


def _check_room(models: Sequence[_PlannedModel], plan: TwinPlan) -> None:
    sizes = [model.padded.num_bytes for model in models]
    disk = next(above for above in plan.out.absolute().parents if above.is_dir())
    wanted = {f"free on the disk of '{disk}'": (sum(sizes), shutil.disk_usage(disk).free)}
    if hasattr(os, "sysconf"):
        wanted["of memory"] = (sizes[0], os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for where, (needed, there) in wanted.items():
        if needed > there:
            raise ConfigError(
                f"a twin of {plan.num_layers} layers of {plan.hidden_size} takes {needed / 2**30:,.1f} GiB, and there "
                f"are {there / 2**30:,.1f} GiB {where}. Expected fewer layers or a smaller hidden size."
            )


def _draft_models(plan: TwinPlan, target: PaddedModel) -> list[_PlannedModel]:
    path = plan.model.with_name(f"{plan.model.name}-draft")
    if plan.draft_model == "none" or not path.is_dir():
        return []
    small = open_model(path)
    factor, num_layers = 1, small.num_layers
    if plan.draft_model == "pad":
        factor = target.factor
        num_layers = -(-small.num_layers * target.num_layers // target.small.num_layers)  # rounded up
    padded = PaddedModel(small=small, factor=factor, num_layers=num_layers, dtype=plan.dtype)
    return [_PlannedModel(DRAFT_MODEL, _drafter_path(path, plan), padded)]


def _write_heads(
    heads: Sequence[_PlannedHead],
    target: PaddedModel,
    of_twin: TargetFingerprint,
    plan: TwinPlan,
    generator: torch.Generator,
    on_tensor: Callable[[], None],
) -> None:
    padding = Padding(target.factor, plan.fill, generator)
    for head in heads:
        native.write_checkpoint(padded_head(head.checkpoint, padding, target.record, of_twin), head.path, replaces=True)
        for _ in head.checkpoint.weights:
            on_tensor()


def _nothing() -> None:
    pass


def _heads(plan: TwinPlan) -> list[_PlannedHead]:
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
        heads.append(_PlannedHead(source, _drafter_path(source, plan), replace(checkpoint, weights=weights)))
    return heads


def _written(role: str, source: Path, path: Path) -> TwinPart:
    shapes = open_files(path).weights.shapes
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return TwinPart(role, source, path, sum(map(prod, shapes.values())), size)


# Parameters of a target that is also compared in float32; a choice: a larger one would not fit into memory.
_WIDEST_FLOAT32 = 1_000_000_000
_WIDTHS = [3, 2, 1]  # of every drafter's tree: further candidates must be the same too
# Relative to the largest logit, for decoders that may reorder sums; the bounds of `NEAR_TIE` in `bench/verify.py`.
_SAME_WITHIN = {torch.float32: 1e-4, torch.bfloat16: 2.0**-6}


class TwinCheck(NamedTuple):
    """One comparison of a twin with its original."""

    what: str  # "logits", "greedy text", or the name of the compared drafter
    dtype: str
    decoder: str
    num_compared: int  # positions with logits, output tokens, or drafted nodes
    difference: float | None  # largest difference of two logits; None for text and drafts
    is_same: bool  # whether the twin does the same as the original


def check_twin(
    parts: Sequence[TwinPart],
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int = 24,
    on_progress: Callable[[int, int], None] = no_progress,
) -> list[TwinCheck]:
    """Runs original and twin on a CPU, each on the decoder that serves there.

    On an exact decoder logits must be equal bit for bit. Other decoders may sum a longer row in another order, and
    attention of a hybrid rounds otherwise: logits must then agree to rounding. `prompts` are token ids of real text;
    `on_progress` counts comparisons.
    """
    target = next(part for part in parts if part.role == TARGET)
    drafters = [part for part in parts if part.role != TARGET]
    dtypes = ["bfloat16"] if target.num_parameters > _WIDEST_FLOAT32 else ["float32", "bfloat16"]
    record = read_twin_record(read_json_object(target.path / "config.json"), str(target.path))
    if record is not None and record.recurrent is not None:
        dtypes = ["float32"]  # a hybrid rounds queries and keys once more: in bfloat16 texts part at near ties
    checks: list[TwinCheck] = []
    for dtype in dtypes:
        pair = [load_model(str(path), dtype=dtype, device="cpu") for path in (target.source, target.path)]
        compared: list[TwinPart | None] = [None, *(drafters if dtype == dtypes[-1] else ())]
        decoded = (_decoded(pair, prompts, part, max_tokens) for part in compared)
        for check in chain([_logits(pair, prompts)], decoded):
            checks.append(check)
            on_progress(len(checks), len(dtypes) * 2 + len(drafters))
    return checks


def _logits(pair: Sequence[LoadedModel], prompts: Sequence[Sequence[int]]) -> TwinCheck:
    difference, largest = 0.0, 0.0
    runners = [Runner(model, num_slots=1, context_len=max(map(len, prompts)), max_nodes=1) for model in pair]
    for prompt in prompts:
        ours, theirs = (all_logits(runner, prompt) for runner in runners)
        difference = max(difference, float((ours - theirs).abs().max()))
        largest = max(largest, float(ours.abs().max()))
    is_exact = all(runner.is_exact for runner in runners) and len({model.config.model_type for model in pair}) == 1
    tolerance = 0.0 if is_exact else _SAME_WITHIN[pair[0].dtype] * largest
    return TwinCheck(
        what="logits",
        dtype=_name(pair[0]),
        decoder=runners[1].name,
        num_compared=sum(map(len, prompts)),
        difference=difference,
        is_same=difference <= tolerance,
    )


def _decoded(
    pair: Sequence[LoadedModel], prompts: Sequence[Sequence[int]], part: TwinPart | None, max_tokens: int
) -> TwinCheck:
    """Compares greedy text, and a drafter's drafts if `part` has a drafter."""
    texts, drafts = [], []
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for index, model in enumerate(pair):
        seen: list[Any] = []
        make = None
        if part is not None:
            make = _maker(part, part.path if index else part.source, model, seen)
        llm = LLM(
            model, drafter=make, trust_drafter=make is not None, max_num_seqs=1,
            max_model_len=min(model.context_len, max(map(len, prompts)) + max_tokens),
        )  # fmt: skip
        outputs = llm.generate([list(prompt) for prompt in prompts], params)
        texts.append([output.outputs[0].token_ids for output in outputs])
        drafts.append(seen)
    num_tokens = sum(map(len, texts[0]))
    num_nodes = sum(len(tokens) - 1 for tokens, _ in drafts[0])
    return TwinCheck(
        what="greedy text" if part is None else f"drafts of {part.source.name}",
        dtype=_name(pair[0]),
        decoder=llm.target.name,
        num_compared=num_tokens if part is None else num_nodes,
        difference=None,
        is_same=texts[0] == texts[1] and drafts[0] == drafts[1] and bool(num_tokens if part is None else num_nodes),
    )


def _maker(part: TwinPart, path: Any, model: LoadedModel, seen: list[Any]) -> Callable[[], Drafter]:
    facts = native_facts(part.path)  # None for a draft model
    widths = _WIDTHS if facts is None else _WIDTHS[: facts.get("heads")]
    options = drafter_options(
        {"method": part.role, "model": str(path), "tree": {"widths": widths}, "quantization": "none"}
    )
    return lambda: _Listening(create_drafter(options, model), seen)


class _Listening:
    """A drafter that keeps the tokens and parents of every tree that another drafter proposes."""

    def __init__(self, drafter: Drafter, seen: list[Any]) -> None:
        self._drafter, self._seen = drafter, seen
        self.name, self.reads = drafter.name, drafter.reads

    @property
    def nodes_by_depth(self) -> Sequence[int]:
        return self._drafter.nodes_by_depth

    def attach(self, target: TargetHandle) -> None:
        self._drafter.attach(target)

    def begin(self, slot: int, request: DraftRequest) -> None:
        self._drafter.begin(slot, request)

    def propose(self, context: DraftContext) -> TokenTree:
        tree = self._drafter.propose(context)
        self._seen.extend(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True))
        return tree

    def commit(self, committed: Committed) -> None:
        self._drafter.commit(committed)

    def release(self, slot: int) -> None:
        self._drafter.release(slot)


def _name(model: LoadedModel) -> str:
    return str(model.dtype).removeprefix("torch.")
