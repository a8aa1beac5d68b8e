"""Writes files and directories whole or not at all: beside their destination, synced to disk, then renamed.

Whatever ends the writing (a full disk, missing rights, Ctrl-C) removes what was begun and leaves the place as it was. A
process that is killed leaves what it had begun beside the place, under a hidden name; a directory that was just being
replaced waits there too, in `.NAME-…/old`.

A place that is a symbolic link is written through: the link stays, and what it leads to is replaced. Where links are
not trusted, and for links inside a directory that is merged into, there is an error instead. No link is replaced.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import stat
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from foretoken.core.errors import RequestError, undone_on_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from foretoken.core.errors import ForetokenError

_LONGEST_NAME = 40  # characters of the place's name in that of its neighbour: file systems allow 255 bytes
_log = logging.getLogger(__name__)


class NotPutBackError(OSError):
    """Writing failed, and so did putting back what was there; the message says where that lies."""


@contextmanager
def new_file(path: Path, *, mode: int | None = None, follows_links: bool = True) -> Iterator[Path]:
    """A new empty file to write to, which takes its place when the block ends without an error.

    Args:
        path: The place, in a directory that exists.
        mode: Its permissions; None for those of the file that is replaced, or what the umask allows a new one.
        follows_links: Whether a place that is a symbolic link is written through, or an error.

    Yields:
        The file's temporary name, in the same directory.

    Raises:
        OSError: When it cannot be written, or something that is no regular file is in its place.
    """
    place = _resolved(path, follows_links=follows_links)
    if os.path.lexists(place) and not place.is_file():
        kind = errno.EISDIR if place.is_dir() else errno.EEXIST
        raise OSError(kind, f"'{place.name}' is no regular file there", str(path))
    new = _beside(place, place.parent)
    if mode is None and place.exists():
        mode = stat.S_IMODE(place.stat().st_mode)
    with undone_on_error(lambda: _remove_begun(new)):
        created = (0o666 if mode is None else mode) | stat.S_IRUSR | stat.S_IWUSR
        os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, created))
        wanted = stat.S_IMODE(new.stat().st_mode) if mode is None else mode
        yield new
        _sync(new)
        new.chmod(wanted)
        new.replace(place)
    _sync_names(place.parent)


def is_begun(path: Path, name: str) -> bool:
    """Whether a file is an unfinished `name`, left by a killed process."""
    return path.name.startswith(f".{name[:_LONGEST_NAME]}-")


def write_file(path: Path, data: bytes | str, *, mode: int | None = None, follows_links: bool = True) -> None:
    """Writes or replaces a file; see `new_file`. Text is written as UTF-8."""
    with new_file(path, mode=mode, follows_links=follows_links) as new:
        new.write_bytes(data.encode() if isinstance(data, str) else data)


def put_file(written: Path, place: Path) -> None:
    """Moves a file that was written in pieces to its place, on the same file system, where it replaces another one.

    Args:
        written: Closed by now.
        place: The place, in a directory that exists.
    """
    _sync(written)
    written.replace(place)
    _sync_names(place.parent)


@contextmanager
def new_directory(
    path: Path, *, existing: Literal["refuse", "replace", "merge"] = "refuse", last: str = ""
) -> Iterator[Path]:
    """A new directory to write into, which takes its place when the block ends without an error.

    Parents that are missing are made then, and removed again when that fails.

    Args:
        path: The place.
        existing: What becomes of a directory that is there. "refuse": an error, unless it is empty. "replace": it goes,
            with everything in it. "merge": new files take the place of files of their names, and the others stay.
        last: Name of the file that is merged last.

    Yields:
        The directory to write into, on the disk of the place.

    Raises:
        OSError: When it cannot be written, or what is in its place is not replaced.
    """
    place = _resolved(path)
    _check_place(place, existing)
    work = _beside(place, next((above for above in place.parents if above.exists()), place.parent))
    new, old, is_needed = work / "new", work / "old", False
    try:
        work.mkdir(mode=0o700)
        new.mkdir()
        yield new
        _sync_tree(new)
        if existing == "merge" and place.exists():
            _merge(new, place, old, last)
            _sync_names(place)
        else:
            _check_place(place, existing)
            _put(new, place, old)
            _sync_names(place.parent)
    except NotPutBackError:  # what was there lies in it
        is_needed = True
        raise
    finally:
        if not is_needed:
            shutil.rmtree(work, ignore_errors=True)


@contextmanager
def told_as(error: type[ForetokenError], what: str, advice: str) -> Iterator[None]:
    """Turns an `OSError` of the block into one sentence: what cannot be written, why, and how to mend that.

    Args:
        error: The exception that is raised.
        what: Names what is written, as in "'out'".
        advice: What was expected and how to mend it, as sentences.
    """
    try:
        yield
    except BrokenPipeError:  # nobody reads our output any longer: nothing that was written here
        raise
    except OSError as err:
        reason = " ".join((err.strerror or str(err) or type(err).__name__).split()).rstrip(".")
        unchanged = "" if isinstance(err, NotPutBackError) else "Nothing was changed there. "
        raise error(f"{what} cannot be written: {reason}. {unchanged}{advice}") from err


def _check_place(place: Path, existing: str) -> None:
    """Raises `OSError` when what is in a directory's place may not go."""
    if os.path.lexists(place) and not place.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
    if existing == "refuse" and place.exists() and any(place.iterdir()):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(place))


