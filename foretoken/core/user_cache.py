"""Where things that are made once a machine are kept: compiled kernels, measured costs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """`FORETOKEN_CACHE`, or `foretoken` in the user's cache directory; may not exist yet."""
    base = os.environ.get("FORETOKEN_CACHE")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foretoken"
