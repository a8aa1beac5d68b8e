r"""Prints text and tables for people, with control characters escaped and tables fitted to the terminal's width.

A prompt, a model's output or a file name may hold escape sequences that recolour, move or rewrite the terminal's
text, and bidirectional controls that reorder it. On a terminal such characters are written as escapes (`\x1b`).
Files and pipes get the text unchanged, and so does a terminal if the user asks for it.
"""

import logging
import os
import re
import shutil
import sys
import textwrap
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from types import MappingProxyType
from typing import Any, Self, TextIO

from typing_extensions import override

_KEPT = "\n\t\u200c\u200d"  # newline, tab, and the joiners that emoji and several scripts need
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls, invisible formatting, surrogates, line and paragraph separators
_DEPTHS = 8  # levels of a draft in a table of acceptance; a choice: fits 80 columns
_UNBOUNDED = 10_000  # columns of a table that goes to a file or pipe; wider than any table


def visible(text: str) -> str:
    r"""Returns a text with control characters as escapes, such as `\x1b` and `\u202e`; newline and tab stay.

    Handles every character by itself, so that a stream may be converted piece by piece.
    """
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(
        char.encode("unicode_escape", "surrogatepass").decode("ascii")
        if char not in _KEPT and unicodedata.category(char) in _HIDDEN
        else char
        for char in text
    )


def print_text(text: str, *, raw: bool = False) -> None:
    """Writes text to standard output, at once; raw: whether a terminal gets control characters unescaped."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() and not raw else text)
    sys.stdout.flush()


def print_line(line: str) -> None:
    """Writes a line to standard output."""
    print_text(f"{line}\n")


def fact(name: str, value: Any, width: int) -> None:
    r"""Writes a name and a value, which is wrapped below itself; a newline inside the value is shown as `\n`."""
    prose(f"{name.replace('_', ' '):{width}}  " + str(value).replace("\n", "\\n"), " " * (width + 2))


def prose(text: str, indent: str = "") -> None:
    """Writes a line to standard output, wrapped on a narrow terminal; indent: of all lines but the first."""
    print_line(_filled(visible(text), indent) if sys.stdout.isatty() else text)


def conditions(values: Mapping[str, Any]) -> None:
    """Writes the conditions of a measurement: every value that is not None, by name."""
    prose(" ".join(f"{key}={value}" for key, value in values.items() if value is not None))


def print_note(line: str) -> None:
    """Writes a line to standard error, with control characters escaped; see `prose` and `side_output`."""
    shown = visible(line)
    side_output(f"{_filled(shown) if sys.stderr.isatty() else shown}\n")


def side_output(text: str) -> None:
    """Writes text to standard error, at once; drops text that cannot be written (a full disk, a closed pipe).

    Notes and progress are not results: a failed write changes neither the work nor the exit code.
    """
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        _discard(sys.stderr)


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str | None = None,
    texts: Sequence[str] = (),
    colours: Mapping[str, str] = MappingProxyType({}),
    num_keys: int = 1,
) -> None:
    """Prints a table: the first column is text and may be wrapped, the others are numbers unless they are in `texts`.

    A table wider than the terminal is split into several; each repeats the first `num_keys` columns.

    Args:
        texts: Headings of further columns of text. On a terminal a line then separates the rows.
        colours: The colours of cells, by their text.
        num_keys: The number of first columns that name a row.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if title is not None:
        prose(title)
    # Files and pipes get unwrapped lines, so that they can be searched.
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNBOUNDED
    cells = [[visible(cell) for cell in row] for row in rows]
    are_texts = [not index or column in texts for index, column in enumerate(columns)]
    widths = [
        _width(column, room // 2 if is_text else None)
        for column, is_text in zip(zip(columns, *cells, strict=True), are_texts, strict=True)
    ]
    for part in _parts(widths, room, num_keys):
        # Spaces between columns: lines would take a third of 80 columns.
        table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False, leading=int(bool(texts) and sys.stdout.isatty()))
        for index in part:
            table.add_column(
                Text(columns[index]), justify="left" if are_texts[index] else "right", overflow="fold",
                # rich takes the room from the widest column that may wrap, which one of a single word cannot give.
                no_wrap=all(len(row[index]) <= widths[index] for row in cells), min_width=widths[index],
            )  # fmt: skip
        for row in cells:
            table.add_row(*(Text(row[index], style=colours.get(row[index], "")) for index in part))
        narrowest = sum(widths[index] for index in part) + len(part) + 1
        Console(width=max(room, narrowest)).print(table, crop=False, soft_wrap=False)


