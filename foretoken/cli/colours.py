"""Colours of text on a terminal, and when there are any."""

from __future__ import annotations

import os
import unicodedata
from typing import TYPE_CHECKING, TextIO

from foretoken.cli.terminal import visible

if TYPE_CHECKING:
    from collections.abc import Iterable

DIM = "2"
COLOURS = ("32", "36", "35", "33", "34", "31", "92", "96", "95", "93", "94", "91")  # SGR codes, as the theme shows them
_JOINER = "\u200d"


def has_colours(stream: TextIO, wish: bool | None) -> bool:
    """Whether to colour what goes to a stream.

    Args:
        stream: Standard output or error.
        wish: What the command line says; None leaves it to the stream and to https://no-color.org.
    """
    if wish is not None:
        return wish
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def painted(text: str, colour: str | None) -> str:
    """Text in a colour; None leaves it as it is."""
    return text if colour is None or not text else f"\x1b[{colour}m{text}\x1b[0m"


def runs(characters: Iterable[tuple[str, str | None]]) -> list[tuple[str, str | None]]:
    """Characters with their colours as runs of one colour.

    A character that a terminal draws together with the one before it (a combining mark, a variation selector, whatever
    is joined to an emoji) has that one's colour: an escape sequence between them would tear them apart.
    """
    found: list[tuple[str, str | None]] = []
    last = ""
    for char, colour in characters:
        if found and (found[-1][1] == colour or _belongs_to(last, char)):
            found[-1] = (found[-1][0] + char, found[-1][1])
        else:
            found.append((char, colour))
        last = char
    return found


def safe_and_painted(characters: Iterable[tuple[str, str | None]], *, is_visible: bool) -> str:
    """Coloured text; `is_visible` makes control characters in it escapes."""
    return "".join(painted(visible(text) if is_visible else text, colour) for text, colour in runs(characters))


def _belongs_to(before: str, char: str) -> bool:
    """Whether a terminal draws a character in the cell of the one before it."""
    return _JOINER in (before, char) or unicodedata.category(char) in {"Mn", "Me", "Mc"}
