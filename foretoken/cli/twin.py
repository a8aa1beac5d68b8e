"""`foretoken twin`: pads a trained model and its drafters to the cost of a larger model, with the same function."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options, terminal
from foretoken.cli.terminal import progress
from foretoken.core.errors import ConfigError, RequestError, nearest_name_hint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.bench.cost_twin import TwinCheck, TwinPart

_DTYPES = ("float16", "bfloat16", "float32")
_DRAFT_MODELS, _FILLS = ("pad", "keep", "none"), ("zeros", "random")
_NUM_PROMPTS, _PROMPT_LEN = 3, 64  # of the comparison


def twin(
    model: Annotated[
        str,
        typer.Argument(
            parser=options.local_place,
            help="Trained target of the Llama family with safetensors: a directory or a hub id.",
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Directory to write; drafters go beside it, as OUT-medusa.")],
    layers: Annotated[int, typer.Option(min=1, help="Of the twin; at least the model's.")] = 24,
    hidden_size: Annotated[
        int, typer.Option(min=1, help="Hidden size of the twin: the model's times a power of four.")
    ] = 1024,
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

    Then original and twin are compared: logits over bundled text, greedy text, and every drafter's proposals. A twin in
    OUT is replaced.
    """
    import torch

    from foretoken.bench.cost_twin import TwinPlan, check_twin, make_twin
    from foretoken.bench.workload import load_prompts
    from foretoken.decoder.library import set_num_threads
    from foretoken.models.config import check_model_files
    from foretoken.models.loading import load_tokenizer

    for name, value, known in (("--draft-model", draft_model, _DRAFT_MODELS), ("--fill", fill, _FILLS)):
        if value not in known:
            raise ConfigError(f"{name} is '{value}'. {nearest_name_hint(value, known)}")
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigError(f"dtype '{dtype}' does not exist here. {nearest_name_hint(dtype, _DTYPES)}")
    if threads is not None:
        set_num_threads(threads)
    place = options.directory_of(model)
    check_model_files(str(place), may_be_hub_id=False)
    tokenizer = load_tokenizer(str(place))
    if tokenizer is None:
        raise RequestError(
            f"'{model}' has no tokenizer. Expected tokenizer files, for the text that twins are tested on."
        )
    choices: Any = {"draft_model": draft_model, "fill": fill, "dtype": None if dtype is None else getattr(torch, dtype)}
    plan = TwinPlan(model=place, out=out, num_layers=layers, hidden_size=hidden_size, heads=heads, seed=seed, **choices)
    begin = time.perf_counter()
    with progress("tensors") as on_progress:
        parts = make_twin(plan, on_progress)
    written = time.perf_counter()
    prompts = [list(tokenizer(text)["input_ids"])[:_PROMPT_LEN] for text in load_prompts(limit=_NUM_PROMPTS)]
    with progress("comparisons") as on_progress:
        checks = check_twin(parts, prompts, on_progress=on_progress)
    seconds = {"writing": written - begin, "comparing": time.perf_counter() - written}
    _report(parts, checks, seconds, as_json=as_json)
    different = [check for check in checks if not check.is_same]
    if different:
        terminal.print_note(
            f"error: '{out}' does not compute the function of '{model}': {different[0].what} in {different[0].dtype} "
            f"on {different[0].decoder} differ. Expected the same. Measure nothing with it."
        )
        raise typer.Exit(1)


def _report(
    parts: Sequence[TwinPart], checks: Sequence[TwinCheck], seconds: dict[str, float], *, as_json: bool
) -> None:
    if as_json:
        options.print_json(
            {
                "parts": [{**part._asdict(), "source": str(part.source), "path": str(part.path)} for part in parts],
                "checks": [check._asdict() for check in checks],
                "seconds": seconds,
            }
        )
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