@contextmanager
def growing_table(
    columns: Sequence[str], widest: Sequence[str], *, title: str | None = None, num_keys: int = 1
) -> Iterator[Callable[[Sequence[str]], None]]:
    """Yields a function that prints a row at once; a table wider than the terminal is printed as a whole at the end.

    Args:
        widest: The longest cell that is expected in each column.
        title: See `print_table`, as for `num_keys`.
    """
    widths = [max(map(len, pair)) for pair in zip(columns, widest, strict=True)]
    fits = not sys.stdout.isatty() or sum(widths) + len(widths) + 1 <= shutil.get_terminal_size().columns
    rows: list[Sequence[str]] = []

    def line(cells: Sequence[str]) -> str:
        first, *others = (visible(cell) for cell in cells)
        return " ".join(["", first.ljust(widths[0]), *map(str.rjust, others, widths[1:])])

    def add(row: Sequence[str]) -> None:
        if fits and not rows:
            if title is not None:
                prose(title)
            print_line(f"{line(columns)}\n {'─' * (sum(widths) + len(widths) - 1)}")
        if fits:
            print_line(line(row))
        rows.append(row)

    yield add
    if rows and not fits:
        print_table(columns, rows, title=title, num_keys=num_keys)


def percent_by_depth(shares: Sequence[float]) -> str:
    """Returns a table cell with the shares at depth 1 to 8 in percent, aligned, with hyphens for missing depths."""
    known = [f"{share * 100:3.0f}" for share in shares[:_DEPTHS]]
    return " ".join([*known, *["  -"] * (_DEPTHS - len(known))])


def _filled(text: str, indent: str = "") -> str:
    """Wraps a text between words to the terminal's width; keeps text in backquotes whole, to be copied."""
    wrapper = textwrap.TextWrapper(
        shutil.get_terminal_size().columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False,
        expand_tabs=False, replace_whitespace=False,
    )  # fmt: skip
    joined = re.sub(r"`[^`\n]*`", lambda code: code[0].replace(" ", "\0"), text)
    return "\n".join("\n".join(wrapper.wrap(line)) for line in joined.split("\n")).replace("\0", " ")


def _width(cells: Sequence[str], most: int | None) -> int:
    pieces = [piece for cell in cells for piece in (cell.split("\n") if most is None else cell.split())]
    longest = max(map(len, pieces), default=0)
    return longest if most is None else min(longest, most)


def _parts(widths: Sequence[int], room: int, num_keys: int) -> list[list[int]]:
    keys = list(range(num_keys))
    parts = [keys]
    for index in range(num_keys, len(widths)):
        used = sum(widths[i] for i in parts[-1]) + len(parts[-1]) + 1
        if len(parts[-1]) > num_keys and used + widths[index] + 1 > room:
            parts.append(keys)
        parts[-1] = [*parts[-1], index]
    return parts


