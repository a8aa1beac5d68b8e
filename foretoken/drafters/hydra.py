"""Hydra and Hydra++: heads that read the tokens drafted before theirs, evaluated at each node of the tree.

Hydra++ reads the target's features through a decoder block of its own (`heads/prefix_layer.py`), whose KV cache follows
the target's: positions enter it when they are committed, in order, so there is never anything to take back.

Source: Ankner et al. 2024 (arXiv 2402.05109).

Letters: B sequences, T positions, E hidden size.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.attention.dispatch import tree_attention
from foretoken.attention.layout import AttentionLayout
from foretoken.drafters.heads import (
    HeadOptions,
    LastFeatures,
    LoadedHead,
    Proposal,
    chain_seconds,
    grow,
    head_shape,
    load_head,
)
from foretoken.drafters.recorded_growth import RecordedGrowth
from foretoken.heads.hydra import HydraHeads
from foretoken.target.decoder import UnsuitableError
from foretoken.target.lean.native import NativeBlocks
from foretoken.target.slot_cache import LayerShape, SlotCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.core.token_tree import TokenTree
    from foretoken.drafters.base import Committed, DraftContext, Drafter, TargetFacts
    from foretoken.heads.prefix_layer import PrefixLayer
    from foretoken.target.taps import Tap

_TOGETHER = 32  # positions of a sequence that are fed beside others; longer parts are fed alone
_CHUNK = 512  # positions of a long part fed at once
_AFTER_ITS_NORM = 2  # the tap of a model of one block


class Options(HeadOptions):
    """Options of Hydra."""


class HydraDrafter:
    """Drafts a head at every node that has children."""

    name = "hydra"
    taps: tuple[Tap, ...] = ("final",)

    def __init__(self, options: Options, target: TargetFacts, loaded: LoadedHead) -> None:
        head = loaded.head
        assert isinstance(head, HydraHeads), "`load_head` checks the method"
        self._options, self._device = options, target.device
        size, dtype = head.config.hidden_size, head.weight.dtype
        self._grower = RecordedGrowth(partial(grow, head, loaded.parts), target.device)
        self._features: LastFeatures | PrefixFeatures
        if head.prefix is None:
            self._features = LastFeatures(target.num_slots, size, device=target.device, dtype=dtype)
        else:
            self._features = PrefixFeatures(head.prefix, target, dtype)
        start = torch.zeros(1, size, device=target.device, dtype=dtype)
        self.shape = head_shape(options, loaded, target, lambda shape: chain_seconds(shape, loaded, start))
        self.max_nodes = self.shape.num_nodes

    @torch.inference_mode()
    def propose(self, context: DraftContext) -> TokenTree:
        """See `Drafter`."""
        proposal = Proposal(context, self.shape, self._features.is_known, self._options, self._device)
        if not proposal.rows:
            return proposal.without_drafts()
        return proposal.grown(self._grower, self._features.of(proposal.slots))

    def commit(self, committed: Committed) -> None:
        """See `Drafter`."""
        self._features.learn(committed)

    def release(self, slot: int) -> None:
        """See `Drafter`."""
        self._features.forget(slot)


class PrefixFeatures:
    """The target's features as the decoder block of Hydra++ sees them, at the last committed position of every slot.

    Committed features are kept until the next proposal asks, and then fed in one pass: nothing is computed for
    sequences that are not drafted for, and what was committed meanwhile is fed together.

    Attributes:
        cache: KV rows of the block by slot.
    """

    def __init__(self, layer: PrefixLayer, target: TargetFacts, dtype: torch.dtype) -> None:
        config = layer.config
        shape = LayerShape(config.num_key_value_heads, config.head_dim, config.head_dim)
        self.cache = SlotCache(
            [shape], num_slots=target.num_slots, capacity=target.context_len + _TOGETHER, dtype=dtype,
            device=target.device,
        )  # fmt: skip
        self._layer, self._dtype = layer, dtype
        self._native: NativeBlocks | None = None
        if target.device.type == "cpu":
            with suppress(UnsuitableError):
                self._native = NativeBlocks(layer.as_blocks(self.cache.capacity), self.cache, dtype, [_AFTER_ITS_NORM])
        self._fed = [0] * target.num_slots  # positions in the cache
        self._waiting: list[list[Tensor]] = [[] for _ in range(target.num_slots)]  # (T, E) each, committed after those
        self._known = [0] * target.num_slots  # positions in the cache or waiting
        self._last = torch.zeros(target.num_slots, layer.norm.shape[0], device=target.device, dtype=dtype)

    def is_known(self, slot: int, length: int) -> bool:
        """Whether all features of positions 0 … `length - 1` came in."""
        return length > 0 and self._known[slot] == length

    def learn(self, committed: Committed) -> None:
        """Takes what entered the target's KV."""
        assert committed.features is not None, "the drafter taps features"
        each = zip(committed.slots, committed.starts, committed.lengths, strict=True)
        for row, (slot, start, length) in enumerate(each):
            if start == 0:
                self.forget(slot)
            if start == self._known[slot]:  # else a part is missing: the slot stays behind and is not drafted for
                self._waiting[slot].append(committed.features[row, :length, 0].to(self._dtype))
                self._known[slot] += length

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
        return self._last[torch.tensor(list(slots), device=self._last.device)]

    def _feed(self, slots: list[int], parts: list[Tensor]) -> None:
        """Runs the block over the next positions of some slots, (T, E) of each, padded to the longest."""
        lengths = [len(part) for part in parts]
        width, device = max(lengths), self._last.device
        features = parts[0].unsqueeze(0) if len(parts) == 1 else torch.nn.utils.rnn.pad_sequence(parts, True)
        prefix = [self._fed[slot] for slot in slots]
        positions = torch.tensor(prefix, device=device).unsqueeze(1) + torch.arange(width, device=device)
        # Rows of padding lie after all others of their slot: they are seen by padding alone and overwritten next.
        layout = AttentionLayout(slots=slots, prefix=prefix, positions=positions)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.cache.write(0, layout, key, value)
            return tree_attention(query, keys, values, layout, scale=query.shape[-1] ** -0.5)

        tapped = None if self._native is None else self._native.decode(features, layout, None)
        encoded: Tensor = self._layer(features, positions, attend) if tapped is None else tapped[:, :, 0]
        last = torch.tensor([length - 1 for length in lengths], device=device)
        self._last[torch.tensor(slots, device=device)] = encoded[torch.arange(len(slots), device=device), last]
        for slot, length in zip(slots, lengths, strict=True):
            self._fed[slot] += length


def create(options: Options, target: TargetFacts) -> Drafter:
    """See `foretoken.drafters.registry`."""
    return HydraDrafter(options, target, load_head(options, target, "hydra"))
