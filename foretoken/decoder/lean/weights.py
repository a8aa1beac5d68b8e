"""What a lean decoder runs: the weights of a model's blocks where they lie, and the few facts around them.

The block: RMS norm, grouped-query attention with rotary positions over a full or sliding window, residual, RMS norm,
gated SiLU, residual. Biases, norms of queries and keys, tied embeddings and every static rotary scaling are options of
it.

Letters: V vocabulary, D hidden size, E head size, P positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretoken.decoder.base import UnsuitableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor, nn

    from foretoken.core.taps import Tap


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One decoder layer.

    Attributes:
        attention: The module that holds `q_proj`, `k_proj`, `v_proj` and `o_proj`.
        mlp: The module that holds `gate_proj`, `up_proj` and `down_proj`.
        attention_norm: (D,) float32.
        mlp_norm: (D,) float32.
        query_norm: (E,) float32, applied to each head before its rotation, or None.
        key_norm: Likewise.
        window: Only keys less than this many positions back are seen; None for all.
    """

    attention: Any
    mlp: Any
    attention_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeanWeights:
    """A model that a lean decoder knows.

    Attributes:
        embedding: (V, D); of no rows where blocks stand alone.
        blocks: In order.
        final_norm: (D,) float32.
        head: The LM head module; its weight is the embedding where they are tied. Not read without an embedding.
        module: Holds all of them; its tensors have to stay where they are.
        is_borrowed: Whether it is the caller's own, in which no weight may be moved.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: E.
        epsilon: Of every norm.
        scale: Factor of the dot products of attention.
        cos: (P, E / 2) float32, rotary tables with their scaling, of every position a pass may feed.
        sin: Likewise.
    """

    embedding: Tensor
    blocks: Sequence[Block]
    final_norm: Tensor
    head: nn.Module
    module: nn.Module
    is_borrowed: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float
    scale: float
    cos: Tensor
    sin: Tensor

    @property
    def vocab_size(self) -> int:
        """V, the width of the logits."""
        head: Any = self.head
        return int(head.weight.shape[0])

    @property
    def dtype(self) -> torch.dtype:
        """Of all matrices."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Of all tensors."""
        return self.embedding.device


def tap_indices(taps: Sequence[Tap], num_layers: int) -> list[int]:
    """Boundary indices of taps; `final` is one past the last block's output.

    Raises:
        UnsuitableError: When a tap does not exist; the generic decoder says so in full.
    """
    indices = [num_layers + 1 if tap == "final" else tap for tap in taps]
    if any(not isinstance(i, int) or not 0 <= i <= num_layers + 1 for i in indices) or num_layers + 1 in taps:
        raise UnsuitableError(f"taps {list(taps)} do not all exist.")
    return [int(i) for i in indices]
