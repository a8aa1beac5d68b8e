"""Heads that take one token a step and keep nothing of earlier steps but a state: Medusa, Hydra, the MLP speculator.

Letters as in `base`; W width of a head's state.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from pydantic import Field
from typing_extensions import override

from foretoken.heads.base import Head, HeadConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from foretoken.decoder.lean.head_steps import HeadSteps
    from foretoken.models.parts import TargetParts


class StepHeadConfig(HeadConfig):
    """Sizes of a head with a network for every step.

    Attributes:
        num_heads: K, tokens drafted at most.
    """

    num_heads: int = Field(ge=1, le=64)

    @property
    def steps(self) -> int:
        """See `HeadConfig`."""
        return self.num_heads


class StepHead(Head):
    """A state that starts from the feature `final`, behind the target's last norm, and takes one token a step."""

    config: StepHeadConfig

    def encode(self, features: Tensor) -> Tensor:
        """What steps start from, at every position of whole texts.

        Args:
            features: (B, S, E), positions 0 … S - 1.

        Returns:
            (B, S, W).
        """
        return features

    @abstractmethod
    def step(self, index: int, state: Tensor, tokens: Tensor, parts: TargetParts) -> tuple[Tensor, Tensor]:
        """Takes one token.

        Args:
            index: i, which step.
            state: (..., W), as `encode` or the step before gave it.
            tokens: (...) int64, x_{t+1+i}.
            parts: What is shared with the target.

        Returns:
            The state after the token and what `draft_logits` reads, both (..., some width).
        """

    def native_steps(self, parts: TargetParts) -> HeadSteps | None:
        """What the native kernels draft from, after `optimize_for_inference`; None where they do not know the network.

        Steps and logits are then those of `encode`, `step` and `draft_logits`, but for rounding.

        Args:
            parts: What is shared with the target.
        """
        del parts
        return None

    @override
    def teacher_forced(self, features: Tensor, tokens: Tensor, parts: TargetParts) -> Iterator[Tensor]:
        state = self.encode(features)
        for index in range(self.config.num_heads):
            state, hidden = self.step(index, state, tokens.roll(-(index + 1), dims=1), parts)
            yield hidden
