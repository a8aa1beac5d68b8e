"""The two files of a batch: requests, and answers that gather beside their place until all are there."""

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
        number: From 1.
        data: Its bytes; None where there are more than a request may have.
    """

    number: int
    data: bytes | None


def count_lines(path: Path) -> int:
    """Lines that are not empty, for a progress line.

    Raises:
        RequestError: When the file is missing or no regular file.
    """
    return sum(1 for _ in read_lines(path))


def read_lines(path: Path) -> Iterator[Line]:
    """Lines that are not empty, one in memory at a time.

    Raises:
        RequestError: When the file is missing or no regular file.
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
    """Answers on their way to a file, which gets its name once all are there; until then it is `OUT.part`.

    Attributes:
        answered: Names of the lines that have an answer: their custom_id, or else their id.
    """

    def __init__(self, out: Path, model: str) -> None:
        """Opens what an earlier run left, or begins. A last line that was cut off is removed.

        Args:
            out: Place of the file.
            model: Whose answers it holds.

        Raises:
            ConfigError: When the file holds something else, or answers of another model.
        """
        self._out, self._part, self._model = out, partial_file(out), model
        self.answered: set[str] = set()
        with told_as(ConfigError, f"'{self._part}'", "Choose another OUT, or remove it to begin anew."):
            length = self._read() if self._part.exists() else 0
            self._file = self._part.open("ab", buffering=0)  # a buffer would be written again when it is closed
            self._file.truncate(length)

    def add(self, answer: dict[str, Any]) -> None:
        """Appends an answer; it survives the end of the process.

        Raises:
            ConfigError: When it cannot be written, as on a full disk.
        """
        with told_as(ConfigError, f"'{self._part}'", "Make room, and run the command again: it goes on."):
            left = memoryview(dumped(answer) + b"\n")
            while left:  # a disk that is nearly full takes a part
                left = left[self._file.write(left) :]
        self.answered.add(name_of(answer))

    def finish(self) -> None:
        """Brings all to disk and gives the file its name."""
        with told_as(ConfigError, f"'{self._out}'", "Run the command again: it goes on."):
            self._file.close()
            put_file(self._part, self._out)

    def close(self) -> None:
        """Leaves the file as it is, for a later run."""
        self._file.close()

    def _read(self) -> int:
        """Notes what has an answer; gives the length of the whole lines."""
        length = 0
        with self._part.open("rb") as file:
            for data in file:
                if not data.endswith(b"\n"):
                    break
                length += len(data)
                self.answered.add(self._checked(data))
        return length

    def _checked(self, data: bytes) -> str:
        """The name of an answered line."""
        try:
            answer = json.loads(data)
            name, theirs = name_of(answer), answer["response"]["body"].get("model", self._model)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as err:
            raise ConfigError(f"'{self._part}' holds something else than answers. Choose another OUT.") from err
        if theirs != self._model:
            raise ConfigError(
                f"'{self._part}' was begun with the model '{theirs}', and it is '{self._model}' now. Choose another "
                "OUT, or remove the file to begin anew."
            )
        return name


def partial_file(out: Path) -> Path:
    """Where answers are until all are there."""
    return out.with_name(f"{out.name}.part")


def name_of(answer: dict[str, Any]) -> str:
    """What tells a line from others: its custom_id, which is kept apart from ids, or its id."""
    return str(answer["id"]) if answer["custom_id"] is None else f"={answer['custom_id']}"


@contextmanager
def held(out: Path) -> Iterator[None]:
    """The file for this run alone while the block lasts.

    Raises:
        ConfigError: When another run writes it.
    """
    with told_as(ConfigError, f"'{out}'", "Choose another OUT."):
        out.parent.mkdir(parents=True, exist_ok=True)
    refusal = f"another run writes '{out}'. Wait for it, or choose another OUT."
    with file_lock(out.with_name(f"{out.name}.lock"), refusal=refusal):
        yield
