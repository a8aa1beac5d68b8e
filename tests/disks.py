"""What lies on a disk."""

from pathlib import Path


def everything(directory: Path) -> dict[Path, bytes | str | None]:
    """All that lies below, hidden files too: contents of files, where links lead, None for directories."""
    return {
        path: str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
    }
