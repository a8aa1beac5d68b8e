"""Reads records from Hugging Face data sets: by hub name, or from local files without a network.

`datasets` is imported here only, and only when such a source is asked for.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ConfigError, RequestError, foreign_errors_as, one_line
from foretoken.training.data.records import Record, read_row
from foretoken.training.data.sources import Source

if TYPE_CHECKING:
    from collections.abc import Iterator

_BUILDERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".arrow": "arrow", ".txt": "text"}
_HEADING = re.compile(r"\s*= [^=].* =\s*")  # WikiText's " = Title = "; its sections have " = = Section = = "


def dataset_source(name: str, *, config: str | None = None, split: str = "train", text_column: str = "text") -> Source:
    """Rows of a data set, streamed, in the forms that `read_row` knows.

    A data set whose first row with text is a heading of WikiText (` = Title = `) has articles cut into rows: rows are
    joined into documents that begin at such headings. Rows without text are left out.

    Args:
        name: Hub name, a directory (data files, or what `save_to_disk` wrote) or a data file.
        config: Configuration, of data sets that have several.
        split: Split.
        text_column: See `read_row`.

    Raises:
        ConfigError: When `datasets` is not installed.
        RequestError: When the data set or split cannot be opened.
    """
    try:
        import datasets
    except ImportError as err:
        raise ConfigError(
            f"the data set '{name}' needs the package 'datasets', which is not installed. "
            "Run in foretoken's repository: pip install '.[datasets]'. Or pass files with --jsonl or --text."
        ) from err
    hint = "" if config is None else f" ({config})"
    opening = f"split '{split}' of data set '{name}'{hint} cannot be opened"
    with foreign_errors_as(RequestError, lambda err: f"{opening}: {one_line(err)}."):
        rows, total = _open(datasets, name, config, split)

    def records() -> Iterator[Record]:
        reading, ours = f"data set '{name}' cannot be read", (ConfigError, RequestError)
        with foreign_errors_as(RequestError, lambda err: f"{reading}: {one_line(err)}.", passing=ours):
            found = _rows(rows, f"{name}[{split}]", text_column)
            yield from _articles(found)

    shown = name if config is None else f"{name}/{config}"
    return Source(name=f"{shown}[{split}]", records=records, total=total, unit="rows")


def _open(datasets: Any, name: str, config: str | None, split: str) -> tuple[Any, int | None]:
    """The rows of a split, to be iterated over, and their number where it is known beforehand."""
    datasets.disable_progress_bars()
    place = Path(name)
    if any((place / file).is_file() for file in ("dataset_dict.json", "state.json")):
        saved = datasets.load_from_disk(name)
        saved = saved[split] if isinstance(saved, dict) else saved
        return saved, len(saved)
    if place.is_file():
        builder = _BUILDERS.get("".join(place.suffixes).removesuffix(".gz"), "")
        if not builder:
            raise ValueError(f"its suffix is none of {', '.join(_BUILDERS)}")
        rows = datasets.load_dataset(builder, data_files={split: str(place)}, split=split, streaming=True)
    else:
        rows = datasets.load_dataset(name, config, split=split, streaming=True)
    known = rows.info.splits or {}
    return rows, known[split].num_examples or None if split in known else None


def _rows(rows: Any, where: str, text_column: str) -> Iterator[Record]:
    """Records of rows."""
    for number, row in enumerate(rows):
        record = read_row(row, f"{where} row {number}", text_column=text_column, size=1)
        if record is not None:
            yield record


def _articles(records: Iterator[Record]) -> Iterator[Record]:
    """Records, joined at WikiText's headings when the first of them is one."""
    first = next(records, None)
    if first is None:
        return
    if not _is_heading(first):
        yield first
        yield from records
        return
    lines, size = [first.text], first.size
    begin = first
    for record in records:
        if _is_heading(record):
            yield replace(begin, text="".join(lines), size=size)
            begin, lines, size = record, [], 0
        lines.append(record.text)
        size += record.size
    yield replace(begin, text="".join(lines), size=size)


def _is_heading(record: Record) -> bool:
    """Whether a plain text record is the title of an article."""
    return record.prompt is None and record.messages is None and _HEADING.fullmatch(record.text) is not None
