"""Which text of a stream was drafted, for pages that show it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foretoken.engine.codec import Codec
from foretoken.engine.token_spans import TokenSpans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.core.results import StreamChunk
    from foretoken.engine.llm import LLM


class TokenOrigins:
    """Follows one completion."""

    def __init__(self, llm: LLM, prompt: Sequence[int], *, skip_special_tokens: bool) -> None:
        """Begins behind a prompt.

        Args:
            llm: Writes the completion.
            prompt: Token ids, of which the last few matter.
            skip_special_tokens: As its parameters say.
        """
        codec = Codec(llm.tokenizer, llm.target.vocab_size)
        self._spans = TokenSpans(codec, prompt, skip_special_tokens=skip_special_tokens)
        self._is_drafted: list[bool] = []
        self._num_shown = 0

    def of(self, chunk: StreamChunk) -> list[dict[str, Any]]:
        """The text of a chunk by the tokens that it came from, as `text` and `is_drafted`."""
        self._spans.push(chunk.token_ids)
        self._is_drafted += chunk.is_drafted
        parts: list[dict[str, Any]] = []
        last = None
        for at, character in enumerate(chunk.text, start=self._num_shown):
            token = self._spans.token_of(at)
            if token != last:
                parts.append({"text": "", "is_drafted": self._is_drafted[token]})
                last = token
            parts[-1]["text"] += character
        self._num_shown += len(chunk.text)
        return parts
