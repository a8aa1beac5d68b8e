"""SPiRe: drafts with a few of the target's blocks, over first and last tokens and a feedback memory.

See `foretoken.heads.spire`. A slot has a KV row for each committed token. With feedback these rows come from the
target's features alone, so that committed tokens need no pass. A draft begins at the root: it gathers the rows within
sight, at most `sinks + window - 1` a sequence, and adds a row for each node that has children. Drafted rows never enter
the slot.

Native kernels have neither sinks nor shared KV rows, so drafts run on torch's operations, as CUDA graphs on GPUs.

Letters: B sequences, M nodes of a level, T rows within sight, C committed tokens, F E features of a position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

from foretoken.core.backend import integers_on
from foretoken.decoder.slot_cache import LayerShape, SlotCache
from foretoken.drafters.head_drafter import HeadDrafter
from foretoken.drafters.head_features import CHUNK, WaitingFeatures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.drafters.base import TargetHandle
    from foretoken.heads.decoder_layer import KeyValue
    from foretoken.heads.spire import SpireHead
    from foretoken.models.parts import TargetParts
    from foretoken.sampling.draft_draws import DraftDraws
    from foretoken.trees.choices import TreeShape
    from foretoken.trees.expansion import Expansion


class Sight:
    """The KV rows that new tokens of B sequences may see; later tokens see those of earlier ones too.

    Attributes:
        keys: (B, T, Hk, Dh) of each group of blocks with the same rows: one with feedback, else one for each block.
        values: As `keys`.
        seen: (B, M, T) bool, rows of the last M tokens and of those before them on their paths.
    """

    def __init__(self, head: SpireHead, cache: SlotCache, places: Tensor) -> None:
        """Gathers the committed rows in sight; places: (B, 2) int64, slots and their numbers of rows."""
        self._head = head
        slots, self._lengths = places.unbind(1)
        config, device = head.config, places.device
        lengths, recent = self._lengths.unsqueeze(1), min(config.window - 1, cache.capacity)
        sinks = torch.arange(config.sinks, device=device).expand(len(places), -1)
        first = (lengths - recent).clamp_min(config.sinks)
        rows = torch.cat([sinks, first + torch.arange(recent, device=device)], dim=1)
        is_row = rows < lengths
        rows = rows.where(is_row, 0)
        is_finite = is_row.unsqueeze(2).unsqueeze(3)  # others may hold anything, and masked values are multiplied by 0
        self.keys, self.values = (
            [store[slots.unsqueeze(1), :, rows].where(is_finite, 0) for store in stores]
            for stores in (cache.keys, cache.values)
        )
        self._positions, self.seen = rows, is_row.unsqueeze(1)

    def read(self, tokens: Tensor, depths: Tensor, parts: TargetParts, *, is_chain: bool = False) -> Tensor:
        """Computes new tokens, and adds their rows; returns (B, M, E), the inputs of the LM head.

        Args:
            tokens: (B, M) int64; `seen` has the rows of their paths, which their own follow.
            depths: (M,) int64, positions behind the committed rows.
            parts: The modules shared with the target.
            is_chain: Whether each token is the child of the one before; else they do not see each other.
        """
        head, num = self._head, tokens.shape[1]
        positions = self._lengths.unsqueeze(1) + depths
        own = torch.eye(num, dtype=torch.bool, device=tokens.device)
        if is_chain:
            own = torch.ones_like(own).tril()
        before, has_feedback = self._positions, head.config.has_feedback
        self._positions = torch.cat([before, positions], dim=1)
        path, seen = self.seen, torch.cat([self.seen.expand(-1, num, -1), own.expand(len(tokens), -1, -1)], dim=2)
        self.seen = seen
        keys_at, visible = (before, path) if has_feedback else (self._positions, seen)
        mask = (visible & head.config.in_sight(positions.unsqueeze(2), keys_at.unsqueeze(1))).unsqueeze(1)

        def attention(index: int, query: Tensor, new: KeyValue | None) -> Tensor:
            group = 0 if has_feedback else index
            if new is not None:
                self._add(group, new)
            query, key, value = (part.transpose(1, 2) for part in (query, self.keys[group], self.values[group]))
            is_grouped = query.shape[1] != key.shape[1]
            return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=is_grouped).transpose(
                1, 2
            )

        states = head.states(tokens, positions, attention, parts)
        if has_feedback:
            self._add(0, head.memory_rows(states, positions))
        return head.output(states, parts)

    def _add(self, group: int, new: KeyValue) -> None:
        self.keys[group] = torch.cat([self.keys[group], new.key.to(self.keys[group].dtype)], dim=1)
        self.values[group] = torch.cat([self.values[group], new.value.to(self.values[group].dtype)], dim=1)


class SpireRows(WaitingFeatures):
    """The KV rows of committed tokens."""

    def __init__(self, head: SpireHead, parts: TargetParts, target: TargetHandle, dtype: torch.dtype) -> None:
        """Allocates rows for the context."""
        layer, config = head.config.layer, head.config
        shape = LayerShape(layer.num_key_value_heads, layer.head_dim, layer.head_dim)
        cache = SlotCache(
            [shape] * (1 if config.has_feedback else config.num_layers), num_slots=target.num_slots,
            capacity=target.context_len, dtype=dtype, device=target.device,
        )  # fmt: skip
        super().__init__(cache, target, dtype)
        self._head, self._parts, self._device = head, parts, target.device

    @override
    def is_known(self, slot: int, length: int) -> bool:
        """Returns whether all features are here; a draft needs a row to see."""
        return length > 0 and super().is_known(slot, length)

    @override
    def of(self, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """(B, 2) int64, the slots and their numbers of rows; feeds what waits."""
        waiting = [(slot, text) for slot, text in zip(slots, texts, strict=True) if self._waiting[slot]]
        if waiting and self._head.config.has_feedback:
            self._feed_features(waiting)
        for slot, text in waiting:
            if not self._head.config.has_feedback:
                for begin in range(self._fed[slot], self._known[slot], CHUNK):
                    self._feed_tokens(slot, text[begin : min(begin + CHUNK, self._known[slot])], begin)
            self._waiting[slot], self._fed[slot] = [], self._known[slot]
        return integers_on([[slot, self._known[slot]] for slot in slots], self._device)

    def _feed_features(self, waiting: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Writes the rows of the target's features: of C tokens of all these slots at once."""
        places = [
            (slot, at, text[at]) for slot, text in waiting for at in range(self._fed[slot], self._known[slot])
        ]  # fmt: skip
        slots, at, tokens = integers_on(list(zip(*places, strict=True)), self._device).unbind()
        features = torch.cat([self._joined(slot) for slot, _ in waiting])
        rows = self._head.committed_rows(features.unsqueeze(0), tokens.unsqueeze(0), at.unsqueeze(0), self._parts)
        for store, new in zip((self.cache.keys[0], self.cache.values[0]), rows, strict=True):
            store[slots, :, at] = new[0].to(store.dtype)

    def _feed_tokens(self, slot: int, tokens: Sequence[int], begin: int) -> None:
        """Runs the blocks over C committed tokens of one slot, and keeps their rows."""
        ids = integers_on([tokens], self._device)
        sight = Sight(self._head, self.cache, integers_on([[slot, begin]], self._device))
        sight.read(ids, torch.arange(len(tokens), device=self._device), self._parts, is_chain=True)
        for stores, rows in ((self.cache.keys, sight.keys), (self.cache.values, sight.values)):
            for store, new in zip(stores, rows, strict=True):
                store[slot, :, begin : begin + len(tokens)] = new[0, -len(tokens) :].transpose(0, 1)


class SpireDrafter(HeadDrafter):
    """Drafts token by token from the rows in sight, every level of a tree at once."""

    reads_last = False
    head: SpireHead

    @override
    def features_for(self, target: TargetHandle) -> SpireRows:
        self._rows = SpireRows(self.head, self.parts, target, self.dtype)
        return self._rows

    @override
    def fill(self, expansion: Expansion, state: Tensor) -> None:
        """Fills trees level by level, without reading any tensor; state: (B, 2), from `SpireRows.of`."""
        sight = Sight(self.head, self._rows.cache, state)
        for depth in expansion.levels():
            frontier = expansion.frontier(depth)
            sight.seen = frontier.inherited(sight.seen)
            depths = torch.full((frontier.tokens.shape[1],), depth, device=state.device)
            hidden = sight.read(frontier.tokens, depths, self.parts)
            expansion.grow(depth, self.head.logits(depth, hidden, self.parts).float())

    @override
    def trial(self, shape: TreeShape, roots: Tensor, draws: DraftDraws) -> None:
        self._expansion.expand(shape, roots, draws, [integers_on([[0, 1]], roots.device)])
