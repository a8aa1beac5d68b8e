"""Heads that draft with a decoder block over pairs of a feature and the next token: the EAGLE family.

The pair of position t is (feature of x_0 … x_t, x_{t+1}). The block's output at t predicts x_{t+2}. A draft has no
further features of the target: step i reads the output of step i - 1 in place of the feature, with x_{t+1+i}. Committed
positions are always read with the target's features.

Letters as in `base`; W width of the block.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from foretoken.decoder.lean.native_linear import fast_linear
from foretoken.heads.base import Head, HeadConfig
from foretoken.heads.decoder_layer import DecoderLayer, Heads, LayerConfig, unrolled_attention

if TYPE_CHECKING:
    from collections.abc import Iterator

    from foretoken.decoder.blocks import Blocks
    from foretoken.decoder.lean.native_head import AutoregressiveSteps
    from foretoken.decoder.lean.native_linear import Quantization
    from foretoken.models.parts import TargetParts


class AutoregressiveConfig(HeadConfig):
    """Sizes of an autoregressive head.

    Attributes:
        num_steps: K, steps that training unrolls and measures; drafts may be deeper.
        layer: Sizes of the decoder block.
    """

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


class BlockInputs(NamedTuple):
    """The inputs of the decoder block, (..., W) each; `side` is None for blocks with one input."""

    inputs: Tensor
    side: Tensor | None


class BlockOutputs(NamedTuple):
    """Values computed from the block's output, (..., W) each.

    Attributes:
        state: Replaces the next feature.
        hidden: The input of `Head.draft_logits`.
    """

    state: Tensor
    hidden: Tensor


class AutoregressiveHead(Head):
    """A head with one decoder block, `layer`."""

    config: AutoregressiveConfig
    layer: DecoderLayer

    def begin(self, features: Tensor) -> Tensor:
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
        """Packs the linear layers around the block; `as_blocks` runs the block as a whole."""
        if compacts:
            self.layer.compact()
        for name, child in list(self.named_children()):
            if isinstance(child, nn.Linear):
                setattr(self, name, fast_linear(child, quantization=quantization, compacts=compacts))

    @abstractmethod
    def as_blocks(self, num_positions: int) -> Blocks:
        """Returns the block for `BlockStack`, for up to `num_positions` positions; its output goes to `outputs`."""

    @abstractmethod
    def native_steps(self, parts: TargetParts) -> AutoregressiveSteps | None:
        """Returns the head for the native kernels, after `optimize_for_inference`; None if they cannot run it."""

    @override
    def teacher_forced(self, features: Tensor, tokens: Tensor, parts: TargetParts) -> Iterator[Tensor]:
        return self.unrolled(features, tokens, parts)

    def unrolled(
        self,
        features: Tensor,
        tokens: Tensor,
        parts: TargetParts,
        *,
        starts: slice = slice(None),
        is_detached: bool = False,
    ) -> Iterator[Tensor]:
        """Computes `teacher_forced` for all drafts of a text at once.

        Step i of the draft that begins at position t stands at index t.

        Args:
            features: (B, S, F E).
            tokens: (B, S) int64.
            parts: The modules shared with the target.
            starts: Q positions of the drafts that go on after the first step: later tensors are (B, Q, …).
            is_detached: Whether gradients stop between steps, as in HASS; else they flow through all steps, as in
                EAGLE-3's training-time test.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        state = self.begin(features)
        first: Heads | None = None
        later: list[Heads] = []
        for index in range(self.config.num_steps):
            following = tokens.roll(-(index + 1), dims=1)
            if index == 1:
                positions, state = positions[starts], state[:, starts]
            embedded = self.embed(following[:, starts] if index else following, parts).to(state.dtype)
            inputs, side = self.paired(state, embedded)
            heads = self.layer.projected(inputs, positions.unsqueeze(0) + index, side)
            if first is None:
                first = heads
            else:
                later.append(heads)
            mixed = unrolled_attention(heads.query, positions, first, later)
            state, hidden = self.outputs(self.layer.finished(inputs, mixed))
            yield hidden
            if is_detached:
                state = state.detach()
