"""Hydra heads: Medusa heads that also read the drafted tokens before theirs, so each tree node has its own pass.

Head i reads u = [f_t; e(x_{t+1}); …; e(x_{t+1+i})] with the target's embedding e. Its first block is y = R u + c +
silu(W u + b), the further ones y <- y + silu(W y + b). In plain Hydra f_t is the target's feature. In Hydra++ f_t is
the output of a decoder block over all features (`PrefixLayer`).

Source: Ankner et al. 2024 (arXiv 2402.05109), sections 3 and 4; biases as in the released code.
Letters as in `base`; L blocks of a head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Unpack

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import dropout, linear, silu
from typing_extensions import override

from foretoken.decoder.blocks import Blocks, LmHead
from foretoken.decoder.native_linear import linear_layer, optimize_for_inference
from foretoken.heads.base import IN_PLACE, StepHead, StepHeadConfig, WindowPositions, stacked_layers
from foretoken.heads.decoder_layer import DecoderLayer, LayerConfig, Placement
from foretoken.heads.steps import HeadStep, HeadSteps

if TYPE_CHECKING:
    from foretoken.decoder.quantized import Quantization
    from foretoken.models.parts import TargetParts


class PrefixLayer(DecoderLayer):
    """The decoder block of Hydra++, with a final `norm` (E,)."""

    def __init__(self, config: LayerConfig, hidden_size: int, **placement: Unpack[Placement]) -> None:
        super().__init__(config, hidden_size, **placement)
        self.norm = nn.Parameter(torch.empty(hidden_size, **placement))

    @override
    def initialize(self) -> None:
        super().initialize()
        with torch.no_grad():
            self.norm.fill_(1.0)

    @override
    def forward(self, inputs: Tensor, positions: Tensor | None = None, side: Tensor | None = None) -> Tensor:
        """Returns (B, T, E), features that depend on all positions before; see `DecoderLayer`."""
        return self.normed(super().forward(inputs, positions, side), self.norm)

    @override
    def as_blocks(self, num_positions: int) -> Blocks:
        return replace(super().as_blocks(num_positions), final_norm=self.as_norm(self.norm))


class HydraConfig(StepHeadConfig):
    """Sizes of Hydra heads."""

    method: ClassVar[str] = "hydra"

    num_heads: int = Field(default=4, ge=1, le=64)
    num_layers: int = Field(default=4, ge=1)  # L, blocks of each head
    tied_blocks: bool = False  # whether the blocks after the first share weights, as in the released checkpoints
    own_lm_head: bool = False  # whether each head has its own LM head, with a bias; else all share the target's
    prefix: LayerConfig | None = None
    dropout: float = Field(default=0.0, ge=0, lt=1)  # before every block and LM head while training, in [0, 1)


class HydraHeads(StepHead):
    """The network: `prefix` in Hydra++, first blocks, further blocks, and LM heads unless the target's is shared."""

    config: HydraConfig

    def __init__(self, config: HydraConfig, **placement: Unpack[Placement]) -> None:
        super().__init__(config)
        heads, width, more = config.num_heads, config.hidden_size, config.num_layers - 1
        stored = 1 if config.tied_blocks and more else more
        self.prefix = None if config.prefix is None else PrefixLayer(config.prefix, width, **placement)
        self.first = nn.ModuleList(FirstBlock((i + 2) * width, width, **placement) for i in range(heads))
        # Of the further blocks: (K, L - 1 or 1 when tied, E, E) and (K, L - 1 or 1, E).
        self.weight = nn.Parameter(torch.empty(heads, stored, width, width, **placement))
        self.bias = nn.Parameter(torch.empty(heads, stored, width, **placement))
        self._further: list[list[nn.Module]] = []  # the further blocks as layers, after `optimize_for_inference`
        own = heads if config.own_lm_head else 0
        self.lm_heads = nn.ModuleList(nn.Linear(width, config.vocab_size, **placement) for _ in range(own))

    @override
    def initialize(self, parts: TargetParts) -> None:
        """Makes all heads pass the feature on: training starts at the target's own next-token prediction."""
        with torch.no_grad():
            if self.prefix is not None:
                self.prefix.initialize()
            for block in self._first_blocks():
                block.initialize()
            self.weight.zero_()
            self.bias.zero_()
            for head in self.lm_heads.children():
                head.get_parameter("weight").copy_(parts.lm_head_weight)
                head.get_parameter("bias").zero_()

    @override
    def encode(self, features: Tensor, positions: WindowPositions = IN_PLACE) -> Tensor:
        if self.prefix is None:
            return features
        encoded: Tensor = self.prefix(features, positions.of(torch.arange(features.shape[1], device=features.device)))
        return encoded

    @override
    def step(self, index: int, state: Tensor, tokens: Tensor, parts: TargetParts) -> tuple[Tensor, Tensor]:
        """Appends the embedding of the token to the state."""
        state = torch.cat([state, parts.embed(tokens).to(state.dtype)], dim=-1)
        hidden = self.first[index](self._dropped(state))
        for layer in range(self.config.num_layers - 1):
            stored = 0 if self.config.tied_blocks else layer
            if self._further:
                hidden = hidden + silu(self._further[index][stored](hidden))
            else:
                hidden = hidden + silu(
                    linear(self._dropped(hidden), self.weight[index, stored], self.bias[index, stored])
                )
        return state, hidden

    @override
    def draft_logits(self, index: int, hidden: Tensor, parts: TargetParts) -> Tensor:
        hidden = self._dropped(hidden)
        logits: Tensor = self.lm_heads[index](hidden) if self.lm_heads else parts.lm_head(hidden)
        return logits

    @property
    @override
    def has_target_lm_head(self) -> bool:
        return not self.config.own_lm_head

    @override
    def optimize_for_inference(self, quantization: Quantization | None = None, *, compacts: bool = True) -> None:
        """Packs the weights; `PrefixLayer.as_blocks` runs the decoder block of Hydra++ as a whole."""
        if self.prefix is not None and compacts:
            self.prefix.compact()
        for block in self._first_blocks():
            block.stack()
        optimize_for_inference(self.first, quantization=quantization, compacts=compacts)
        optimize_for_inference(self.lm_heads, quantization=quantization, compacts=compacts)
        self._further = stacked_layers(self.weight, self.bias, quantization=quantization, compacts=compacts)
        if quantization is not None:
            self.weight = nn.Parameter(self.weight.detach()[:0].clone(), requires_grad=False)

    @override
    def native_steps(self, parts: TargetParts) -> HeadSteps | None:
        config, native = self.config, parts.native
        if native is None:
            return None
        more = range(config.num_layers - 1)
        steps = [
            HeadStep(
                first=first.both,
                embedding=native.embedding,
                blocks=[self._further[index][0 if config.tied_blocks else layer] for layer in more],
                head=LmHead(self.lm_heads[index]) if config.own_lm_head else native.head,
            )
            for index, first in enumerate(self._first_blocks())
        ]
        return HeadSteps(
            kind="path",
            hidden_size=config.hidden_size,
            width=config.hidden_size,
            vocab_size=config.vocab_size,
            steps=steps,
            token_map=self.token_map,
        )

    def _first_blocks(self) -> list[FirstBlock]:
        return [block for block in self.first if isinstance(block, FirstBlock)]

    def _dropped(self, x: Tensor) -> Tensor:
        return dropout(x, self.config.dropout) if self.training and self.config.dropout else x


