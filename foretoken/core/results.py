"""Results of a request, and metrics of a running engine, as in vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from foretoken.core.records import GenerationMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric; the name is vLLM's ("vllm:generation_tokens") or our own ("foretoken:target_passes")."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter(Metric):
    """A count so far."""

    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge(Metric):
    """A value at this moment."""

    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector(Metric):
    """Counts so far by position, from 0."""

    values: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """Log-probability of a token under the target, before temperature and processors.

    Attributes:
        logprob: Natural logarithm of the probability.
        rank: Rank by probability, from 1; equal tokens share the best rank.
        decoded_token: The token alone as text, or None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: 0..n-1.
        text: Decoded output, without the prompt and without the stop string or stop token.
        token_ids: Output tokens, including the end-of-sequence token if it was generated.
        cumulative_logprob: Sum of the output tokens' log-probabilities, or None without `logprobs`.
        logprobs: For each output token a mapping from token id to `Logprob`: the output token first, then the most
            probable ones, best first. None if not requested.
        finish_reason: "stop", "length", "error" (see `error`), or "abort" (the request was aborted).
        stop_reason: The stop string or token id that ended the text, or None.
        error: The reason for "error": the target's logits were not finite, no token was possible, or decoding failed.
            None otherwise.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None = None

    def finished(self) -> bool:
        """Whether the completion is over; a method, as in vLLM."""
        return self.finish_reason is not None


class TextPart(NamedTuple):
    """The certain text of one token, and the names of the drafters that proposed the token, if any.

    If several tokens make one character, the last token has the character.
    """

    text: str
    accepted_from: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChunk:
    """New text of one completion.

    Attributes:
        request_id: Unique within the `LLM`.
        prompt_index: Position of the prompt in the call.
        index: Index among its n completions.
        text: Text that became certain since the last chunk.
        token_ids: Tokens generated since the last chunk.
        finish_reason: Set in the last chunk, with `stop_reason` and `error`; see `CompletionOutput`.
        stop_reason: The stop string or token id that ended the text, or None.
        logprobs: One entry for each of its tokens, see `CompletionOutput`; None if not requested.
        error: The reason for "error", or None.
        is_drafted: For each of its tokens whether it was an accepted draft.
        parts: Its text by token; joined they are `text`.
        prompt_logprobs: In the first chunk of the first completion, see `RequestOutput`. None in all others, if not
            requested, and if the prompt was not read to its end.
    """

    request_id: str
    prompt_index: int
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    error: str | None = None
    is_drafted: Sequence[bool] = ()
    parts: Sequence[TextPart] = ()
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The result of one prompt.

    Attributes:
        request_id: Unique within the `LLM`.
        prompt: The prompt as text; None for a prompt of token ids.
        prompt_token_ids: The prompt as token ids.
        outputs: n completions.
        metrics: Counts and seconds over all n completions.
        prompt_logprobs: For each prompt token a mapping as in `CompletionOutput.logprobs`; None for the first token.
            None as a whole if not requested.
        num_cached_tokens: Prompt tokens of the first completion that the prefix cache held; None before it began.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: Sequence[CompletionOutput]
    metrics: GenerationMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None

    @property
    def finished(self) -> bool:
        """Whether all completions are over."""
        return all(output.finish_reason is not None for output in self.outputs)
