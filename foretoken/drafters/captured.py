"""Whole drafts as CUDA graphs: one launch instead of some thirty for each level.

Letters: B sequences.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from foretoken.core.backend import has_cuda_graphs
from foretoken.decoder.cuda_graphs import WARM_UPS, CapturedGraphs, CudaGraphCapture, bound_of
from foretoken.sampling.noise import KeyedNoise
from foretoken.trees.dynamic import begin_expansion

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from foretoken.decoder.cuda_graphs import GraphCapture
    from foretoken.sampling.draft_draws import DraftDraws
    from foretoken.trees.dynamic import AnyShape, ShapedExpansion

_MAX_GRAPHS = 64  # a choice: batches of up to eight sequences in eight depths
_CAPTURED_USE = 2  # a choice: what is drafted once is not worth the time of a capture
_TRUNCATION = ("top_k", "top_p", "min_p")
Result = TypeVar("Result")


class Prefixes(NamedTuple):
    """The committed rows of B cache slots, which drafts stand behind.

    Attributes:
        slots: On the host; under capture (B,) int32 on the device.
        lengths: Of the prefixes; on the host, under capture (B,) int32 on the device.
        bound: Under capture the greatest length that the graph serves; else None.
        positions: Of the first nodes behind the prefixes, as `lengths`; None if row i of every slot holds position i.
    """

    slots: Sequence[int] | Tensor
    lengths: Sequence[int] | Tensor
    bound: int | None = None
    positions: Sequence[int] | Tensor | None = None


class CapturedExpansion(Generic[Result]):
    """Expands trees, as CUDA graphs where possible."""

    def __init__(
        self,
        fill: Callable[..., Result],
        device: torch.device,
        *,
        is_capturable: bool = True,
        capture: GraphCapture | None = None,
    ) -> None:
        """Prepares. A graph is captured when its shape is used again; on GPUs by CUDA graphs if `capture` is None.

        Args:
            fill: Fills a tree of roots in place, without reading any tensor: takes the expansion, the inputs of
                `expand`, and its prefixes if there are any.
            is_capturable: Whether the work of `fill` can be captured.
        """
        self._fill, self._device = fill, device
        if capture is None and has_cuda_graphs(device):
            capture = CudaGraphCapture(device)
        self._graphs: CapturedGraphs[tuple[ShapedExpansion, Result]] | None = None
        if capture is not None and is_capturable:
            self._graphs = CapturedGraphs(capture, device, limit=_MAX_GRAPHS, name="a tree")
        self._uses: Counter[Hashable] = Counter()

    def expand(
        self,
        shape: AnyShape,
        roots: Tensor,
        draws: DraftDraws,
        inputs: Sequence[Tensor],
        prefixes: Prefixes | None = None,
    ) -> tuple[ShapedExpansion, Result]:
        """Returns trees of (B,) int64 roots, filled, and the result of `fill`; both are valid until the next call.

        Args:
            inputs: What `fill` reads, equal in shape and dtype for equal trees and batches.
            prefixes: On the host; None if `fill` reads no KV cache.
        """
        if self._graphs is None:
            expansion = begin_expansion(shape, roots, draws)
            return expansion, self._fill(expansion, *inputs, *(() if prefixes is None else (prefixes,)))
        batch = draws.batch
        truncation = {name: value for name in _TRUNCATION if (value := getattr(batch, name)) is not None}
        own, bound = list(inputs), None
        if prefixes is not None:
            own.append(_places(prefixes))
            bound = bound_of(max(prefixes.lengths))
        contents = [
            roots, draws.root_positions, draws.is_coupled, draws.is_sampled, batch.noise.seeds, batch.temperature,
            batch.greedy, *own, *truncation.values(),
        ]  # fmt: skip
        kinds = (draws.has_coupled, draws.has_sampled, draws.is_drawn_for_all)
        key = (shape, len(roots), kinds, *truncation, batch.largest_top_k, bound, *(part.shape for part in inputs))
        work = partial(self._captured_tree, shape, draws, list(truncation), bound)
        self._uses[key] += 1
        if self._uses[key] < _CAPTURED_USE:
            WARM_UPS.count += 1
            return work(*(content.to(self._device) for content in contents))
        return self._graphs.run(key, contents, work)

    def _captured_tree(
        self, shape: AnyShape, draws: DraftDraws, limits: Sequence[str], bound: int | None, *places: Tensor
    ) -> tuple[ShapedExpansion, Result]:
        """The captured function: expands trees with draws from parameters in tensors of its own, `limits` last."""
        roots, root_positions, is_coupled, is_sampled, seeds, temperature, greedy, *others = places
        inputs: list[Any] = others[: len(others) - len(limits)]
        if bound is not None:
            slots, lengths, positions = (row[: len(roots)] for row in inputs.pop())
            inputs.append(Prefixes(slots, lengths, bound, positions))
        own_limits: dict[str, Any] = dict(zip(limits, others[len(others) - len(limits) :], strict=True))
        # Nothing else of the batch is read, see `DraftDraws.keys`.
        batch = replace(
            draws.batch, noise=KeyedNoise(seeds), temperature=temperature, greedy=greedy, processors=(), **own_limits
        )
        own = replace(draws, batch=batch, root_positions=root_positions, is_coupled=is_coupled, is_sampled=is_sampled)
        expansion = begin_expansion(shape, roots, own)
        return expansion, self._fill(expansion, *inputs)


def _places(prefixes: Prefixes) -> Tensor:
    """Returns slots, lengths and positions, (3, B or more) int32; each row begins at a multiple of 16 bytes."""
    positions = prefixes.lengths if prefixes.positions is None else prefixes.positions
    rows = [list(prefixes.slots), list(prefixes.lengths), list(positions)]
    return torch.tensor([[*row, *[0] * (-len(row) % 4)] for row in rows], dtype=torch.int32)
