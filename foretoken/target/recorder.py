"""Work recorded once and run again: on a GPU the host then starts one graph instead of hundreds of kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

Output = TypeVar("Output")


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
