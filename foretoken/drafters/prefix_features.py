"""The decoder block of Hydra++ (`heads/prefix_layer.py`) while drafting: its KV cache and what it gave last.

The cache follows the target's: positions enter it when they are committed, in order, so there is never anything to take
back. What runs the block is the matter of `foretoken.decoder.block_stack`.

Source: Ankner et al. 2024 (arXiv 2402.05109), section 4.3.

Letters: M positions of a pass, T positions and B slots of sequences, E hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.core.passes import Pass
from foretoken.decoder.block_stack import BlockStack
from foretoken.drafters.last_features import rows_at, set_last

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.decoder.cuda_graphs import GraphCapture
    from foretoken.decoder.lean.int8 import Quantization
    from foretoken.drafters.base import Committed, TargetHandle
    from foretoken.heads.prefix_layer import PrefixLayer

_TOGETHER = 32  # positions of a sequence that are fed beside others; longer parts are fed alone
_CHUNK = 512  # positions of a long part fed at once


class PrefixFeatures:
    """The target's features as the decoder block of Hydra++ sees them, at the last committed position of every slot.

    Committed features are kept until the next proposal asks, and then fed in one pass: nothing is computed for
    sequences that are not drafted for, and what was committed meanwhile is fed together.

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
        self._dtype = dtype
        self._fed = [0] * target.num_slots  # positions in the cache
        # (T, 1, E) each, committed after those
        self._waiting: list[list[Tensor]] = [[] for _ in range(target.num_slots)]
        self._known = [0] * target.num_slots  # positions in the cache or waiting
        self._last = torch.zeros(target.num_slots, layer.norm.shape[0], device=target.device, dtype=dtype)

    def is_known(self, slot: int, length: int) -> bool:
        """Whether all features of positions 0 … `length - 1` came in."""
        return length > 0 and self._known[slot] == length

    def learn(self, committed: Committed) -> None:
        """Takes what entered the target's KV."""
        assert committed.features is not None, "the drafter taps features"
        lengths = committed.lengths
        parts = [committed.features] if len(lengths) == 1 else committed.features.split(lengths)
        for slot, start, features in zip(committed.slots, committed.starts, parts, strict=True):
            if start == 0:
                self.forget(slot)
            if start == self._known[slot]:  # else a part is missing: the slot stays behind and is not drafted for
                self._waiting[slot].append(features)
                self._known[slot] += len(features)

    def forget(self, slot: int) -> None:
        """The slot's sequence is over."""
        self._fed[slot], self._known[slot], self._waiting[slot] = 0, 0, []

    def of(self, slots: Sequence[int]) -> Tensor:
        """(B, E), the block's output at the last committed position; feeds what waits."""
        for slot in slots:
            waiting = sum(map(len, self._waiting[slot]))
            if waiting > _TOGETHER:
                features = torch.cat(self._waiting[slot])
                for chunk in features.split(_CHUNK):
                    self._feed([slot], [chunk])
                self._waiting[slot] = []
        behind = [slot for slot in slots if self._waiting[slot]]
        if behind:
            parts = [self._waiting[slot][0] if len(self._waiting[slot]) == 1 else torch.cat(self._waiting[slot])
                     for slot in behind]  # fmt: skip
            self._feed(behind, parts)
            for slot in behind:
                self._waiting[slot] = []
        return rows_at(self._last, slots)

    def _feed(self, slots: list[int], parts: list[Tensor]) -> None:
        """Runs the block over the next positions of some slots, (T, 1, E) of each."""
        lengths, prefix_lens = [len(part) for part in parts], [self._fed[slot] for slot in slots]
        features = (parts[0] if len(parts) == 1 else torch.cat(parts))[:, 0].to(self._dtype)
        work = Pass.of_chains(
            [[0] * length for length in lengths], slots=slots, prefix_lens=prefix_lens, device=features.device
        )
        encoded = self.stack.run(features, work)
        set_last(self._last, slots, encoded, work.offsets)
        for slot, length in zip(slots, lengths, strict=True):
            self._fed[slot] += length
