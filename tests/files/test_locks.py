"""A lock file that is removed while it is held: nobody holds it beside another, and none is left."""

from __future__ import annotations

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
