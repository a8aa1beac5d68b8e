"""Holds a name of a lock file for one run at a time; the system gives it back when the process ends, however it ends.

The file is removed while it is held, so a run that ended leaves none. Whoever opened it before that, and gets the lock
after, has a file without a name: `filelock` sees that it has no links any more, and opens the name anew.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from filelock import FileLock, SoftFileLock, Timeout

from foretoken.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_ENDING_SECONDS = 0.5  # for a run that is just giving the name back


@contextmanager
def file_lock(path: Path, *, refusal: str) -> Iterator[None]:
    """The name for this run alone while the block lasts.

    Args:
        path: Of the lock file, in a directory that exists.
        refusal: What is said when another run holds it.

    Raises:
        ConfigError: When another run holds it.
        OSError: When there can be no such file.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=_ENDING_SECONDS)
    except Timeout as err:
        raise ConfigError(refusal) from err
    try:
        yield
    finally:
        if not isinstance(lock, SoftFileLock):  # what it becomes where the file's existence is the lock
            with suppress(OSError):  # on Windows, where files that are open stay, the library removes it
                path.unlink()
        lock.release()
