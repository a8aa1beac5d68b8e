"""The interface of all draft heads: a state that starts from the target's feature and takes one token a step.

Position t has the feature h_t of the tokens x_0 … x_t. The target's own head gives x_{t+1}, the root of the next tree;
head i, counted from 0, gives x_{t+2+i}. Heads that look at the tokens between take them one a step: step i reads
x_{t+1+i}. Training and drafting go through the same two functions.

Letters: E hidden size of the target, W width of a head's state, K heads, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from foretoken.decoder.lean.native_linear import optimize_for_inference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from foretoken.decoder.lean.head_steps import HeadSteps
    from foretoken.decoder.lean.int8 import Quantization
    from foretoken.hf.parts import TargetParts


class HeadConfig(BaseModel):
    """Sizes of a head; a method's own configuration derives from it.

    Attributes:
        hidden_size: E, of the target.
        vocab_size: V, width of the target's logits.
        num_heads: K, tokens drafted at most.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    method: ClassVar[str]

    hidden_size: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    num_heads: int = Field(ge=1, le=64)


class Head(nn.Module, ABC):
    """A network that drafts from the feature `final`, the output of the target's last norm."""

    config: HeadConfig

    @abstractmethod
    def initialize(self, parts: TargetParts) -> None:
        """Sets the weights from which training starts; draws from torch's global generator."""

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
            index: i, which head.
            state: (..., W), as `encode` or the step before gave it.
            tokens: (...) int64, x_{t+1+i}.
            parts: What is shared with the target.

        Returns:
            The state after the token and what `logits` reads, both (..., some width).
        """

    @abstractmethod
    def logits(self, index: int, hidden: Tensor, parts: TargetParts) -> Tensor:
        """(..., V) logits of head i over x_{t+2+i}; hidden: as `step` gave it."""

    @property
    def has_target_lm_head(self) -> bool:
        """Whether `logits` reads the target's LM head, `parts.lm_head`."""
        return False

    def optimize_for_inference(self, quantization: Quantization | None = None) -> None:
        """Packs the large float32 weights for small-batch GEMMs on a CPU; for drafting alone, not for training.

        Args:
            quantization: "int8" to keep matrices in int8, a byte a weight in the place of what was loaded.

        Raises:
            UnsuitableError: When a matrix cannot be quantised; the head cannot be used any more.
        """
        optimize_for_inference(self, quantization=quantization)

    def native_steps(self, parts: TargetParts) -> HeadSteps | None:
        """What the native kernels draft from, after `optimize_for_inference`; None where they do not know the network.

        Steps and logits are then those of `encode`, `step` and `logits`, but for rounding.

        Args:
            parts: What is shared with the target.
        """
        del parts
        return None

    def teacher_forced(self, features: Tensor, tokens: Tensor, parts: TargetParts) -> Iterator[Tensor]:
        """What each head's `logits` reads when the text itself is fed.

        Args:
            features: (B, S, E).
            tokens: (B, S) int64.
            parts: What is shared with the target.

        Yields:
            K tensors (B, S, …); those of head i are meaningful at positions t <= S - 2 - i, where x_{t+1+i} exists.
        """
        state = self.encode(features)
        for index in range(self.config.num_heads):
            state, hidden = self.step(index, state, tokens.roll(-(index + 1), dims=1), parts)
            yield hidden


def build_head(config: HeadConfig, **keywords: Any) -> Head:
    """The head that a configuration describes, weights not set; keywords: `device` and `dtype`."""
    from importlib import import_module

    module = import_module(f"foretoken.heads.{config.method}")
    head: Head = module.HEAD(config, **keywords)
    return head
