"""The user's cache directory: compiled kernels and measured costs, made once for each machine.

Cached files are run as code, or steer the engine. So the cache is used only if no user but this one and root can write
to it: owner and mode of the directory, its parents and every file are checked. Otherwise, or without a home directory,
everything works without a cache.
"""

import json
import logging
import math
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.files.atomic_files import write_file

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# Neither follows a link nor waits for the other end of a pipe.
_READING = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_log = logging.getLogger(__name__)
_said: list[str] = []


def cache_directory() -> Path:
    """Returns `FORETOKEN_CACHE`, or `foretoken` in the user's cache directory; raises `OSError` without a home."""
    base = os.environ.get("FORETOKEN_CACHE")
    if base:
        return Path(base).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    if base and Path(base).is_absolute():
        return Path(base) / "foretoken"
    try:
        home = Path.home()
    except RuntimeError as err:
        raise FileNotFoundError("there is no home directory") from err
    if not home.is_absolute():
        raise FileNotFoundError(f"the home directory '{home}' is not an absolute path")
    return home / ".cache" / "foretoken"


def open_cache() -> Path | None:
    """Returns the cache directory, and makes it if needed. Returns None if it is unsafe; logs the reason once."""
    try:
        directory = cache_directory()
        # Another user can change the target of his link at any time.
        for part in (directory, *directory.parents):
            if part.is_symlink() and not _is_owned(part.lstat()):
                raise PermissionError(f"the link '{part}' belongs to another user")
        directory = Path(os.path.realpath(directory))
        for part in (*reversed(directory.parents), directory):
            if not part.exists():
                part.mkdir(mode=0o700, exist_ok=True)
            _check_directory(part, is_parent=part != directory)
    except (OSError, ValueError) as err:
        say_nothing_is_kept(str(err))
        return None
    return directory


def read_kept(path: Path, *, limit: int) -> bytes | None:
    """Returns a file of at most `limit` bytes in `open_cache`; None if another user can write to it."""
    try:
        with os.fdopen(os.open(path, _READING), "rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode) or not _is_owned(facts) or _others_write(facts):
                return None
            data = file.read(limit + 1)
    except OSError:
        return None
    return data if len(data) <= limit else None


def may_replace(path: Path, *, mark: bytes) -> bool:
    """Whether a file of the cache is missing, empty, or begins with `mark`, so that no other data is lost."""
    try:
        with os.fdopen(os.open(path, _READING), "rb") as file:
            return stat.S_ISREG(os.fstat(file.fileno()).st_mode) and file.read(len(mark)) in (b"", mark)
    except FileNotFoundError:
        return True
    except OSError:
        return False


def write_kept(path: Path, data: bytes) -> None:
    """Replaces a file of the cache atomically; only this user can read it. Raises `OSError` for symbolic links."""
    write_file(path, data, mode=0o600, follows_links=False)


def say_nothing_is_kept(reason: str) -> None:
    """Logs once a process why the cache is not used."""
    if _said:
        return
    _said.append(reason)
    _log.warning(
        "compiled kernels and measured costs are not kept for the next process: %s. Set FORETOKEN_CACHE to a directory "
        "that only you can write to.", reason,
    )  # fmt: skip


def _check_directory(directory: Path, *, is_parent: bool) -> None:
    """Refuses a directory that other users can write to; in a sticky parent, such as /tmp, entries are safe."""
    facts = directory.stat()
    if not stat.S_ISDIR(facts.st_mode):
        raise NotADirectoryError(f"'{directory}' is not a directory")
    if not _is_owned(facts):
        raise PermissionError(f"'{directory}' belongs to another user")
    is_sticky = is_parent and facts.st_mode & stat.S_ISVTX
    if _others_write(facts) and not is_sticky and not _is_private_group(facts):
        raise PermissionError(f"other users can write to '{directory}'")


def _is_owned(facts: os.stat_result) -> bool:
    return os.name != "posix" or facts.st_uid in (0, os.geteuid())


def _others_write(facts: os.stat_result) -> bool:
    return os.name == "posix" and bool(facts.st_mode & _OTHERS_WRITE)


def _is_private_group(facts: os.stat_result) -> bool:
    """Whether only the group may write besides, and the group has this user alone."""
    import grp  # POSIX alone has these
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(facts.st_gid)
    except KeyError:
        return False
    is_own = group.gr_gid == user.pw_gid and group.gr_name == user.pw_name
    return is_own and not facts.st_mode & stat.S_IWOTH and set(group.gr_mem) <= {user.pw_name}


_FORMAT = 1  # of the file; files of another format are ignored
# Bytes; a choice: the file is read whole at every load. The oldest entries are dropped above that.
_LARGEST_FILE = 1 << 20
_LONGEST_AGE_S = 30 * 24 * 3600  # a choice: after a month drivers, clocks, texts and other load have changed


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptEntries:
    """A file of cached entries; the key `mark` shows that foretoken wrote it, `what` is for messages."""

    file: str
    mark: str
    holder: str
    what: str

    def read(self, key: str) -> dict[str, Any] | None:
        """Returns the entry of a key; None without an entry of the last month. The entry is not checked."""
        directory = open_cache()
        return None if directory is None else self._entries(directory / self.file).get(key)

    def keep(self, key: str, entry: Mapping[str, Any]) -> None:
        """Writes an entry beside the other entries of the last month; replaces the file atomically."""
        directory = open_cache()
        if directory is None:
            return
        path = directory / self.file
        if not may_replace(path, mark=self._beginning):
            _log.warning(
                "%s are not kept: '%s' is not a file that foretoken wrote, and stays as it is. Move it away, or set "
                "FORETOKEN_CACHE to another directory.", self.what, path,
            )  # fmt: skip
            return
        entries = {**self._entries(path), key: {"measured": time.time(), **entry}}
        try:
            write_kept(path, self._as_bytes(entries))
        except OSError as err:
            say_nothing_is_kept(str(err))

    @property
    def _beginning(self) -> bytes:
        return f'{{"{self.mark}":'.encode()

    def _as_bytes(self, entries: dict[str, Any]) -> bytes:
        """Returns the file's bytes; drops the oldest entries if it would be too large."""
        while True:
            data = json.dumps({self.mark: _FORMAT, self.holder: entries}).encode()
            if len(data) <= _LARGEST_FILE or len(entries) < 2:
                return data
            oldest_first = sorted(entries, key=lambda key: float(entries[key]["measured"]))
            entries = {key: entries[key] for key in oldest_first[(len(entries) + 3) // 4 :]}

    def _entries(self, path: Path) -> dict[str, Any]:
        data = read_kept(path, limit=_LARGEST_FILE)
        if data is None or not data.startswith(self._beginning):
            return {}
        try:
            known = json.loads(data).get(self.holder)
        except (ValueError, RecursionError):  # no JSON, no UTF-8, or nested too deeply
            return {}
        now = time.time()
        return {key: entry for key, entry in known.items() if _is_recent(entry, now)} if isinstance(known, dict) else {}


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a finite number; booleans and NaN are not."""
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _is_recent(entry: Any, now: float) -> bool:
    measured: Any = entry.get("measured") if isinstance(entry, dict) else None
    return is_number(measured) and now - _LONGEST_AGE_S < measured <= now
