"""Work recorded once and run again: on a GPU the host then starts one graph instead of hundreds of kernels."""

from __future__ import annotations

import logging
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

Output = TypeVar("Output")
_LEAST_BOUND = 512
_log = logging.getLogger(__name__)


class Recorder(Protocol):
    """Makes something that can be run again out of a function over tensors that stay where they are."""

    def record(self, run: Callable[[], Output]) -> tuple[Output, Callable[[], None]]:
        """Gives what a run fills, and what runs it again."""
        ...


class GraphRecorder:
    """CUDA graphs, all in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Output]) -> tuple[Output, Callable[[], None]]:
        """See `Recorder`."""
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles kernels and lets libraries choose theirs, neither of which can be recorded
                run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = run()
        return output, graph.replay


class _Recording(NamedTuple, Generic[Output]):
    """One recorded piece of work.

    Attributes:
        inputs: Filled before a run.
        output: Filled by a run.
        run: Runs it.
    """

    inputs: list[Tensor]
    output: Output
    run: Callable[[], None]


def bound_of(longest: int) -> int:
    """The bound that a recording is made for where lengths are at most `longest`: 512, doubled until it fits."""
    bound = _LEAST_BOUND
    while bound < longest:
        bound *= 2
    return bound


class Recordings(Generic[Output]):
    """The same work over tensors of several shapes, recorded when a shape is first met.

    Attributes:
        shapes: Those recorded, the one not used for longest first.
        memory_bytes: What recordings have taken so far, on the device.
    """

    def __init__(self, recorder: Recorder, device: torch.device, *, limit: int, name: str) -> None:
        """No recordings yet.

        Args:
            recorder: Makes them.
            device: Where inputs lie.
            limit: Most recordings kept; then the one not used for longest is forgotten.
            name: What is recorded, for the log.
        """
        self._recorder, self._device, self._limit, self._name = recorder, device, limit, name
        self._kept: OrderedDict[Hashable, _Recording[Output]] = OrderedDict()
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
            work: Takes as many tensors, looks at no content of theirs. It runs before it is recorded, over these
                inputs, so what it writes elsewhere is what is to be written anyway.
        """
        recording = self._kept.get(shape) or self._record(shape, inputs, work)
        self._kept.move_to_end(shape)
        for place, content in zip(recording.inputs, inputs, strict=True):
            place.copy_(content, non_blocking=True)
        recording.run()
        return recording.output

    def _record(self, shape: Hashable, inputs: Sequence[Tensor], work: Callable[..., Output]) -> _Recording[Output]:
        """Records a shape."""
        if len(self._kept) >= self._limit:
            self._kept.popitem(last=False)
        before = _allocated(self._device)
        places = [torch.empty_like(content, device=self._device).copy_(content) for content in inputs]
        output, run = self._recorder.record(partial(work, *places))
        self.memory_bytes += _allocated(self._device) - before
        _log.info("recorded %s of %s; they hold %.0f MiB.", self._name, shape, self.memory_bytes / 2**20)
        self._kept[shape] = recording = _Recording(places, output, run)
        return recording


def _allocated(device: torch.device) -> int:
    """Bytes in use on a GPU; 0 elsewhere."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
