"""`foretoken quantize`: writes a model in 4 or 8 bits, in the format of compressed-tensors."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options, terminal
from foretoken.cli.terminal import progress
from foretoken.core.errors import ConfigError, RequestError, nearest_name_hint

if TYPE_CHECKING:
    from foretoken.bench.quality import Quality

_PIECE_TOKENS, _MOST_PIECES = 512, 128  # of calibration text; a choice: those of the method's paper are 128 x 2,048
_MOST_TEXTS = 64  # of held-out text; a choice: some 11,000 tokens
_CARD = """# {name}

`{original}` in {scheme}, {how}, written by `foretoken quantize` in the format of
[compressed-tensors](https://github.com/vllm-project/compressed-tensors). The LM head, the embedding, norms and biases
are as in the original.

{quality}

Speculative decoding with this model is lossless against this model, not against the original.
"""


def quantize(
    model: Annotated[
        str, typer.Argument(parser=options.local_place, help="Model with safetensors: a directory or a hub id.")
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
            "outputs on it change least. Needs memory for the whole model. Default: to nearest.",
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
    from foretoken.decoder.library import set_num_threads
    from foretoken.models.making.writing import SCHEMES, Original, quantize_linear, write_quantized

    if scheme not in SCHEMES:
        raise ConfigError(f"--scheme is '{scheme}'. {nearest_name_hint(scheme, SCHEMES)}")
    chosen = SCHEMES[scheme]
    if group_size is not None:
        if chosen.group == 0 or group_size not in (32, 64, 128):
            raise ConfigError(f"--group-size is {group_size} with {scheme}. Expected 32, 64 or 128, with W4A16.")
        chosen = chosen._replace(group=group_size)
    if threads is not None:
        set_num_threads(threads)
    place = options.directory_of(model)
    source = Original(place)
    source.check_groups(chosen)
    if compare:
        _check_text(text)
    texts = None if calibrate is None else _pieces(str(calibrate), source)
    digest = None if texts is None else hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    settings = {"source": str(place.resolve()), "scheme": scheme, "group_size": chosen.group, "calibration": digest}
    begin = time.perf_counter()

    def quantized(name: str, weight: Any) -> Any:
        return quantize_linear(name, weight, chosen)

    if texts is not None:
        from foretoken.models.making.calibration import Calibration

        quantized = Calibration(source, chosen, texts).quantized
    with terminal.progress("files") as on_progress:
        write_quantized(source, out, chosen, settings, quantized, on_progress)
    written = time.perf_counter()
    quality = measured_quality(out, str(place), text) if compare else None
    how = "quantized to nearest" if texts is None else f"quantized by GPTQ on {len(texts)} pieces of text"
    _finish(place, out, scheme, how, quality)
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    if as_json:
        seconds = {"writing": written - begin, "comparing": time.perf_counter() - written}
        facts = {"out": str(out), "scheme": scheme, "group_size": chosen.group, "bytes": size, "seconds": seconds}
        options.print_json(facts | {"quality": None if quality is None else quality.model_dump()})
        return
    terminal.print_line(f"{out}: {scheme}, {size / 2**20:.0f} MiB, {written - begin:.1f} s to write, {how}")
    if quality is not None:
        terminal.print_line(str(quality))


def _check_text(text: str) -> None:
    from foretoken.bench.workload import load_prompts

    load_prompts(text, limit=1)  # before anything is written


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


def measured_quality(quantized: Path, original: str, text: str) -> Quality | None:
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
    with progress("texts compared") as on_progress:
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
