"""Runs passes of the lean decoder as CUDA graphs, each captured once and then replayed.

A graph belongs to a `PassShape`; inputs that differ between passes of a shape are filled in before the graph runs.
Trees, levels of trees over nodes of earlier passes, and short chains use graphs. Prompts, which have no logits, and
passes with many unwanted logits run without a graph: they keep the GPU busy for longer than the host takes to launch
kernels.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from foretoken.attention.dispatch import has_kernel
from foretoken.core.backend import has_cuda_graphs
from foretoken.core.errors import PassError
from foretoken.decoder.base import PassOutput, UnsuitableError
from foretoken.decoder.cuda_graphs import (
    CapturedGraphs,
    CudaGraphCapture,
    PassShape,
    captured_pass,
    padded_inputs,
    shape_of,
)
from foretoken.decoder.held_memory import HeldMemory
from foretoken.decoder.lean.stock import StockDecoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from foretoken.core.passes import Pass, Tap
    from foretoken.decoder.cuda_graphs import GraphCapture
    from foretoken.decoder.lean.elementwise import TorchOps
    from foretoken.decoder.lean.stock import LeanWeights
    from foretoken.decoder.slot_cache import SlotCache

MAX_GRAPHS = 48
_LARGEST_LOGITS = 1 << 28  # bytes of the logits of one graph
_MOST_TOKENS = 4096
_MOST_UNWANTED = 64  # tokens with unused logits


class GraphDecoder:
    """See `Decoder`."""

    name = "lean-graphs"
    is_exact = False

    def __init__(
        self,
        weights: LeanWeights,
        cache: SlotCache,
        taps: Sequence[Tap],
        *,
        capture: GraphCapture | None = None,
        ops: TorchOps | None = None,
    ) -> None:
        """Prepares the decoder; graphs are captured on first use of a shape.

        Args:
            weights: The model.
            cache: Its KV rows.
            taps: Features to read.
            capture: Captures and replays; None for CUDA graphs.
            ops: See `StockDecoder`.

        Raises:
            UnsuitableError: If a tap does not exist, or passes cannot be captured here.
        """
        if capture is None:
            if not has_cuda_graphs(weights.device):
                raise UnsuitableError("passes are captured as CUDA graphs on NVIDIA GPUs only.")
            capture = CudaGraphCapture(weights.device)
        if weights.layers.has_experts:
            raise UnsuitableError("a pass through experts looks at their routing on the host, and cannot be captured.")
        widest = max(part.shape[-1] for part in (*cache.keys, *cache.values))
        if not has_kernel(weights.dtype, widest):
            raise UnsuitableError("passes are captured as CUDA graphs only where the attention kernel runs.")
        self._stock = StockDecoder(weights, cache, taps, ops=ops)
        self._vocab_size = weights.vocab_size
        self._every_row = torch.arange(_MOST_TOKENS, device=weights.device)
        self._weights = HeldMemory(weights.tensors())
        self._graphs: CapturedGraphs[PassOutput] = CapturedGraphs(
            capture, weights.device, limit=MAX_GRAPHS, name="a pass"
        )

    def run(self, work: Pass) -> PassOutput:
        """See `Decoder`."""
        if self._weights.has_changed():
            raise PassError("a weight has moved in memory, where captured passes do not find it. Make a new LLM.")
        if work.num_layers is not None:  # a pass of a draft
            return self._stock.run(work)
        shape = shape_of(work)
        if work.logit_rows is None or not self._is_captured(shape, work.num_tokens - len(work.logit_rows)):
            return self._stock.run(work)
        with torch.inference_mode():
            inputs = padded_inputs(work, shape)
            output = self._graphs.run(shape, inputs, partial(self._run_captured, shape))
            logits, features = output.logits, output.features
            assert logits is not None, "a graph computes all of them"
            # The next run overwrites these tensors.
            return PassOutput(
                logits=logits[: work.num_tokens].clone() if work.has_all_logits else logits[work.logit_rows],
                features=None if features is None else features[: work.num_tokens].clone(),
            )

    @property
    def memory_bytes(self) -> int:
        """Memory that graphs have taken so far, on the device."""
        return self._graphs.memory_bytes

    def _is_captured(self, shape: PassShape, num_unwanted: int) -> bool:
        logits_bytes = shape.num_tokens * self._vocab_size * 4
        is_small = shape.num_tokens <= _MOST_TOKENS and logits_bytes <= _LARGEST_LOGITS
        return is_small and num_unwanted <= _MOST_UNWANTED

    def _run_captured(self, shape: PassShape, *inputs: Tensor) -> PassOutput:
        work, layout = captured_pass(shape, inputs)
        return self._stock.run_on(replace(work, logit_rows=self._every_row[: shape.num_tokens]), layout)
