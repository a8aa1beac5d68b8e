"""What each query of one forward pass may see, as a value shared by all layers.

A pass feeds T tokens per sequence. Their keys and values go to the cache rows after the sequence's prefix and after
`offset` scratch rows that earlier passes over the same prefix wrote (a draft tree grown level by level). The prefix is
seen by every query; scratch rows only as `visible` says. Row i of the prefix holds position i.

Letters: B sequences, T tokens fed, W = offset + T scratch rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.attention.tables import PassTables, packed_bits
from foretoken.core.checks import require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.core.token_tree import TokenTree


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayout:
    """Where each sequence's keys lie and which of them each query sees.

    Attributes:
        slots: B cache slots.
        prefix: B prefix lengths.
        offset: Scratch rows written before this pass.
        positions: (B, T) int64, positions of the queries.
        tree: The token tree that the T tokens are: each sees its ancestors and itself. Without earlier scratch rows.
        visible: (B, T, W) bool, scratch rows each query sees, where it is no tree of this pass alone.
        scratch_positions: (B, W) int64, positions of all scratch rows; given with `visible`.

    With neither `tree` nor `visible` the tokens are causal, with no earlier scratch rows.

    A recorded pass (`for_recording`) is run again with other contents of the same tensors: it has tables alone, and
    what would have to be known on the host is a bound.
    """

    slots: Sequence[int]
    prefix: Sequence[int]
    positions: Tensor
    offset: int = 0
    tree: TokenTree | None = None
    visible: Tensor | None = None
    scratch_positions: Tensor | None = None
    is_recorded: bool = False
    _tables: list[PassTables] = field(default_factory=list, init=False, repr=False)
    _masks: dict[tuple[int, int | None], Tensor | None] = field(default_factory=dict, init=False, repr=False)
    _ancestors: list[Tensor] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        """Checks what the masks rely on."""
        require(self.offset == 0 or self.visible is not None, "earlier scratch rows are seen only as `visible` says")
        require(self.tree is None or self.visible is None, "a tree says what is visible")

    @classmethod
    def for_recording(cls, tables: PassTables, positions: Tensor) -> AttentionLayout:
        """A pass whose slots, lengths and visibility are read on the device, whenever it runs.

        Args:
            tables: Filled anew before every run.
            positions: (B, T) int64, likewise.
        """
        batch = positions.shape[0]
        layout = cls(slots=range(batch), prefix=[tables.max_prefix] * batch, positions=positions, is_recorded=True)
        layout._tables.append(tables)
        return layout

    @property
    def num_queries(self) -> int:
        """T."""
        return self.positions.shape[1]

    @property
    def starts(self) -> list[int]:
        """First cache row that each sequence writes."""
        return [prefix + self.offset for prefix in self.prefix]

    def num_keys(self, row: int) -> int:
        """Cache rows that a sequence's queries may see: prefix, earlier scratch rows and this pass's own."""
        return self.prefix[row] + self.offset + self.num_queries

    def tables(self) -> PassTables:
        """The same for kernels; made once per pass."""
        if not self._tables:
            self._tables.append(self._build_tables())
        return self._tables[0]

    def mask(self, row: int, window: int | None) -> Tensor | None:
        """What one sequence's queries see; computed once per pass and window.

        Args:
            row: Index into the batch.
            window: Only keys less than this many positions back, or None.

        Returns:
            (T, S) bool with S = `num_keys(row)`, or None when every query sees every key.
        """
        if window is not None and self.num_keys(row) <= window:
            window = None
        key = (row, window)
        if key not in self._masks:
            self._masks[key] = self._build_mask(row, window)
        return self._masks[key]

    def _build_tables(self) -> PassTables:
        """See `tables`."""
        device = self.positions.device
        slots, prefix = torch.tensor([list(self.slots), list(self.prefix)], device=device)
        rows = torch.arange(self.offset, self.offset + self.num_queries, device=device)
        scratch = self.positions if self.scratch_positions is None else self.scratch_positions
        words = None
        if self.visible is not None:
            words = packed_bits(self.visible)
        elif self.tree is not None and self.tree.width > 1:
            words = self.tree.ancestor_words().view(torch.int32)  # little-endian: the low half comes first
        return PassTables(
            slots=slots.to(torch.int32), prefix=prefix.to(torch.int32), positions=self.positions.to(torch.int32),
            scratch_positions=scratch.to(torch.int32), words=words, written_slots=slots.unsqueeze(1),
            written_rows=prefix.unsqueeze(1) + rows, max_prefix=max(self.prefix),
        )  # fmt: skip

    def _visible(self) -> Tensor | None:
        """`visible`, worked out from the tree when it is first asked for."""
        if self.tree is None or self.tree.width == 1:
            return self.visible
        if not self._ancestors:
            self._ancestors.append(self.tree.ancestor_mask())
        return self._ancestors[0]

    def _build_mask(self, row: int, window: int | None) -> Tensor | None:
        """See `mask`."""
        queries, prefix, device = self.num_queries, self.prefix[row], self.positions.device
        if queries == 1 and self.visible is None and window is None:
            return None
        visible = self._visible()
        causal = torch.ones(queries, queries, dtype=torch.bool, device=device).tril()
        own = causal if visible is None else visible[row]
        mask = torch.cat([torch.ones(queries, prefix, dtype=torch.bool, device=device), own], dim=1)
        if window is not None:
            scratch = self.positions[row] if self.scratch_positions is None else self.scratch_positions[row]
            key_positions = torch.cat([torch.arange(prefix, device=device), scratch])
            mask &= self.positions[row].unsqueeze(1) - key_positions < window
        return mask
