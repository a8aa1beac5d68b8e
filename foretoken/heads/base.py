"""The interface of all draft heads: the features that a head reads, and its outputs for a given text.

Position t has the feature h_t of the tokens x_0 … x_t. The target's LM head gives x_{t+1}, the root of the next tree.
Step i of a draft, counted from 0, takes the token x_{t+1+i} and predicts x_{t+2+i}. Training and drafting call the same
functions.

Letters: E hidden size of the target, F features that a head reads, K steps, V vocabulary, Vd vocabulary of the drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Unpack

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from typing_extensions import override

from foretoken.decoder.native_linear import fast_linear, linear_layer, optimize_for_inference
from foretoken.heads.decoder_layer import (
    DecoderLayer,
    Heads,
    LayerConfig,
    Placement,
    causal_attention,
    unrolled_attention,
)

if TYPE_CHECKING:
    from foretoken.core.passes import Tap
    from foretoken.decoder.quantized import Quantization
    from foretoken.heads.steps import AutoregressiveSteps, HeadSteps
    from foretoken.models.parts import TargetParts


class HeadConfig(BaseModel):
    """Sizes of a head, E and V of its target; each method derives its own configuration."""

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


class WindowPositions(NamedTuple):
    """Positions of the tokens of B training windows, as a decoder block rotates them.

    The first `anchor` tokens keep their positions and all later tokens have `offset` added. So short windows teach a
    head to draft at positions that it never sees as a length. Source: LongSpec, Yang et al. 2025 (arXiv 2502.17421).
    """

    anchor: Tensor | int = 0  # (B, 1) int64, or 0
    offset: Tensor | int = 0  # (B, 1) int64, or 0 for the positions of a text

    def of(self, tokens: Tensor) -> Tensor:
        """Returns (B, T) int64, (1, T) without offsets; tokens: (T,) int64, counted from the window's begin."""
        return tokens.unsqueeze(0) + self.offset * (tokens >= self.anchor)


IN_PLACE = WindowPositions()


class Head(nn.Module, ABC):
    """Drafts from the target's features."""

    config: HeadConfig
    token_map: Tensor | None  # (Vd,) int64, the token of each logit, or None for all
    # Tokens that a head with the target's LM head learned over, see `HeadCheckpoint`.
    draft_vocab: Sequence[int] | None = None

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("token_map", None)

    @abstractmethod
    def initialize(self, parts: TargetParts) -> None:
        """Sets the weights from which training starts; draws from torch's global generator."""

    @abstractmethod
    def teacher_forced(
        self, features: Tensor, tokens: Tensor, parts: TargetParts, positions: WindowPositions = IN_PLACE
    ) -> Iterator[Tensor]:
        """Computes the inputs of each step's LM head when the text itself is fed.

        Yields K tensors (B, S, …); step i is valid at positions t <= S - 2 - i, where x_{t+1+i} exists.

        Args:
            features: (B, S, F E), the taps of a position side by side.
            tokens: (B, S) int64.
            parts: The modules shared with the target.
            positions: For the rotations of heads with a decoder block.
        """

    def draft_logits(self, index: int, hidden: Tensor, parts: TargetParts) -> Tensor:
        """Returns (..., Vd) logits of step i for x_{t+2+i}; hidden: from `teacher_forced`. By the target's LM head."""
        del index
        return parts.lm_head(hidden)

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
        return True

    def optimize_for_inference(self, quantization: Quantization | None = None, *, compacts: bool = True) -> None:
        """Packs the large float32 weights for small-batch GEMMs on a CPU. The head can draft but not train afterwards.

        Args:
            quantization: How matrices are quantized; `UnsuitableError` for one that cannot be makes the head unusable.
            compacts: Whether float32 weights become bfloat16 if that is exact; their inputs are then rounded to
                bfloat16.
        """
        optimize_for_inference(self, quantization=quantization, compacts=compacts)


def build_head(config: HeadConfig, **placement: Unpack[Placement]) -> Head:
    """Builds the head that a configuration describes, with uninitialized weights."""
    from importlib import import_module

    module = import_module(f"foretoken.heads.{config.method}")
    head: Head = module.HEAD(config, **placement)
    return head


def stacked_layers(weight: Tensor, bias: Tensor | None, **options: Any) -> list[list[nn.Module]]:
    """Returns the layers of a (K, L, rows, columns) stack, by head, for small-batch GEMMs; see `fast_linear`."""
    biases = [[None] * weight.shape[1]] * len(weight) if bias is None else bias.detach()
    return [
        [fast_linear(linear_layer(*each), **options) for each in zip(of_head, rows, strict=True)]
        for of_head, rows in zip(weight.detach(), biases, strict=True)
    ]


class StepHeadConfig(HeadConfig):
    """Sizes of a head with one network for each step; K is the largest depth of a draft."""

    num_heads: int = Field(ge=1, le=64)

    @property
    def steps(self) -> int:
        """K."""
        return self.num_heads


class StepHead(Head):
    """A head with a state, which starts as the feature `final` and takes one token a step."""

    config: StepHeadConfig

    def encode(self, features: Tensor, positions: WindowPositions = IN_PLACE) -> Tensor:
        """Returns the first states (B, S, W) for features (B, S, E) of positions 0 … S - 1."""
        del positions
        return features

    @abstractmethod
    def step(self, index: int, state: Tensor, tokens: Tensor, parts: TargetParts) -> tuple[Tensor, Tensor]:
        """Takes token x_{t+1+i}, (...) int64, in step i from `state`, (..., W), of `encode` or the step before.

        Returns the state after the token and the input of `draft_logits`, (..., any width) each.
        """

    def native_steps(self, parts: TargetParts) -> HeadSteps | None:
        """Returns the head for the native kernels, after `optimize_for_inference`; None if they cannot run it.

        The kernels' steps and logits equal `encode`, `step` and `draft_logits` up to rounding.
        """
        del parts
        return None

    @override
    def teacher_forced(
        self, features: Tensor, tokens: Tensor, parts: TargetParts, positions: WindowPositions = IN_PLACE
    ) -> Iterator[Tensor]:
        state = self.encode(features, positions)
        for index in range(self.config.num_heads):
            state, hidden = self.step(index, state, tokens.roll(-(index + 1), dims=1), parts)
            yield hidden


