"""Which tests a run takes: `--slow no` (the default), `all`, or one share of the slow tests, `3/8`."""

import os
import re
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

_LONG_FILE_S = 20.0  # a file whose tests take longer says why in its first lines: "Slow because …."
_REASON = re.compile(r"Slow because ([^.]+)\.")


def add_option(parser: pytest.Parser) -> None:
    """Adds `--slow`."""
    parser.addoption(
        "--slow", default="no", type=_share, metavar="no|all|K/N",
        help="tests marked slow: none, all, or the K-th of N shares, K from 0",
    )  # fmt: skip


def _share(text: str) -> tuple[int, int]:
    """Returns K and N: slow tests whose node id falls into K of N shares are taken; N = 0 takes none."""
    if text in ("no", "all"):
        return 0, int(text == "all")
    share, _, number = text.partition("/")
    if not (share.isdecimal() and number.isdecimal() and int(share) < int(number)):
        raise pytest.UsageError(f"--slow is '{text}'. Expected no, all, or K/N with K < N, for example 3/8.")
    return int(share), int(number)


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out slow tests of other shares, and tests for a GPU unless FORETOKEN_TEST_DEVICE=cuda asks for them."""
    share, number = config.getoption("--slow")
    has_gpu = os.environ.get("FORETOKEN_TEST_DEVICE") == "cuda"

    def is_taken(item: pytest.Item) -> bool:
        if item.get_closest_marker("gpu") is not None and not has_gpu:
            return False
        is_slow = item.get_closest_marker("slow") is not None
        return not is_slow or (number > 0 and zlib.crc32(item.nodeid.encode()) % number == share)

    config.hook.pytest_deselected(items=[item for item in items if not is_taken(item)])
    items[:] = [item for item in items if is_taken(item)]


def summarize(reporter: pytest.TerminalReporter, root: Path) -> None:
    """Prints how many slow tests of each file ran, and the files that took long."""
    reports = [report for found in reporter.stats.values() for report in found if hasattr(report, "duration")]
    slow = Counter(_file(report) for report in reports if report.when == "call" and "slow" in report.keywords)
    if slow:
        reporter.section("slow tests of this run")
        reporter.write_line(", ".join(f"{file} {number}" for file, number in sorted(slow.items())))
    seconds = Counter[str]()
    for report in reports:
        seconds[_file(report)] += report.duration
    long = [(file, s) for file, s in seconds.most_common() if s > _LONG_FILE_S]
    if long:
        reporter.section(f"files of more than {_LONG_FILE_S:.0f} s; all tests took {seconds.total():.0f} s")
        for file, s in long:
            reporter.write_line(f"{s:6.1f} s  {file}: {_reason(root / file)}")


def _reason(file: Path) -> str:
    match = _REASON.search(" ".join(file.read_text(encoding="utf-8")[:2000].split()))
    return match[1] if match else "gives no reason"


def _file(report: Any) -> str:
    return str(report.nodeid).partition("::")[0]
