"""Runs passes of the lean decoder as CUDA graphs, each captured once and then replayed.

A graph belongs to a `PassShape`; inputs that differ between passes of a shape are filled in before the graph runs.
Trees, levels of trees over nodes of earlier passes, and short chains use graphs. Prompts, which have no logits, and
passes with many unwanted logits run without a graph: they keep the GPU busy for longer than the host takes to launch
kernels.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from foretoken.attention.layout import has_kernel
from foretoken.core.backend import has_cuda_runtime
from foretoken.core.errors import PassError
from foretoken.core.passes import Pass
from foretoken.decoder.base import PassOutput, UnsuitableError
from foretoken.decoder.memory import HeldMemory
from foretoken.decoder.torch_blocks import StockDecoder

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from foretoken.core.passes import Tap
    from foretoken.decoder.blocks import LeanWeights
    from foretoken.decoder.slot_cache import SlotCache

Output = TypeVar("Output")
_LEAST_BOUND = 512
_log = logging.getLogger(__name__)


class GraphCapture(Protocol):
    """Captures a function over tensors with fixed addresses, for replay."""

    def capture(self, run: Callable[[], Output]) -> tuple[Output, Callable[[], None]]:
        """Returns the output tensors that each run fills, and a function that replays the run."""
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
            for _ in range(2):  # compiles kernels and lets libraries choose theirs; neither can be captured
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
    """Returns the bound that a graph is captured for, given the longest length: 512, doubled until it fits."""
    bound = _LEAST_BOUND
    while bound < longest:
        bound *= 2
    return bound


# Counts captures, and first drafts of a shape, which compile kernels: their seconds are not those of later ones.
WARM_UPS = SimpleNamespace(count=0)


class CapturedGraphs(Generic[Output]):
    """Work over tensors of several shapes; a graph is captured at the first use of a shape."""

    def __init__(self, capture: GraphCapture, device: torch.device, *, limit: int, name: str) -> None:
        """Creates an empty set of at most `limit` graphs; beyond that the least recently used graph is dropped."""
        self._capture, self._device, self._limit, self._name = capture, device, limit, name
        self._kept: OrderedDict[Hashable, _Graph[Output]] = OrderedDict()
        self.memory_bytes = 0

    @property
    def shapes(self) -> list[Hashable]:
        """Captured shapes, least recently used first."""
        return list(self._kept)

    def run(self, shape: Hashable, inputs: Sequence[Tensor], work: Callable[..., Output]) -> Output:
        """Runs the work; overwrites the result of an earlier call for the same shape.

        Args:
            shape: All values that the work depends on besides the contents of its inputs.
            inputs: Equal in shape and dtype for equal shapes; on any device.
            work: Takes as many tensors and never reads their contents on the host. It first runs uncaptured over these
                inputs, so its side effects must be the wanted ones.
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
        WARM_UPS.count += 1
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
    """The sizes S, M and W that a graph is captured for; all but `max_prefix` are powers of two.

    `max_tokens` and `max_nodes` bound one sequence; `max_prefix` bounds the prefix lengths.
    """

    num_sequences: int
    num_tokens: int
    num_nodes: int
    max_tokens: int
    max_nodes: int
    max_prefix: int


def shape_of(work: Pass) -> PassShape:
    """Returns the smallest shape that holds a pass."""
    return PassShape(
        num_sequences=_rounded_up(work.num_sequences),
        num_tokens=_rounded_up(work.num_tokens),
        num_nodes=_rounded_up(work.node_offsets[-1]),
        max_tokens=_rounded_up(max(end - start for start, end in pairwise(work.offsets))),
        max_nodes=_rounded_up(max(end - start for start, end in pairwise(work.node_offsets))),
        max_prefix=bound_of(max(work.prefix_lens)),
    )


