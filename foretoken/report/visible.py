r"""Token text made safe and legible on a page: control and bidirectional characters as escapes (`\x1b`, `\u202e`).

HTML's own characters are left to the template engine and to the script, neither of which ever takes text for markup.
"""

from __future__ import annotations

import unicodedata

_KEPT = "\u200c\u200d"  # joiners that emoji and several scripts need
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp", "Co"}


def visible(text: str, kept: str = "\n\t") -> str:
    """Text in which characters that a browser would obey or hide are escapes.

    Args:
        text: Anything.
        kept: Control characters that stay.
    """
    return "".join(char if char in kept or char in _KEPT or not _is_hidden(char) else _escape(char) for char in text)


def label(text: str) -> str:
    r"""A token in one line: white space that would not be seen is a symbol."""
    text = visible(text, kept="\n\t ")
    if not text:
        return "(no text)"
    return text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "␣" if not text.strip(" ") else " ")


def _is_hidden(char: str) -> bool:
    return unicodedata.category(char) in _HIDDEN


def _escape(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")
