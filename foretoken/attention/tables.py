"""What kernels read instead of masks: a few integers a query, on the device, made once a pass for all layers.

Letters: B sequences, T tokens fed, W scratch rows, N32 words of 32 bits that hold W bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassTables:
    """Where each sequence's keys lie and which of them each query sees, as kernels want it.

    Row r of a slot holds position r for r < prefix; every query sees those rows, less what lies outside a sliding
    window. Scratch row j is row prefix + j.

    Attributes:
        slots: (B,) int32, cache slots.
        prefix: (B,) int32, prefix lengths.
        positions: (B, T) int32, of the queries.
        scratch_positions: (B, W) int32, of the scratch rows.
        words: (B, T, N32) int32, bit j % 32 of word j // 32 is set where the query sees scratch row j; None where the
            T tokens are causal: query t sees scratch rows 0 … t.
        written_slots: (B, 1) int64, `slots` once more, as indexing wants them.
        written_rows: (B, T) int64, cache rows of the tokens that are fed.
        max_prefix: Upper bound of `prefix`, known on the host: launches depend on it, results do not.
    """

    slots: Tensor
    prefix: Tensor
    positions: Tensor
    scratch_positions: Tensor
    words: Tensor | None
    written_slots: Tensor
    written_rows: Tensor
    max_prefix: int

    def tensors(self) -> list[Tensor]:
        """All tensors, `words` last and left out where there are none."""
        return [
            self.slots, self.prefix, self.positions, self.scratch_positions, self.written_slots, self.written_rows,
            *([] if self.words is None else [self.words]),
        ]  # fmt: skip

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor], *, max_prefix: int) -> PassTables:
        """What `tensors` took apart."""
        slots, prefix, positions, scratch_positions, written_slots, written_rows, *words = tensors
        return cls(
            slots=slots, prefix=prefix, positions=positions, scratch_positions=scratch_positions,
            words=words[0] if words else None, written_slots=written_slots, written_rows=written_rows,
            max_prefix=max_prefix,
        )  # fmt: skip


def packed_bits(visible: Tensor) -> Tensor:
    """Bit sets of a mask.

    Args:
        visible: (B, T, W) bool.

    Returns:
        (B, T, ceil(W / 32)) int32; bit j % 32 of word j // 32 is entry j.
    """
    batch, queries, width = visible.shape
    count = -(-width // 32)
    padded = torch.nn.functional.pad(visible, (0, count * 32 - width)).view(batch, queries, count, 32)
    bits = padded.to(torch.int64) << torch.arange(32, device=visible.device)
    return bits.sum(-1).to(torch.int32)  # distinct bits: the sum is the union; the top one becomes the sign
