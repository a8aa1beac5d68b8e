"""What a request asks of sampling and stopping: a validated value with vLLM's field names."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from foretoken.core.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

GREEDY_BELOW = 1e-5  # a temperature under this is greedy decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it stops.

    Attributes:
        n: Independent completions of the prompt.
        temperature: 0 means greedy decoding.
        top_k: Keep the k most probable tokens; 0 or -1 keeps all.
        top_p: Keep the smallest set of tokens whose probability reaches p.
        min_p: Keep tokens with at least this fraction of the most probable token's probability.
        repetition_penalty: Divides positive and multiplies negative logits of tokens seen in prompt or output.
        presence_penalty: Subtracted once from the logit of every token already in the output.
        frequency_penalty: Subtracted once per occurrence in the output.
        logit_bias: Token id to the number, -100..100, added to its logit.
        bad_words: Token sequences, or strings, that must not appear.
        min_tokens: End-of-sequence and stop token ids are impossible before this many output tokens.
        max_tokens: Most output tokens; None means up to the context limit.
        stop: Strings that end the text.
        stop_token_ids: Token ids that end the text.
        ignore_eos: Goes on after the end-of-sequence token.
        include_stop_str_in_output: Keeps the stop string or stop token in the text.
        seed: Makes sampled text reproducible: the same seed gives the same text for every drafter, tree and batch.
        logprobs: Return the log-probability of each output token and of this many most probable ones.
        skip_special_tokens: Leaves special tokens out of the text.

    Raises:
        RequestError: When a value is outside its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[str | Sequence[int]] = ()
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    seed: int | None = None
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Checks ranges."""
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        _check_range("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _check_range("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _check_range("n", self.n, 1, 128)
        _check_range("top_k", self.top_k, -1, math.inf)
        _check_range("min_tokens", self.min_tokens, 0, math.inf)
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 1, math.inf)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}. Expected at most as many."
                )
        if self.logprobs is not None:
            _check_range("logprobs", self.logprobs, 0, 1024)
        for token, bias in self.logit_bias.items():
            _check_range("a token id of logit_bias", token, 0, math.inf)
            _check_range(f"logit_bias[{token}]", bias, -100.0, 100.0)
        if any(not text for text in self.stop_strings):
            raise RequestError("stop holds an empty string. Expected non-empty strings. Leave it out.")
        if any(len(word) == 0 for word in self.bad_words):
            raise RequestError("bad_words holds an empty word. Expected at least one token each. Leave it out.")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        """Whether the temperature means greedy decoding."""
        return self.temperature < GREEDY_BELOW

    @property
    def is_plain(self) -> bool:
        """Whether temperature is all that changes the target's law."""
        return not (
            self.has_penalties or self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.logit_bias
            or self.bad_words or self.min_tokens
        )  # fmt: skip

    @property
    def has_penalties(self) -> bool:
        """Whether any processor reads the token history's counts."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


def _check_range(name: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    """Raises `RequestError` unless `value` lies in [low, high], or (low, high] when `low_open`; NaN never does."""
    inside = (low < value if low_open else low <= value) and value <= high
    if not inside:
        below = "above" if low_open else "at least"
        upper = "" if high == math.inf else f" and at most {high:g}"
        raise RequestError(f"{name} is {value}. Expected {below} {low:g}{upper}.")
