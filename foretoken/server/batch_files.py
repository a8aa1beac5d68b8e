"""Reads the requests of a batch, and writes the answers to a partial file until all are there."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ConfigError, RequestError
from foretoken.files.atomic_files import put_file, told_as
from foretoken.files.bounded_reads import MIB, check_regular
from foretoken.files.locks import file_lock
from foretoken.server.replies import dumped

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_MOST_LINE_BYTES = 8 * MIB
_PIECE_BYTES = MIB


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a batch.

    Attributes:
        number: Counted from 1.
        data: The bytes of the line; None if the line is longer than a request may be.
    """

    number: int
    data: bytes | None


def count_lines(path: Path) -> int:
    """Returns the number of lines that are not empty.

    Raises:
        RequestError: When the file is missing or not a regular file.
    """
    return sum(1 for _ in read_lines(path))


def read_lines(path: Path) -> Iterator[Line]:
    """Yields the lines that are not empty, with one in memory at a time.

    Raises:
        RequestError: When the file is missing or not a regular file.
    """
    try:
        check_regular(path, error=RequestError)
        with path.open("rb") as file:
            number = 0
            while data := file.readline(_MOST_LINE_BYTES + 1):
                number += 1
                is_too_long = len(data) > _MOST_LINE_BYTES
                while is_too_long and not data.endswith(b"\n"):
                    data = file.readline(_PIECE_BYTES)
                    if not data:
                        break
                if is_too_long or data.strip():
                    yield Line(number, None if is_too_long else data)
    except OSError as err:
        raise RequestError(f"'{path}' cannot be read: {err.strerror}. Expected a file of JSON lines.") from err


class AnswerFile:
    """Collects answers in `OUT.part`, which is renamed to `OUT` when all answers are there.

    Attributes:
        answered: Names of the answered lines: the custom_id, or the id of a line without one.
    """

    def __init__(self, out: Path, model: str) -> None:
        """Opens the file of an earlier run, or starts one. Removes a last line that was cut off.

        Raises:
            ConfigError: When the file holds other data, or answers of another model.
        """
        self._out, self._part, self._model = out, partial_file(out), model
        self.answered: set[str] = set()
        with told_as(ConfigError, f"'{self._part}'", "Choose another OUT, or remove it to start again."):
            length = self._read() if self._part.exists() else 0
            self._file = self._part.open("ab", buffering=0)  # a buffer would be written again at close
            self._file.truncate(length)

    def add(self, answer: dict[str, Any]) -> None:
        """Appends an answer, which then survives the end of the process.

        Raises:
            ConfigError: When the answer cannot be written, as on a full disk.
        """
        with told_as(ConfigError, f"'{self._part}'", "Make room, and run the command again: it continues."):
            left = memoryview(dumped(answer) + b"\n")
            while left:  # a nearly full disk takes a part
                left = left[self._file.write(left) :]
        self.answered.add(name_of(answer))

    def finish(self) -> None:
        """Writes all data to disk and renames the file."""
        with told_as(ConfigError, f"'{self._out}'", "Run the command again: it continues."):
            self._file.close()
            put_file(self._part, self._out)

    def close(self) -> None:
        """Keeps the partial file for a later run."""
        self._file.close()

    def _read(self) -> int:
        """Collects the names of answered lines; returns the length in bytes of all complete lines."""
        length = 0
        with self._part.open("rb") as file:
            for data in file:
                if not data.endswith(b"\n"):
                    break
                length += len(data)
                self.answered.add(self._checked(data))
        return length

    def _checked(self, data: bytes) -> str:
        """Returns the name of an answered line."""
        try:
            answer = json.loads(data)
            name, theirs = name_of(answer), answer["response"]["body"].get("model", self._model)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as err:
            raise ConfigError(f"'{self._part}' holds data other than answers. Choose another OUT.") from err
        if theirs != self._model:
            raise ConfigError(
                f"'{self._part}' holds answers of the model '{theirs}', but this run uses '{self._model}'. Choose "
                "another OUT, or remove the file to start again."
            )
        return name


def partial_file(out: Path) -> Path:
    """Returns the path of the partial file."""
    return out.with_name(f"{out.name}.part")


def name_of(answer: dict[str, Any]) -> str:
    """Returns the name of a line: its custom_id, or the id of a line without one; the two never collide."""
    return str(answer["id"]) if answer["custom_id"] is None else f"={answer['custom_id']}"


@contextmanager
def held(out: Path) -> Iterator[None]:
    """Locks the file for this run until the block ends; raises `ConfigError` when another run writes the file."""
    with told_as(ConfigError, f"'{out}'", "Choose another OUT."):
        out.parent.mkdir(parents=True, exist_ok=True)
    refusal = f"another run writes '{out}'. Wait for it, or choose another OUT."
    with file_lock(out.with_name(f"{out.name}.lock"), refusal=refusal):
        yield
