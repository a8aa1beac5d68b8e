"""A file of JSON lines that long work appends to, so that the same command continues after an interruption.

The first line holds the conditions of all results; every other line is one result. `add` returns when the line is on
disk. An unfinished last line is removed when the file is opened again.
"""

from __future__ import annotations

import json
import os
from datetime import date
from typing import TYPE_CHECKING, Any

from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError, one_line
from foretoken.files.atomic_files import told_as, write_file
from foretoken.files.bounded_reads import MIB, read_regular

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_MOST_BYTES = 512 * MIB


class JournalFile:
    """A file of JSON lines with results.

    Attributes:
        conditions: Conditions of all lines.
        date: Date when the file was begun, such as 2026-11-22.
        lines: All results, the oldest first.
    """

    def __init__(self, path: Path, conditions: Mapping[str, Any] | None = None, *, advice: str) -> None:
        """Opens or begins the file.

        Args:
            path: The file; missing parents are made.
            conditions: JSON-ready; None for those of an existing file.
            advice: A sentence at the end of messages.

        Raises:
            ConfigError: When the file has other conditions, is damaged before its last line, or cannot be read or
                written.
        """
        self._path, self._advice = path, advice
        # In JSON's types, for the comparison: JSON has no tuples.
        ours = None if conditions is None else json.loads(json.dumps(conditions))
        head, self.lines = self._read()
        if head is None:
            if ours is None:
                raise ConfigError(f"'{path}' holds no results yet. {advice}")
            head = {"conditions": ours, "date": date.today().isoformat()}
            with told_as(ConfigError, f"'{path}'", advice):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(path, json.dumps(head) + "\n")
        self.conditions: dict[str, Any] = head["conditions"]
        self.date = str(head["date"])
        if ours is not None:
            self._check(ours)

    def add(self, line: Mapping[str, Any]) -> None:
        """Appends a line and syncs it to disk; raises `ConfigError` if it cannot be written, as on a full disk."""
        advice = "Expected room for one more line. Make some, and go on."
        with told_as(ConfigError, f"'{self._path}'", advice), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.lines.append(json.loads(json.dumps(line)))

    def _check(self, ours: Mapping[str, Any]) -> None:
        """Raises `ConfigError` for the first condition that differs."""
        for name in dict.fromkeys([*ours, *self.conditions]):
            theirs, now = self.conditions.get(name), ours.get(name)
            if theirs != now:
                raise ConfigError(
                    f"'{self._path}' was measured with {name} {shown(theirs)}, and {name} is {shown(now)} now. "
                    f"Expected the same, as all its figures go into one table. {self._advice}"
                )

    def _read(self) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
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
