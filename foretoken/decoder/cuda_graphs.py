"""CUDA graphs: work captured once and replayed, one launch by the host instead of hundreds of kernels."""

from __future__ import annotations

import logging
from collections import OrderedDict
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from foretoken.attention.layout import AttentionLayout
from foretoken.core.backend import has_cuda_runtime
from foretoken.core.passes import Pass

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
    return torch.cuda.memory_allocated(device) if has_cuda_runtime(device) else 0


class PassShape(NamedTuple):
    """What a captured graph is made for; all but the bound of the prefix are powers of two.

    Attributes:
        num_sequences: S.
        num_tokens: M.
        num_nodes: W.
        max_tokens: Bound of the tokens of one sequence.
        max_nodes: Bound of the nodes of one sequence.
        max_prefix: Bound of the prefix lengths.
    """

    num_sequences: int
    num_tokens: int
    num_nodes: int
    max_tokens: int
    max_nodes: int
    max_prefix: int


def shape_of(work: Pass) -> PassShape:
    """The smallest shape that holds a pass."""
    return PassShape(
        num_sequences=_rounded_up(work.num_sequences),
        num_tokens=_rounded_up(work.num_tokens),
        num_nodes=_rounded_up(work.node_offsets[-1]),
        max_tokens=_rounded_up(max(end - start for start, end in pairwise(work.offsets))),
        max_nodes=_rounded_up(max(end - start for start, end in pairwise(work.node_offsets))),
        max_prefix=bound_of(max(work.prefix_lens)),
    )


def padded_inputs(work: Pass, shape: PassShape) -> list[Tensor]:
    """What has to be filled in before a graph of that shape is replayed; of equal sizes for all passes of the shape.

    Args:
        work: The pass.
        shape: At most twice as many tokens and nodes as the pass has.

    Returns:
        Tokens, positions and parents in one (M + 2 W,) int64 tensor, made in one launch on the device of the pass; and
        slots, prefix lengths, and where the tokens and the nodes of each sequence begin in one (4, S + 1 or more) int32
        tensor on the host.
    """
    parts: list[Tensor] = []
    sized = ((work.tokens, shape.num_tokens), (work.positions, shape.num_nodes), (work.parents, shape.num_nodes))
    for part, size in sized:
        # Tokens of no sequence are embedded as well, so that each has to be in the vocabulary.
        parts += [part, part[: size - len(part)]] if size > len(part) else [part]
    width = _places_width(shape)
    rows = (work.slots, work.prefix_lens, work.offsets, work.node_offsets)
    # Sequences that are added begin where the last one ends.
    places = [[*row, *[row[-1]] * (width - len(row))] for row in rows]
    return [torch.cat(parts), torch.tensor(places, dtype=torch.int32)]


def captured_pass(shape: PassShape, inputs: Sequence[Tensor]) -> tuple[Pass, AttentionLayout]:
    """The pass that lies in `inputs` whenever the graph runs; for functions under capture, so nothing is looked at.

    Args:
        shape: What the graph is made for.
        inputs: As `padded_inputs` gives them, all on the device.

    Returns:
        A pass of M tokens, without logits, whose positions are those of its tokens, and what each token sees. Lengths
        and slots of the pass mean nothing; they are read from the layout's tables.
    """
    from foretoken.attention.triton_tables import pass_tables

    packed, places = inputs
    tokens, positions, parents = packed.split([shape.num_tokens, shape.num_nodes, shape.num_nodes])
    num = shape.num_sequences
    tables, token_positions = pass_tables(
        parents, positions, places[0, :num], places[1, :num], places[2, : num + 1], places[3, : num + 1],
        num_tokens=shape.num_tokens, max_prefix=shape.max_prefix, max_tokens=shape.max_tokens,
        max_nodes=shape.max_nodes,
    )  # fmt: skip
    work = Pass(
        tokens=tokens, positions=token_positions, parents=parents, slots=range(num),
        prefix_lens=[shape.max_prefix] * num, offsets=[*range(num), shape.num_tokens], logit_rows=None,
    )  # fmt: skip
    return work, AttentionLayout.of_tables(work, tables)


def _places_width(shape: PassShape) -> int:
    """Returns the width of a row of places: at least S + 1, so that every row begins at a multiple of 16 bytes."""
    return -(-(shape.num_sequences + 1) // 4) * 4


def _rounded_up(number: int) -> int:
    return 1 << (number - 1).bit_length()
