"""One decoder block over the target's features: what gives a Hydra++ head more than the last position.

A block of `decoder_layer` and an RMS norm behind it.

Source: Ankner et al. 2024 (arXiv 2402.05109), section 4.3.

Letters: B sequences, T positions, E hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from typing_extensions import override

from foretoken.decoder.blocks import Blocks
from foretoken.heads.decoder_layer import DecoderLayer, LayerConfig

if TYPE_CHECKING:
    from foretoken.decoder.blocks import Norm


class PrefixLayer(DecoderLayer):
    """See the module.

    Attributes:
        norm: (E,), behind the block.
    """

    def __init__(
        self,
        config: LayerConfig,
        hidden_size: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, hidden_size, device=device, dtype=dtype)
        self.norm = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))

    @override
    def initialize(self) -> None:
        super().initialize()
        with torch.no_grad():
            self.norm.fill_(1.0)

    @override
    def forward(self, inputs: Tensor, positions: Tensor | None = None, side: Tensor | None = None) -> Tensor:
        """(B, T, E), features in the light of all that came before; see `DecoderLayer`."""
        return self.normed(super().forward(inputs, positions, side), self.norm)

    def as_blocks(self, num_positions: int) -> Blocks:
        """Block and norm as a `BlockStack` takes them; num_positions: how many may be fed."""
        norm: Norm | None = self.as_norm(self.norm)
        return Blocks(blocks=[self.as_block(num_positions)], final_norm=norm)
