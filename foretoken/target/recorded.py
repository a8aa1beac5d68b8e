"""Passes of the lean decoder, recorded once and run again.

A recording belongs to a shape: batch, tokens, bound of the prefix, and what else shapes a launch. What differs between
passes of a shape lies in tensors that are filled before it runs. A tree brings its tokens and parents, padded to few
widths, with slots and prefix lengths; positions and who sees what are made within. Other short passes, by which draft
models grow trees and catch up, bring their tables. Long passes, and those too near the end of the cache to be padded,
run as they would without recordings.

Letters: B sequences, T tokens fed, N nodes of a padded tree, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from foretoken.attention.dispatch import has_kernel
from foretoken.attention.layout import AttentionLayout
from foretoken.attention.tables import PassTables
from foretoken.core.errors import PassError
from foretoken.target.decoder import PassOutput, UnsuitableError
from foretoken.target.held_memory import HeldMemory, plain_tensors
from foretoken.target.lean.stock import StockDecoder
from foretoken.target.recorder import GraphRecorder, Recordings, bound_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.target.lean.stock import Steps
    from foretoken.target.loading import LoadedModel
    from foretoken.target.recorder import Recorder
    from foretoken.target.slot_cache import SlotCache
    from foretoken.target.taps import Tap

MAX_RECORDINGS = 48
_LARGEST_LOGITS = 1 << 28  # bytes of one recording's logits
_WIDEST_CHAIN = 64  # tokens of a pass that is no tree


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


class RecordedDecoder:
    """See `Decoder`."""

    name = "lean-recorded"
    is_exact = False

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
        self._cache, self._weights = cache, HeldMemory(plain_tensors(model.module))
        self._vocab_size, self._last_position, self._device = model.vocab_size, model.context_len - 1, model.device
        self._recordings: Recordings[PassOutput] = Recordings(
            recorder, model.device, limit=MAX_RECORDINGS, name="a pass"
        )

    def run(self, tokens: Tensor, layout: AttentionLayout) -> PassOutput:
        """See `Decoder`."""
        if self._weights.has_changed():
            raise PassError("a weight has moved in memory, where recorded passes do not find it. Make a new LLM.")
        shape = self._shape(layout)
        if shape is None:
            return self._stock.run(tokens, layout)
        with torch.inference_mode():
            work = partial(self._run_chain if shape.num_scratch else self._run_tree, shape)
            output = self._recordings.run(shape, _inputs(tokens, layout, shape), work)
            width, logits, features = layout.num_queries, output.logits, output.features
            # The next run fills the same tensors; callers may keep what they got.
            return PassOutput(
                logits=logits[:, :width].clone(), features=None if features is None else features[:, :width].clone()
            )

    @property
    def memory_bytes(self) -> int:
        """What recordings have taken so far, on the device."""
        return self._recordings.memory_bytes

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
        longest = max(layout.prefix)
        bound = bound_of(longest)
        is_too_large = batch * width * self._vocab_size * 4 > _LARGEST_LOGITS
        if is_too_large or longest + layout.offset + width > self._cache.capacity:
            return None
        if layout.tree is not None:
            return _Shape(batch, width, bound)
        return _Shape(batch, width, bound, layout.offset + width, layout.visible is not None)

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
