"""Heads that draft with a decoder block over pairs of a feature and the token after it: the EAGLE family.

The pair of position t is (feature of x_0 … x_t, x_{t+1}); what comes out of the block at it says x_{t+2}, and stands in
the place of the next feature, which a draft does not have: step i reads what step i - 1 gave, with x_{t+1+i}. Committed
positions are always read with the target's own features.

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
    from foretoken.decoder.lean.head_steps import AutoregressiveSteps
    from foretoken.decoder.lean.native_linear import Quantization
    from foretoken.models.parts import TargetParts


class AutoregressiveConfig(HeadConfig):
    """Sizes of such a head.

    Attributes:
        num_steps: K, steps that acceptance is measured for, and that training unrolls at most; drafts may be deeper.
        layer: Sizes of the decoder block.
    """

    num_steps: int = Field(default=7, ge=1, le=64)
    layer: LayerConfig

    @property
    def steps(self) -> int:
        """See `HeadConfig`."""
        return self.num_steps

    @property
    def max_depth(self) -> int | None:
        """Any number."""
        return None

    @property
    def width(self) -> int:
        """W."""
        return self.hidden_size


class BlockInputs(NamedTuple):
    """What the decoder block reads; both (..., W), the second one None for blocks without it."""

    inputs: Tensor
    side: Tensor | None


class BlockOutputs(NamedTuple):
    """What comes of the block's outputs; both (..., W).

    Attributes:
        state: Stands in the place of the next feature.
        hidden: What `Head.draft_logits` reads.
    """

    state: Tensor
    hidden: Tensor


class AutoregressiveHead(Head):
    """See the module.

    Attributes:
        layer: The decoder block.
    """

    config: AutoregressiveConfig
    layer: DecoderLayer

    def begin(self, features: Tensor) -> Tensor:
        """(..., W), the state that the features of a position give, of (..., F E)."""
        return features

    def embed(self, tokens: Tensor, parts: TargetParts) -> Tensor:
        """(..., W), the embeddings of tokens: the target's own, unless the head brings some."""
        return parts.embed(tokens)

    @abstractmethod
    def paired(self, state: Tensor, embedded: Tensor) -> BlockInputs:
        """What the block reads of pairs: (..., W) states and (..., W) embeddings of the tokens after them."""

    def outputs(self, x: Tensor) -> BlockOutputs:
        """What comes of (..., W) outputs of the block."""
        return BlockOutputs(x, x)

    @override
    def optimize_for_inference(self, quantization: Quantization | None = None, *, compacts: bool = True) -> None:
        """Packs the linear layers around the block, which runs as a whole, see `as_blocks`."""
        if compacts:
            self.layer.compact()
        for name, child in list(self.named_children()):
            if isinstance(child, nn.Linear):
                setattr(self, name, fast_linear(child, quantization=quantization, compacts=compacts))

    @abstractmethod
    def as_blocks(self, num_positions: int) -> Blocks:
        """The block as a `BlockStack` takes it, giving what `outputs` reads; num_positions: how many may be fed."""

    @abstractmethod
    def native_steps(self, parts: TargetParts) -> AutoregressiveSteps | None:
        """What the native kernels draft from, after `optimize_for_inference`; None where they cannot.

        Args:
            parts: What is shared with the target.
        """

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
        """`teacher_forced`, all drafts of a text side by side: step i of the draft that begins at position t, at t.

        Args:
            features: (B, S, F E).
            tokens: (B, S) int64.
            parts: What is shared with the target.
            starts: The positions whose drafts are followed beyond the first step: later tensors are (B, Q, …).
            is_detached: Whether no gradient goes from a step into those before it, as in HASS; else through all of
                them, as in EAGLE-3's training-time test.
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
