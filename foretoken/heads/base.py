"""What all draft heads share: which of the target's features they read, and what they say when the text itself is fed.

Position t has the feature h_t of the tokens x_0 … x_t. The target's own head gives x_{t+1}, the root of the next tree;
step i of a draft, counted from 0, takes the token x_{t+1+i} and gives x_{t+2+i}. Training goes through the same
functions as drafting.

Letters: E hidden size of the target, F features that a head reads, K steps, V vocabulary, Vd vocabulary of the drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from typing_extensions import override

from foretoken.decoder.lean.native_linear import optimize_for_inference

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from foretoken.core.passes import Tap
    from foretoken.decoder.lean.head_steps import HeadSteps
    from foretoken.decoder.lean.native_linear import Quantization
    from foretoken.models.parts import TargetParts


class HeadConfig(BaseModel):
    """Sizes of a head; a method's own configuration derives from it.

    Attributes:
        hidden_size: E, of the target.
        vocab_size: V, width of the target's logits.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    method: ClassVar[str]

    hidden_size: int = Field(ge=1)
    vocab_size: int = Field(ge=1)

    @property
    @abstractmethod
    def steps(self) -> int:
        """K, steps that are measured, and trained at most."""

    @property
    def max_depth(self) -> int | None:
        """Most tokens that can be drafted one after another; None for any number."""
        return self.steps

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The features that are read, see `foretoken.core.passes`."""
        return ("final",)


class Head(nn.Module, ABC):
    """A network that drafts from the target's features.

    Attributes:
        config: Its sizes.
        token_map: (Vd,) int64 buffer, the token of each logit where drafts cover a part of the vocabulary; else None.
    """

    config: HeadConfig
    token_map: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("token_map", None)

    @abstractmethod
    def initialize(self, parts: TargetParts) -> None:
        """Sets the weights from which training starts; draws from torch's global generator."""

    @abstractmethod
    def teacher_forced(self, features: Tensor, tokens: Tensor, parts: TargetParts) -> Iterator[Tensor]:
        """What the logits of each step are read from when the text itself is fed.

        Args:
            features: (B, S, F E), the taps of a position side by side.
            tokens: (B, S) int64.
            parts: What is shared with the target.

        Yields:
            K tensors (B, S, …); those of step i are meaningful at positions t <= S - 2 - i, where x_{t+1+i} exists.
        """

    @abstractmethod
    def draft_logits(self, index: int, hidden: Tensor, parts: TargetParts) -> Tensor:
        """(..., Vd) logits of step i over x_{t+2+i}; hidden: as `teacher_forced` gave it."""

    def logits(self, index: int, hidden: Tensor, parts: TargetParts) -> Tensor:
        """(..., V), `draft_logits` with -inf for tokens that cannot be drafted."""
        return self.whole_vocabulary(self.draft_logits(index, hidden, parts))

    def whole_vocabulary(self, logits: Tensor) -> Tensor:
        """(..., V) of (..., Vd) logits: the rest cannot be drafted."""
        if self.token_map is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.config.vocab_size), float("-inf"))
        whole[..., self.token_map] = logits
        return whole

    @property
    def has_target_lm_head(self) -> bool:
        """Whether the logits are read by the target's LM head, `parts.lm_head`."""
        return False

    def optimize_for_inference(self, quantization: Quantization | None = None, *, compacts: bool = True) -> None:
        """Packs the large float32 weights for small-batch GEMMs on a CPU; for drafting alone, not for training.

        Args:
            quantization: "int8" to keep matrices in int8, a byte a weight in the place of what was loaded.
            compacts: Whether float32 weights become bfloat16 where that holds them exactly; their inputs are rounded to
                bfloat16 then.

        Raises:
            UnsuitableError: When a matrix cannot be quantised; the head cannot be used any more.
        """
        optimize_for_inference(self, quantization=quantization, compacts=compacts)


def build_head(config: HeadConfig, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Head:
    """The head that a configuration describes, weights not set."""
    from importlib import import_module

    module = import_module(f"foretoken.heads.{config.method}")
    head: Head = module.HEAD(config, device=device, dtype=dtype)
    return head


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
