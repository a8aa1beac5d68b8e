"""EAGLE's head: a linear layer fuses embedding and feature, then one decoder block without a norm before attention.

The block's output estimates the next feature; the target's LM head reads the estimate. EAGLE-2 uses the same weights
with another tree, HASS another training.

Source: Li et al. 2024 (arXiv 2401.15077). The feature is the one after the target's last norm, as in the released code,
which differs from the paper. Letters as in `base`; W width of the block, here E.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Unpack

import torch
from torch import Tensor, nn
from typing_extensions import override

from foretoken.heads.base import AutoregressiveConfig, AutoregressiveHead, BlockInputs
from foretoken.heads.decoder_layer import DecoderLayer, Placement
from foretoken.heads.steps import AutoregressiveSteps

if TYPE_CHECKING:
    from foretoken.models.parts import TargetParts


class EagleConfig(AutoregressiveConfig):
    """Sizes of an EAGLE head; only the fusing layer of vLLM's heads has no bias."""

    method: ClassVar[str] = "eagle"

    has_bias: bool = False


class EagleHead(AutoregressiveHead):
    """The network; `fc` is (W, 2 W), embedding first."""

    config: EagleConfig

    def __init__(self, config: EagleConfig, **placement: Unpack[Placement]) -> None:
        super().__init__(config)
        width = config.width
        self.fc = nn.Linear(2 * width, width, bias=config.has_bias, **placement)
        self.layer = DecoderLayer(config.layer, width, has_input_norm=False, **placement)

    @override
    def initialize(self, parts: TargetParts) -> None:
        """Passes the feature on; training replaces this by a map to the next feature where it has the data."""
        with torch.no_grad():
            width = self.config.width
            self.fc.weight.zero_()
            self.fc.weight[:, width:].copy_(torch.eye(width))
            if self.config.has_bias:
                self.fc.bias.zero_()
        self.layer.initialize()

    @override
    def paired(self, state: Tensor, embedded: Tensor) -> BlockInputs:
        return BlockInputs(self.fc(torch.cat([embedded, state], dim=-1)), None)

    @override
    def native_steps(self, parts: TargetParts) -> AutoregressiveSteps | None:
        if parts.native is None:
            return None
        return AutoregressiveSteps(
            width=self.config.width, vocab_size=self.config.vocab_size, embedding=parts.native.embedding,
            head=parts.native.head, token_map=self.token_map, fuse=self.fc,
        )  # fmt: skip


HEAD = EagleHead
CONFIG = EagleConfig
