"""Writes results as a parquet table, for pandas, polars or DuckDB; only this module imports pyarrow."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ConfigError
from foretoken.files.atomic_files import new_file, told_as

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


def write_parquet(rows: Sequence[Mapping[str, Any]], directory: Path, facts: Mapping[str, Any]) -> list[Path]:
    """Writes or replaces the table of a directory, results.parquet.

    Args:
        rows: Values by column: numbers, text, booleans, None, or lists of numbers. Missing values are null. A column of
            several types, such as trees given by name and by shape, is written as JSON text.
        directory: The directory of the table.
        facts: JSON-ready conditions of all rows, stored as JSON text under "foretoken" in the metadata of the file.

    Returns:
        The file.

    Raises:
        ConfigError: When pyarrow is not installed, or the file cannot be written.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as err:
        raise ConfigError(
            "a parquet table needs the package 'pyarrow', which is not installed. Run in foretoken's "
            "repository: pip install '.[report]'."
        ) from err
    path = directory / "results.parquet"
    names = dict.fromkeys(name for row in rows for name in row)
    table = pa.table({name: _column([row.get(name) for row in rows]) for name in names})
    table = table.replace_schema_metadata({"foretoken": json.dumps(facts)})
    with told_as(ConfigError, f"'{path}'", "Expected room for the table. Make some."), new_file(path) as new:
        pq.write_table(table, new)
    return [path]


def _column(values: list[Any]) -> list[Any]:
    """Returns values of one type: numbers, text, booleans or number lists as they are, mixtures as JSON text."""
    known = [value for value in values if value is not None]
    kinds = {type(value) for value in known}
    if kinds <= {int, float}:
        return [None if value is None else float(value) for value in values] if float in kinds else values
    if len(kinds) == 1 and not kinds & {dict, list, tuple}:
        return values
    if kinds == {list} and all(type(entry) in (int, float) for value in known for entry in value):
        return values
    return [None if value is None else json.dumps(value) for value in values]
