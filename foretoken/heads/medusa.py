"""Medusa heads: independent residual blocks on the target's feature, one stack for each token ahead.

Source: Cai et al. 2024 (arXiv 2401.10774), section 2.1; the block's bias is from the released code, not the paper.
Letters as in `base`; L blocks of a head, Vd drafted vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import silu
from typing_extensions import override

from foretoken.decoder.blocks import LmHead
from foretoken.decoder.native_linear import fast_linear, linear_layer
from foretoken.heads.base import StepHead, StepHeadConfig, stacked_layers
from foretoken.heads.steps import HeadStep, HeadSteps

if TYPE_CHECKING:
    from foretoken.decoder.quantized import Quantization
    from foretoken.heads.decoder_layer import Placement
    from foretoken.models.parts import TargetParts


def part_of(stack: nn.Parameter, index: int) -> Tensor:
    """Returns `stack[index]` of a (K, ...) stack; the backward pass adds its gradient to `stack.grad[index]` alone.

    Autograd's indexing would add a whole stack of zeros around the gradient, for every part and every portion of a
    batch. `torch.autograd.grad` finds no gradient for the stack: only `backward` does.
    """
    result: Tensor = _Part.apply(stack, index)
    return result


class _Part(torch.autograd.Function):
    """One part of a stack of parameters, without a copy; the backward pass adds to the stack's gradient in place."""

    @staticmethod
    def forward(ctx: Any, stack: nn.Parameter, index: int) -> Tensor:
        ctx.stack, ctx.index = stack, index
        return stack.detach()[index]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        stack = ctx.stack
        if stack.grad is None:
            stack.grad = torch.zeros_like(stack)
        stack.grad[ctx.index] += grad
        return None, None


class MedusaConfig(StepHeadConfig):
    """Sizes of Medusa heads."""

    method: ClassVar[str] = "medusa"

    num_heads: int = Field(default=4, ge=1, le=64)
    num_layers: int = Field(default=1, ge=0)  # L, residual blocks of each head; 0 leaves the LM head alone
    has_bias: bool = True
    tied_blocks: bool = False  # whether the L blocks of a head share weights, as in code that repeated a module
    own_lm_head: bool = False  # whether each head has its own LM head; else all share the target's
    draft_vocab_size: int | None = Field(default=None, ge=1)  # vd; None for the whole vocabulary

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if (self.draft_vocab_size or 0) > self.vocab_size:
            raise ValueError(f"draft_vocab_size is {self.draft_vocab_size}. Expected at most {self.vocab_size}")
        if self.draft_vocab_size is not None and not self.own_lm_head:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}, but the target's LM head covers all tokens. Expected "
                "own_lm_head"
            )
        return self


