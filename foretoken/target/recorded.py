"""Passes of the lean decoder, recorded once and run again.

A recording belongs to a shape: batch, tokens, bound of the prefix, and what else shapes a launch. What differs between
passes of a shape lies in tensors that are filled before it runs. A tree brings its tokens and parents, padded to few
widths, with slots and prefix lengths; positions and who sees what are made within. Other short passes, by which draft
models grow trees and catch up, bring their tables. Long passes, and those too near the end of the cache to be padded,
run as they would without recordings.

Letters: B sequences, T tokens fed, N nodes of a padded tree, V vocabulary.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from foretoken.attention.dispatch import has_kernel
from foretoken.attention.layout import AttentionLayout
from foretoken.attention.tables import PassTables
from foretoken.target.decoder import PassOutput, UnsuitableError
from foretoken.target.lean.stock import StockDecoder
from foretoken.target.recorder import GraphRecorder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.target.lean.stock import Steps
    from foretoken.target.loading import LoadedModel
    from foretoken.target.recorder import Recorder
    from foretoken.target.slot_cache import SlotCache
    from foretoken.target.taps import Tap

MAX_RECORDINGS = 48
_LARGEST_LOGITS = 1 << 28  # bytes of one recording's logits
_WIDEST_CHAIN = 64  # tokens of a pass that is no tree
_SHORTEST_PREFIX = 512  # bounds of the prefix are this, doubled until it fits
_log = logging.getLogger(__name__)


class _Shape(NamedTuple):
    """What a recording is made for.

    Attributes:
        batch: B.
        width: T, or N for a tree.
        max_prefix: Bound of the prefix lengths.
        num_scratch: Scratch rows; 0 for a tree.
        has_words: Whether tables say who sees what; without them the pass is causal. False for a tree.
    """

    batch: int
    width: int
    max_prefix: int
    num_scratch: int = 0
    has_words: bool = False


class _Recording(NamedTuple):
    """One recorded pass.

    Attributes:
        inputs: Filled before a run.
        output: Filled by a run.
        run: Runs it.
    """

    inputs: list[Tensor]
    output: PassOutput
    run: Callable[[], None]


class RecordedDecoder:
    """See `Decoder`.

    Attributes:
        memory_bytes: What recordings have taken so far, on the device.
    """

    name = "lean-recorded"

    def __init__(
        self,
        model: LoadedModel,
        cache: SlotCache,
        taps: Sequence[Tap],
        *,
        recorder: Recorder | None = None,
        steps: Steps | None = None,
    ) -> None:
        """Prepares; recordings are made when a shape is first met.

        Args:
            model: The target.
            cache: Its KV rows.
            taps: Features to read.
            recorder: Makes recordings; None for CUDA graphs.
            steps: See `StockDecoder`.

        Raises:
            UnsuitableError: When the architecture is not known, or passes cannot be recorded here.
        """
        if recorder is None:
            if model.device.type != "cuda":
                raise UnsuitableError("passes are recorded on NVIDIA GPUs only.")
            recorder = GraphRecorder(model.device)
        widest = max(part.shape[-1] for part in (*cache.keys, *cache.values))
        if not has_kernel(model.dtype, widest):
            raise UnsuitableError("passes are recorded only where the attention kernel runs.")
        self._stock = StockDecoder(model, cache, taps, steps=steps)
        self._recorder, self._cache = recorder, cache
        self._vocab_size, self._last_position, self._device = model.vocab_size, model.context_len - 1, model.device
        self._recordings: OrderedDict[_Shape, _Recording] = OrderedDict()
        self.memory_bytes = 0

    def run(self, tokens: Tensor, layout: AttentionLayout) -> PassOutput:
        """See `Decoder`."""
        shape = self._shape(layout)
        if shape is None:
            return self._stock.run(tokens, layout)
        with torch.inference_mode():
            inputs = _inputs(tokens, layout, shape)
            recording = self._recordings.get(shape) or self._record(shape, inputs)
            self._recordings.move_to_end(shape)
            for place, content in zip(recording.inputs, inputs, strict=True):
                place.copy_(content, non_blocking=True)
            recording.run()
            width, logits, features = layout.num_queries, recording.output.logits, recording.output.features
            # The next run fills the same tensors; callers may keep what they got.
            return PassOutput(
                logits=logits[:, :width].clone(), features=None if features is None else features[:, :width].clone()
            )

    def fill(self, tokens: Tensor, layout: AttentionLayout) -> Tensor | None:
        """See `Decoder`."""
        return self._stock.fill(tokens, layout)

    def _shape(self, layout: AttentionLayout) -> _Shape | None:
        """The recording that serves a pass, or None where none does."""
        batch, width = layout.positions.shape
        if layout.tree is not None:
            width = 1 << (width - 1).bit_length()
        elif width > _WIDEST_CHAIN:
            return None
        longest, bound = max(layout.prefix), _SHORTEST_PREFIX
        while bound < longest:
            bound *= 2
        is_too_large = batch * width * self._vocab_size * 4 > _LARGEST_LOGITS
        if is_too_large or longest + layout.offset + width > self._cache.capacity:
            return None
        if layout.tree is not None:
            return _Shape(batch, width, bound)
        return _Shape(batch, width, bound, layout.offset + width, layout.visible is not None)

    def _record(self, shape: _Shape, inputs: Sequence[Tensor]) -> _Recording:
        """Records a shape, and forgets the one that was not used for longest where there are too many.

        What runs before the recording is the pass itself, so it writes the rows that are to be written anyway.
        """
        if len(self._recordings) >= MAX_RECORDINGS:
            self._recordings.popitem(last=False)
        before = _allocated(self._device)
        places = [torch.empty_like(content, device=self._device).copy_(content) for content in inputs]
        run_tree = partial(self._run_tree, shape, *places)
        output, run = self._recorder.record(partial(self._run_chain, shape, *places) if shape.num_scratch else run_tree)
        self.memory_bytes += _allocated(self._device) - before
        _log.info("recorded a pass of %s; recordings hold %.0f MiB.", shape, self.memory_bytes / 2**20)
        self._recordings[shape] = recording = _Recording(places, output, run)
        return recording

    def _run_tree(self, shape: _Shape, tokens: Tensor, parents: Tensor, places: Tensor) -> PassOutput:
        """What is recorded of a tree; places: (2, B) int64, slots and prefix lengths."""
        from foretoken.attention.triton_tables import tree_tables

        slots, prefix = places
        starts = prefix.to(torch.int32)
        made = tree_tables(parents, starts, self._last_position)
        tables = PassTables(
            slots=slots.to(torch.int32), prefix=starts, positions=made.positions, scratch_positions=made.positions,
            words=made.words, written_slots=slots.unsqueeze(1),
            written_rows=prefix.unsqueeze(1) + torch.arange(shape.width, device=self._device),
            max_prefix=shape.max_prefix,
        )  # fmt: skip
        positions = made.positions.to(torch.int64)
        return self._stock.run(tokens, AttentionLayout.for_recording(tables, positions))

    def _run_chain(self, shape: _Shape, tokens: Tensor, positions: Tensor, *contents: Tensor) -> PassOutput:
        """What is recorded of another pass; contents: as `PassTables.tensors` gives them."""
        tables = PassTables.from_tensors(contents, max_prefix=shape.max_prefix)
        return self._stock.run(tokens, AttentionLayout.for_recording(tables, positions))


def _inputs(tokens: Tensor, layout: AttentionLayout, shape: _Shape) -> list[Tensor]:
    """What has to be filled in before a recording runs."""
    if layout.tree is None:
        return [tokens, layout.positions, *layout.tables().tensors()]
    padding = (0, shape.width - tokens.shape[1])
    trees = [pad(part, padding, value=value) for part, value in ((tokens, 0), (layout.tree.parents, -1))]
    return [*trees, torch.tensor([list(layout.slots), list(layout.prefix)])]


def _allocated(device: torch.device) -> int:
    """Bytes in use on a GPU; 0 elsewhere."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
