"""Directories that a command writes whole: where they may stand, and how they take their place at the end."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretoken.core import atomic_files
from foretoken.core.atomic_files import told_as
from foretoken.core.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


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
            The directory to write into; see `atomic_files`.

        Raises:
            RequestError: When the place is taken or cannot be written to.
        """
        self.check(directory, force=force)
        with (
            told_as(RequestError, f"'{directory}'", "Mend that or choose another place."),
            atomic_files.new_directory(directory, existing="replace") as building,
        ):
            yield building
            self.check(directory, force=force)
