"""Writing a checkpoint so that it appears whole or not at all: full disks and missing rights leave nothing behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from foretoken.core.errors import ConfigError
from foretoken.target.model_files import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

CONFIG = "config.json"


@contextmanager
def whole_files(directory: Path, *, replaces: bool = False) -> Iterator[Path]:
    """A new directory to write into; its files go to `directory` when the block ends without an error.

    It lies beside `directory`, on the same disk, so that moving is renaming. When anything fails, `directory` is as it
    was before, parents that were missing included.

    Args:
        directory: Where the files belong; made where it is not there.
        replaces: Whether they take the place of everything in it. Otherwise each takes the place of the file of its
            name and the others stay, `config.json` last.

    Raises:
        ConfigError: When they cannot be written, whatever the system's reason.
    """
    try:
        with tempfile.TemporaryDirectory(
            dir=_existing(directory.parent), prefix=f".{directory.name}.", ignore_cleanup_errors=True
        ) as folder:
            new = Path(folder) / "new"
            new.mkdir()
            yield new
            _move(new, directory, Path(folder) / "old", replaces=replaces)
    except (OSError, SafetensorError) as err:
        reason = err.strerror if isinstance(err, OSError) and err.strerror else one_line(err)
        raise ConfigError(
            f"'{directory}' cannot be written: {reason}. Nothing was changed there. Expected a directory with enough "
            "room that may be written to. Name another place, or make room."
        ) from err


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One file of tensors, each with memory of its own: safetensors, or a pickle where the name ends otherwise.

    Raises:
        OSError: When it cannot be written.
        SafetensorError: Likewise.
    """
    if path.suffix == ".safetensors":
        path.touch()
        mode = path.stat().st_mode  # safetensors leaves its files to their owner alone
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


def _existing(directory: Path) -> Path:
    """The nearest directory above that exists."""
    return next((place for place in (directory, *directory.parents) if place.exists()), directory)


def _move(new: Path, directory: Path, old: Path, *, replaces: bool) -> None:
    """Puts files in their place; a directory that is replaced goes to `old`, and comes back when this fails."""
    if directory.exists() and not replaces:
        _merge(new, directory, old)
        return
    made = _make_parents(directory.parent)
    try:
        if directory.exists():
            directory.rename(old)
        try:
            new.rename(directory)
        except BaseException:
            if old.exists():
                old.rename(directory)
            raise
    except BaseException:
        for parent in made:
            with suppress(OSError):  # somebody else put something there
                parent.rmdir()
        raise
    shutil.rmtree(old, ignore_errors=True)


def _merge(new: Path, directory: Path, old: Path) -> None:
    """Puts files beside those that are there; ones of the same name go to `old`, and come back when this fails."""
    old.mkdir()
    moved: list[str] = []
    try:
        for path in sorted(new.iterdir(), key=lambda path: path.name == CONFIG):
            here = directory / path.name
            if here.is_dir() and not here.is_symlink():
                raise IsADirectoryError(errno.EISDIR, f"'{path.name}' is a directory there")
            moved.append(path.name)
            if os.path.lexists(here):
                here.rename(old / path.name)
            path.rename(here)
    except BaseException:
        for name in moved:
            if os.path.lexists(old / name):
                (old / name).replace(directory / name)
            elif not (new / name).exists():
                (directory / name).unlink()
        raise


def _make_parents(directory: Path) -> list[Path]:
    """Makes a directory with its parents; those that were missing, deepest first."""
    missing = [place for place in (directory, *directory.parents) if not place.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    return missing
