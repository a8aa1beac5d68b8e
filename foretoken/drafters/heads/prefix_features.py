"""The decoder block of Hydra++ (`heads/prefix_layer.py`) while drafting: its KV cache and what it gave last.

What runs the block is the matter of `foretoken.decoder.block_stack`.

Source: Ankner et al. 2024 (arXiv 2402.05109), section 4.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretoken.decoder.block_stack import BlockStack
from foretoken.drafters.heads.stack_features import StackFeatures

if TYPE_CHECKING:
    import torch

    from foretoken.decoder.cuda_graphs import GraphCapture
    from foretoken.decoder.lean.int8 import Quantization
    from foretoken.drafters.base import TargetHandle
    from foretoken.heads.prefix_layer import PrefixLayer


class PrefixFeatures(StackFeatures):
    """The target's features as the decoder block of Hydra++ sees them, at the last committed position of every slot.

    Attributes:
        stack: The block with its KV rows by slot.
    """

    def __init__(
        self,
        layer: PrefixLayer,
        target: TargetHandle,
        dtype: torch.dtype,
        *,
        capture: GraphCapture | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        """Nothing is known yet.

        Args:
            layer: The block.
            target: Tells slots, context and device.
            dtype: Of the block.
            capture: Captures; None for CUDA graphs on GPUs and none elsewhere.
            quantization: Of the block's matrices, see `BlockStack`.
        """
        capacity = target.context_len
        self.stack = BlockStack(
            layer.as_blocks(capacity), num_slots=target.num_slots, capacity=capacity, capture=capture,
            quantization=quantization,
        )  # fmt: skip
        super().__init__(self.stack.run, self.stack.cache, target, width=layer.norm.shape[0], dtype=dtype)
