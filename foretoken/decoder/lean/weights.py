"""What a lean decoder runs: the blocks of a model, and what stands before and behind them.

Letters: V vocabulary, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.held_memory import is_plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch import Tensor, nn

    from foretoken.core.passes import Tap
    from foretoken.decoder.blocks import Blocks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeanWeights:
    """A model that a lean decoder knows.

    Attributes:
        embedding: (V, E), in the dtype of the blocks.
        embedding_scale: Factor of what is looked up.
        layers: The blocks.
        head: The LM head module; its weight is the embedding where they are tied.
        logit_softcap: c in c tanh(logit / c), or None.
        is_borrowed: Whether the weights are the caller's own, and none may be moved.
    """

    embedding: Tensor
    embedding_scale: float = 1.0
    layers: Blocks
    head: nn.Module
    logit_softcap: float | None = None
    is_borrowed: bool

    @property
    def num_layers(self) -> int:
        """Blocks."""
        return len(self.layers.blocks)

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

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor but the rotary tables, of those whose memory can be looked at."""
        yield from filter(is_plain, (self.embedding, *self.layers.tensors(), *self.head.parameters()))


def tap_indices(taps: Sequence[Tap], num_layers: int) -> list[int]:
    """Boundary indices of taps; `final` is one past the last block's output.

    Raises:
        UnsuitableError: When a tap does not exist; the generic decoder says so in full.
    """
    indices = [num_layers + 1 if tap == "final" else tap for tap in taps]
    if any(not isinstance(i, int) or not 0 <= i <= num_layers + 1 for i in indices) or num_layers + 1 in taps:
        raise UnsuitableError(f"taps {list(taps)} do not all exist.")
    return [int(i) for i in indices]
