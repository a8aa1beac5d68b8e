"""Trees grown by heads, recorded on GPUs: all levels of a tree are then one start of a graph.

A recording belongs to a shape of tree, a batch and the kinds of draws in it. States, roots and the parameters of draws
lie in tensors that are filled before it runs. Requests that cut off part of the law (top-k, top-p, min-p) are drafted
for without recordings.

Letters: B sequences, W width of a head's state.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from foretoken.sampling.noise import KeyedNoise
from foretoken.target.recorder import GraphRecorder
from foretoken.trees.growth import TreeGrowth

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from foretoken.sampling.draft_draws import DraftDraws
    from foretoken.target.recorder import Recorder
    from foretoken.trees.choices import TreeShape

_MAX_RECORDINGS = 32
_Key = tuple["TreeShape", int, bool, bool, bool]  # shape, batch and which kinds of draws


class _Recording(NamedTuple):
    """One recorded tree.

    Attributes:
        inputs: Filled before a run.
        growth: Filled by a run.
        run: Runs it.
    """

    inputs: list[Tensor]
    growth: TreeGrowth
    run: Callable[[], None]


class RecordedGrowth:
    """Grows trees with one head, recorded where that is possible."""

    def __init__(
        self, fill: Callable[[TreeGrowth, Tensor], None], device: torch.device, *, recorder: Recorder | None = None
    ) -> None:
        """Prepares; recordings are made when a shape is first met.

        Args:
            fill: Fills a tree of roots from (B, W) states, without a look at the content of any tensor.
            device: Where trees lie.
            recorder: Makes recordings; None for CUDA graphs on GPUs and none elsewhere.
        """
        self._fill = fill
        self._recorder = GraphRecorder(device) if recorder is None and device.type == "cuda" else recorder
        self._recordings: OrderedDict[_Key, _Recording] = OrderedDict()

    def grow(self, shape: TreeShape, roots: Tensor, draws: DraftDraws, state: Tensor) -> TreeGrowth:
        """A filled tree; what an earlier call gave is not valid any more.

        Args:
            shape: What to fill.
            roots: (B,) int64.
            draws: How tokens are chosen.
            state: (B, W), what steps start from.
        """
        if self._recorder is None or draws.batch.has_truncation:
            growth = TreeGrowth(shape, roots, draws)
            self._fill(growth, state)
            return growth
        inputs = [
            roots, state, draws.root_positions, draws.is_coupled, draws.is_sampled, draws.batch.noise.seeds,
            draws.batch.temperature, draws.batch.greedy,
        ]  # fmt: skip
        key = (shape, len(roots), draws.has_coupled, draws.has_sampled, draws.is_drawn_for_all)
        recording = self._recordings.get(key) or self._record(self._recorder, key, inputs, draws)
        self._recordings.move_to_end(key)
        for place, content in zip(recording.inputs, inputs, strict=True):
            place.copy_(content)
        recording.run()
        return recording.growth

    def _record(self, recorder: Recorder, key: _Key, inputs: list[Tensor], draws: DraftDraws) -> _Recording:
        """Records a shape, and forgets the one that was not used for longest where there are too many."""
        if len(self._recordings) >= _MAX_RECORDINGS:
            self._recordings.popitem(last=False)
        places = [content.clone() for content in inputs]
        roots, state, root_positions, is_coupled, is_sampled, seeds, temperature, greedy = places
        # Nothing else of the batch is read, see `DraftDraws.keys`.
        batch = replace(
            draws.batch, noise=KeyedNoise(seeds), temperature=temperature, greedy=greedy, bias=None, terminators=None,
            bad_words=None, repetition=None, presence=None, frequency=None, min_tokens=None,
        )  # fmt: skip
        own = replace(draws, batch=batch, root_positions=root_positions, is_coupled=is_coupled, is_sampled=is_sampled)

        def run() -> TreeGrowth:
            growth = TreeGrowth(key[0], roots, own)
            self._fill(growth, state)
            return growth

        growth, again = recorder.record(run)
        self._recordings[key] = recording = _Recording(places, growth, again)
        return recording
