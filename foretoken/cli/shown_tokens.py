"""`foretoken generate --show`: prints the text as it comes, with every accepted token in its drafter's colour."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections import Counter
from typing import TYPE_CHECKING, TextIO

from foretoken.cli import terminal
from foretoken.cli.terminal import visible
from foretoken.text.codec import Codec, Detokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from foretoken.core.records import StepRecord

DIM = "2"
COLOURS = ("32", "36", "35", "33", "34", "31", "92", "96", "95", "93", "94", "91")  # SGR codes
_JOINER = "\u200d"


def has_colours(stream: TextIO, wish: bool | None) -> bool:
    """Decides whether to colour a stream; without the user's `wish` by the stream and https://no-color.org."""
    if wish is not None:
        return wish
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def painted(text: str, colour: str | None) -> str:
    """Returns a text in a colour; None for no colour."""
    return text if colour is None or not text else f"\x1b[{colour}m{text}\x1b[0m"


def runs(characters: Iterable[tuple[str, str | None]]) -> list[tuple[str, str | None]]:
    """Groups characters with their colours into runs of one colour.

    A character that a terminal joins to the previous one (a combining mark, a variation selector, a part of an emoji)
    has the same colour: an escape sequence between them would separate them.
    """
    found: list[tuple[str, str | None]] = []
    last = ""
    for char, colour in characters:
        is_joined = _JOINER in (last, char) or unicodedata.category(char) in {"Mn", "Me", "Mc"}
        if found and (found[-1][1] == colour or is_joined):
            found[-1] = (found[-1][0] + char, found[-1][1])
        else:
            found.append((char, colour))
        last = char
    return found


def safe_and_painted(characters: Iterable[tuple[str, str | None]], *, is_visible: bool) -> str:
    """Returns coloured text; `is_visible` turns control characters into escapes."""
    return "".join(painted(visible(text) if is_visible else text, colour) for text, colour in runs(characters))


class ShownTokens:
    """Colours one completion: the target's own tokens are plain, accepted tokens have their drafter's colour."""

    def __init__(self, codec: Codec, prompt: Sequence[int], *, colour: bool | None, raw: bool) -> None:
        """Begins a text.

        Args:
            codec: The tokenizer.
            prompt: Token ids of the prompt.
            colour: The wish of the command line; None to decide by the streams.
            raw: Whether a terminal gets control characters unescaped.
        """
        self._spans = Detokenizer(codec, prompt)
        self._origins: list[tuple[str, ...]] = []  # of each token; empty for the target's own
        self._colours: dict[tuple[str, ...], str] = {}
        self._shown = self._passes = 0
        self._is_coloured = has_colours(sys.stdout, colour)
        self._is_legend_coloured = has_colours(sys.stderr, colour)
        self._is_visible = sys.stdout.isatty() and not raw

    def add_step(self, record: StepRecord) -> None:
        """Begins a text.

        `colour` is the wish of the command line, None to decide by the streams. `raw` shows control characters
        unescaped on a terminal.
        """
        step = record.sequences[0]
        self._passes += 1
        self._spans.push_all(step.tokens)
        self._origins += [*step.accepted_from, *[()] * (len(step.tokens) - step.num_accepted)]
        for origin in step.accepted_from:
            self._colours.setdefault(origin, COLOURS[len(self._colours) % len(COLOURS)])

    def write_prompt(self, text: str) -> None:
        """Writes the prompt, dimmed."""
        self._write_characters([(char, DIM) for char in text])

    def write_text(self, text: str) -> None:
        """Writes the next characters of the text."""
        places = range(self._shown, self._shown + len(text))
        self._write_characters([(char, self._colour(place)) for char, place in zip(text, places, strict=True)])
        self._shown += len(text)

    def note_summary(self) -> None:
        """Prints on standard error the legend of the colours, and how many tokens came from each drafter."""
        counts = Counter(self._origins)
        total = max(len(self._origins), 1)
        parts = [
            f"{painted(terminal.visible(' and '.join(origin)), colour if self._is_legend_coloured else None)} "
            f"{counts[origin]} ({counts[origin] / total:.0%})"
            for origin, colour in self._colours.items()
        ]
        own = f"the target's own {counts[()]} ({counts[()] / total:.0%})"
        tau = len(self._origins) / max(self._passes, 1)
        terminal.side_output(f"[{', '.join(['tokens: ' + own, *parts])}; tau {tau:.2f}]\n")

    def _colour(self, place: int) -> str | None:
        return self._colours.get(self._origins[self._spans.token_of(place)]) if self._origins else None

    def _write_characters(self, characters: list[tuple[str, str | None]]) -> None:
        if not self._is_coloured:
            characters = [(char, None) for char, _ in characters]
        sys.stdout.write(safe_and_painted(characters, is_visible=self._is_visible))
        sys.stdout.flush()
