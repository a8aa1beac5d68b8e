"""Stores converted weights between runs: one directory per model, precision and format."""

from __future__ import annotations

import hashlib
from pathlib import Path

_WEIGHTS = (".safetensors", ".gguf", ".bin")


def converted_path(cache_dir: str, model: str, form: str, suffix: str, recipe: str = "") -> Path:
    """Where a model's conversion lies; changes with the weights' files and the recipe, so a stale one is never read.

    Args:
        cache_dir: Folder of all conversions; made if missing.
        model: The model's directory.
        form: Short name of the result: its dtype, or the format that weights are rounded to.
        suffix: Of the file or folder, such as ".gguf".
        recipe: Settings and versions that the result depends on beside `form`.
    """
    digest = hashlib.sha256(str(Path(model).resolve()).encode())
    for file in sorted(Path(model).iterdir()):
        digest.update(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}".encode())
    digest.update(recipe.encode())
    folder = Path(cache_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{Path(model).resolve().name}-{form}-{digest.hexdigest()[:12]}{suffix}"


def stored_bytes(path: str | Path) -> int:
    """Bytes of the weights in a file, or of the files of weights in a folder."""
    path = Path(path)
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.suffix in _WEIGHTS]
    return sum(file.stat().st_size for file in files)
