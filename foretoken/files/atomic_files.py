"""Writes files and directories whole or not at all: under a hidden name beside the path, synced to disk, then renamed.

If anything ends the writing (a full disk, missing rights, Ctrl-C), unfinished files are removed and the path stays as
it was. A killed process leaves unfinished files under their hidden name; a directory that was being replaced is then
in `.NAME-…/old`. Only a `JournalFile` grows in place, line by line.

If the path is a symbolic link, the link stays and what it points to is replaced. Untrusted links, and links inside a
directory that is merged into, raise an error.
"""

import errno
import json
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError

from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError, ForetokenError, RequestError, one_line, undone_on_error
from foretoken.files.bounded_reads import MIB, read_regular

_LONGEST_NAME = 40  # characters of the path's name in the hidden name; file systems allow 255 bytes
_log = logging.getLogger(__name__)


class NotPutBackError(OSError):
    """Writing failed, and so did restoring the old content; the message says where the old content is."""


@contextmanager
def new_file(path: Path, *, mode: int | None = None, follows_links: bool = True) -> Iterator[Path]:
    """Yields the temporary name of a new empty file, which replaces `path` when the block ends without an error.

    Missing parents are made.

    Args:
        mode: Permissions; None for those of the replaced file, or of the umask for a new file.
        follows_links: Whether to write through a path that is a symbolic link; raises an error otherwise.

    Raises:
        OSError: When it cannot be written, or the path is not a regular file.
    """
    path = _resolved(path, follows_links=follows_links)
    if os.path.lexists(path) and not path.is_file():
        kind = errno.EISDIR if path.is_dir() else errno.EEXIST
        raise OSError(kind, f"'{path.name}' is no regular file there", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    new = _beside(path, path.parent)
    if mode is None and path.exists():
        mode = stat.S_IMODE(path.stat().st_mode)
    with undone_on_error(lambda: _remove_begun(new)):
        created = (0o666 if mode is None else mode) | stat.S_IRUSR | stat.S_IWUSR
        os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, created))
        wanted = stat.S_IMODE(new.stat().st_mode) if mode is None else mode
        yield new
        _sync(new)
        new.chmod(wanted)
        new.replace(path)
    _sync_names(path.parent)


def is_begun(path: Path, name: str) -> bool:
    """Whether a file is an unfinished `name`, left by a killed process."""
    return path.name.startswith(f".{name[:_LONGEST_NAME]}-")


def write_file(path: Path, data: bytes | str, *, mode: int | None = None, follows_links: bool = True) -> None:
    """Writes or replaces a file; see `new_file`. Text is written as UTF-8."""
    with new_file(path, mode=mode, follows_links=follows_links) as new:
        new.write_bytes(data.encode() if isinstance(data, str) else data)


def put_file(written: Path, path: Path) -> None:
    """Moves a finished, closed file to a path on the same file system; replaces another file there."""
    _sync(written)
    written.replace(path)
    _sync_names(path.parent)


@contextmanager
def new_directory(
    path: Path, *, existing: Literal["refuse", "replace", "merge"] = "refuse", last: str = ""
) -> Iterator[Path]:
    """Yields a new directory to write into, which moves to `path` when the block ends without an error.

    Missing parents are made at the end, and removed again if that fails.

    Args:
        existing: What to do with an existing directory. "refuse": an error, unless it is empty. "replace": it is
            removed with all its content. "merge": new files replace files of the same names; the others stay.
        last: Name of the file that is merged last.

    Raises:
        OSError: When it cannot be written, or the path must not be replaced.
    """
    path = _resolved(path)
    _check_replaceable(path, existing)
    work = _beside(path, _existing_parent(path))
    new, old, is_needed = work / "new", work / "old", False
    try:
        work.mkdir(mode=0o700)
        new.mkdir()
        yield new
        _sync_tree(new)
        if existing == "merge" and path.exists():
            _merge(new, path, old, last)
            _sync_names(path)
        else:
            _check_replaceable(path, existing)
            _move_to(new, path, old)
            _sync_names(path.parent)
    except NotPutBackError:  # `work` holds the old content
        is_needed = True
        raise
    finally:
        if not is_needed:
            shutil.rmtree(work, ignore_errors=True)


