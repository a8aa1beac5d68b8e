"""Where the directories of a cost twin go, and what may be there already."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretoken.core.errors import ConfigError, ModelError
from foretoken.files.bounded_reads import read_json_object
from foretoken.models.describe import KEY

if TYPE_CHECKING:
    from pathlib import Path

_SUFFIXES = {".json", ".safetensors", ".txt", ".model", ".jinja"}  # of files that twins consist of


def drafter_place(source: Path, model: Path, out: Path) -> Path:
    """Where the twin of a drafter goes: `OUT-medusa` for `MODEL-medusa`.

    Args:
        source: The drafter.
        model: The target.
        out: The target's twin.
    """
    return out.with_name(f"{out.name}-{source.resolve().name.removeprefix(f'{model.resolve().name}-')}")


def check_place(path: Path) -> None:
    """Refuses to write over what is no twin.

    Raises:
        ConfigError: When there is anything else.
    """
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
    """Whether a directory holds a twin, of a model or of a head."""
    try:
        config = read_json_object(path / "config.json")
    except ModelError:
        return False
    notes = config.get("notes")
    return KEY in config or (isinstance(notes, dict) and KEY in notes)
