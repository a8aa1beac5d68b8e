"""Preallocated KV rows by slot.

A slot holds one sequence: committed rows first, in position order, then scratch rows that a pass writes. Committing
moves the accepted rows into place; rejecting does nothing. The cache does not know lengths: its callers do.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from foretoken.core.backend import has_triton_kernels, integers_on, reads_are_free

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.attention.layout import AttentionLayout


class LayerShape(NamedTuple):
    """Sizes of one layer's keys and values; K and V may differ in width (multi-head latent attention)."""

    num_heads: int
    key_width: int
    value_width: int


class SlotCache:
    """Keys and values of all layers, allocated once.

    Layers of equal size share one tensor, so that a commit is a copy or two for the whole model.
    """

    def __init__(
        self, shapes: Sequence[LayerShape], *, num_slots: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocates (layers, slots, heads, capacity, width) per distinct size.

        Args:
            shapes: One entry a layer.
            num_slots: Sequences held at once.
            capacity: Rows a slot, scratch rows included.
            dtype: Of keys and values.
            device: Where they live.
        """
        self.num_slots, self.capacity = num_slots, capacity
        sizes = [(s.num_heads, width) for s in shapes for width in (s.key_width, s.value_width)]
        self._stores = {
            size: torch.zeros(count, num_slots, size[0], capacity, size[1], dtype=dtype, device=device)
            for size, count in Counter(sizes).items()
        }
        taken: Counter[tuple[int, int]] = Counter()
        views = []
        for size in sizes:
            views.append(self._stores[size][taken[size]])
            taken[size] += 1
        self.keys, self.values = views[0::2], views[1::2]

    def write(self, layer: int, layout: AttentionLayout, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the keys and values of a pass in place.

        Args:
            layer: Layer index.
            layout: Slots and rows of the pass.
            key: (M, Hk, Dk).
            value: (M, Hk, Dv).

        Returns:
            The layer's whole keys and values, (slots, Hk, capacity, D).
        """
        keys, values = self.keys[layer], self.values[layer]
        if reads_are_free(keys.device) and not layout.is_captured:
            for row, slot in enumerate(layout.slots):
                tokens, rows = layout.tokens_of(row), layout.rows_of(row)
                keys[slot, :, rows] = key[tokens].transpose(0, 1)
                values[slot, :, rows] = value[tokens].transpose(0, 1)
            return keys, values
        tables = layout.tables()
        if layout.is_captured or has_triton_kernels(keys.device):
            from foretoken.decoder.triton_write import write_rows

            write_rows(keys, values, key, value, tables)
        else:  # a pass that is not captured has no padding
            keys[tables.written_slots, :, tables.written_rows] = key
            values[tables.written_slots, :, tables.written_rows] = value
        return keys, values

    def move_paths(self, slots: Sequence[int], prefix: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Moves the rows of accepted nodes behind the root's, in every layer at once.

        Args:
            slots: B slots, all different.
            prefix: The row of each root.
            paths: Accepted nodes of each in order. Those of a chain stand where they belong, and cost nothing.
        """
        each = zip(slots, prefix, paths, strict=True)
        moved = [(slot, root, path) for slot, root, path in each if list(path) != list(range(1, len(path) + 1))]
        if not moved:
            return
        device = self.keys[0].device
        if has_triton_kernels(device):
            from foretoken.decoder.triton_commit import commit_rows

            depth = max(len(path) for *_, path in moved)
            padded = integers_on([[*path, *[-1] * (depth - len(path))] for *_, path in moved], device)
            places = integers_on([[slot, root, len(path)] for slot, root, path in moved], device).T.contiguous()
            for store in self._stores.values():
                commit_rows(store, places[0], places[1], padded, places[2])
            return
        for slot, root, path in moved:
            self.move_rows(slot, [root + node for node in path], root + 1)

    def move_rows(self, slot: int, source: Sequence[int], start: int) -> None:
        """Moves rows of a slot to consecutive places, in every layer at once.

        Args:
            slot: Which sequence.
            source: Rows to move, in order; may overlap the destination.
            start: First destination row.
        """
        if list(source) == list(range(start, start + len(source))):
            return  # a chain's accepted rows stand where they belong
        for store in self._stores.values():
            rows = torch.tensor(source, device=store.device)
            store[:, slot, :, start : start + len(source)] = store[:, slot].index_select(2, rows)

    def copy_rows(self, source: int, slot: int, count: int) -> None:
        """Copies the first `count` rows of a slot to another one, in every layer at once."""
        for store in self._stores.values():
            store[:, slot, :, :count] = store[:, source, :, :count]

    def poison(self, slot: int, start: int) -> None:
        """Overwrites the rows of a slot from `start` on with NaN; a correct program never notices."""
        for store in self._stores.values():
            store[:, slot, :, start:] = float("nan")
