"""Checks the files of a model directory before any library reads them, with one clear sentence about what is wrong."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

from safetensors import SafetensorError, safe_open

from foretoken.core.errors import ModelError, listed, one_line
from foretoken.files.bounded_reads import MIB, check_regular, read_json_object

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_INDEX = "model.safetensors.index.json"
# Kinds of files that libraries read to their end, which a device has not.
_READ_WHOLE = {".json", ".safetensors", ".txt", ".model", ".jinja"}
_TEMPLATES = "additional_chat_templates"  # the one directory that tokenizers read besides
_MOST_TEXT_BYTES = 256 * MIB  # tokenizers of 260,000 tokens have 40 MiB


def check_model_files(name: str, *, may_be_hub_id: bool = True) -> None:
    """Looks at a model directory before any library does, for one clear sentence about what is wrong with it.

    Args:
        name: A directory, or a hub id, whose files are looked at when they are there.
        may_be_hub_id: Whether a hub id is allowed at all.

    Raises:
        ModelError: When the directory is missing, holds no configuration or no safetensors, or holds a damaged file.
    """
    directory = Path(name)
    if not directory.is_dir():
        if may_be_hub_id and _is_hub_id(name):
            return
        raise ModelError(
            f"there is no model directory '{name}'. Expected a directory with config.json and safetensors. "
            + _nearby(directory)
        )
    check_readable(directory)
    if not (directory / "config.json").is_file():
        raise ModelError(f"'{name}' has no config.json. Expected a model directory in Hugging Face layout.")
    read_json_object(directory / "config.json")
    weights = sorted(directory.glob("*.safetensors"))
    if (directory / _INDEX).is_file() and not (directory / "model.safetensors").is_file():
        indexed_files(directory / _INDEX)
    if not weights:
        pickles = sorted(p.name for kind in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in directory.glob(kind))
        if pickles:
            raise ModelError(
                f"'{name}' holds only pickle weights ({pickles[0]}), which can run code when they are loaded. "
                "Expected safetensors. Convert them first where you trust their origin."
            )
        raise ModelError(f"'{name}' holds no weights. Expected *.safetensors beside config.json.")
    for path in weights:
        try:
            with safe_open(path, framework="np") as file:  # not "pt", which would import torch
                file.keys()
        except (SafetensorError, OSError) as err:
            raise ModelError(f"{path} is damaged: {one_line(err)}. Copy or download it again.") from err


def check_readable(directory: Path) -> None:
    """Refuses what would keep a library reading: devices and pipes in the place of files, and endless text.

    Raises:
        ModelError: Naming the first such file.
    """
    for path in sorted([*directory.iterdir(), *directory.glob(f"{_TEMPLATES}/*")]):
        if path.suffix not in _READ_WHOLE or not path.exists():
            continue
        check_regular(path)
        size = path.stat().st_size
        if path.suffix != ".safetensors" and size > _MOST_TEXT_BYTES:
            raise ModelError(
                f"'{path}' has {size} bytes. Expected at most {_MOST_TEXT_BYTES}. Copy or download it again."
            )


def indexed_files(index: Path) -> list[Path]:
    """The weight files that an index such as `model.safetensors.index.json` names, sorted.

    Args:
        index: Its files must lie beside it.

    Raises:
        ModelError: When it is damaged, has no weight_map, or names a file of another directory or a missing one.
    """
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map. Expected one that gives each tensor's file.")
    names = sorted({str(shard) for shard in weight_map.values()})
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ModelError(f"{index} names files outside its directory: {listed(outside)}. Expected plain file names.")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ModelError(
            f"'{index.parent}' lacks weight files that its index names: {listed(missing)}. Copy or download them again."
        )
    return [index.parent / name for name in names]


def _is_hub_id(name: str) -> bool:
    """Whether a name that is no directory is meant for the hub: it has that form and is not near local models."""
    path = Path(name)
    if not _HUB_ID.fullmatch(name) or path.exists():
        return False
    return not path.parent.is_dir() if "/" in name else not _model_directories(Path())


def _nearby(directory: Path) -> str:
    """Names of model directories beside a missing one."""
    known = {path.name: str(path) for path in _model_directories(directory.parent)}
    close = get_close_matches(directory.name, known, n=1, cutoff=0.5)
    question = f"Did you mean '{known[close[0]]}'? " if close else ""
    return f"{question}Known: {listed(known.values())}." if known else "Check the path."


def _model_directories(parent: Path) -> list[Path]:
    """Directories in `parent` that hold a model."""
    return [path for path in parent.iterdir() if (path / "config.json").is_file()] if parent.is_dir() else []
