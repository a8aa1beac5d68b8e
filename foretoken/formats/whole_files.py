"""Writes a checkpoint whole or not at all: a full disk or a missing permission leaves nothing behind."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from foretoken.core.errors import ConfigError, one_line
from foretoken.files.atomic_files import new_directory, told_as

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

CONFIG = "config.json"


@contextmanager
def whole_files(directory: Path, *, replaces: bool = False) -> Iterator[Path]:
    """A new directory to write into; its files go to `directory` when the block ends without an error.

    Args:
        directory: Where the files belong; made where it is not there. See `core.atomic_files` for symbolic links.
        replaces: Whether they take the place of everything in it. Otherwise each takes the place of the file of its
            name and the others stay, `config.json` last.

    Raises:
        ConfigError: When they cannot be written, whatever the system's reason.
    """
    advice = "Expected a directory with enough room that may be written to. Name another place, or make room."
    existing: Any = "replace" if replaces else "merge"
    with (
        told_as(ConfigError, f"'{directory}'", advice),
        new_directory(directory, existing=existing, last=CONFIG) as new,
    ):
        yield new


@contextmanager
def safetensors_errors() -> Iterator[None]:
    """Raises what safetensors says of a file that cannot be written as an `OSError`."""
    try:
        yield
    except SafetensorError as err:
        raise OSError(one_line(err)) from err


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One file of tensors, each with memory of its own: safetensors, or a pickle where the name ends otherwise.

    Raises:
        OSError: When it cannot be written.
    """
    if path.suffix == ".safetensors":
        path.touch()
        mode = path.stat().st_mode  # safetensors leaves its files to their owner alone
        with safetensors_errors():
            save_file(dict(tensors), path, metadata={"format": "pt"})
        path.chmod(mode)
        return
    with path.open("wb") as file:
        try:
            torch.save(dict(tensors), file)
        except RuntimeError as err:  # torch's writer hides what the file said
            cause = err.__context__ if isinstance(err.__context__, OSError) else None
            raise cause or OSError(one_line(err)) from err


def write_config(directory: Path, config: Mapping[str, Any]) -> None:
    """The `config.json` of a checkpoint."""
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
