"""The decoder block of Hydra++ (`heads/prefix_layer.py`) while drafting: its KV cache and what it gave last.

The cache follows the target's: positions enter it when they are committed, in order, so there is never anything to take
back. On CPUs the block is a model of one block on the native kernels, on GPUs one CUDA graph for each batch, width and
bound of the context, elsewhere and for long parts torch's operations.

Source: Ankner et al. 2024 (arXiv 2402.05109), section 4.3.

Letters: B sequences, T positions, E hidden size.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from foretoken.attention.dispatch import has_kernel, tree_attention
from foretoken.attention.layout import AttentionLayout
from foretoken.attention.tables import PassTables
from foretoken.target.decoder import UnsuitableError
from foretoken.target.lean.native import NativeBlocks
from foretoken.target.recorder import GraphRecorder, Recordings, bound_of
from foretoken.target.slot_cache import LayerShape, SlotCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.drafters.base import Committed, TargetFacts
    from foretoken.heads.prefix_layer import PrefixLayer
    from foretoken.target.recorder import Recorder

_TOGETHER = 32  # positions of a sequence that are fed beside others; longer parts are fed alone
_CHUNK = 512  # positions of a long part fed at once
_AFTER_ITS_NORM = 2  # the tap of a model of one block
_MAX_RECORDINGS = 32


class PrefixFeatures:
    """The target's features as the decoder block of Hydra++ sees them, at the last committed position of every slot.

    Committed features are kept until the next proposal asks, and then fed in one pass: nothing is computed for
    sequences that are not drafted for, and what was committed meanwhile is fed together.

    Attributes:
        cache: KV rows of the block by slot.
    """

    def __init__(
        self, layer: PrefixLayer, target: TargetFacts, dtype: torch.dtype, *, recorder: Recorder | None = None
    ) -> None:
        """Nothing is known yet.

        Args:
            layer: The block.
            target: Tells slots, context and device.
            dtype: Of the block.
            recorder: Makes recordings; None for CUDA graphs on GPUs and none elsewhere.
        """
        config = layer.config
        shape = LayerShape(config.num_key_value_heads, config.head_dim, config.head_dim)
        self.cache = SlotCache(
            [shape], num_slots=target.num_slots, capacity=target.context_len + _TOGETHER, dtype=dtype,
            device=target.device,
        )  # fmt: skip
        self._layer, self._dtype = layer, dtype
        if recorder is None and target.device.type == "cuda":
            recorder = GraphRecorder(target.device)
        self._recordings: Recordings[Tensor] | None = None
        if recorder is not None and has_kernel(dtype, config.head_dim):
            self._recordings = Recordings(recorder, target.device, limit=_MAX_RECORDINGS, name="a decoder block")
        self._native: NativeBlocks | None = None
        if target.device.type == "cpu" and self._recordings is None:
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
        features = parts[0].unsqueeze(0) if len(parts) == 1 else torch.nn.utils.rnn.pad_sequence(parts, True)
        prefix = [self._fed[slot] for slot in slots]
        if self._recordings is not None and features.shape[1] <= _TOGETHER:
            width, bound = 1 << (features.shape[1] - 1).bit_length(), bound_of(max(prefix))
            inputs = [pad(features, (0, 0, 0, width - features.shape[1])), torch.tensor([slots, prefix, lengths])]
            self._recordings.run((len(slots), width, bound), inputs, partial(self._run_recorded, bound))
        else:
            self._run(features, slots, prefix, lengths)
        for slot, length in zip(slots, lengths, strict=True):
            self._fed[slot] += length

    def _run(self, features: Tensor, slots: list[int], prefix: list[int], lengths: list[int]) -> None:
        """Feeds (B, T, E) features and keeps what comes of the last position of each; rows of padding do no harm."""
        # They lie after all others of their slot: they are seen by padding alone and overwritten next.
        device = features.device
        positions = torch.tensor(prefix, device=device).unsqueeze(1) + torch.arange(features.shape[1], device=device)
        layout = AttentionLayout(slots=slots, prefix=prefix, positions=positions)
        tapped = None if self._native is None else self._native.decode(features, layout, None)
        encoded = self._encoded(features, layout) if tapped is None else tapped[:, :, 0]
        last = torch.tensor([length - 1 for length in lengths], device=device)
        self._last[torch.tensor(slots, device=device)] = encoded[torch.arange(len(slots), device=device), last]

    def _run_recorded(self, bound: int, features: Tensor, places: Tensor) -> Tensor:
        """What is recorded of the same; places: (3, B) int64, slots, positions fed before and lengths."""
        slots, prefix, lengths = places
        rows = prefix.unsqueeze(1) + torch.arange(features.shape[1], device=features.device)
        positions = rows.to(torch.int32)
        tables = PassTables(
            slots=slots.to(torch.int32), prefix=prefix.to(torch.int32), positions=positions,
            scratch_positions=positions, words=None, written_slots=slots.unsqueeze(1), written_rows=rows,
            max_prefix=bound,
        )  # fmt: skip
        encoded = self._encoded(features, AttentionLayout.for_recording(tables, rows))
        self._last[slots] = encoded[torch.arange(len(slots), device=slots.device), lengths - 1]
        return encoded

    def _encoded(self, features: Tensor, layout: AttentionLayout) -> Tensor:
        """(B, T, E), the block in torch's operations; writes its keys and values."""

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.cache.write(0, layout, key, value)
            return tree_attention(query, keys, values, layout, scale=query.shape[-1] ** -0.5)

        encoded: Tensor = self._layer(features, layout.positions, attend)
        return encoded
