"""A disk without room, and what lies on one."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def full_disk(room: int = 1024) -> Iterator[None]:
    """No file of this process can be longer than `room` bytes: the kernel refuses the write, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def everything(directory: Path) -> dict[Path, bytes | str | None]:
    """All that lies below, hidden files too: contents of files, where links lead, None for directories."""
    return {
        path: str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
    }
