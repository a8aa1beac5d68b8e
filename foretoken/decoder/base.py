"""The decoder interface: a decoder turns tokens into logits. Runners differ in their decoder alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from foretoken.core.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from foretoken.core.passes import Pass


class UnsuitableError(ModelError):
    """A decoder does not know the model's architecture, or cannot run on this machine; another decoder must serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOutput:
    """The result of a pass.

    Attributes:
        logits: (R, V) float32, of `Pass.logit_rows`; None if none were asked for.
        features: (M, F, D) in the model's dtype, tapped features in the order of the taps; None without taps and for
            passes without features.
        chosen: (R,) int64, the token after each row by `Pass.choice`, the lowest among equals; -1 if the largest logit
            is not finite. None if the decoder chooses no tokens; impossible tokens then keep their logits.
        attention: (S, L, Hk, C) float32, softmax weights over the cache rows 0..C-1 of each sequence, summed over the
            sequence's tokens of `Pass.attention_rows` and over the query heads of each KV head. C is the most rows of a
            sequence, prefix and nodes; 0 for rows that no such token sees. L is the
            number of layers run. None without `attention_rows`.
    """

    logits: Tensor | None
    features: Tensor | None
    chosen: Tensor | None = None
    attention: Tensor | None = None

    @property
    def needed_logits(self) -> Tensor:
        """The logits of a pass that asked for some; raises `RuntimeError` if there are none."""
        if self.logits is None:
            raise RuntimeError("this pass has no logits")
        return self.logits

    def attention_over(self, counts: Sequence[int]) -> list[Tensor | None] | None:
        """Returns the weights over the first `counts` rows of each sequence; None for no rows, and without weights."""
        if self.attention is None:
            return None
        return [self.attention[row, :, :, :count] if count else None for row, count in enumerate(counts)]

    def without_first(self, num_tokens: int, num_sequences: int) -> PassOutput:
        """Returns features and attention without those of the first tokens and sequences of the pass."""
        features, attention = self.features, self.attention
        return PassOutput(
            logits=None,
            features=None if features is None else features[num_tokens:],
            attention=None if attention is None else attention[num_sequences:],
        )


class Decoder(Protocol):
    """Computes a forward pass over new tokens of several sequences, on a slot cache.

    Attributes:
        name: Shown in reports.
        is_exact: Whether a token gets the same bits in every pass and with any number of threads. Speculative and plain
            decoding then agree bit for bit. Otherwise they round differently, and two tokens with nearly equal scores
            can swap.
    """

    name: str
    is_exact: bool

    def run(self, work: Pass) -> PassOutput:
        """Computes every token of a pass; writes its keys and values to the cache row of its node.

        Raises `PassError` if something does not fit the model or the cache, or a weight's memory was freed.
        """
        ...
