"""`foretoken generate --show`: the text as it comes, every accepted token in the colour of the drafter it came from."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING

from foretoken.cli import terminal
from foretoken.cli.colours import COLOURS, DIM, has_colours, painted, safe_and_painted
from foretoken.text.detokenizer import TokenSpans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.core.records import StepRecord
    from foretoken.text.codec import Codec


class ShownTokens:
    """Colours one completion: the target's own tokens plain, accepted ones by who proposed them."""

    def __init__(self, codec: Codec, prompt: Sequence[int], *, colour: bool | None, raw: bool) -> None:
        """Begins a text.

        Args:
            codec: The tokenizer.
            prompt: Its token ids.
            colour: What the command line says about colours; None leaves it to the streams.
            raw: Whether control characters reach a terminal as they are.
        """
        self._spans = TokenSpans(codec, prompt)
        self._origins: list[tuple[str, ...]] = []  # of each token; nobody for the target's own
        self._colours: dict[tuple[str, ...], str] = {}
        self._shown = self._passes = 0
        self._is_coloured = has_colours(sys.stdout, colour)
        self._is_legend_coloured = has_colours(sys.stderr, colour)
        self._is_visible = sys.stdout.isatty() and not raw

    def add(self, record: StepRecord) -> None:
        """Takes in an iteration of the one sequence, before its text is written."""
        step = record.sequences[0]
        self._passes += 1
        self._spans.push(step.tokens)
        self._origins += [*step.accepted_from, *[()] * (len(step.tokens) - step.num_accepted)]
        for origin in step.accepted_from:
            self._colours.setdefault(origin, COLOURS[len(self._colours) % len(COLOURS)])

    def write_prompt(self, text: str) -> None:
        """Writes the prompt, dim beside what follows."""
        self._write([(char, DIM) for char in text])

    def write(self, text: str) -> None:
        """Writes the next characters of the text."""
        places = range(self._shown, self._shown + len(text))
        self._write([(char, self._colour(place)) for char, place in zip(text, places, strict=True)])
        self._shown += len(text)

    def note_summary(self) -> None:
        """Says on standard error what the colours mean, and how many tokens came from whom."""
        counts = Counter(self._origins)
        total = max(len(self._origins), 1)
        parts = [
            f"{painted(terminal.visible(_name(origin)), self._legend_colour(origin))} "
            f"{counts[origin]} ({counts[origin] / total:.0%})"
            for origin in self._colours
        ]
        own = f"the target's own {counts[()]} ({counts[()] / total:.0%})"
        tau = len(self._origins) / max(self._passes, 1)
        terminal.side_output(f"[{', '.join(['tokens: ' + own, *parts])}; tau {tau:.2f}]\n")

    def _colour(self, place: int) -> str | None:
        """The colour of the character at a place of the text."""
        return self._colours.get(self._origins[self._spans.token_of(place)]) if self._origins else None

    def _legend_colour(self, origin: tuple[str, ...]) -> str | None:
        return self._colours[origin] if self._is_legend_coloured else None

    def _write(self, characters: list[tuple[str, str | None]]) -> None:
        if not self._is_coloured:
            characters = [(char, None) for char, _ in characters]
        sys.stdout.write(safe_and_painted(characters, is_visible=self._is_visible))
        sys.stdout.flush()


def _name(origin: tuple[str, ...]) -> str:
    """Who proposed a token, in words."""
    return " and ".join(origin)
