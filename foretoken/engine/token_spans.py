"""Which characters of a text came from which of its tokens."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from foretoken.engine.detokenizer import Detokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from foretoken.engine.codec import Codec


class TokenSpans:
    """Follows one sequence's output token by token.

    A character belongs to the token with which it became certain: of several tokens that make one character, to the
    last. Stop strings may have cut the text that a caller gets; its characters are the first ones here.
    """

    def __init__(self, codec: Codec, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        """Begins behind a prompt, of which the last few tokens matter."""
        self._detokenizer = Detokenizer(codec, prompt, skip_special_tokens=skip_special_tokens)

    @property
    def text(self) -> str:
        """What is certain so far."""
        return self._detokenizer.text

    def push(self, tokens: Iterable[int]) -> None:
        """Adds tokens."""
        for token in tokens:
            self._detokenizer.push(token)

    def token_of(self, character: int) -> int:
        """The place among the tokens of the one that a character came from; the last one for what is held back."""
        ends = self._detokenizer.ends
        return min(bisect_right(ends, character), len(ends) - 1)

    def parts(self, text: str) -> list[str]:
        """What each token brought to a text: as many as there are tokens, together the text."""
        ends = [*self._detokenizer.ends[:-1], len(text)] if self._detokenizer.ends else []
        return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
