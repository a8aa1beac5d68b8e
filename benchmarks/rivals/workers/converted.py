"""Stores converted weights between runs: one directory per model, precision and format."""

from __future__ import annotations

import hashlib
from pathlib import Path


def converted_path(cache_dir: str, model: str, dtype: str, suffix: str) -> Path:
    """Where a model's conversion lies; changes with the weights' files, so that a stale one is never read.

    Args:
        cache_dir: Folder of all conversions; made if missing.
        model: The model's directory.
        dtype: Of the conversion.
        suffix: Of the file or folder, such as ".gguf".
    """
    digest = hashlib.sha256(str(Path(model).resolve()).encode())
    for file in sorted(Path(model).iterdir()):
        digest.update(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}".encode())
    folder = Path(cache_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{Path(model).resolve().name}-{dtype}-{digest.hexdigest()[:12]}{suffix}"
