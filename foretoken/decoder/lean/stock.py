"""The lean decoder on torch's GEMM (`torch_blocks`): embedding, blocks, LM head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretoken.attention.layout import AttentionLayout
from foretoken.decoder.base import PassOutput, UnsuitableError
from foretoken.decoder.blocks import Matrix
from foretoken.decoder.held_memory import check_memory, is_plain
from foretoken.decoder.lean.torch_blocks import TorchBlocks, fuse, is_packable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from foretoken.core.passes import Pass, Tap
    from foretoken.decoder.blocks import Blocks
    from foretoken.decoder.lean.elementwise import TorchOps
    from foretoken.decoder.slot_cache import SlotCache


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeanWeights:
    """A model for lean decoders.

    Attributes:
        embedding: (V, E), in the dtype of the blocks.
        embedding_scale: Factor of embeddings.
        layers: The blocks.
        head: The LM head module; a tied one has the embedding as its weight.
        logit_softcap: c in c tanh(logit / c), or None.
        is_borrowed: Whether the weights are the caller's and must not be moved.
    """

    embedding: Tensor
    embedding_scale: float = 1.0
    layers: Blocks
    head: nn.Module
    logit_softcap: float | None = None
    is_borrowed: bool

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return len(self.layers.blocks)

    @property
    def vocab_size(self) -> int:
        """V, the width of the logits."""
        head: Any = self.head
        return int(head.weight.shape[0])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of all matrices."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.embedding.device

    def tensors(self) -> Iterator[Tensor]:
        """Yields every tensor with readable memory except the rotary tables."""
        yield from filter(is_plain, (self.embedding, *self.layers.tensors(), *self.head.parameters()))


def tap_indices(taps: Sequence[Tap], num_layers: int) -> list[int]:
    """Returns boundary indices of taps, `final` one past the last output; raises `UnsuitableError` for unknown taps."""
    indices = [num_layers + 1 if tap == "final" else tap for tap in taps]
    if any(not isinstance(i, int) or not 0 <= i <= num_layers + 1 for i in indices) or num_layers + 1 in taps:
        raise UnsuitableError(f"taps {list(taps)} do not all exist.")
    return [int(i) for i in indices]


class StockDecoder:
    """See `Decoder`. `FusedLinear` says how much memory fused weights take."""

    name = "lean-stock"
    is_exact = False

    def __init__(
        self, weights: LeanWeights, cache: SlotCache, taps: Sequence[Tap], *, ops: TorchOps | None = None
    ) -> None:
        """Fuses the projections.

        Args:
            weights: The model.
            cache: Its KV rows.
            taps: Features to read.
            ops: Element-wise operations; None for the fastest.

        Raises:
            UnsuitableError: If a tap does not exist.
        """
        self._weights = weights
        self._taps = tap_indices(taps, weights.num_layers)
        self._blocks = TorchBlocks(weights.layers, cache, moves_weights=not weights.is_borrowed, ops=ops)
        self._head = _head(weights)
        self._tensors = list(weights.tensors())

    def run(self, work: Pass) -> PassOutput:
        """See `Decoder`."""
        return self.run_on(work, AttentionLayout(work))

    def run_on(self, work: Pass, layout: AttentionLayout) -> PassOutput:
        """Runs a pass with a layout that exists already."""
        check_memory(self._tensors)
        with torch.inference_mode():
            x = functional.embedding(work.tokens, self._weights.embedding)
            if self._weights.embedding_scale != 1.0:
                x = x * self._weights.embedding_scale
            final, features = self._blocks.run(x, work, layout, self._taps)
            if work.logit_rows is None:
                return PassOutput(logits=None, features=features)
            logits = self._head(final if work.has_all_logits else final[work.logit_rows]).float()
            cap = self._weights.logit_softcap
            return PassOutput(logits=logits if cap is None else torch.tanh(logits / cap) * cap, features=features)


def _head(weights: LeanWeights) -> Callable[[Tensor], Tensor]:
    """Returns the LM head, packed if possible; a tied head may be as large as the rest of a small model."""
    head = weights.head
    if type(head) is not nn.Linear or not is_packable(head.weight):
        return head
    is_tied = head.weight.data_ptr() == weights.embedding.data_ptr()
    return head if is_tied else fuse(Matrix(weight=head.weight, bias=head.bias))
