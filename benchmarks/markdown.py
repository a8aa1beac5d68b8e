"""Tables in Markdown."""

from collections.abc import Sequence


def markdown_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [headings, ["---"] * len(headings), *lines])
