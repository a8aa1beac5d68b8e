"""The decoder block of Hydra++ (`heads/prefix_layer.py`) while drafting: its KV cache and what it gave last.

The cache follows the target's: positions enter it when they are committed, in order, so there is never anything to take
back. On CPUs the block is a model of one block on the native kernels, on GPUs one CUDA graph for each size of pass (see
`foretoken.decoder.captured_pass`), elsewhere and for long parts torch's operations.

Source: Ankner et al. 2024 (arXiv 2402.05109), section 4.3.

Letters: M positions of a pass, T positions and B slots of sequences, E hidden size.
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
from foretoken.core.backend import has_cuda_graphs, runs_cpu_kernels
from foretoken.core.passes import Pass
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.captured_pass import PassShape, captured_pass, padded_inputs, shape_of
from foretoken.decoder.cuda_graphs import CapturedGraphs, CudaGraphCapture
from foretoken.decoder.lean.native import NativeBlocks
from foretoken.decoder.slot_cache import LayerShape, SlotCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.decoder.cuda_graphs import GraphCapture
    from foretoken.drafters.base import Committed, TargetHandle
    from foretoken.heads.prefix_layer import PrefixLayer

_TOGETHER = 32  # positions of a sequence that are fed beside others; longer parts are fed alone
_CHUNK = 512  # positions of a long part fed at once
_AFTER_ITS_NORM = 2  # the tap of a model of one block
_MAX_GRAPHS = 32


class PrefixFeatures:
    """The target's features as the decoder block of Hydra++ sees them, at the last committed position of every slot.

    Committed features are kept until the next proposal asks, and then fed in one pass: nothing is computed for
    sequences that are not drafted for, and what was committed meanwhile is fed together.

    Attributes:
        cache: KV rows of the block by slot.
    """

    def __init__(
        self, layer: PrefixLayer, target: TargetHandle, dtype: torch.dtype, *, capture: GraphCapture | None = None
    ) -> None:
        """Nothing is known yet.

        Args:
            layer: The block.
            target: Tells slots, context and device.
            dtype: Of the block.
            capture: Captures; None for CUDA graphs on GPUs and none elsewhere.
        """
        config = layer.config
        shape = LayerShape(config.num_key_value_heads, config.head_dim, config.head_dim)
        self.cache = SlotCache(
            [shape], num_slots=target.num_slots, capacity=target.context_len + _TOGETHER, dtype=dtype,
            device=target.device,
        )  # fmt: skip
        self._layer, self._dtype = layer, dtype
        if capture is None and has_cuda_graphs(target.device):
            capture = CudaGraphCapture(target.device)
        self._graphs: CapturedGraphs[Tensor] | None = None
        if capture is not None and has_kernel(dtype, config.head_dim):
            self._graphs = CapturedGraphs(capture, target.device, limit=_MAX_GRAPHS, name="a decoder block")
        self._native: NativeBlocks | None = None
        if runs_cpu_kernels(target.device) and self._graphs is None:
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
        parts = committed.features[:, 0].to(self._dtype).split(committed.lengths)
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
        return self._last[torch.tensor(list(slots), device=self._last.device)]

    def _feed(self, slots: list[int], parts: list[Tensor]) -> None:
        """Runs the block over the next positions of some slots, (T, E) of each."""
        lengths, prefix_lens = [len(part) for part in parts], [self._fed[slot] for slot in slots]
        features = parts[0] if len(parts) == 1 else torch.cat(parts)
        work = Pass.of_chains(
            [[0] * length for length in lengths], slots=slots, prefix_lens=prefix_lens, device=features.device
        )
        if self._graphs is not None and max(lengths) <= _TOGETHER:
            shape = shape_of(work)
            inputs = [*padded_inputs(work, shape), pad(features, (0, 0, 0, shape.num_tokens - len(features)))]
            encoded = self._graphs.run(shape, inputs, partial(self._run_captured, shape))
        else:
            encoded = self._run(features, work)
        last = torch.tensor([end - 1 for end in work.offsets[1:]], device=features.device)
        self._last[torch.tensor(slots, device=features.device)] = encoded[last]
        for slot, length in zip(slots, lengths, strict=True):
            self._fed[slot] += length

    def _run(self, features: Tensor, work: Pass) -> Tensor:
        """(M, E), the block's output for the features of a pass."""
        if self._native is None:
            return self._encoded(features, work.positions, AttentionLayout(work))
        tapped = self._native.run(work, features.float()).features
        assert tapped is not None, "the norm is tapped"
        return tapped[:, 0]

    def _run_captured(self, shape: PassShape, *inputs: Tensor) -> Tensor:
        """What is captured of the same; inputs: those of the pass, then its features."""
        work, layout = captured_pass(shape, inputs[:-1])
        return self._encoded(inputs[-1], work.positions, layout)

    def _encoded(self, features: Tensor, positions: Tensor, layout: AttentionLayout) -> Tensor:
        """(M, E), the block in torch's operations; writes its keys and values."""

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.cache.write(0, layout, key[0], value[0])
            return tree_attention(query[0], keys, values, layout, scale=query.shape[-1] ** -0.5).unsqueeze(0)

        encoded: Tensor = self._layer(features.unsqueeze(0), positions.unsqueeze(0), attend)[0]
        return encoded
