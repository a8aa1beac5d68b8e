"""Where things made once a machine are kept, and what is believed of what lies there."""

import os
import stat
from pathlib import Path

import pytest

from foretoken.files import user_cache
from foretoken.files.user_cache import cache_directory, open_cache, read_kept, write_kept


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_cache, "_said", [])


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FORETOKEN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "foretoken"
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "here"))
    assert cache_directory() == tmp_path / "here"
    monkeypatch.delenv("FORETOKEN_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    for ignored in ("", "relative/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_directory() == tmp_path / "me" / ".cache" / "foretoken"


def test_what_is_made_is_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever the umask: parents, directory and files."""
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "a" / "b"))
    before = os.umask(0)
    try:
        directory = open_cache()
        assert directory == tmp_path / "a" / "b"
        write_kept(directory / "file", b"data")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a", directory, directory / "file")]
    assert modes == [0o700, 0o700, 0o600]
    assert read_kept(directory / "file", limit=4) == b"data"
    assert read_kept(directory / "file", limit=3) is None
    assert list(directory.iterdir()) == [directory / "file"]


def test_a_link_in_its_place_is_neither_followed_nor_replaced(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"other")
    (tmp_path / "file").symlink_to(tmp_path / "other")
    assert read_kept(tmp_path / "file", limit=9) is None
    with pytest.raises(OSError, match="it is a symbolic link"):
        write_kept(tmp_path / "file", b"ours")
    assert (tmp_path / "file").is_symlink()
    assert (tmp_path / "other").read_bytes() == b"other"


def test_a_directory_in_its_place_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError, match="file"):
        write_kept(tmp_path / "file", b"ours")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
    assert read_kept(tmp_path / "file", limit=9) is None


def test_links_in_a_circle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "a"))
    assert open_cache() is None
    assert open_cache() is None
    assert caplog.text.count("Set FORETOKEN_CACHE to a directory that only you can write to.") == 1