class AutoregressiveConfig(HeadConfig):
    """Sizes of an autoregressive head; training unrolls and measures K steps, drafts may be deeper."""

    num_steps: int = Field(default=7, ge=1, le=64)
    layer: LayerConfig

    @property
    def steps(self) -> int:
        """K."""
        return self.num_steps

    @property
    def max_depth(self) -> int | None:
        """None: drafts may have any depth."""
        return None

    @property
    def width(self) -> int:
        """W."""
        return self.hidden_size


class UnrolledHead(Head):
    """A head that drafts token by token, and computes all drafts of a text at once in training."""

    config: AutoregressiveConfig

    @abstractmethod
    def unrolled(
        self,
        features: Tensor,
        tokens: Tensor,
        parts: TargetParts,
        positions: WindowPositions = IN_PLACE,
        *,
        starts: slice = slice(None),
        is_detached: bool = False,
    ) -> Iterator[Tensor]:
        """Computes `teacher_forced` for all drafts of a text at once, from the same arguments.

        Step i of the draft that begins at position t stands at index t.

        Args:
            starts: Q positions of the drafts that go on after the first step: later tensors are (B, Q, …).
            is_detached: Whether gradients stop between steps, as in HASS; else they flow through all steps, as in
                EAGLE-3's training-time test.
        """

    @override
    def teacher_forced(
        self, features: Tensor, tokens: Tensor, parts: TargetParts, positions: WindowPositions = IN_PLACE
    ) -> Iterator[Tensor]:
        return self.unrolled(features, tokens, parts, positions)


class BlockInputs(NamedTuple):
    """The inputs of the decoder block, (..., W) each; `side` is None for blocks with one input."""

    inputs: Tensor
    side: Tensor | None


class BlockOutputs(NamedTuple):
    """Values from the block's output, (..., W) each: the next feature, and the input of `Head.draft_logits`."""

    state: Tensor
    hidden: Tensor


_FUSING = "fc"  # the layer of EAGLE and EAGLE-3 that reads several features or an embedding side by side


class AutoregressiveHead(UnrolledHead):
    """A head with one decoder block, `layer`; the block's output goes to `outputs`."""

    layer: DecoderLayer

    def initial_state(self, features: Tensor) -> Tensor:
        """Returns (..., W), the state of positions with features (..., F E)."""
        return features

    def embed(self, tokens: Tensor, parts: TargetParts) -> Tensor:
        """Returns (..., W), embeddings of tokens: the target's, unless the head has its own."""
        return parts.embed(tokens)

    @abstractmethod
    def paired(self, state: Tensor, embedded: Tensor) -> BlockInputs:
        """Returns the block's inputs for pairs of (..., W) states and (..., W) embeddings of the next tokens."""

    def outputs(self, x: Tensor) -> BlockOutputs:
        """Returns the state and hidden values for the block's (..., W) output."""
        return BlockOutputs(x, x)

    @override
    def optimize_for_inference(self, quantization: Quantization | None = None, *, compacts: bool = True) -> None:
        """Packs the linear layers around the block; `DecoderLayer.as_blocks` runs the block as a whole.

        The fusing layer keeps its weights. Its inputs differ in size, embeddings of 0.017 and features of 6 in a 0.5B,
        and so do its weights: int8 with one scale a row makes those of features 0, see "A fusing layer in int8" in
        `benchmarks/NOTES.md`.
        """
        if compacts:
            self.layer.compact()
        for name, child in list(self.named_children()):
            if isinstance(child, nn.Linear):
                kept = None if name == _FUSING else quantization
                setattr(self, name, fast_linear(child, quantization=kept, compacts=compacts))

    @abstractmethod
    def native_steps(self, parts: TargetParts) -> AutoregressiveSteps | None:
        """Returns the head for the native kernels, after `optimize_for_inference`; None if they cannot run it."""

    @override
    def unrolled(
        self,
        features: Tensor,
        tokens: Tensor,
        parts: TargetParts,
        positions: WindowPositions = IN_PLACE,
        *,
        starts: slice = slice(None),
        is_detached: bool = False,
    ) -> Iterator[Tensor]:
        begins = torch.arange(tokens.shape[1], device=tokens.device)
        state = self.initial_state(features)
        first: Heads | None = None
        later: list[Heads] = []
        for index in range(self.config.num_steps):
            following = tokens.roll(-(index + 1), dims=1)
            if index == 1:
                begins, state = begins[starts], state[:, starts]
            embedded = self.embed(following[:, starts] if index else following, parts).to(state.dtype)
            inputs, side = self.paired(state, embedded)
            heads = self.layer.projected(inputs, positions.of(begins + index), side)
            if first is None:
                first, mixed = heads, causal_attention(heads)
            else:
                later.append(heads)
                mixed = unrolled_attention(heads.query, begins, first, later)
            state, hidden = self.outputs(self.layer.finished(inputs, mixed))
            yield hidden
            if is_detached:
                state = state.detach()
