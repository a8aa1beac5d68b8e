"""Turns tokens into text as they come; never takes a character back."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from foretoken.text.codec import REPLACEMENT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from foretoken.text.codec import Codec

_TOGETHER = 32  # tokens that are decoded at once


class Detokenizer:
    """Decodes one sequence's output incrementally.

    A token's text can depend on the tokens before it, so a few of them are decoded again. Text that ends inside a
    character is held back until the character is whole. The text does not depend on how many tokens come at once.

    Attributes:
        text: The certain text so far.
        ends: For each token the number of certain characters. If several tokens make one character, the last one has
            it.
    """

    def __init__(self, codec: Codec, prompt: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._codec, self._skip = codec, skip_special_tokens
        self._tokens = list(prompt[-5:])  # context for the first token
        self._read = len(self._tokens)
        self._prefix = 0
        self.text = ""
        self.ends: list[int] = []

    def push(self, token: int) -> str:
        """Adds a token; returns the text that became certain, which may be empty."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._prefix : self._read])
        now = self._decode(self._tokens[self._prefix :])
        new = "" if now.endswith(REPLACEMENT) else now[len(before) :]
        if new:
            self._prefix, self._read = self._read, len(self._tokens)
            self.text += new
        self.ends.append(len(self.text))
        return new

    def push_all(self, tokens: Sequence[int]) -> None:
        """Adds several tokens; the result is that of `push` for each, in less time for most text."""
        for start in range(0, len(tokens), _TOGETHER):
            some = tokens[start : start + _TOGETHER]
            if not self._push_together(some):
                for token in some:
                    self.push(token)

    def _push_together(self, tokens: Sequence[int]) -> bool:
        """Adds tokens if each adds its own text alone, which decoding them together confirms; returns whether it did.

        Bytes of a character, hidden tokens, and text that changes beside other text need `push`.
        """
        added = [self._codec.added(token, skip_special_tokens=self._skip) for token in tokens]
        text = "".join(part for part in added if part is not None)
        if len(tokens) < 2 or None in added:
            return False
        window = self._tokens[self._prefix :]
        if self._decode([*window, *tokens]) != self._decode(window[: self._read - self._prefix]) + text:
            return False
        self._tokens.extend(tokens)
        self._prefix, self._read = len(self._tokens) - 1, len(self._tokens)
        for part in filter(None, added):
            self.text += part
            self.ends.append(len(self.text))
        return True

    def flush(self) -> str:
        """Returns the held-back text, incomplete characters included."""
        before = self._decode(self._tokens[self._prefix : self._read])
        rest = self._decode(self._tokens[self._prefix :])[len(before) :]
        self._prefix = self._read = len(self._tokens)
        self.text += rest
        return rest

    def _decode(self, tokens: list[int]) -> str:
        if len(tokens) == 1:
            return self._codec.alone(tokens[0], skip_special_tokens=self._skip)
        return self._codec.decode(tokens, skip_special_tokens=self._skip)


class StopStrings:
    """Finds stop strings in growing text, and tells how much of the text can be shown."""

    def __init__(self, stops: Sequence[str], *, keep: bool) -> None:
        """Looks for `stops`; `keep` leaves the stop string in the text."""
        self._stops, self._keep = stops, keep
        self.is_empty = not stops
        self._held_back = max((len(stop) for stop in stops), default=1) - 1

    def find(self, text: str, num_new: int) -> tuple[str, int] | None:
        """Returns the first stop string that ends in the last `num_new` characters, and where to cut; else None."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            at = text.find(stop, max(0, len(text) - num_new - len(stop) + 1))
            if at >= 0 and (best is None or at < best[0]):
                best = (at, stop)
        if best is None:
            return None
        at, stop = best
        return stop, at + len(stop) * self._keep

    def showable(self, text: str) -> int:
        """Returns the number of characters that no stop string can cut any more."""
        return len(text) - min(self._held_back, len(text))


class TokenSpans:
    """Maps the characters of one sequence's output to its tokens.

    If several tokens make one character, it belongs to the last of them. A stop string may have cut the caller's text;
    its characters are the first ones here.
    """

    def __init__(self, codec: Codec, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        """Begins after a prompt; only its last tokens matter."""
        self._detokenizer = Detokenizer(codec, prompt, skip_special_tokens=skip_special_tokens)

    @property
    def text(self) -> str:
        """The certain text so far."""
        return self._detokenizer.text

    def push(self, tokens: Iterable[int]) -> None:
        """Adds tokens."""
        for token in tokens:
            self._detokenizer.push(token)

    def token_of(self, character: int) -> int:
        """Returns the index of a character's token; the last token for held-back text."""
        ends = self._detokenizer.ends
        return min(bisect_right(ends, character), len(ends) - 1)

    def parts(self, text: str) -> list[str]:
        """Splits a text by token; returns one part for each token."""
        ends = [*self._detokenizer.ends[:-1], len(text)] if self._detokenizer.ends else []
        return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
