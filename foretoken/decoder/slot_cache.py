"""Preallocated KV rows by slot.

A slot holds one sequence: committed rows first, in position order, then scratch rows that a pass writes. A commit moves
the accepted rows into place; a rejection needs no action. The callers know the lengths, the cache does not.

With enough memory every slot has rows for the longest sequence. Otherwise slots share a smaller number of rows, and
`RowPool` gives a sequence more rows as it grows. The rows of a sequence are consecutive in both cases. Kernels read
shared rows as those of many more slots, one granule of rows apart: a sequence begins where one of these slots begins.
"""

from __future__ import annotations

from collections import Counter
from ctypes import c_int64
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor

from foretoken.core.backend import (
    has_cuda_runtime,
    has_triton_kernels,
    integers_on,
    kernel_threads,
    reads_are_free,
    runs_cpu_kernels,
)
from foretoken.core.checks import require
from foretoken.decoder.library import library_or_none
from foretoken.decoder.memory import untouched_zeros
from foretoken.decoder.recurrent_states import LayerState, RecurrentStates

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from foretoken.attention.layout import AttentionLayout


class Move(NamedTuple):
    """Rows to copy, after all earlier moves; source and target may overlap."""

    source: int
    target: int
    num_rows: int


class _Rows(NamedTuple):
    """Rows of a slot: `size` of them are its own, and the first `used` may hold keys and values."""

    start: int = 0
    size: int = 0
    used: int = 0

    @property
    def end(self) -> int:
        return self.start + self.size


