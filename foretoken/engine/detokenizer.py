"""Turning committed tokens into text as they come, without ever taking a character back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

_INCOMPLETE = "\ufffd"  # what decoding shows for bytes that do not make a character yet


class Detokenizer:
    """Incremental decoding of one sequence's output.

    Tokens are decoded with the few before them, because a token's text can depend on its neighbours, and text that ends
    inside a character is held back until the character is whole.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._tokens = list(prompt[-5:])  # context for the first token
        self._read = len(self._tokens)
        self._prefix = 0
        self.text = ""

    def push(self, token: int) -> str:
        """Adds a token and gives the text that became certain, which may be empty."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._prefix : self._read])
        now = self._decode(self._tokens[self._prefix :])
        if now.endswith(_INCOMPLETE) or len(now) <= len(before):
            return ""
        self._prefix, self._read = self._read, len(self._tokens)
        self.text += now[len(before) :]
        return now[len(before) :]

    def push_all(self, tokens: Sequence[int]) -> None:
        """Adds several tokens; one by one only where the last of them does not end a character."""
        known, read = len(self._tokens), self._read
        self._tokens.extend(tokens)
        before = self._decode(self._tokens[self._prefix : read])
        now = self._decode(self._tokens[self._prefix :])
        if not now.endswith(_INCOMPLETE) and len(now) > len(before):
            self._prefix, self._read = read, len(self._tokens)
            self.text += now[len(before) :]
            return
        del self._tokens[known:]
        for token in tokens:
            self.push(token)

    def flush(self) -> str:
        """Gives what is held back, incomplete characters included."""
        before = self._decode(self._tokens[self._prefix : self._read])
        rest = self._decode(self._tokens[self._prefix :])[len(before) :]
        self._prefix = self._read = len(self._tokens)
        self.text += rest
        return rest

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)
        return text


class StopStrings:
    """Finds stop strings in growing text and says how much of it can be shown already."""

    def __init__(self, stops: Sequence[str], *, keep: bool) -> None:
        """Looks for `stops`; `keep` leaves the stop string in the text. `is_empty` tells that there is none."""
        self._stops, self._keep = stops, keep
        self.is_empty = not stops
        self._held_back = max((len(stop) for stop in stops), default=1) - 1

    def find(self, text: str, num_new: int) -> tuple[str, int] | None:
        """The first stop string that ends within the last `num_new` characters.

        Returns:
            The stop string and where to cut the text, or None.
        """
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
        """Characters that no stop string can take back."""
        return len(text) - min(self._held_back, len(text))