class MedusaHeads(StepHead):
    """Computes x <- x + silu(W x + b), L times, then an LM head; stacked weights hold all heads.

    The feature is the output of the target's last norm. Some checkpoints start each head with a frozen copy of that
    norm on the residual stream; their network is the same as this one with `has_bias=False`.
    """

    config: MedusaConfig

    def __init__(self, config: MedusaConfig, **placement: Unpack[Placement]) -> None:
        super().__init__(config)
        stored = 1 if config.tied_blocks and config.num_layers else config.num_layers

        def empty(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*size, **placement))

        heads, width = config.num_heads, config.hidden_size
        self.weight = empty(heads, stored, width, width)  # (K, L or 1 when tied, E, E)
        self.bias = empty(heads, stored, width) if config.has_bias else None
        rows = config.draft_vocab_size or config.vocab_size
        self.lm_head = empty(heads, rows, width) if config.own_lm_head else None  # (K, Vd, E); None for the target's
        # Both lists are by head, and empty before `optimize_for_inference`.
        self._quick_blocks: list[list[nn.Module]] = []
        self._quick_lm_heads: list[nn.Module] = []
        if config.draft_vocab_size is not None:
            self.token_map = torch.arange(rows, device=placement.get("device"))

    @override
    def initialize(self, parts: TargetParts) -> None:
        """Zeroes the blocks and copies the target's LM head: training starts at its next-token prediction."""
        with torch.no_grad():
            self.weight.zero_()
            if self.bias is not None:
                self.bias.zero_()
            if self.lm_head is not None:
                rows = parts.lm_head_weight if self.token_map is None else parts.lm_head_weight[self.token_map]
                self.lm_head.copy_(rows)

    @override
    def step(self, index: int, state: Tensor, tokens: Tensor, parts: TargetParts) -> tuple[Tensor, Tensor]:
        """Ignores the token; the state stays the feature."""
        hidden = state
        for layer in range(self.config.num_layers):
            stored = 0 if self.config.tied_blocks else layer
            if self._quick_blocks:
                hidden = hidden + silu(self._quick_blocks[index][stored](hidden))
            else:
                bias = None if self.bias is None else self.bias[index, stored]
                hidden = hidden + silu(nn.functional.linear(hidden, self.weight[index, stored], bias))
        return state, hidden

    @override
    def draft_logits(self, index: int, hidden: Tensor, parts: TargetParts) -> Tensor:
        if self._quick_lm_heads:
            logits: Tensor = self._quick_lm_heads[index](hidden)
            return logits
        if self.lm_head is None:
            return parts.lm_head(hidden)
        return nn.functional.linear(hidden, part_of(self.lm_head, index))

    @property
    @override
    def has_target_lm_head(self) -> bool:
        return not self.config.own_lm_head

    @override
    def optimize_for_inference(self, quantization: Quantization | None = None, *, compacts: bool = True) -> None:
        """Packs the weights; splits stacked blocks and LM heads into single layers."""
        self._quick_blocks = stacked_layers(self.weight, self.bias, quantization=quantization, compacts=compacts)
        del self.weight
        self.bias = None
        for weight in [] if self.lm_head is None else self.lm_head.detach():
            self._quick_lm_heads.append(fast_linear(linear_layer(weight), quantization=quantization, compacts=compacts))
        self.lm_head = None

    @override
    def native_steps(self, parts: TargetParts) -> HeadSteps | None:
        config = self.config
        heads = [LmHead(layer) for layer in self._quick_lm_heads]
        if not heads:
            if parts.native is None:
                return None
            heads = [parts.native.head] * config.num_heads
        layers = [0 if config.tied_blocks else layer for layer in range(config.num_layers)]
        return HeadSteps(
            kind="feature",
            hidden_size=config.hidden_size,
            width=config.hidden_size,
            vocab_size=config.vocab_size,
            steps=[
                HeadStep(blocks=[blocks[layer] for layer in layers], head=head)
                for blocks, head in zip(self._quick_blocks, heads, strict=True)
            ],
            token_map=self.token_map,
        )

    def all_logits(self, features: Tensor, parts: TargetParts, count: int) -> Tensor:
        """Returns (B, C, V) logits of the first C = `count` heads for (B, E) features, in a few batched GEMMs."""
        hidden = self._all_hidden(features, parts, count)
        if self._quick_lm_heads:
            quick = zip(self._quick_lm_heads, hidden, strict=False)
            return self.whole_vocabulary(torch.stack([lm_head(rows) for lm_head, rows in quick], dim=1))
        if self.lm_head is None:
            return self.whole_vocabulary(parts.lm_head(hidden.transpose(0, 1)))
        return self.whole_vocabulary((hidden @ self.lm_head[:count].transpose(1, 2)).transpose(0, 1))

    def _all_hidden(self, features: Tensor, parts: TargetParts, count: int) -> Tensor:
        """Returns (C, B, E), the inputs of the first LM heads."""
        if self._quick_blocks:
            return torch.stack([self.step(index, features, features, parts)[1] for index in range(count)])
        hidden = features.expand(count, *features.shape)
        for layer in range(self.config.num_layers):
            stored = 0 if self.config.tied_blocks else layer
            linear = hidden @ self.weight[:count, stored].transpose(1, 2)
            hidden = hidden + silu(linear if self.bias is None else linear + self.bias[:count, stored].unsqueeze(1))
        return hidden


HEAD = MedusaHeads
CONFIG = MedusaConfig