def check_writable(path: Path, error: type[ForetokenError], advice: str) -> None:
    """Raises `error`, as `told_as` does, unless a file or directory can be made at a path. For use before long work."""
    with told_as(error, f"'{path}'", advice):
        resolved = _resolved(path)
        trial = _beside(resolved, _existing_parent(resolved))
        trial.mkdir()
        trial.rmdir()


@contextmanager
def told_as(error: type[ForetokenError], what: str, advice: str) -> Iterator[None]:
    """Turns an error of writing into one sentence of type `error`: what cannot be written, why, and `advice`.

    Catches `OSError`, and what safetensors raises for files that cannot be written.
    """
    try:
        yield
    except BrokenPipeError:  # standard output was closed; no file is concerned
        raise
    except (OSError, SafetensorError) as err:
        reason = " ".join((getattr(err, "strerror", None) or str(err) or type(err).__name__).split()).rstrip(".")
        unchanged = "" if isinstance(err, NotPutBackError) else "Nothing was changed there. "
        raise error(f"{what} cannot be written: {reason}. {unchanged}{advice}") from err


def _check_replaceable(path: Path, existing: str) -> None:
    if os.path.lexists(path) and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    if existing == "refuse" and path.exists() and any(path.iterdir()):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))


def _move_to(new: Path, path: Path, old: Path) -> None:
    """Moves a directory to a path. An existing directory goes to `old`, and back if this fails."""
    made = [above for above in path.parents if not above.exists()]  # deepest first

    def undo() -> None:
        if old.exists() and not path.exists():
            _put_back({old: path}, old)
        for parent in made:
            with suppress(OSError):  # not made, or not empty any more
                parent.rmdir()

    with undone_on_error(undo):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            new.chmod(stat.S_IMODE(path.stat().st_mode))
            path.rename(old)
        new.rename(path)


def _merge(new: Path, directory: Path, old: Path, last: str) -> None:
    """Moves files into an existing directory. Files of the same name go to `old`, and back if this fails."""
    old.mkdir()
    moved: list[str] = []

    def undo() -> None:
        back = {directory / name: new / name for name in moved if not (new / name).exists()}
        back |= {old / name: directory / name for name in moved if (old / name).exists()}
        _put_back(back, old)

    with undone_on_error(undo):
        for path in sorted(new.iterdir(), key=lambda path: (path.name == last, path.name)):
            here = directory / path.name
            if os.path.lexists(here) and (here.is_symlink() or not here.is_file()):
                kind = "a symbolic link" if here.is_symlink() else "a directory" if here.is_dir() else "no regular file"
                raise FileExistsError(errno.EEXIST, f"'{path.name}' is {kind} there", str(here))
            moved.append(path.name)
            if here.exists():
                here.rename(old / path.name)
            path.rename(here)


def _put_back(moves: dict[Path, Path], old: Path) -> None:
    try:
        for source, path in moves.items():
            source.rename(path)
    except OSError as err:
        reason = err.strerror or str(err)
        raise NotPutBackError(err.errno, f"{reason}; what was there before lies in '{old}': move it back") from err


