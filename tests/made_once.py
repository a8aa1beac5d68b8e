"""Files that are made once in a run of the tests, and read by all its processes: pytest's own and those of xdist."""

import atexit
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

_VARIABLE = "FORETOKEN_TESTS_SHARE"


def shared_folder() -> Path:
    """The run's folder, which goes with the process that asked first: pytest's, before it starts any other."""
    if _VARIABLE not in os.environ:
        os.environ[_VARIABLE] = tempfile.mkdtemp(prefix="foretoken-tests-")
        atexit.register(_remove, os.environ[_VARIABLE], os.getpid())
    return Path(os.environ[_VARIABLE])


def new_folder(name: str) -> Path:
    """A new directory inside the run's folder."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=shared_folder()))


def _remove(folder: str, owner: int) -> None:
    """Unless this is a fork of the process that made it."""
    if os.getpid() == owner:
        shutil.rmtree(folder)


def made_once(name: str, key: str, make: Callable[[Path], None]) -> Path:
    """A directory that the first process to ask for it makes, while the others wait.

    Args:
        name: What it holds, a part of its name.
        key: Tells it from others of the name: whatever its content depends on.
        make: Fills the directory it is given.
    """
    folder = shared_folder()
    directory = folder / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    with FileLock(f"{directory}.lock"):
        if not directory.exists():
            unfinished = new_folder(name)
            make(unfinished)
            unfinished.rename(directory)
    return directory
