"""Prompts that completions begin with: their text and log-probabilities, and answers that hold nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from foretoken.server.answers import completion_entries

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.core.results import Logprob, RequestOutput, StreamChunk
    from foretoken.entrypoints.llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoedPrompt:
    """A prompt that its completions begin with.

    Attributes:
        text: As it was given, or that of its token ids.
        first_token: Its first token as text, for which there is no log-probability.
        entries: Its tokens with their log-probabilities, in the lists of `completion_entries`; None while they are not
            known, and where nobody asked.
    """

    text: str
    first_token: str
    entries: dict[str, Any] | None = None

    @classmethod
    def read(cls, llm: LLM, text: str | None, token_ids: list[int]) -> EchoedPrompt:
        """A prompt that was not scored.

        Args:
            llm: Whose tokens these are.
            text: As it was given; None where it came as token ids.
            token_ids: All of it.

        Raises:
            RequestError: When the model has no tokenizer, or that fails.
        """
        return cls(text=llm.decode(token_ids) if text is None else text, first_token=llm.decode(token_ids[:1]))

    def scored(self, logprobs: Sequence[dict[int, Logprob] | None], num_top: int) -> EchoedPrompt:
        """The same with log-probabilities.

        Tokens begin in the text where those before them end; a first one that is no part of the text, as the tokenizer
        adds it, takes no characters.

        Args:
            logprobs: Of every token, see `RequestOutput.prompt_logprobs`.
            num_top: Alternatives of each token.
        """
        begin = len(self.first_token) if self.text.startswith(self.first_token) else 0
        rest = completion_entries([entry for entry in logprobs if entry is not None], num_top, begin)
        return replace(self, entries={
            "tokens": [self.first_token, *rest["tokens"]],
            "token_logprobs": [None, *rest["token_logprobs"]],
            "top_logprobs": [None, *rest["top_logprobs"]],
            "text_offset": [0, *(min(offset, len(self.text)) for offset in rest["text_offset"])],
        })  # fmt: skip


def prompt_alone(output: RequestOutput) -> RequestOutput:
    """A result without what was generated behind its prompt."""
    outputs = [
        replace(
            each, text="", token_ids=[], logprobs=None if each.logprobs is None else [], finish_reason="length",
            stop_reason=None,
        )
        for each in output.outputs
    ]  # fmt: skip
    return replace(output, outputs=outputs)


def chunk_alone(chunk: StreamChunk) -> StreamChunk:
    """The chunk of a completion's only token, without it; one that failed still says so."""
    is_over = chunk.finish_reason in ("stop", "length")
    return replace(
        chunk, text="", token_ids=[], logprobs=None if chunk.logprobs is None else [], is_drafted=(), parts=(),
        finish_reason="length" if is_over else chunk.finish_reason, stop_reason=None,
    )  # fmt: skip
