"""The interface of all draft heads: the features that a head reads, and its outputs for a given text.

Position t has the feature h_t of the tokens x_0 … x_t. The target's LM head gives x_{t+1}, the root of the next tree.
Step i of a draft, counted from 0, takes the token x_{t+1+i} and predicts x_{t+2+i}. Training and drafting call the same
functions.

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
    from foretoken.decoder.lean.native_head import HeadSteps
    from foretoken.decoder.lean.native_linear import Quantization
    from foretoken.models.parts import TargetParts


class HeadConfig(BaseModel):
    """Sizes of a head; each method derives its own configuration.

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
        """K, the number of steps that training unrolls and measures."""

    @property
    def max_depth(self) -> int | None:
        """Largest depth of a draft; None for any depth."""
        return self.steps

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The features that the head reads, see `foretoken.core.passes`."""
        return ("final",)


class Head(nn.Module, ABC):
    """A network that drafts from the target's features.

    Attributes:
        config: Sizes.
        token_map: (Vd,) int64 buffer, the token of each logit, if drafts cover a part of the vocabulary; else None.
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
        """Computes the inputs of each step's LM head when the text itself is fed.

        Args:
            features: (B, S, F E), the taps of a position side by side.
            tokens: (B, S) int64.
            parts: The modules shared with the target.

        Yields:
            K tensors (B, S, …); step i is valid at positions t <= S - 2 - i, where x_{t+1+i} exists.
        """

    @abstractmethod
    def draft_logits(self, index: int, hidden: Tensor, parts: TargetParts) -> Tensor:
        """Returns (..., Vd) logits of step i for x_{t+2+i}; hidden: from `teacher_forced`."""

    def logits(self, index: int, hidden: Tensor, parts: TargetParts) -> Tensor:
        """Returns (..., V), `draft_logits` with -inf for tokens that cannot be drafted."""
        return self.whole_vocabulary(self.draft_logits(index, hidden, parts))

    def whole_vocabulary(self, logits: Tensor) -> Tensor:
        """Scatters (..., Vd) logits into (..., V), with -inf for tokens that cannot be drafted."""
        if self.token_map is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.config.vocab_size), float("-inf"))
        whole[..., self.token_map] = logits
        return whole

    @property
    def has_target_lm_head(self) -> bool:
        """Whether the target's LM head, `parts.lm_head`, computes the logits."""
        return False

    def optimize_for_inference(self, quantization: Quantization | None = None, *, compacts: bool = True) -> None:
        """Packs the large float32 weights for small-batch GEMMs on a CPU. The head can draft but not train afterwards.

        Args:
            quantization: "int8" replaces matrices by int8 ones, one byte a weight.
            compacts: Whether float32 weights become bfloat16 if that is exact; their inputs are then rounded to
                bfloat16.

        Raises:
            UnsuitableError: If a matrix cannot be quantised; the head is then unusable.
        """
        optimize_for_inference(self, quantization=quantization, compacts=compacts)


def build_head(config: HeadConfig, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Head:
    """Builds the head that a configuration describes, with uninitialized weights."""
    from importlib import import_module

    module = import_module(f"foretoken.heads.{config.method}")
    head: Head = module.HEAD(config, device=device, dtype=dtype)
    return head


class StepHeadConfig(HeadConfig):
    """Sizes of a head with one network for each step.

    Attributes:
        num_heads: K, the largest depth of a draft.
    """

    num_heads: int = Field(ge=1, le=64)

    @property
    def steps(self) -> int:
        """K."""
        return self.num_heads


class StepHead(Head):
    """A head with a state, which starts as the feature `final` and takes one token a step."""

    config: StepHeadConfig

    def encode(self, features: Tensor) -> Tensor:
        """Returns the first states (B, S, W) for features (B, S, E) of positions 0 … S - 1."""
        return features

    @abstractmethod
    def step(self, index: int, state: Tensor, tokens: Tensor, parts: TargetParts) -> tuple[Tensor, Tensor]:
        """Takes one token.

        Args:
            index: The step i.
            state: (..., W), from `encode` or the step before.
            tokens: (...) int64, x_{t+1+i}.
            parts: The modules shared with the target.

        Returns:
            The state after the token and the input of `draft_logits`, (..., any width) each.
        """

    def native_steps(self, parts: TargetParts) -> HeadSteps | None:
        """Returns the head for the native kernels, after `optimize_for_inference`; None if they cannot run it.

        The kernels' steps and logits equal `encode`, `step` and `draft_logits` up to rounding.
        """
        del parts
        return None

    @override
    def teacher_forced(self, features: Tensor, tokens: Tensor, parts: TargetParts) -> Iterator[Tensor]:
        state = self.encode(features)
        for index in range(self.config.num_heads):
            state, hidden = self.step(index, state, tokens.roll(-(index + 1), dims=1), parts)
            yield hidden
