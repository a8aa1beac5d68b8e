"""Lock files that are removed while they are held, and freed memory that stays in the process."""

import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from foretoken.core.errors import ConfigError
from foretoken.files.processes import file_lock


def taken(path: Path) -> bool:
    """Whether another thread gets the lock; it gives it back."""

    def take() -> bool:
        with file_lock(path, refusal="held"):
            return path.exists()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(take).result()


def test_who_opened_the_file_before_it_was_removed_holds_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl", reason="locks of Windows are others")
    path, flock, first, ends = tmp_path / "lock", fcntl.flock, ExitStack(), []

    def flock_late(file: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX and not ends:  # the file is open, and its holder ends before it is locked
            ends.append(path.stat().st_ino)
            first.close()
        flock(file, operation)

    first.enter_context(file_lock(path, refusal="held"))
    monkeypatch.setattr(fcntl, "flock", flock_late)
    with file_lock(path, refusal="held"):
        assert len(ends) == 1
        assert path.exists(), "else the next one would not meet this lock"
        with pytest.raises(ConfigError, match="held"):
            taken(path)
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_removed_before_the_lock_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it could be the next holder's file that is removed."""
    fcntl = pytest.importorskip("fcntl", reason="locks of Windows are others")
    path, flock, is_there = tmp_path / "lock", fcntl.flock, []

    def flock_seen(file: int, operation: int) -> None:
        if operation & fcntl.LOCK_UN:
            is_there.append(path.exists())
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock_seen)
    with file_lock(path, refusal="held"):
        assert path.exists()
    assert is_there == [False]


def test_who_is_refused_leaves_the_file_to_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with file_lock(path, refusal="held"):
        for _ in range(2):
            with pytest.raises(ConfigError, match="held"):
                taken(path)
        assert path.exists()
    assert not path.exists()
    assert taken(path)


_PROGRAM = """
import resource, sys
import torch
from foretoken.files.processes import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def rounds(count):
    for _ in range(count):
        torch.ones(9 << 20)  # larger than any block that the C library keeps by itself

rounds(12)  # what is freed is not always joined at once to what can be given again
before = faults()
rounds(4)
print(faults() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_freed_memory_is_not_asked_of_the_system_again() -> None:
    found = {}
    for mode in ("keep", "return"):
        command = [sys.executable, "-c", _PROGRAM, mode]
        found[mode] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert found["keep"] < 10
    assert found["return"] > 20  # tensors of 36 MiB, pages of 4 KiB or 2 MiB
