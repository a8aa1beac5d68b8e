"""CUDA graphs: work captured once and replayed, one launch by the host instead of hundreds of kernels."""

from __future__ import annotations

import logging
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from foretoken.core.backend import has_cuda_runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

Output = TypeVar("Output")
_LEAST_BOUND = 512
_log = logging.getLogger(__name__)


class GraphCapture(Protocol):
    """Captures a function over tensors that stay where they are, so that it can be replayed."""

    def capture(self, run: Callable[[], Output]) -> tuple[Output, Callable[[], None]]:
        """Gives what a run fills, and what replays it."""
        ...


class CudaGraphCapture:
    """CUDA graphs, all in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Output]) -> tuple[Output, Callable[[], None]]:
        """See `GraphCapture`."""
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles kernels and lets libraries choose theirs, neither of which can be captured
                run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = run()
        return output, graph.replay


class _Graph(NamedTuple, Generic[Output]):
    """One captured graph.

    Attributes:
        inputs: Filled before a run.
        output: Filled by a run.
        run: Runs it.
    """

    inputs: list[Tensor]
    output: Output
    run: Callable[[], None]


def bound_of(longest: int) -> int:
    """The bound that a graph is captured for where lengths are at most `longest`: 512, doubled until it fits."""
    bound = _LEAST_BOUND
    while bound < longest:
        bound *= 2
    return bound


class CapturedGraphs(Generic[Output]):
    """The same work over tensors of several shapes, captured when a shape is first met.

    Attributes:
        shapes: Those captured, the one not used for longest first.
        memory_bytes: What graphs have taken so far, on the device.
    """

    def __init__(self, capture: GraphCapture, device: torch.device, *, limit: int, name: str) -> None:
        """No graphs yet.

        Args:
            capture: Captures them.
            device: Where inputs lie.
            limit: Most graphs kept; then the one not used for longest is forgotten.
            name: What is captured, for the log.
        """
        self._capture, self._device, self._limit, self._name = capture, device, limit, name
        self._kept: OrderedDict[Hashable, _Graph[Output]] = OrderedDict()
        self.memory_bytes = 0

    @property
    def shapes(self) -> list[Hashable]:
        """See the class."""
        return list(self._kept)

    def run(self, shape: Hashable, inputs: Sequence[Tensor], work: Callable[..., Output]) -> Output:
        """Does the work; what an earlier call for the same shape gave is overwritten.

        Args:
            shape: Whatever the work depends on besides the contents of its inputs.
            inputs: Equal in shape and dtype for equal shapes; on any device.
            work: Takes as many tensors, looks at no content of theirs. It runs before it is captured, over these
                inputs, so what it writes elsewhere is what is to be written anyway.
        """
        graph = self._kept.get(shape) or self._captured(shape, inputs, work)
        self._kept.move_to_end(shape)
        for place, content in zip(graph.inputs, inputs, strict=True):
            place.copy_(content, non_blocking=True)
        graph.run()
        return graph.output

    def _captured(self, shape: Hashable, inputs: Sequence[Tensor], work: Callable[..., Output]) -> _Graph[Output]:
        """Captures a shape."""
        if len(self._kept) >= self._limit:
            self._kept.popitem(last=False)
        before = _allocated(self._device)
        places = [torch.empty_like(content, device=self._device).copy_(content) for content in inputs]
        output, run = self._capture.capture(partial(work, *places))
        self.memory_bytes += _allocated(self._device) - before
        _log.info("captured %s of %s; they hold %.0f MiB.", self._name, shape, self.memory_bytes / 2**20)
        self._kept[shape] = graph = _Graph(places, output, run)
        return graph


def _allocated(device: torch.device) -> int:
    """Bytes in use on a GPU; 0 elsewhere."""
    return torch.cuda.memory_allocated(device) if has_cuda_runtime(device) else 0
