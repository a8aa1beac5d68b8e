"""The target's features as the decoder block of a head sees them, at the last committed position of every slot.

The block's KV cache follows the target's: positions enter it when they are committed, in order and with the target's
own features, so there is never anything to take back. Committed features are kept until the next proposal asks, and
then fed in one pass: nothing is computed for sequences that are not drafted for, and what was committed meanwhile is
fed together.

Letters: M positions of a pass, T positions and B slots of sequences, F features of a position, E hidden size, W width
of what is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.core.passes import Pass
from foretoken.drafters.last_features import rows_at, set_last

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.drafters.base import Committed, TargetHandle

_TOGETHER = 32  # positions of a sequence that are fed beside others; longer parts are fed alone
_CHUNK = 512  # positions of a long part fed at once


class StackFeatures:
    """See the module."""

    def __init__(
        self, encode: Callable[[Tensor, Pass], Tensor], target: TargetHandle, *, width: int, dtype: torch.dtype
    ) -> None:
        """Nothing is known yet.

        Args:
            encode: Feeds the block (M, F E) features of a pass, whose tokens are those after them; gives the (M, W)
                that are kept of the last ones.
            target: Tells slots and device.
            width: W.
            dtype: Of what is fed and kept.
        """
        self._encode, self._dtype = encode, dtype
        self._fed = [0] * target.num_slots  # positions in the cache
        # (T, F, E) each, committed after those
        self._waiting: list[list[Tensor]] = [[] for _ in range(target.num_slots)]
        self._known = [0] * target.num_slots  # positions in the cache or waiting
        self._last = torch.zeros(target.num_slots, width, device=target.device, dtype=dtype)

    def is_known(self, slot: int, length: int) -> bool:
        """Whether all features of positions 0 … `length - 1` came in."""
        # A feeding that failed leaves fewer: the slot is not drafted for until it begins anew.
        here = self._fed[slot] + sum(map(len, self._waiting[slot]))
        return length > 0 and self._known[slot] == here == length

    def learn(self, committed: Committed) -> None:
        """Takes what entered the target's KV."""
        assert committed.features is not None, "the drafter taps features"
        lengths = committed.lengths
        parts = [committed.features] if len(lengths) == 1 else committed.features.split(lengths)
        for slot, start, features in zip(committed.slots, committed.starts, parts, strict=True):
            if start == 0:
                self.forget(slot)
            if start == self._known[slot]:  # else a part is missing: the slot stays behind and is not drafted for
                self._waiting[slot].append(features)
                self._known[slot] += len(features)

    def forget(self, slot: int) -> None:
        """The slot's sequence is over."""
        self._fed[slot], self._known[slot], self._waiting[slot] = 0, 0, []

    def of(self, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """(B, W), what the block gave at the last position whose features came in; feeds what waits.

        Args:
            slots: B slots.
            texts: The committed tokens of each, which reach a token further.
        """
        behind, following, parts = [], [], []
        for slot, text in zip(slots, texts, strict=True):
            if not self._waiting[slot]:
                continue
            waiting = self._waiting[slot]
            features = (waiting[0] if len(waiting) == 1 else torch.cat(waiting)).flatten(1).to(self._dtype)
            self._waiting[slot] = []
            begin = self._fed[slot] + 1
            if len(features) > _TOGETHER:
                for chunk in features.split(_CHUNK):
                    self._feed([slot], [text[begin : begin + len(chunk)]], chunk)
                    begin += len(chunk)
            else:
                behind.append(slot)
                following.append(text[begin : begin + len(features)])
                parts.append(features)
        if behind:
            self._feed(behind, following, parts[0] if len(parts) == 1 else torch.cat(parts))
        return rows_at(self._last, slots)

    def _feed(self, slots: Sequence[int], following: Sequence[Sequence[int]], features: Tensor) -> None:
        """Runs the block over the next positions of some slots; (M, F E) features, and the tokens after them."""
        prefix_lens = [self._fed[slot] for slot in slots]
        work = Pass.of_chains(following, slots=slots, prefix_lens=prefix_lens, device=features.device)
        set_last(self._last, slots, self._encode(features, work), work.offsets)
        for slot, tokens in zip(slots, following, strict=True):
            self._fed[slot] += len(tokens)
