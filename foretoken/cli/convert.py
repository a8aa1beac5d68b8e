"""`foretoken convert`: converts a draft head from one format to another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options, terminal
from foretoken.core.errors import ConfigError, ModelError, nearest_name_hint

if TYPE_CHECKING:
    from foretoken.formats.checkpoint import HeadCheckpoint, TargetInfo

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
        typer.Option(help="Directory of the target, for formats that leave out its sizes or repeat its tensors."),
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
    name, checkpoint = _read(local_head(source, revision), around, has_target=target is not None)
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
    _say(facts)
    for reader in readers:
        terminal.prose(f"  {reader}", "    ")


def _read(place: Path, around: TargetInfo, *, has_target: bool) -> tuple[str, HeadCheckpoint]:
    """Returns the head at a path and the name of its format; has_target: whether the target's weights can be read."""
    from foretoken.entrypoints.drafter_files import check_is_no_model
    from foretoken.formats.registry import read_head

    weights = around.loaded if has_target else None
    try:
        return read_head(place, target=around.fingerprint, base_config=around.config, weights=weights)
    except ModelError:
        check_is_no_model(place)
        raise


def _say(facts: dict[str, Any]) -> None:
    heads = "" if facts["heads"] is None else f"{facts['heads']} heads, "
    terminal.prose(
        f"{facts['source']} ({facts['source_format']}) -> {facts['out']} ({facts['format']}): {facts['method']}, "
        f"{heads}{facts['dtype']}"
    )
    for file, size in facts["files"].items():
        terminal.say(f"  {file}  {size} bytes")


def _counted(checkpoint: HeadCheckpoint, method: str, num_heads: int | None, num_layers: int | None) -> HeadCheckpoint:
    """Checks the tensors against the user's options, and drops further heads."""
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
    """Refuses to replace anything without --force, and anything but a checkpoint with it."""
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