class FirstBlock(nn.Module):
    """Computes R u + c + silu(W u + b), R because the width changes; after `stack` R and W are one matrix."""

    def __init__(self, inputs: int, outputs: int, **placement: Unpack[Placement]) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, **placement)
        self.residual = nn.Linear(inputs, outputs, **placement)
        self.both: nn.Module | None = None

    def initialize(self) -> None:
        """Sets W to zero and makes R pass the feature on."""
        outputs = self.residual.weight.shape[0]
        for part in (self.linear, self.residual):
            part.bias.zero_()
        self.linear.weight.zero_()
        self.residual.weight.zero_()
        self.residual.weight[:, :outputs].copy_(torch.eye(outputs))

    def stack(self) -> None:
        """Joins both layers into one linear layer, for drafting."""
        weight = torch.cat([self.residual.weight, self.linear.weight])
        self.both = linear_layer(weight, torch.cat([self.residual.bias, self.linear.bias]))
        del self.residual, self.linear

    def forward(self, u: Tensor) -> Tensor:
        """Turns (..., inputs) into (..., outputs)."""
        residual, gated = (self.residual(u), self.linear(u)) if self.both is None else self.both(u).chunk(2, dim=-1)
        result: Tensor = residual + silu(gated)
        return result


HEAD = HydraHeads
CONFIG = HydraConfig
