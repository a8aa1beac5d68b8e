"""The user's cache directory: compiled kernels and measured costs, made once a machine.

What is kept is run as code, or steers the engine. So nothing is read or written unless this user and root are the only
ones who can put it there: the directory, those above it and every file are asked for their owner and mode. Where that
does not hold, or there is no home directory, everything works and nothing is kept.
"""

from __future__ import annotations

import json
import logging
import math
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.files.atomic_files import write_file

if TYPE_CHECKING:
    from collections.abc import Mapping

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# Neither follows a link nor waits for the other end of a pipe.
_READING = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_log = logging.getLogger(__name__)
_said: list[str] = []


def cache_directory() -> Path:
    """`FORETOKEN_CACHE`, or `foretoken` in the user's cache directory; may not exist yet.

    Raises:
        OSError: When there is neither, as in a container whose user has no home.
    """
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
    """The cache directory, made where it is missing; None where nothing can be kept, which is logged once."""
    try:
        directory = cache_directory()
        # A link that somebody else made may lead anywhere, later to another place than now.
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
    """Contents of a file of the cache.

    Args:
        path: In `open_cache`.
        limit: Most bytes it may have.

    Returns:
        None where there is no regular file, it is longer, or somebody else could have written it.
    """
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
    """Whether nobody loses anything when a file of the cache is written.

    Args:
        path: In `open_cache`, which may be a directory that holds other things as well.
        mark: What our own file begins with.

    Returns:
        True where there is nothing, or a regular file that is empty or begins with `mark`, whoever can write to it.
    """
    try:
        with os.fdopen(os.open(path, _READING), "rb") as file:
            return stat.S_ISREG(os.fstat(file.fileno()).st_mode) and file.read(len(mark)) in (b"", mark)
    except FileNotFoundError:
        return True
    except OSError:
        return False


def write_kept(path: Path, data: bytes) -> None:
    """Replaces a file of the cache in one move; only this user can read it.

    Args:
        path: In `open_cache`.
        data: Its contents.

    Raises:
        OSError: When that is not possible, or a symbolic link is in its place.
    """
    write_file(path, data, mode=0o600, follows_links=False)


def say_nothing_is_kept(reason: str) -> None:
    """Logs why nothing is kept; once a process."""
    if _said:
        return
    _said.append(reason)
    _log.warning(
        "compiled kernels and measured costs are not kept for the next process: %s. Set FORETOKEN_CACHE to a directory "
        "that only you can write to.", reason,
    )  # fmt: skip


def _check_directory(directory: Path, *, is_parent: bool) -> None:
    """Raises `PermissionError` when somebody else can put files there.

    Where everybody may make entries but not touch those of others (the sticky bit, as /tmp has it), what lies below is
    safe with an owner of its own.
    """
    facts = directory.stat()
    if not stat.S_ISDIR(facts.st_mode):
        raise NotADirectoryError(f"'{directory}' is not a directory")
    if not _is_owned(facts):
        raise PermissionError(f"'{directory}' belongs to another user")
    is_sticky = is_parent and facts.st_mode & stat.S_ISVTX
    if _others_write(facts) and not is_sticky and not _is_private_group(facts):
        raise PermissionError(f"other users can write to '{directory}'")


def _is_owned(facts: os.stat_result) -> bool:
    """Whether a file belongs to this user or to root."""
    return os.name != "posix" or facts.st_uid in (0, os.geteuid())


def _others_write(facts: os.stat_result) -> bool:
    """Whether group or others may write."""
    return os.name == "posix" and bool(facts.st_mode & _OTHERS_WRITE)


def _is_private_group(facts: os.stat_result) -> bool:
    """Whether it is only the group that may write too, and that is the group which many systems give each user."""
    import grp  # POSIX alone has these
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(facts.st_gid)
    except KeyError:
        return False
    is_own = group.gr_gid == user.pw_gid and group.gr_name == user.pw_name
    return is_own and not facts.st_mode & stat.S_IWOTH and set(group.gr_mem) <= {user.pw_name}


_FORMAT = 1
_LARGEST_FILE = 1 << 20  # bytes; the oldest entries go when there are more
_LONGEST_AGE_S = 30 * 24 * 3600  # drivers, clocks, texts and the machine's other users change


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptEntries:
    """A kind of entries.

    Attributes:
        file: Name of their file in the cache directory.
        mark: The first key of the file, by which it is known as ours.
        holder: The key under which the entries stand.
        what: What they are, for messages.
    """

    file: str
    mark: str
    holder: str
    what: str

    def read(self, key: str) -> dict[str, Any] | None:
        """The entry under a key as it was kept, whatever it holds; None where there is none of the last month."""
        directory = open_cache()
        return None if directory is None else self._entries(directory / self.file).get(key)

    def keep(self, key: str, entry: Mapping[str, Any]) -> None:
        """Keeps an entry beside what the file holds of the last month; the file is replaced in one move."""
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
        """What the file begins with."""
        return f'{{"{self.mark}":'.encode()

    def _as_bytes(self, entries: dict[str, Any]) -> bytes:
        """The file, without the oldest entries where it would be too large to be read again."""
        while True:
            data = json.dumps({self.mark: _FORMAT, self.holder: entries}).encode()
            if len(data) <= _LARGEST_FILE or len(entries) < 2:
                return data
            oldest_first = sorted(entries, key=lambda key: float(entries[key]["measured"]))
            entries = {key: entries[key] for key in oldest_first[(len(entries) + 3) // 4 :]}

    def _entries(self, path: Path) -> dict[str, Any]:
        """Entries of the last month; nothing where there is no file of ours or it is damaged."""
        data = read_kept(path, limit=_LARGEST_FILE)
        if data is None or not data.startswith(self._beginning):
            return {}
        try:
            known = json.loads(data).get(self.holder)
        except (ValueError, RecursionError):  # no JSON, no UTF-8; nested beyond what the parser bears
            return {}
        now = time.time()
        return {key: entry for key, entry in known.items() if _is_recent(entry, now)} if isinstance(known, dict) else {}


def is_number(value: Any) -> bool:
    """Whether a value of JSON, which may be a truth value, NaN or an integer of any size, is a finite number."""
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _is_recent(entry: Any, now: float) -> bool:
    """Whether an entry of the file was made in the last month."""
    measured: Any = entry.get("measured") if isinstance(entry, dict) else None
    return is_number(measured) and now - _LONGEST_AGE_S < measured <= now
