"""Where run state (corpus, checkpoints, logs) lives by default: always outside the repository."""

from pathlib import Path


def default_run_dir() -> Path:
    """Return the per-user cache directory for this recipe."""
    return Path.home() / ".cache" / "foretoken" / "tinycode"
