"""Commands that convert and check drafters: `foretoken convert`, `foretoken doctor` and `foretoken verify`."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options, terminal
from foretoken.cli.terminal import ProgressBar
from foretoken.core.errors import ConfigError, ModelError, nearest_name_hint

if TYPE_CHECKING:
    import torch

    from foretoken.bench.loss import Loss
    from foretoken.bench.verify import Comparison
    from foretoken.bench.workload import Workload
    from foretoken.entrypoints.config import Setup
    from foretoken.formats.checkpoint import HeadCheckpoint, TargetInfo
    from foretoken.models.loaded import LoadedModel
    from foretoken.training.doctor.checks import Check

_DTYPES = ("float16", "bfloat16", "float32")
_NUM_HEADS = "Keep the first N heads; an error when the tensors hold fewer."
_NUM_LAYERS = "Layers of each head; an error when the tensors have others."


def checked_dtype(name: str | None) -> torch.dtype | None:
    """Returns the dtype of a checkpoint to write; raises `ConfigError` for a name that is not one of `_DTYPES`."""
    import torch

    if name is None:
        return None
    if name not in _DTYPES:
        raise ConfigError(f"dtype '{name}' does not exist here. {nearest_name_hint(name, _DTYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def option_name(name: str) -> str:
    """Returns our name of an option of TensorRT-LLM's converters, as `tp_size` or `fixed_num_medusa_heads`."""
    return name.replace("_", "-").removeprefix("fixed-")