def prepare_streams() -> None:
    """Makes the standard streams safe to use. Changes `sys`.

    Closed streams become the null device, so that no file that is opened later gets their number. Characters that an
    encoding lacks are written as escapes. Raises `OSError` when standard output is closed.
    """
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    for name in closed:
        number = ("stdin", "stdout", "stderr").index(name)
        setattr(sys, name, os.fdopen(_null(number), "r" if name == "stdin" else "w", encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if "stdout" in closed:
        raise OSError("standard output is closed")


def end_output() -> None:
    """Flushes both streams; drops text that cannot be written, since the interpreter would try again."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _discard(stream)


class NoteHandler(logging.Handler):
    """Prints the package's log as notes, one line each."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        prefix = "warning: " if record.levelno >= logging.WARNING else ""
        print_note(f"{prefix}{record.getMessage()}")


def show_log() -> None:
    """Prints the package's log on standard error, from level INFO."""
    logger = logging.getLogger("foretoken")
    if not any(isinstance(handler, NoteHandler) for handler in logger.handlers):
        logger.addHandler(NoteHandler())
    logger.setLevel(logging.INFO)


def _discard(stream: TextIO) -> None:
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, stream.fileno())
    os.close(descriptor)


def _null(number: int) -> int:
    opened = os.open(os.devnull, os.O_RDWR)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
    return number


class ProgressBar:
    """Shows the progress of long work on a terminal's standard error, from the first report to the end of a block."""

    def __init__(self, what: str) -> None:
        """Prepares a bar; `what` names the counted things."""
        self._what = what
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pause()

    def __call__(self, done: int, total: int) -> None:
        """Shows that `done` of `total` things are done."""
        if not sys.stderr.isatty():
            return
        self._bar = self._bar or self._started()
        self._bar.update(self._bar.task_ids[0], completed=done, total=total)

    def pause(self) -> None:
        """Removes the bar until the next report, so that results can be printed in its place."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _started(self) -> Any:
        from rich import progress as rich
        from rich.console import Console

        columns = (
            rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn(),
            rich.TimeElapsedColumn(), rich.TextColumn("left"), rich.TimeRemainingColumn(),
        )  # fmt: skip
        bar = rich.Progress(*columns, console=Console(stderr=True), transient=True)
        bar.add_task(self._what)
        bar.start()
        return bar


class StartClock:
    """Times the stages of a start; on a terminal the running one has a line, which disappears.

    Attributes:
        seconds: Of each stage that has ended, by its name.
    """

    def __init__(self) -> None:
        """Begins with the stage before the command, in seconds of the processor: clocks that may jump are not read."""
        self.seconds = {"Python and command": round(time.process_time(), 3)}

    @contextmanager
    def stage(self, name: str, detail: Callable[[], str] = str) -> Iterator[None]:
        """Times a stage; `detail` returns what its line shows besides the seconds, four times a second."""
        begin = time.perf_counter()
        with _running_line(lambda: f"{name}: {time.perf_counter() - begin:.0f} s{detail()}"):
            yield
        self.seconds[name] = round(time.perf_counter() - begin, 3)

    def print_table(self) -> None:
        """Writes the seconds of each stage to standard error."""
        print_note("start                   seconds")
        for name, seconds in {**self.seconds, "all": sum(self.seconds.values())}.items():
            print_note(f" {name:22} {seconds:7.1f}")


@contextmanager
def _running_line(text: Callable[[], str]) -> Iterator[None]:
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(
        get_renderable=lambda: Text(text(), no_wrap=True, overflow="ellipsis"), console=Console(stderr=True),
        transient=True,
    ) as live:  # fmt: skip
        live.refresh()
        yield


@contextmanager
def renewed_line() -> Iterator[tuple[Callable[[str], None], float]]:
    """Yields a function that shows progress on standard error, and the least seconds between its calls.

    On a terminal one line is renewed; else there is a line every 30 seconds.
    """
    if not sys.stderr.isatty():
        yield print_note, 30.0
        return
    from rich.console import Console

    with Console(stderr=True).status("reading") as status:
        yield status.update, 0.0


@contextmanager
def step_progress(total: int) -> Iterator[Callable[[Any], None]]:
    """Shows a training run: one renewed line on a terminal, else a line now and then.

    Yields a function of a `StepReport`. The run has at most `total` steps. The time left counts evaluations too.
    """
    is_terminal, is_open, shown, evaluated = sys.stderr.isatty(), False, 0.0, ""  # is_open: the line has no end yet
    begin, begun_at = time.monotonic(), -1.0  # the clock, and the share of the run that was done at that time

    def show(report: Any) -> None:
        nonlocal shown, evaluated, begin, begun_at, is_open
        now = time.monotonic()
        is_resumed = begun_at < 0 and report.step > 1  # how much of the run these seconds did is not known yet
        left = (now - begin) * max(1 - report.done, 0.0) / max(report.done - max(begun_at, 0.0), 1e-9)
        if begun_at < 0:  # the first step warms up and is not counted once there is another
            begin, begun_at = now, report.done
        if report.held_out_tau is not None:
            evaluated = f"held-out tau {report.held_out_tau:.3f} (step {report.step})"
        if now - shown < (0.2 if is_terminal else 15.0) and report.step < total:
            return
        shown = now
        minutes, seconds = divmod(round(left + (report.seconds_after or 0.0)), 60)
        parts = [
            f"step {report.step}/{total}",
            *([] if is_resumed else [f"{minutes}:{seconds:02d} left"]),
            f"loss {report.loss:.4f}",
            *([evaluated] if evaluated else ()),
            f"matches {' '.join(f'{share:.0%}' for share in report.head_matches)}",
            f"{report.tokens_per_s:.0f} tokens/s",
            f"lr {report.rate:.1e}",
        ]
        side_output(f"\r\033[K{_fitted(parts)}" if is_terminal else f"{', '.join(parts)}\n")
        is_open = is_terminal and report.step < total
        if is_terminal and not is_open:
            side_output("\n")

    try:
        yield show
    finally:
        if is_open:
            side_output("\n")


def _fitted(parts: list[str]) -> str:
    """Joins the parts that fit a terminal line, the most important first: a wrapped line cannot be renewed."""
    room = shutil.get_terminal_size().columns - 1
    line = parts[0][:room]
    for part in parts[1:]:
        line += f", {part}" if len(line) + 2 + len(part) <= room else ""
    return line
