"""Commands on files of heads and models: `foretoken inspect`, `foretoken convert` and `foretoken doctor`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options, terminal
from foretoken.core.errors import ConfigError, ModelError, nearest_name_hint

if TYPE_CHECKING:
    from foretoken.bench.loss import Loss
    from foretoken.formats.checkpoint import HeadCheckpoint, TargetInfo
    from foretoken.models.loaded import LoadedModel
    from foretoken.text.prompt_rows import PromptRow
    from foretoken.training.doctor.checks import Check
    from foretoken.training.doctor.examine import Examination


def inspect(
    place: Annotated[
        str,
        typer.Argument(
            parser=options.local_place, help=f"A head's directory or file; or a model: {options.MODEL_FORMS}."
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            parser=options.local_place,
            help="A head's target, with safetensors: completes the head's facts, and is compared with it.",
        ),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read all tensors, and report faults.")] = False,
    original: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            parser=options.local_place,
            help="Model that the target in 4 or 8 bits was quantized from: measures perplexity, KL divergence and "
            "greedy tokens beside it.",
        ),
    ] = None,
    text: options.HeldOut = "heldout",
    as_json: options.AsJson = False,
) -> None:
    """Print what a directory or file holds: a target's architecture, sizes, dtype, tokenizer; or a head's format.

    With --verify (or --target, or in a foreign format) a head is read completely: numbers that are not finite, and
    tensors that are missing, unknown or of a wrong shape, are errors. With --verify a target's tensors are compared
    with its architecture, and their numbers are read.
    """
    from foretoken.models.names import is_gguf

    directory = options.directory_of(place)
    is_file = is_gguf(directory)
    is_quick = target is None and original is None and not verify
    facts = _quick_facts(directory) if is_quick and not is_file else None
    if facts is None and not is_file:
        facts = _head_facts(directory, target, verify=verify)
    if facts is not None and original is not None:
        raise ConfigError(f"'{directory}' is a head, which has no --original. Expected a target in 4 or 8 bits.")
    if facts is None:
        from foretoken.bench.quality import QUALITY_KEY, read_quality
        from foretoken.models.describe import describe_directory, describe_gguf

        facts = describe_gguf(directory, verify=verify) if is_file else describe_directory(directory)
        if original is not None:
            from foretoken.cli.quantize import measured_quality

            quality = measured_quality(directory, original, text)
            facts |= {} if quality is None else {QUALITY_KEY: quality.model_dump()}
        read_quality(facts, str(directory))
        if verify and not is_file:
            from foretoken.models.weight_files import weight_findings

            found = weight_findings(directory)
            facts |= {**({"warnings": found.warnings} if found.warnings else {}), "findings": found.findings}
    has_findings = bool(facts.get("findings"))
    if as_json:
        options.print_json(facts)
    else:
        _print_facts(facts)
    if has_findings:
        raise typer.Exit(1)


def _quick_facts(directory: Path) -> dict[str, Any] | None:
    from foretoken.formats.describe import native_facts
    from foretoken.models.describe import describe_plain

    head = native_facts(directory)
    return describe_plain(directory) if head is None else {"directory": str(directory), **head}


def _head_facts(directory: Path, target: str | None, *, verify: bool) -> dict[str, Any] | None:
    from foretoken.formats import describe
    from foretoken.formats.checkpoint import TargetInfo
    from foretoken.formats.registry import holds_head, read_head

    if not holds_head(directory):
        return None
    around = TargetInfo() if target is None else TargetInfo.of_directory(target)
    with describe.kept_warnings() as warnings:
        name, checkpoint = read_head(
            directory,
            target=around.fingerprint,
            base_config=around.config,
            weights=None if target is None else around.loaded,
        )
    facts = {"directory": str(directory), **describe.describe_head(name, checkpoint)}
    if around.fingerprint is not None and checkpoint.target is not None:
        warnings += checkpoint.target.differences(around.fingerprint)
    if not verify:
        return facts | ({"warnings": warnings} if warnings else {})
    tensors = describe.describe_tensors(checkpoint)
    return facts | {"tensors": tensors, "findings": [*warnings, *describe.suspicious_tensors(tensors)]}


def _print_facts(facts: dict[str, Any]) -> None:
    lists = {key: facts.pop(key) for key in ("tensors", "warnings", "findings") if key in facts}
    width = max(map(len, facts))
    for key, value in facts.items():
        terminal.fact(key, _shown_fact(key, value), width)
    for row in lists.get("tensors", []):
        terminal.print_line(
            f"  {row['tensor']}  {row['shape']}  {row['dtype']}  largest {row['largest']:.3g}  norm {row['norm']:.3g}"
        )
    for message in [*lists.get("warnings", []), *lists.get("findings", [])]:
        terminal.prose(f"warning: {message}")
    if lists.get("findings") == []:
        terminal.print_line("no findings: every tensor is there, of the right shape and finite")


def _shown_fact(key: str, value: Any) -> str:
    if key == "acceptance":
        firsts = [row[0] if isinstance(row, list) and row else row for row in value]
        return "first candidates " + " ".join(map(str, firsts))
    if key == "rounding_quality":
        from foretoken.bench.quality import Quality

        return str(Quality(**value))
    if key == "weight_dtypes" and isinstance(value, dict):
        return ", ".join(f"{name} {each['bytes'] / 2**20:.1f} MiB ({each['tensors']})" for name, each in value.items())
    if isinstance(value, dict):
        scalars = {name: part for name, part in value.items() if not isinstance(part, dict | list)}
        return ", ".join(f"{name.replace('_', ' ')} {part}" for name, part in scalars.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


_DTYPES = ("float16", "bfloat16", "float32")
_NUM_HEADS = "Keep the first N heads; an error when the tensors hold fewer."
_NUM_LAYERS = "Layers of each head; an error when the tensors have others."


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
            parser=options.local_place,
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
    import torch

    from foretoken.formats.checkpoint import TargetInfo
    from foretoken.formats.files import local_head
    from foretoken.formats.registry import head_readers, write_head

    _check_out(out, force=force)
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigError(f"dtype '{dtype}' does not exist here. {nearest_name_hint(dtype, _DTYPES)}")
    around = TargetInfo() if target is None else TargetInfo.of_directory(target)
    name, checkpoint = _read_head(local_head(source, revision), around, has_target=target is not None)
    checkpoint = _counted(checkpoint, "hydra", num_hydra_heads, num_hydra_layers)
    checkpoint = _counted(checkpoint, "medusa", num_medusa_heads, num_medusa_layers)
    to = to.replace("-", "_")
    how: dict[str, Any] = {"target": around, "tp_size": tp_size, "as_safetensors": safetensors}
    new_dtype = None if dtype is None else getattr(torch, dtype)
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
    _print_conversion(facts)
    for reader in readers:
        terminal.prose(f"  {reader}", "    ")


def _read_head(place: Path, around: TargetInfo, *, has_target: bool) -> tuple[str, HeadCheckpoint]:
    from foretoken.entrypoints.drafter_files import check_is_no_model
    from foretoken.formats.registry import read_head

    weights = around.loaded if has_target else None
    try:
        return read_head(place, target=around.fingerprint, base_config=around.config, weights=weights)
    except ModelError:
        check_is_no_model(place)
        raise


def _print_conversion(facts: dict[str, Any]) -> None:
    heads = "" if facts["heads"] is None else f"{facts['heads']} heads, "
    terminal.prose(
        f"{facts['source']} ({facts['source_format']}) -> {facts['out']} ({facts['format']}): {facts['method']}, "
        f"{heads}{facts['dtype']}"
    )
    for file, size in facts["files"].items():
        terminal.print_line(f"  {file}  {size} bytes")


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
            help="Try the training of a fresh head: medusa, hydra, mlp_speculator, eagle, hass, eagle3, spire or "
            "falcon.",
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
        typer.Option(
            "--speculative-config",
            "-s",
            metavar="DRAFTER",
            help="Split the speed that a drafter loses, as `bench` takes it, into causes; may be repeated.",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences decoded at once for -s.")] = 1,
    *,
    prompts: options.Prompts = "heldout",
    num_prompts: options.NumPrompts = 24,
    max_tokens: options.MaxTokens = 64,
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
    from foretoken.bench.compare import compare_setups
    from foretoken.bench.loss import split_loss
    from foretoken.bench.workload import make_workload, read_prompts
    from foretoken.entrypoints.config import checked_setups
    from foretoken.entrypoints.drafter_files import check_is_no_model
    from foretoken.formats.files import local_head, open_files
    from foretoken.formats.registry import holds_head
    from foretoken.training.data.packed import PackedTokens
    from foretoken.training.doctor.examine import Examination

    place = None if head is None else local_head(head)
    if place is not None and not holds_head(place):
        check_is_no_model(place)
        open_files(place)  # a damaged file gives a better message than a missing head
        raise ConfigError(f"'{head}' holds no draft head. Expected a directory or a file with the weights of a head.")
    setups = checked_setups(drafters, target=model)
    if any(setup.config is None for setup in setups):
        raise ConfigError("'plain' loses no speed to drafts. Expected a drafter. Pass -s ngram, or another one.")
    rows = read_prompts(prompts, limit=num_prompts)
    packed = None if data is None else PackedTokens.open(data)
    has_head = head is not None or method is not None
    (loaded, tokenizer), runner = loading.load(model, unpacks=has_head), loading.runner
    options.check_max_tokens(max_tokens, loaded)
    case = Examination(
        head=place,
        method=method,
        train_check=train_check,
        prompts=[row.text for row in rows],
        max_tokens=max_tokens,
        data=packed,
        runner=runner,
        allow_other_target=allow_other_target,
    )
    checks = _examined(loaded, tokenizer, case, rows, Path(prompts).name) if has_head else []
    losses: list[tuple[str, Loss]] = []
    if setups:
        workload = make_workload(rows, loaded, tokenizer, runner=runner, temperatures=(0.0,), max_tokens=max_tokens)
        with terminal.progress("batches") as on_progress:
            [[plain, *measured]] = compare_setups(
                loaded, tokenizer, setups, workload, batch_size=batch_size, runner=runner, on_progress=on_progress
            )
        losses = [(row.setup, split_loss(row, plain)) for row in measured]
    header = options.run_header(loaded, head=head, prompts=len(rows))
    if as_json:
        found = {"losses": [{"setup": name, **loss.as_dict()} for name, loss in losses]} if losses else {}
        options.print_json({**header, "checks": [asdict(check) for check in checks], **found})
    else:
        terminal.conditions(header)
        if checks:
            _print_checks(checks)
        for name, loss in losses:
            _print_loss(name, loss)
    if any(check.verdict == "fault" for check in checks):
        raise typer.Exit(1)


def _examined(
    target: LoadedModel, tokenizer: Any, case: Examination, rows: list[PromptRow], source: str
) -> list[Check]:
    """Makes the checks of a head; a line says what is being done. `rows` are those of the case, `source` their name."""
    from dataclasses import replace
    from functools import partial

    from foretoken.bench.workload import make_workload
    from foretoken.training.doctor.examine import examine
    from foretoken.training.evaluation import TEMPERATURES

    settings: dict[str, Any] = {"temperatures": TEMPERATURES, "max_tokens": case.max_tokens, "source": source}
    asked = partial(make_workload, rows, target, tokenizer, runner=case.runner, **settings)
    with terminal.renewed_line() as (show, _):
        return examine(target, tokenizer, replace(case, asked=asked), show)


def _print_checks(checks: list[Check]) -> None:
    rows = [[check.name, check.verdict, _shown(check.value), check.message] for check in checks]
    columns = ["check", "verdict", "found", "what it means"]
    terminal.print_table(columns, rows, texts=columns, colours=_COLOURS)


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