def convert(
    source: Annotated[
        str, typer.Argument(help="A head of any known format: a directory, its file of weights, or a hub id.")
    ],
    out: Annotated[Path, typer.Argument(help="Directory to write; it must not exist, or be empty.")],
    to: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="native, medusa, medusa_v2 (shares the target's LM head), vllm_medusa, hydra, mlp_speculator, "
            "tensorrt_llm, eagle, eagle3, falcon, or speculators (EAGLE-3 for vLLM).",
        ),
    ] = "native",
    target: Annotated[
        str | None,
        typer.Option(
            parser=options.local_path,
            help="The target, with safetensors, for formats that leave out its sizes or repeat its tensors.",
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Revision of SOURCE on the hub; its main branch if none.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="NAME", help="float16, bfloat16 or float32; the source's when left out.")
    ] = None,
    tp_size: Annotated[int, typer.Option(min=1, help="Ranks to split over, for tensorrt_llm.")] = 1,
    num_hydra_heads: Annotated[int | None, typer.Option(min=1, help=_NUM_HEADS)] = None,
    num_hydra_layers: Annotated[int | None, typer.Option(min=1, help=_NUM_LAYERS)] = None,
    num_medusa_heads: Annotated[int | None, typer.Option(min=1, help=_NUM_HEADS)] = None,
    num_medusa_layers: Annotated[int | None, typer.Option(min=1, help=_NUM_LAYERS)] = None,
    safetensors: Annotated[
        bool,
        typer.Option("--safetensors", help="Write safetensors instead of the pickles of medusa, hydra and eagle."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the checkpoint that OUT holds.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Convert a draft head between formats; the files tell the source's format.

    OUT appears whole or not at all. Options may be spelt as in TensorRT-LLM's converters. Prints who else reads the
    result, and how: the same weights can be another network in another project.
    """
    from foretoken.formats.checkpoint import TargetInfo
    from foretoken.formats.files import local_head
    from foretoken.formats.registry import head_readers, write_head

    _check_out(out, force=force)
    new_dtype = checked_dtype(dtype)
    around = TargetInfo() if target is None else TargetInfo.of_directory(target)
    name, checkpoint = _read_head(local_head(source, revision), around, has_target=target is not None)
    checkpoint = _counted(checkpoint, "hydra", num_hydra_heads, num_hydra_layers)
    checkpoint = _counted(checkpoint, "medusa", num_medusa_heads, num_medusa_layers)
    to = to.replace("-", "_")
    how: dict[str, Any] = {"target": around, "tp_size": tp_size, "as_safetensors": safetensors}
    write_head(to, checkpoint, out, dtype=new_dtype, replaces=True, **how)
    readers = head_readers(to, checkpoint, **how)
    files = {path.name: path.stat().st_size for path in sorted(out.iterdir())}
    facts = {
        "source": source,
        "source_format": name,
        "out": str(out),
        "format": to,
        "method": checkpoint.config.method,
        "heads": getattr(checkpoint.config, "num_heads", None),
        "dtype": dtype or _dtype_name(checkpoint),
        "files": files,
        "readers": [reader._asdict() for reader in readers],
    }
    if as_json:
        options.print_json(facts)
        return
    count = "" if facts["heads"] is None else f"{facts['heads']} heads, "
    terminal.prose(f"{source} ({name}) -> {out} ({to}): {facts['method']}, {count}{facts['dtype']}")
    for file, size in files.items():
        terminal.print_line(f"  {file}  {size} bytes")
    for reader in readers:
        terminal.prose(f"  {reader}", "    ")


def _read_head(path: Path, around: TargetInfo, *, has_target: bool) -> tuple[str, HeadCheckpoint]:
    from foretoken.entrypoints.drafter_files import check_is_no_model
    from foretoken.formats.registry import MODELS_OWN, holds_own_head, read_head

    weights = around.loaded if has_target else None
    try:
        return read_head(path, target=around.fingerprint, base_config=around.config, weights=weights)
    except ModelError:
        if not holds_own_head(path, MODELS_OWN):
            check_is_no_model(path)
        raise


def _counted(checkpoint: HeadCheckpoint, method: str, num_heads: int | None, num_layers: int | None) -> HeadCheckpoint:
    from foretoken.formats.checkpoint import first_heads

    if num_heads is None and num_layers is None:
        return checkpoint
    config: Any = checkpoint.config
    if config.method != method:
        raise ConfigError(
            f"options for {method} heads were given. The source holds a head of method '{config.method}'."
        )
    if num_layers not in (None, config.num_layers):
        raise ConfigError(f"{num_layers} layers are asked for. The tensors of the source have {config.num_layers}.")
    return checkpoint if num_heads is None else first_heads(checkpoint, num_heads)


def _check_out(out: Path, *, force: bool) -> None:
    from foretoken.formats.registry import holds_head

    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ConfigError(f"'{out}' is not a directory. Expected a new one.")
    content = sorted(out.iterdir()) if out.is_dir() else []
    if not content:
        return
    if not force:
        raise ConfigError(f"'{out}' is not empty. Expected a new directory. Pass --force to replace it.")
    foreign = [path.name for path in content if not _is_part_of_a_head(path)]
    if foreign or not holds_head(out):
        what = f": it holds {foreign[0]!r}" if foreign else ""
        raise ConfigError(
            f"'{out}' is not a directory of a head alone{what}, so --force does not replace it. Name another place."
        )


def _is_part_of_a_head(path: Path) -> bool:
    return path.is_file() and (path.name == "config.json" or path.suffix in (".safetensors", ".pt", ".bin"))


def _dtype_name(checkpoint: HeadCheckpoint) -> str:
    dtypes = {str(part.dtype) for part in checkpoint.weights.values() if part.is_floating_point()}
    return ", ".join(sorted(dtypes)).replace("torch.", "")


_DOCTORS_PROMPTS = options.PromptOptions(num_prompts=24, max_tokens=64)
_CHECKED = ["check", "verdict", "found", "what it means"]
_COLOURS = {"ok": "green", "warning": "yellow", "not decided": "yellow", "fault": "red", "skipped": "dim"}


def doctor(
    model: options.Model,
    head: Annotated[
        str | None,
        typer.Argument(
            help="A trained head, in any format that can be read: a directory, its file of weights, or a hub id."
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Try the training of a fresh head: medusa, hydra, mlp_speculator, eagle, hass, eagle3, mtp, "
            "spire or falcon.",
        ),
    ] = None,
    train_check: Annotated[
        bool, typer.Option("--train-check", help="Try training with the sizes of HEAD too; HEAD stays as it is.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help="Packed tokens to try training on. Default: the target's own texts.")
    ] = None,
    speculative_config: Annotated[
        list[str] | None,
        options.drafter_option(
            help="Split the speed that a drafter loses, as `bench` takes it, into causes; may be repeated."
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences decoded at once for -s.")] = 1,
    *,
    asked: Annotated[options.PromptOptions, ("prompts", "num_prompts", "max_tokens")] = _DOCTORS_PROMPTS,
    allow_other_target: Annotated[
        bool, typer.Option("--allow-other-target", help="Continue with a head for another target of the same sizes.")
    ] = False,
    loading: Annotated[options.LoadOptions, ("dtype", "device", "runner", "threads")],
    as_json: options.AsJson = False,
) -> None:
    """Find out why a head does not draft, or why drafts do not pay: each line names a cause and a remedy.

    The target continues prompts. The head is compared with the target's text: with the right feature and with features
    that are mistaken for it, at the right token and at the tokens beside it, and through the engine. Warnings are not
    faults.

    With -s every drafter decodes the prompts in turn with plain decoding, greedily. Its seconds per token are compared
    with an ideal: every draft is accepted as a whole, drafting costs nothing, a wide pass takes as long as a plain one,
    and the host does no more than without drafts. Acceptance, drafting, wide passes and host share the difference.
    """
    drafters = speculative_config or []
    if head is None and method is None and not drafters:
        raise ConfigError("there is nothing to examine. Expected a head, --method to train one, or -s to time drafts.")
    if train_check and head is None:
        raise ConfigError("--train-check takes the sizes of a head. Expected one. Pass HEAD, or --method alone.")
    from foretoken.entrypoints.config import checked_setups
    from foretoken.training.data.packed import PackedTokens
    from foretoken.training.doctor.examine import Examination, examine
    from foretoken.training.evaluation import TEMPERATURES

    path = None if head is None else _path_of_head(head)
    setups = checked_setups(drafters, target=model)
    if any(setup.config is None for setup in setups):
        raise ConfigError("'plain' loses no speed to drafts. Expected a drafter. Pass -s ngram, or another one.")
    rows = asked.rows()
    packed = None if data is None else PackedTokens.open(data)
    has_head = head is not None or method is not None
    (loaded, tokenizer), runner = loading.load(model, unpacks=has_head), loading.runner
    options.check_max_tokens(asked.max_tokens, loaded)
    make = partial(asked.workload, rows, loaded, tokenizer, runner=runner)
    checks: list[Check] = []
    if has_head:
        case = Examination(
            head=path, method=method, train_check=train_check, prompts=[row.text for row in rows],
            max_tokens=asked.max_tokens, data=packed, runner=runner, allow_other_target=allow_other_target,
            asked=partial(make, temperatures=TEMPERATURES, source=Path(asked.prompts).name),
        )  # fmt: skip
        with terminal.renewed_line() as (show, _):
            checks = examine(loaded, tokenizer, case, show)
    losses: dict[str, Loss] = {}
    if setups:
        workload = make(temperatures=(0.0,))
        losses = _losses(loaded, tokenizer, setups, workload, batch_size=batch_size, runner=runner)
    header = options.run_header(loaded, head=head, prompts=len(rows))
    if as_json:
        found = {"losses": [{"setup": name, **loss.as_dict()} for name, loss in losses.items()]} if losses else {}
        options.print_json({**header, "checks": [asdict(check) for check in checks], **found})
    else:
        terminal.conditions(header)
        cells = [[check.name, check.verdict, _shown(check.value), check.message] for check in checks]
        if cells:
            terminal.print_table(_CHECKED, cells, texts=_CHECKED, colours=_COLOURS)
        for name, loss in losses.items():
            _print_loss(name, loss)
    if any(check.verdict == "fault" for check in checks):
        raise typer.Exit(1)


def _path_of_head(head: str) -> Path:
    from foretoken.entrypoints.drafter_files import check_is_no_model
    from foretoken.formats.files import local_head, open_files
    from foretoken.formats.registry import MODELS_OWN, holds_head, holds_own_head

    path = local_head(head)
    if not holds_head(path) and not holds_own_head(path, MODELS_OWN):
        check_is_no_model(path)
        open_files(path)  # a damaged file gives a better message than a missing head
        raise ConfigError(f"'{head}' holds no draft head. Expected a directory or a file with the weights of a head.")
    return path


def _losses(
    target: LoadedModel, tokenizer: Any, setups: list[Setup], workload: Workload, *, batch_size: int, runner: str
) -> dict[str, Loss]:
    from foretoken.bench.compare import compare_setups
    from foretoken.bench.loss import split_loss

    with ProgressBar("batches") as on_progress:
        [[plain, *measured]] = compare_setups(
            target, tokenizer, setups, workload, batch_size=batch_size, runner=runner, on_progress=on_progress
        )
    return {row.setup: split_loss(row, plain) for row in measured}


def _print_loss(name: str, loss: Loss) -> None:
    unexplained = loss.unexplained / loss.seconds
    title = (
        f"{name}: {loss.measured * 1e3:.2f} ms a token, plain decoding {loss.plain * 1e3:.2f}, ideal "
        f"{loss.ideal * 1e3:.2f}. Lost: {loss.seconds * 1e3:.2f} ms, {unexplained:.0%} without a cause"
    )
    rows = [
        [cause.name, f"{cause.seconds * 1e3:.2f}", f"{cause.seconds / loss.seconds:.0%}", cause.advice]
        for cause in loss.causes
    ]
    columns = ["cause", "ms a token", "share", "what it means"]
    terminal.print_table(columns, rows, title=title, texts=columns[-1:])


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_shown(part)}" for key, part in value.items())
    if isinstance(value, list | tuple):
        is_nested = any(isinstance(part, list) for part in value)
        return ("\n" if is_nested else " ").join(_shown(part) for part in value)
    return "" if value is None else str(value)


def verify(
    model: options.Model,
    *,
    drafters: options.DrafterChoices,
    asked: options.PromptOptions,
    batch_size: Annotated[list[int] | None, typer.Option(min=1, help="May be repeated. Default: 1.")] = None,
    transformers: Annotated[
        bool, typer.Option("--transformers", help="Also compare greedy plain decoding with transformers' generate.")
    ] = False,
    seed: options.Seed = 0,
    loading: options.LoadOptions,
    as_json: options.AsJson = False,
) -> None:
    """Decode prompts plainly and with each drafter, and compare token by token.

    Greedy and seeded sampled texts must be identical. A difference is a near-tie when the two tokens' scores agree to
    rounding, and a bug otherwise. Each row is printed as soon as it is known.
    """
    from foretoken.bench.verify import verify_setups
    from foretoken.entrypoints.config import checked_setups

    setups = checked_setups(drafters.texts or ["ngram"], target=model)
    for setup in setups:
        _check_comparable(setup, model, is_sampled=asked.temperature is None or any(asked.temperature))
    rows = asked.rows()
    (loaded, tokenizer), runner = loading.load(model), loading.runner
    workload = asked.workload(rows, loaded, tokenizer, runner=runner, seed=seed)
    header = options.run_header(loaded, prompts=len(workload.prompts), max_tokens=workload.max_tokens, seed=seed)
    names = [*(["transformers generate"] if transformers else []), *(setup.name for setup in setups)]
    widest = [max(names, key=len), "0.8", *["12345"] * 3, "1.00", *["12345"] * 3]
    checks: list[Comparison] = []
    with ProgressBar("tokens") as bar, terminal.growing_table(_COMPARED, widest) as add:
        for found in verify_setups(
            loaded, tokenizer, setups, workload, batch_sizes=batch_size or [1], with_transformers=transformers,
            runner=runner, on_progress=bar,
        ):  # fmt: skip
            bar.pause()
            header.setdefault("runner", found[0].runner)
            if not as_json:
                if not checks:
                    terminal.conditions(header)
                add(_row_of(found))
            checks += found
    if as_json:
        options.print_json({**header, "checks": [asdict(check) for check in checks]})
    else:
        _print_differences(checks)
    if any(not check.is_proof for check in checks):
        raise typer.Exit(1)


def _check_comparable(setup: Setup, target: str, *, is_sampled: bool) -> None:
    from foretoken.entrypoints.config import parse_speculative_config

    options.check_has_target_text("verify", setup)
    policy = parse_speculative_config(setup.config, target=target).policy
    if is_sampled and not policy.is_lossy and not policy.keeps_seeded_text:
        raise ConfigError(
            f"the rule '{policy.rule}' of '{setup.name}' gives a seeded request another text of the same "
            "distribution, which cannot be compared. Pass --temperature 0, or leave the rule out."
        )


_COMPARED = ["drafter", "T", "batch", "texts", "tokens", "tau", "identical", "near-tie", "bug"]


def _row_of(group: list[Comparison]) -> list[str]:
    """Returns the cells of one setup at one temperature and batch size."""
    first, verdicts = group[0], [check.verdict for check in group]
    tau = sum(check.mean_acceptance_length for check in group) / len(group)
    counts = (str(verdicts.count(verdict)) for verdict in ("identical", "near-tie", "bug"))
    return [
        first.setup, f"{first.temperature:g}", str(first.batch_size), str(len(group)),
        str(sum(check.num_tokens for check in group)), f"{tau:.2f}", *counts,
    ]  # fmt: skip


def _print_differences(checks: list[Comparison]) -> None:
    for check in checks:
        if check.verdict != "identical":
            gap = "lengths differ" if check.gap is None else f"relative score gap {check.gap:.1e}"
            terminal.print_line(
                f"{check.verdict}: {check.setup}, temperature {check.temperature:g}, batch {check.batch_size}, prompt "
                f"{check.prompt}, output token {check.divergence}: {gap}"
            )
