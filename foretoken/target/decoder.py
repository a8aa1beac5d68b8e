"""What turns tokens into logits: the one thing in which the runners differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from foretoken.core.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from foretoken.attention.layout import AttentionLayout


class UnsuitableError(ModelError):
    """A decoder does not know the model's architecture, or cannot run on this machine: another one has to serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOutput:
    """What a pass gives back.

    Attributes:
        logits: (B, T, V) float32.
        features: (B, T, F, D) in the model's dtype, tapped features in the order asked for, or None without taps.
    """

    logits: Tensor
    features: Tensor | None


class Decoder(Protocol):
    """One forward pass over new tokens of several sequences, on a slot cache it was made for.

    Attributes:
        name: Named in reports.
        is_exact: Whether a token gets the same bits whatever the width of its pass, the other sequences of the batch
            and the number of threads. Speculative and plain decoding then agree bit for bit; without it they round
            differently, and two tokens whose scores agree to the last bits can swap.
    """

    name: str
    is_exact: bool

    def run(self, tokens: Tensor, layout: AttentionLayout) -> PassOutput:
        """Logits of every token; writes the tokens' rows after prefix and scratch rows.

        Args:
            tokens: (B, T) int64.
            layout: Positions, slots and who sees what.

        Raises:
            PassError: When something does not fit the model or the cache, or a weight's memory was freed.
        """
        ...

    def fill(self, tokens: Tensor, layout: AttentionLayout) -> Tensor | None:
        """As `run`, without logits; gives the features."""
        ...