class RowPool:
    """Consecutive rows for each slot, in multiples of `granule`, from a shared store of `num_rows` rows."""

    def __init__(self, num_slots: int, num_rows: int, *, granule: int, most: int) -> None:
        """Creates a pool of slots without rows, with at most `most` rows a slot; rounds `num_rows` down."""
        self.granule, self.num_rows = granule, num_rows // granule * granule
        self._most = self._rounded(most)
        self._rows = [_Rows()] * num_slots

    def first_row(self, slot: int) -> int:
        """Returns the first row of a slot."""
        return self._rows[slot].start

    def size(self, slot: int) -> int:
        """Returns the number of rows of a slot."""
        return self._rows[slot].size

    def fits(self, counts: Iterable[int]) -> bool:
        """Decides whether slots could have these numbers of rows if no others had any."""
        return sum(map(self._rounded, counts)) <= self.num_rows

    def trim(self, slot: int, count: int) -> None:
        """Takes all but the first `count` rows of a slot."""
        rows, wanted = self._rows[slot], self._rounded(count)
        if wanted < rows.size:
            self._rows[slot] = _Rows(rows.start, wanted, min(rows.used, wanted)) if wanted else _Rows()

    def reserve(self, slot: int, count: int) -> list[Move] | None:
        """Gives a slot at least `count` rows, its old rows first; returns the moves to make, in order.

        Returns None, without any change, if other slots have too many rows.
        """
        wanted, old = self._rounded(count), self._rows[slot]
        if wanted <= old.size:
            self._rows[slot] = old._replace(used=wanted)
            return []
        roomy = max(wanted, min(self._rounded(wanted + wanted // 2), self._most))
        gaps = self._gaps()
        free = next((end - start for start, end in gaps if old.size and start == old.end), 0)
        if free >= wanted - old.size and old.size:
            self._rows[slot] = _Rows(old.start, min(old.size + free, roomy), wanted)
            return []
        for least in (roomy, wanted):
            for start, end in gaps:
                if end - start >= least:
                    self._rows[slot] = _Rows(start, least, wanted)
                    return [Move(old.start, start, old.used)] if old.used else []
        return self._packed(slot, wanted)

    def _packed(self, slot: int, wanted: int) -> list[Move] | None:
        """Packs the used rows of all slots, `wanted` of one of them, and shares out the rest."""
        others = [(rows.start, each) for each, rows in enumerate(self._rows) if rows.size and each != slot]
        own = self._rows[slot]
        order = [each for _, each in sorted([*others, (own.start if own.size else self.num_rows, slot)])]
        used = {each: wanted if each == slot else self._rows[each].used for each in order}
        free = self.num_rows - sum(used.values())
        if free < 0:
            return None
        more = free // len(order) // self.granule * self.granule
        moves, start = list[Move](), 0
        for each in order:
            old = self._rows[each]
            self._rows[each] = _Rows(start, max(used[each], min(used[each] + more, self._most)), used[each])
            if old.used and old.start != start:
                moves.append(Move(old.start, start, old.used))
            start = self._rows[each].end
        # Slots keep their order, so rows that move down never meet those that move up.
        down = [move for move in moves if move.target < move.source]
        return down + [move for move in reversed(moves) if move.target > move.source]

    def _gaps(self) -> list[tuple[int, int]]:
        taken = sorted((rows.start, rows.end) for rows in self._rows if rows.size)
        bounds = [(0, 0), *taken, (self.num_rows, self.num_rows)]
        return [(before[1], after[0]) for before, after in pairwise(bounds) if after[0] > before[1]]

    def _rounded(self, count: int) -> int:
        return -(-count // self.granule) * self.granule


# Rows; a slot of shared rows begins at a multiple of it. A choice: smaller wastes less, larger moves less often.
GRANULE = 16
_PORTION = 64 * GRANULE  # rows moved at once, with a copy if they overlap; a choice: bounds the memory of the copy


class LayerShape(NamedTuple):
    """Sizes of one layer's keys and values; K and V may differ in width (multi-head latent attention).

    `state` is the state of a recurrent layer before the first token. A layer without attention has no heads.
    """

    num_heads: int
    key_width: int
    value_width: int
    state: LayerState | None = None


_SCALE = 4  # bytes behind a quantized row


class SlotCache:
    """Keys and values of all layers, allocated once.

    Layers of equal size share one tensor: a commit takes a copy or two for the whole model. The native kernels can keep
    rows in int8, each with a scale in float32 right behind it; see `kernels/cache_rows.h`.

    Attributes:
        capacity: Most rows of a slot, with scratch rows.
        num_positions: Positions of the tokens in a slot are below it.
        is_shared: Whether slots share rows, and must reserve them.
        is_rounded: Whether rows are in int8.
        keys: Of each layer, (places, heads, capacity, width); 4 bytes wider if quantized. `places` gives the place of a
            slot.
        values: As `keys`.
        states: Of recurrent layers; None if the model has none.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        *,
        num_slots: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        num_rows: int | None = None,
        num_positions: int | None = None,
        is_rounded: bool = False,
    ) -> None:
        """Allocates `capacity` rows a slot, scratch rows included; or shares `num_rows` among all slots.

        `num_rows` is a multiple of `GRANULE` and at least `capacity`. `num_positions` may exceed the capacity if slots
        hold a part of their texts; None if row i holds position i. `is_rounded`: rows in int8, whatever the `dtype`.
        """
        self.num_slots, self.capacity, self.num_positions = num_slots, capacity, num_positions or capacity
        self._shapes, self._dtype, self.is_rounded = shapes, dtype, is_rounded
        self._pool: RowPool | None = None
        if num_rows and num_rows < num_slots * capacity:
            self._pool = RowPool(num_slots, num_rows, granule=GRANULE, most=capacity)
        self.is_shared = self._pool is not None
        empty = {layer: shape.state for layer, shape in enumerate(shapes) if shape.state is not None}
        self.states = RecurrentStates(empty, num_slots=num_slots) if empty else None
        more, stored = (_SCALE, torch.int8) if is_rounded else (0, dtype)
        sizes = [(s.num_heads, width + more) for s in shapes for width in (s.key_width, s.value_width)]
        counts = Counter(size for size in sizes if size[0])
        self._stores = {
            size: self._allocated(count, *size, dtype=stored, device=device) for size, count in counts.items()
        }
        taken: Counter[tuple[int, int]] = Counter()
        nothing = torch.empty((num_slots, 0, capacity, 0), dtype=stored, device=device)  # of layers without attention
        views = []
        for size in sizes:
            views.append(self._stores[size][taken[size]] if size[0] else nothing)
            taken[size] += 1
        self.keys, self.values = views[0::2], views[1::2]

    def _allocated(
        self, num_layers: int, num_heads: int, width: int, *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Returns zeros (layers, places, heads, capacity, width); shared rows are one place."""
        if self._pool is None:
            size = (num_layers, self.num_slots, num_heads, self.capacity, width)
            return untouched_zeros(size, dtype=dtype, device=device)
        rows = self._pool.num_rows
        # The last place needs `capacity` rows too; those past the end stay unused.
        count = num_layers * num_heads * rows * width + self.capacity * width
        store = untouched_zeros((count,), dtype=dtype, device=device)
        return store.as_strided(
            (num_layers, rows // GRANULE, num_heads, self.capacity, width),
            (num_heads * rows * width, GRANULE * width, rows * width, width, 1),
        )

    def with_capacity(self, capacity: int) -> SlotCache:
        """Returns an empty cache of the same model with so many rows a slot."""
        return SlotCache(
            self._shapes, num_slots=self.num_slots, capacity=capacity, dtype=self._dtype, device=self.keys[0].device,
            is_rounded=self.is_rounded,
        )  # fmt: skip

    def affords(self, capacity: int) -> bool:
        """Decides whether the free memory holds a further cache with so many rows a slot."""
        row = sum(part.shape[1] * part.shape[3] * part.itemsize for part in (*self.keys, *self.values))
        return self.num_slots * capacity * row <= free_bytes(self.keys[0].device)

    @property
    def num_rows(self) -> int:
        """Rows of all slots together."""
        return self.num_slots * self.capacity if self._pool is None else self._pool.num_rows

    def rows(self, slot: int) -> int:
        """Returns the number of rows that a slot has."""
        return self.capacity if self._pool is None else min(self._pool.size(slot), self.capacity)

    def places(self, slots: Sequence[int]) -> Sequence[int]:
        """Returns the indices of slots in `keys` and `values`; valid until any slot reserves rows."""
        return slots if self._pool is None else [self._pool.first_row(slot) // GRANULE for slot in slots]

    def fits(self, counts: Sequence[int]) -> bool:
        """Decides whether slots could have these numbers of rows if the others had none."""
        return self._pool is None or self._pool.fits(counts)

    def reserve(self, slot: int, count: int) -> bool:
        """Gives a slot at least `count` rows and keeps its old ones; False, unchanged, if others have too many."""
        if self._pool is None:
            return True
        moves = self._pool.reserve(slot, count)
        for move in moves or ():
            self._move_rows(*move)
        return moves is not None

    def trim(self, slot: int, count: int) -> None:
        """Takes all but the first `count` rows of a slot, for others to use."""
        if self._pool is not None:
            self._pool.trim(slot, count)
        if self.states is not None:
            self.states.trim(slot, count)

    def write(self, layer: int, layout: AttentionLayout, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the keys, (M, Hk, Dk), and values, (M, Hk, Dv), of a pass in place.

        Returns the layer's whole keys and values, (places, Hk, capacity, D).
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
            from foretoken.decoder.triton_kernels import write_rows

            write_rows(keys, values, key, value, tables)
        else:  # only captured passes have padding
            keys[tables.written_slots, :, tables.written_rows] = key
            values[tables.written_slots, :, tables.written_rows] = value
        return keys, values

    def move_paths(self, slots: Sequence[int], prefix: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Moves the rows of accepted nodes behind the root's, in every layer at once.

        Args:
            slots: B slots, all different.
            prefix: The row of each root.
            paths: Accepted nodes of each in order. Those of a chain are in place already, and cost nothing.
        """
        self._move_paths(slots, prefix, paths)
        if self.states is not None:  # at last: if a move fails, the pass is repeated from the old states
            self.states.commit(slots, prefix, [(0, *path) for path in paths])

    def _move_paths(self, slots: Sequence[int], prefix: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        moved: list[tuple[int, int, Sequence[int]]] = []
        for slot, root, path in zip(slots, prefix, paths, strict=True):
            if path and list(path) != list(range(1, len(path) + 1)):
                moved.append((slot, root, path))
        if not moved:
            return  # a chain's accepted rows are in place already
        device = self.keys[0].device
        if has_triton_kernels(device):
            from foretoken.decoder.triton_kernels import commit_rows

            depth = max(len(path) for *_, path in moved)
            padded = [node for *_, path in moved for node in (*path, *[-1] * (depth - len(path)))]
            at = self.places([slot for slot, *_ in moved])
            roots, lengths = [root for _, root, _ in moved], [len(path) for *_, path in moved]
            count = len(moved)
            tables = integers_on([*at, *roots, *lengths, *padded], device).split([count, count, count, len(padded)])
            for store in self._stores.values():
                commit_rows(store, tables[0], tables[1], tables[3].view(count, depth), tables[2])
            return
        for slot, root, path in moved:
            self.move_rows(slot, [root + node for node in path], root + 1)

    def move_rows(self, slot: int, source: Sequence[int], start: int) -> None:
        """Moves rows `source` of a slot, in order, to consecutive rows from `start` on; the ranges may overlap."""
        in_place = next((i for i, row in enumerate(source) if row != start + i), None)
        if in_place is None:
            return
        source, start = source[in_place:], start + in_place
        (place,) = self.places([slot])
        rows = integers_on(source, self.keys[0].device)
        for store in self._stores.values():
            store[:, place, :, start : start + len(source)] = store[:, place].index_select(2, rows)

    def keep_nodes(self, slot: int, length: int, nodes: Sequence[int]) -> None:
        """Keeps nodes of a slot's last pass, over a prefix of `length` tokens, in order; row i holds position i."""
        self.move_rows(slot, [length + node for node in nodes], length)
        if self.states is not None and nodes:
            self.states.commit([slot], [length], [nodes])

    def copy_rows(self, source: int, slot: int, count: int) -> None:
        """Copies the first `count` rows of a slot to another slot, in every layer; both must have as many."""
        require(count <= min(self.rows(source), self.rows(slot)), "rows are copied that a slot does not have")
        if self.states is not None:
            self.states.copy(source, slot, count)
        known, place = self.places([source, slot])
        for store in self._stores.values():
            store[:, place, :, :count] = store[:, known, :, :count]

    def reusable(self, slot: int, length: int) -> int:
        """Returns how many of the first `length` positions of a slot another text can begin with."""
        return length if self.states is None else self.states.reusable(slot, length)

    def copy_from(self, source: SlotCache, places: tuple[int, int], rows: range, start: int) -> None:
        """Copies consecutive rows of another cache of the same model, in every layer, to rows from `start` on.

        `places`: the slot there and the slot here.
        """
        (known,), (place,) = source.places(places[:1]), self.places(places[1:])
        for size, store in self._stores.items():
            copied = source._stores[size][:, known, :, rows.start : rows.stop]
            store[:, place, :, start : start + len(rows)] = copied

    def gather_from(self, source: SlotCache, places: tuple[int, int], rows: Tensor, start: int) -> None:
        """Copies listed rows of another cache of the same model to rows from `start` on, in order.

        Args:
            places: The slot there and the slot here.
            rows: (layers, n) int64, or (layers, Hk, n) for a list of each KV head, of the first layers.
        """
        (known,), (place,) = source.places(places[:1]), self.places(places[1:])
        if len(self._stores) == 1 and not runs_cpu_kernels(rows.device):  # keys and values of all layers in one copy
            ((size, store),) = self._stores.items()
            lists = rows.reshape(len(rows), -1, rows.shape[-1]).repeat_interleave(2, dim=0)
            index = lists.unsqueeze(-1).expand(-1, size[0], -1, size[1])
            copied = source._stores[size][: len(lists), known].gather(2, index)
            store[: len(lists), place, :, start : start + rows.shape[-1]] = copied
            return
        layers = range(len(rows))
        sources = [part[layer][known] for layer in layers for part in (source.keys, source.values)]
        outs = [part[layer][place, :, start:] for layer in layers for part in (self.keys, self.values)]
        by_head = [rows[layer].expand(len(self.keys[layer][place]), -1) for layer in layers for _ in range(2)]
        gather_rows(sources, by_head, outs)

    def poison(self, slot: int, start: int) -> None:
        """Overwrites the rows of a slot from `start` on with NaN; a correct program never notices."""
        (place,) = self.places([slot])
        for store in self._stores.values():
            store[:, place, :, start : self.rows(slot)] = -1 if self.is_rounded else float("nan")  # a scale of NaN

    def _move_rows(self, source: int, target: int, count: int) -> None:
        """Copies shared rows; source and target may overlap."""
        for store in self._stores.values():
            for first in _portions(source, target, count):
                rows = store[:, first.source // GRANULE, :, : first.num_rows]
                copied = rows.clone() if abs(source - target) < first.num_rows else rows
                store[:, first.target // GRANULE, :, : first.num_rows] = copied


def _portions(source: int, target: int, count: int) -> list[Move]:
    """Splits a move into bounded portions, ordered so that none overwrites the source of a later one."""
    starts = range(0, count, _PORTION)
    portions = [Move(source + at, target + at, min(_PORTION, count - at)) for at in starts]
    return portions if target < source else portions[::-1]


_SHARE = 0.5  # of the free memory after the weights are loaded; a choice: the rest is for passes and drafters


def affordable_rows(
    shapes: Sequence[LayerShape],
    *,
    dtype: torch.dtype,
    device: torch.device,
    memory_bytes: int | None = None,
    is_rounded: bool = False,
) -> int:
    """Returns the number of cache rows of all slots that fit into `memory_bytes`; None for half of the free memory."""
    widths = [(s.num_heads, width) for s in shapes for width in (s.key_width, s.value_width)]
    row_bytes = sum(heads * (width + _SCALE if is_rounded else width * dtype.itemsize) for heads, width in widths)
    left = share_of_free(device) if memory_bytes is None else memory_bytes
    return max(left, 0) // max(row_bytes, 1)  # 0 bytes without attention


def share_of_free(device: torch.device, most: float = 1.0) -> int:
    """Returns the default bound on the bytes of KV rows; most: the largest share of the free memory."""
    return int(free_bytes(device) * min(_SHARE, most))


def free_bytes(device: torch.device) -> int:
    """Returns the bytes of memory that are free, also below the limit of a container."""
    if has_cuda_runtime(device):
        return torch.cuda.mem_get_info(device)[0]
    if not runs_cpu_kernels(device):
        return 1 << 62  # unknown: the allocator fails if there is less
    available: int = psutil.virtual_memory().available  # includes memory that caches files
    return min(available, _left_of_container(_CGROUP))


_CGROUP = Path("/sys/fs/cgroup")


def _left_of_container(group: Path) -> int:
    """Returns the bytes below the limit of a Linux container, whose own group is `group`; files can be dropped."""
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - int(used) + int(stat["active_file"]) + int(stat["inactive_file"]))
    except (OSError, ValueError, KeyError):  # no container, no limit ("max"), or another version
        return 1 << 62


def gather_rows(sources: Sequence[Tensor], lists: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Copies listed rows, in order, to the first rows of each output, in place.

    Raises `ValueError` or `IndexError` for rows past the end, and for outputs with fewer rows than listed.

    Args:
        sources: P tensors (Hk, capacity, D) with rows side by side; each has its own D.
        lists: P tensors (Hk, n) int64, the rows of each head, below the capacity.
        outs: P tensors (Hk, n or more, D), with rows side by side.
    """
    count, room = lists[0].shape[1], min(out.shape[1] for out in outs)
    require(count <= room, f"{count} rows are listed, and an output has {room}")
    library = library_or_none() if runs_cpu_kernels(sources[0].device) else None
    if library is None:
        for source, rows, out in zip(sources, lists, outs, strict=True):
            for head, each in enumerate(rows):
                torch.index_select(source[head], 0, each, out=out[head, :count])
        return
    lists = [rows if rows.stride(1) == 1 else rows.contiguous() for rows in lists]
    from_, to, listed = (np.concatenate([_addresses(part) for part in parts]) for parts in (sources, outs, lists))
    row_bytes = np.concatenate([np.full(len(part), part.shape[2] * part.itemsize) for part in sources])
    addresses = [part.ctypes.data for part in (from_, to, listed, row_bytes)]
    sizes = (len(from_), count, min(part.shape[1] for part in sources))
    status = library.foretoken_gather(*map(c_int64, (*addresses, *sizes, kernel_threads())))
    require(status == 0, f"listed rows are refused: status {status}. Expected rows of 0..{sizes[2] - 1}")


def _addresses(part: Tensor) -> Any:
    """Returns the address of each head, (Hk,) int64."""
    return part.data_ptr() + np.arange(len(part)) * (part.stride(0) * part.itemsize)
