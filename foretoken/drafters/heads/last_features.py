"""The target's feature at the last committed position of every slot, for drafters that begin from it.

Letters: B sequences, S slots, E hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.drafters.base import Committed, Prefix


def rows_at(table: Tensor, slots: Sequence[int]) -> Tensor:
    """(B, E), some rows of a table; not a copy where they are one after another."""
    first = slots[0]
    if list(slots) == list(range(first, first + len(slots))):
        return table[first : first + len(slots)]
    return table[torch.tensor(list(slots), device=table.device)]


def set_last(table: Tensor, slots: Sequence[int], rows: Tensor, offsets: Sequence[int]) -> None:
    """Sets rows of a table to the last ones of some sequences.

    Args:
        table: (S, E); changed.
        slots: B of its rows.
        rows: (M, E) of any dtype, one sequence after another.
        offsets: B + 1, where those of each sequence begin.
    """
    if len(slots) == 1:  # without tensors of indices, which take longer than the copy
        table[slots[0]] = rows[offsets[1] - 1]
        return
    if len(rows) > len(slots):
        rows = rows[torch.tensor([end - 1 for end in offsets[1:]], device=rows.device)]
    table[torch.tensor(list(slots), device=rows.device)] = rows.to(table.dtype)


class KeptFeatures(Protocol):
    """What is kept of the target's features, for drafts that begin at the last committed position."""

    def is_known(self, slot: int, length: int) -> bool:
        """Whether what is needed of positions 0 … `length - 1` is here."""

    def learn(self, committed: Committed) -> None:
        """Takes what entered the target's KV."""

    def of(self, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """(B, W), what drafts begin from.

        Args:
            slots: B slots.
            texts: The committed tokens of each, which reach a token further than features.
        """

    def reusable(self, slot: int, length: int) -> int:
        """See `foretoken.drafters.base.PrefixKeeper`."""

    def begin(self, slot: int, prefix: Prefix | None) -> None:
        """A sequence begins in a slot, with what another one left as far as `reusable` allowed; None for nothing."""


class LastFeatures:
    """The target's feature at the last committed position of every slot."""

    def __init__(self, num_slots: int, hidden_size: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self._features = torch.zeros(num_slots, hidden_size, device=device, dtype=dtype)
        self._known = [0] * num_slots  # positions whose last feature is here

    def is_known(self, slot: int, length: int) -> bool:
        """Whether the feature of position `length - 1` is here."""
        return length > 0 and self._known[slot] == length

    def learn(self, committed: Committed) -> None:
        """Takes what entered the target's KV."""
        assert committed.features is not None, "the drafter taps features"
        set_last(self._features, committed.slots, committed.features[:, 0], committed.offsets)
        for slot, start, length in zip(committed.slots, committed.starts, committed.lengths, strict=True):
            self._known[slot] = start + length

    def of(self, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """(B, E), of some slots; see `KeptFeatures`."""
        del texts
        return rows_at(self._features, slots)

    def reusable(self, slot: int, length: int) -> int:
        """All: only the last feature is ever needed, and that comes with the next position."""
        del slot
        return length

    def begin(self, slot: int, prefix: Prefix | None) -> None:
        """A sequence begins in a slot."""
        del prefix
        self._known[slot] = 0
