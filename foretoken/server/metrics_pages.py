"""Pages of figures of several servers as one page."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def merged_pages(pages: Iterable[str]) -> str:
    """One page in Prometheus' text format, each family once with the samples of all pages.

    Args:
        pages: In that format; their samples differ in a label.
    """
    families: dict[str, tuple[list[str], list[str]]] = {}
    for page in pages:
        name = ""
        for line in page.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
            heading, samples = families.setdefault(name, ([], []))
            if not line.startswith("#"):
                samples.append(line)
            elif line not in heading:
                heading.append(line)
    return "".join(f"{line}\n" for heading, samples in families.values() for line in (*heading, *samples))