def padded_inputs(work: Pass, shape: PassShape) -> list[Tensor]:
    """Returns the inputs of a graph for one pass; their sizes are equal for all passes of the shape.

    Args:
        shape: At most twice as many tokens and nodes as the pass has.

    Returns:
        Tokens, positions and parents in one (M + 2 W,) int64 tensor on the device of the pass; and slots, prefix
            lengths, and the first token and node of each sequence in one (4, S + 1 or more) int32 tensor on the host.
    """
    parts: list[Tensor] = []
    sized = ((work.tokens, shape.num_tokens), (work.positions, shape.num_nodes), (work.parents, shape.num_nodes))
    for part, size in sized:
        # Padding tokens are embedded too, so they have to be in the vocabulary.
        parts += [part, part[: size - len(part)]] if size > len(part) else [part]
    width = -(-(shape.num_sequences + 1) // 4) * 4  # at least S + 1, so that every row begins at a multiple of 16 bytes
    rows = (work.slots, work.prefix_lens, work.offsets, work.node_offsets)
    # Padding sequences begin where the last one ends.
    places = [[*row, *[row[-1]] * (width - len(row))] for row in rows]
    return [torch.cat(parts), torch.tensor(places, dtype=torch.int32)]


def captured_pass(shape: PassShape, inputs: Sequence[Tensor]) -> Pass:
    """Returns the pass of M tokens in `inputs`, without logits, for functions under capture.

    inputs: From `padded_inputs`, all on the device.
    """
    packed, places = inputs
    tokens, positions, parents = packed.split([shape.num_tokens, shape.num_nodes, shape.num_nodes])
    num = shape.num_sequences
    rows = [places[0, :num], places[1, :num], places[2, : num + 1], places[3, : num + 1]]
    return _with_tables(tokens, positions, parents, rows, shape)


def captured_nodes(
    tokens: Tensor, positions: Tensor, parents: Tensor, slots: Tensor, prefix_lens: Tensor, *, max_prefix: int
) -> Pass:
    """Returns a pass over the last M nodes of trees of one shape, without logits, for functions under capture.

    Args:
        tokens: (S, M) int64, of the new nodes.
        positions: (S, N) int64, of all nodes; earlier passes computed the first N - M.
        parents: (S, N) int64, as in `Pass`.
        slots: (S,) int32, contiguous, cache slots.
        prefix_lens: (S,) int32, contiguous, committed cache rows.
        max_prefix: Bound of `prefix_lens`.
    """
    (num, new), count = tokens.shape, positions.shape[1]
    starts = torch.arange(num + 1, dtype=torch.int32, device=tokens.device)
    return _with_tables(
        tokens.flatten(), positions.flatten(), parents.flatten(), [slots, prefix_lens, starts * new, starts * count],
        PassShape(num, num * new, num * count, new, count, max_prefix),
    )  # fmt: skip


def _with_tables(
    tokens: Tensor, positions: Tensor, parents: Tensor, places: Sequence[Tensor], shape: PassShape
) -> Pass:
    """Returns a pass under capture: the host reads no contents."""
    from foretoken.attention.triton_tables import pass_tables

    num = shape.num_sequences
    tables, token_positions = pass_tables(
        parents, positions, *places, num_tokens=shape.num_tokens, max_prefix=shape.max_prefix,
        max_tokens=shape.max_tokens, max_nodes=shape.max_nodes,
    )  # fmt: skip
    return Pass(
        tokens=tokens, positions=token_positions, parents=parents, slots=range(num),
        prefix_lens=[shape.max_prefix] * num, offsets=[*range(num), shape.num_tokens], logit_rows=None, tables=tables,
    )  # fmt: skip


def _rounded_up(number: int) -> int:
    return 1 << (number - 1).bit_length()


MAX_GRAPHS = 48
_LARGEST_LOGITS = 1 << 28  # bytes of the logits of one graph
_MOST_TOKENS = 4096
_MOST_UNWANTED = 64  # tokens with unused logits


class GraphDecoder:
    """The lean decoder with passes as CUDA graphs, see `Decoder`."""

    name = "lean-graphs"
    is_exact = False

    def __init__(
        self, weights: LeanWeights, cache: SlotCache, taps: Sequence[Tap], *, capture: GraphCapture | None = None
    ) -> None:
        """Prepares the decoder; raises `UnsuitableError` for a missing tap, or if passes cannot be captured.

        `capture` captures a graph on first use of a shape; None takes CUDA graphs.
        """
        if capture is None:
            if not has_cuda_runtime(weights.device):
                raise UnsuitableError("passes are captured as CUDA graphs on NVIDIA GPUs only.")
            capture = CudaGraphCapture(weights.device)
        if weights.layers.mixers:
            raise UnsuitableError("a pass through recurrent layers goes as deep as its trees, and cannot be captured.")
        if weights.layers.has_experts:
            raise UnsuitableError("a pass through experts looks at their routing on the host, and cannot be captured.")
        widest = max(part.shape[-1] for part in (*cache.keys, *cache.values))
        if not has_kernel(weights.dtype, widest):
            raise UnsuitableError("passes are captured as CUDA graphs only where the attention kernel runs.")
        self._stock = StockDecoder(weights, cache, taps)
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
        if work.num_layers is not None or work.tables is not None or work.attention_rows is not None:
            # a pass of a draft, or one whose weights are read on the host
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

    def _is_captured(self, shape: PassShape, num_unwanted: int) -> bool:
        logits_bytes = shape.num_tokens * self._vocab_size * 4
        is_small = shape.num_tokens <= _MOST_TOKENS and logits_bytes <= _LARGEST_LOGITS
        return is_small and num_unwanted <= _MOST_UNWANTED

    def _run_captured(self, shape: PassShape, *inputs: Tensor) -> PassOutput:
        work = captured_pass(shape, inputs)
        return self._stock.run(replace(work, logit_rows=self._every_row[: shape.num_tokens]))
