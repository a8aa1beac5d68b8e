"""Trees expanded by heads, as CUDA graphs on GPUs: all levels of a tree are then one launch.

A graph belongs to a shape of tree, a batch and the kinds of draws in it. Features, roots and the parameters of draws
lie in tensors that are filled before it runs.

Letters: B sequences, E hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from foretoken.core.backend import has_cuda_graphs
from foretoken.decoder.cuda_graphs import CapturedGraphs, CudaGraphCapture
from foretoken.sampling.noise import KeyedNoise
from foretoken.trees.dynamic import begin_expansion

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor

    from foretoken.decoder.cuda_graphs import GraphCapture
    from foretoken.sampling.draft_draws import DraftDraws
    from foretoken.trees.dynamic import AnyShape, ShapedExpansion

_MAX_GRAPHS = 32
_TRUNCATION = ("top_k", "top_p", "min_p")


class CapturedExpansion:
    """Expands trees with one head, as a CUDA graph where that is possible."""

    def __init__(
        self,
        fill: Callable[[ShapedExpansion, Tensor], None],
        device: torch.device,
        *,
        capture: GraphCapture | None = None,
    ) -> None:
        """Prepares; graphs are captured when a shape is first met.

        Args:
            fill: Fills a tree of roots from (B, E) features, without a look at the content of any tensor.
            device: Where trees lie.
            capture: Captures; None for CUDA graphs on GPUs and none elsewhere.
        """
        self._fill = fill
        if capture is None and has_cuda_graphs(device):
            capture = CudaGraphCapture(device)
        self._graphs: CapturedGraphs[ShapedExpansion] | None = None
        if capture is not None:
            self._graphs = CapturedGraphs(capture, device, limit=_MAX_GRAPHS, name="a tree")

    def expand(self, shape: AnyShape, roots: Tensor, draws: DraftDraws, features: Tensor) -> ShapedExpansion:
        """A filled tree; what an earlier call gave is not valid any more.

        Args:
            shape: What to fill.
            roots: (B,) int64.
            draws: How tokens are chosen.
            features: (B, E), what the head reads.
        """
        if self._graphs is None:
            expansion = begin_expansion(shape, roots, draws)
            self._fill(expansion, features)
            return expansion
        batch = draws.batch
        truncation = {name: value for name in _TRUNCATION if (value := getattr(batch, name)) is not None}
        inputs = [
            roots, features, draws.root_positions, draws.is_coupled, draws.is_sampled, batch.noise.seeds,
            batch.temperature, batch.greedy, *truncation.values(),
        ]  # fmt: skip
        kinds = (draws.has_coupled, draws.has_sampled, draws.is_drawn_for_all)
        limits = (*truncation, batch.largest_top_k)
        work = partial(self._captured_tree, shape, draws, list(truncation))
        return self._graphs.run((shape, len(roots), kinds, limits), inputs, work)

    def _captured_tree(
        self, shape: AnyShape, draws: DraftDraws, limits: Sequence[str], *places: Tensor
    ) -> ShapedExpansion:
        """What is captured: a tree expanded with draws whose parameters, `limits` last, lie in tensors of its own."""
        roots, features, root_positions, is_coupled, is_sampled, seeds, temperature, greedy, *truncation = places
        own_limits: dict[str, Any] = dict(zip(limits, truncation, strict=True))
        # Nothing else of the batch is read, see `DraftDraws.keys`.
        batch = replace(
            draws.batch, noise=KeyedNoise(seeds), temperature=temperature, greedy=greedy, processors=(),
            **own_limits,
        )  # fmt: skip
        own = replace(draws, batch=batch, root_positions=root_positions, is_coupled=is_coupled, is_sampled=is_sampled)
        expansion = begin_expansion(shape, roots, own)
        self._fill(expansion, features)
        return expansion