def _put(new: Path, place: Path, old: Path) -> None:
    """Moves a directory to its place; one that is there goes to `old`, and comes back when this fails."""
    made = [above for above in place.parents if not above.exists()]  # deepest first

    def undo() -> None:
        if old.exists() and not place.exists():
            _put_back({old: place}, old)
        for parent in made:
            with suppress(OSError):  # it was not made, or somebody else put something there
                parent.rmdir()

    with undone_on_error(undo):
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists():
            new.chmod(stat.S_IMODE(place.stat().st_mode))
            place.rename(old)
        new.rename(place)


def _merge(new: Path, place: Path, old: Path, last: str) -> None:
    """Moves files beside those that are there; ones of the same name go to `old`, and come back when this fails."""
    old.mkdir()
    moved: list[str] = []

    def undo() -> None:
        back = {place / name: new / name for name in moved if not (new / name).exists()}
        back |= {old / name: place / name for name in moved if (old / name).exists()}
        _put_back(back, old)

    with undone_on_error(undo):
        for path in sorted(new.iterdir(), key=lambda path: (path.name == last, path.name)):
            here = place / path.name
            if os.path.lexists(here) and (here.is_symlink() or not here.is_file()):
                kind = "a symbolic link" if here.is_symlink() else "a directory" if here.is_dir() else "no regular file"
                raise FileExistsError(errno.EEXIST, f"'{path.name}' is {kind} there", str(here))
            moved.append(path.name)
            if here.exists():
                here.rename(old / path.name)
            path.rename(here)


def _put_back(moves: dict[Path, Path], old: Path) -> None:
    """Undoes renames; raises `NotPutBackError` when that fails."""
    try:
        for source, place in moves.items():
            source.rename(place)
    except OSError as err:
        reason = err.strerror or str(err)
        raise NotPutBackError(err.errno, f"{reason}; what was there before lies in '{old}': move it back") from err


def _remove_begun(path: Path) -> None:
    """Removes a file that was being written, if it is there and can be."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _resolved(path: Path, *, follows_links: bool = True) -> Path:
    """Where a path leads, which may not exist; raises `OSError` for links in a circle, and for any if so asked."""
    if path.is_symlink() and not follows_links:
        raise OSError(errno.ELOOP, "it is a symbolic link", str(path))
    place = Path(os.path.realpath(path))
    if place.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return place


def _beside(place: Path, directory: Path) -> Path:
    """A hidden name that nothing has, for what will move to a place."""
    return directory / f".{place.name[:_LONGEST_NAME]}-{secrets.token_hex(4)}"


def _sync_tree(directory: Path) -> None:
    """Brings everything in a directory to disk."""
    for folder, _, names in os.walk(directory, topdown=False):
        for path in (Path(folder, name) for name in names):
            if not path.is_symlink():
                _sync(path)
        _sync_names(Path(folder))


def _sync_names(directory: Path) -> None:
    """Brings the names in a directory to disk where that can be done: what they name is there already."""
    try:
        _sync(directory)
    except OSError as err:  # some systems open no directories, or sync files alone; it may also not be readable
        _log.debug("the names in '%s' are not synced: %s", directory, err)


def _sync(path: Path) -> None:
    """Brings a file or directory to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True, slots=True)
class OutputDirectory:
    """One kind of such directories.

    Attributes:
        what: Names its contents, as "packed tokens".
        holds_it: Whether a directory that is not empty is one of the kind, which `force` may replace.
    """

    what: str
    holds_it: Callable[[Path], bool]

    def check(self, directory: Path, *, force: bool) -> None:
        """Whether one may be written to a place.

        Raises:
            RequestError: When something is there, unless it is one of the kind and `force` allows to replace it.
        """
        if not directory.exists():
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
        """Builds one beside its place and moves it there at the end.

        Args:
            directory: The place.
            force: Replaces one of the kind that is there.

        Yields:
            The directory to write into; see `new_directory`.

        Raises:
            RequestError: When the place is taken or cannot be written to.
        """
        self.check(directory, force=force)
        with (
            told_as(RequestError, f"'{directory}'", "Mend that or choose another place."),
            new_directory(directory, existing="replace") as building,
        ):
            yield building
            self.check(directory, force=force)