def _remove_begun(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _resolved(path: Path, *, follows_links: bool = True) -> Path:
    if path.is_symlink() and not follows_links:
        raise OSError(errno.ELOOP, "it is a symbolic link", str(path))
    resolved = Path(os.path.realpath(path))
    if resolved.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return resolved


def _existing_parent(path: Path) -> Path:
    return next((above for above in path.parents if above.exists()), path.parent)


def _beside(path: Path, directory: Path) -> Path:
    return directory / f".{path.name[:_LONGEST_NAME]}-{secrets.token_hex(4)}"


def _sync_tree(directory: Path) -> None:
    for folder, _, names in os.walk(directory, topdown=False):
        for path in (Path(folder, name) for name in names):
            if not path.is_symlink():
                _sync(path)
        _sync_names(Path(folder))


def _sync_names(directory: Path) -> None:
    try:
        _sync(directory)
    except OSError as err:  # some systems open no directories, or sync files alone; it may also not be readable
        _log.debug("the names in '%s' are not synced: %s", directory, err)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_ADVICE = "Correct that, or choose another path."


@dataclass(frozen=True, slots=True)
class OutputDirectory:
    """A type of output directory, such as "packed tokens"; `force` may replace only what `holds_it` recognises."""

    what: str
    holds_it: Callable[[Path], bool]

    def check(self, directory: Path, *, force: bool) -> None:
        """Raises `RequestError` if a directory cannot be made, or has content, unless it may be replaced by `force`."""
        if not directory.exists():
            check_writable(directory, RequestError, _ADVICE)
            return
        if not directory.is_dir():
            raise RequestError(f"'{directory}' is not a directory. Expected a new name.")
        if not any(directory.iterdir()):
            return
        if not self.holds_it(directory):
            raise RequestError(f"'{directory}' holds other files. Expected a new or empty directory.")
        if not force:
            raise RequestError(f"'{directory}' holds {self.what} already. Expected a new directory. Pass --force.")

    @contextmanager
    def new(self, directory: Path, *, force: bool) -> Iterator[Path]:
        """Yields a directory that moves to its place at the end; `force` replaces one of this type.

        Raises `RequestError` when the path is taken or cannot be written to.
        """
        self.check(directory, force=force)
        with (
            told_as(RequestError, f"'{directory}'", _ADVICE),
            new_directory(directory, existing="replace") as building,
        ):
            yield building
            self.check(directory, force=force)


_MOST_BYTES = 512 * MIB  # largest journal that is read; a choice, far above the longest sweep


class JournalFile:
    """A file of JSON lines with results, the oldest first, their conditions, and the `date` of its beginning."""

    def __init__(self, path: Path, conditions: Mapping[str, Any] | None = None, *, advice: str) -> None:
        """Opens or begins the file; makes missing parents, and ends messages with `advice`.

        `conditions` are JSON-ready; None for those of an existing file. Raises `ConfigError` when the file has other
        conditions, is damaged before its last line, or cannot be read or written.
        """
        self._path, self._advice = path, advice
        # In JSON's types, for the comparison: JSON has no tuples.
        ours = None if conditions is None else json.loads(json.dumps(conditions))
        head, self.lines = self._read_lines()
        if head is None:
            if ours is None:
                raise ConfigError(f"'{path}' holds no results yet. {advice}")
            head = {"conditions": ours, "date": date.today().isoformat()}
            with told_as(ConfigError, f"'{path}'", advice):
                write_file(path, json.dumps(head) + "\n")
        self.conditions: dict[str, Any] = head["conditions"]
        self.date = str(head["date"])
        if ours is not None:
            self._check_conditions(ours)

    def add(self, line: Mapping[str, Any]) -> None:
        """Appends a line and syncs it to disk; raises `ConfigError` if it cannot be written, as on a full disk."""
        advice = "Expected room for one more line. Make some, and go on."
        with told_as(ConfigError, f"'{self._path}'", advice), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.lines.append(json.loads(json.dumps(line)))

    def _check_conditions(self, ours: Mapping[str, Any]) -> None:
        for name in dict.fromkeys([*ours, *self.conditions]):
            theirs, now = self.conditions.get(name), ours.get(name)
            if theirs != now:
                raise ConfigError(
                    f"'{self._path}' was measured with {name} {shown(theirs)}, and {name} is {shown(now)} now. "
                    f"Expected the same, as all its figures go into one table. {self._advice}"
                )

    def _read_lines(self) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        """Returns head and lines of the file; removes an unfinished last line. The head is None without a file."""
        try:
            data = read_regular(self._path, limit=_MOST_BYTES, error=ConfigError) if self._path.exists() else b""
        except OSError as err:
            raise ConfigError(f"'{self._path}' cannot be read: {err.strerror}. {self._advice}") from err
        whole = data[: data.rfind(b"\n") + 1]
        try:
            values = [json.loads(line) for line in whole.decode("utf-8").split("\n") if line]
        except (ValueError, RecursionError) as err:
            expected = "Expected a JSON object a line."
            raise ConfigError(f"'{self._path}' is damaged: {one_line(err)}. {expected} {self._advice}") from err
        is_ours = all(isinstance(value, dict) for value in values)
        if values and not (is_ours and isinstance(values[0].get("conditions"), dict) and "date" in values[0]):
            raise ConfigError(f"'{self._path}' holds something else than results. {self._advice}")
        if whole and whole != data:
            with told_as(ConfigError, f"'{self._path}'", self._advice):
                os.truncate(self._path, len(whole))
        return (values[0], values[1:]) if values else (None, [])
