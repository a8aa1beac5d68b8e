"""The target's features as a head reads them, by slot.

The KV cache of a head's decoder block follows the target's: positions enter when they are committed, in order and with
the target's own features. Nothing is ever taken back. Committed features wait until the next proposal, and are then fed
in one pass. No work is done for sequences without drafts.

Letters: M positions of a pass, T positions and B slots of sequences, F features of a position, E hidden size, W width
of the stored outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from foretoken.core.passes import Pass
from foretoken.drafters.partial_reads import PartialRows

if TYPE_CHECKING:
    from foretoken.decoder.block_stack import BlockStack
    from foretoken.decoder.slot_cache import SlotCache
    from foretoken.drafters.base import Committed, Prefix, TargetHandle

TOGETHER = 32  # positions of a sequence that are fed in one pass with other sequences; of longer parts the last alone
CHUNK = 512  # positions of a long part per pass


def rows_at(table: Tensor, slots: Sequence[int]) -> Tensor:
    """Returns (B, E), some rows of a table; a view if the rows are contiguous."""
    first = slots[0]
    if list(slots) == list(range(first, first + len(slots))):
        return table[first : first + len(slots)]
    return table[torch.tensor(list(slots), device=table.device)]


def set_last(table: Tensor, slots: Sequence[int], rows: Tensor, offsets: Sequence[int]) -> None:
    """Sets B rows of a table to the last of the (M, E) rows of each sequence; offsets: B + 1, where these begin."""
    if len(slots) == 1:  # without index tensors, which take longer than the copy
        table[slots[0]] = rows[offsets[1] - 1]
        return
    if len(rows) > len(slots):
        rows = rows[torch.tensor([end - 1 for end in offsets[1:]], device=rows.device)]
    table[torch.tensor(list(slots), device=rows.device)] = rows.to(table.dtype)


class LastFeatures:
    """The target's feature at the last committed position of every slot. Methods: see `WaitingFeatures`."""

    def __init__(self, num_slots: int, hidden_size: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self._features = torch.zeros(num_slots, hidden_size, device=device, dtype=dtype)
        self._known = [0] * num_slots  # positions up to the stored feature

    def is_known(self, slot: int, length: int) -> bool:
        """Returns whether the feature of position `length - 1` is here."""
        return length > 0 and self._known[slot] == length

    def learn(self, committed: Committed) -> None:
        """Stores the features of positions that entered the target's KV cache."""
        assert committed.features is not None, "the drafter taps features"
        set_last(self._features, committed.slots, committed.features[:, 0], committed.offsets)
        for slot, start, length in zip(committed.slots, committed.starts, committed.lengths, strict=True):
            self._known[slot] = start + length

    def of(self, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """Returns (B, E), the last features of some slots."""
        del texts
        return rows_at(self._features, slots)

    def reusable(self, slot: int, length: int) -> int:
        """Returns `length`: only the last feature is needed, which comes with the next position."""
        del slot
        return length

    def begin(self, slot: int, prefix: Prefix | None) -> None:
        """Starts a sequence in a slot."""
        del prefix
        self._known[slot] = 0


class WaitingFeatures(ABC):
    """Committed features that wait until the next draft; earlier features are in the KV rows of `cache`."""

    def __init__(
        self, cache: SlotCache, target: TargetHandle, dtype: torch.dtype, rows: PartialRows | None = None
    ) -> None:
        """Starts without features; `rows`: which KV rows drafts read, None for whole texts."""
        self.cache, self._dtype = cache, dtype
        self.rows = rows or PartialRows.own(cache, most_fed=0)
        self._fed = [0] * target.num_slots  # positions in the cache
        # (T, F, E) each, committed after those
        self._waiting: list[list[Tensor]] = [[] for _ in range(target.num_slots)]
        self._has_seen = [False] * target.num_slots  # whether a draft has fed all that waits, see `have_fed`
        self._known = [0] * target.num_slots  # positions in the cache or waiting

    def is_known(self, slot: int, length: int) -> bool:
        """Returns whether the needed features of positions 0 … `length - 1` are here."""
        # After a failed pass there are fewer: the slot gets no draft until it begins anew.
        return self._known[slot] == self._num_here(slot) == length

    def learn(self, committed: Committed) -> None:
        """Stores the features of positions that entered the target's KV cache."""
        assert committed.features is not None, "the drafter taps features"
        lengths = committed.lengths
        parts = [committed.features] if len(lengths) == 1 else committed.features.split(lengths)
        for slot, start, features in zip(committed.slots, committed.starts, parts, strict=True):
            if start == 0:
                self.begin(slot, None)
            if self._has_seen[slot]:
                self._fed[slot], self._waiting[slot], self._has_seen[slot] = self._known[slot], [], False
            if start == self._known[slot]:  # else a part is missing: the slot gets no draft
                self._waiting[slot].append(features)
                self._known[slot] += len(features)

    @abstractmethod
    def of(self, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """Returns the first states of drafts, (B, W) or for blocks (B, K, W); feeds what waits.

        `is_known` holds for the slots. Each text has one token more than features.
        """

    def reusable(self, slot: int, length: int) -> int:
        """Returns the positions with features, at most `length`; see `foretoken.drafters.base.PrefixKeeper`."""
        if self._num_here(slot) != self._known[slot]:  # a failed pass left a hole, behind which features may wait
            return 0
        return self.rows.reusable(slot, min(length, self._known[slot]))

    def begin(self, slot: int, prefix: Prefix | None) -> None:
        """Starts a sequence in a slot; `prefix` is a prefix that `reusable` allowed, or None."""
        source, length = prefix or (slot, 0)
        fed = self._known[source] if self._has_seen[source] else self._fed[source]
        waiting, self._fed[slot] = list[Tensor](), min(fed, length)
        for part in self._waiting[source] if fed < length else ():
            waiting.append(part[: length - fed])
            fed += len(waiting[-1])
        self.rows.begin(slot, source, self._fed[slot])
        self._waiting[slot], self._known[slot], self._has_seen[slot] = waiting, length, False

    def _num_here(self, slot: int) -> int:
        return self._fed[slot] + sum(map(len, self._waiting[slot]))

    def _joined(self, slot: int) -> Tensor:
        """(T, F E), the waiting features of a slot."""
        waiting = self._waiting[slot]
        return (waiting[0] if len(waiting) == 1 else torch.cat(waiting)).flatten(1).to(self._dtype)


class WaitingPairs(NamedTuple):
    """Committed positions that the block has not read, with (M, F E) features.

    Tokens of `work` are those after the features. Its logits are those after the last position of each sequence.
    """

    work: Pass
    features: Tensor


class StackFeatures(WaitingFeatures):
    """Features through a decoder block: its output at the last committed position of every slot.

    Earlier positions leave keys and values alone: of a long part, all but the last position skip the rest of the last
    block, which leaves a ninth of the work of the 0.5B's HASS head.
    """

    def __init__(
        self,
        stack: BlockStack,
        target: TargetHandle,
        *,
        width: int,
        dtype: torch.dtype,
        rows: PartialRows | None = None,
        pair: Callable[[Tensor, Pass], tuple[Tensor, Tensor | None]] = lambda features, _: (features, None),
        finish: Callable[[Tensor], Tensor] = lambda outputs: outputs,
    ) -> None:
        """Starts without features; `rows`: see `WaitingFeatures`.

        `pair` returns both inputs of the block for (M, F E) features and the tokens of a pass. `finish` returns (M, W),
        what is stored of (M, E) outputs of the block.
        """
        super().__init__(stack.cache, target, dtype, rows)
        self.stack, self._pair, self._finish = stack, pair, finish
        self._has_last = [False] * target.num_slots  # whether `_last` is of the last position in the cache
        self._last = torch.zeros(target.num_slots, width, device=target.device, dtype=dtype)

    @override
    def is_known(self, slot: int, length: int) -> bool:
        """Returns whether all features are here; the last feature of a prefix alone does not count."""
        return super().is_known(slot, length) and (self._has_last[slot] or bool(self._waiting[slot]))

    @override
    def begin(self, slot: int, prefix: Prefix | None) -> None:
        super().begin(slot, prefix)
        self._has_last[slot] = False

    @override
    def learn(self, committed: Committed) -> None:
        super().learn(committed)
        self.rows.retrieve(committed)

    @override
    def of(self, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        behind = [(slot, text) for slot, text in zip(slots, texts, strict=True) if self._waiting[slot]]
        if behind:
            own, read = zip(*behind, strict=True)
            self._feed(own, *self._gathered(own, read))
        return rows_at(self._last, slots)

    def waiting(self, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> WaitingPairs | None:
        """Returns what waits of some slots, for drafts that feed it themselves; None if nothing waits of one of them.

        Feeds all but the last position of long parts.
        """
        if not all(self._waiting[slot] for slot in slots):
            return None
        following, features = self._gathered(slots, texts)
        return WaitingPairs(self._pass_of(slots, following, features.device, has_last_logits=True), features)

    def have_fed(self, slots: Sequence[int]) -> None:
        """Notes that the result of `waiting` is in the cache now.

        The features still wait until more features come, because only that draft has the block's output. Another draft
        before then feeds the features again.
        """
        for slot in slots:
            self._has_seen[slot] = True

    def _gathered(self, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> tuple[list[Sequence[int]], Tensor]:
        """Returns the tokens after the features that wait, and these (M, F E) features."""
        following, parts = [], []
        for slot, text in zip(slots, texts, strict=True):
            features = self._shortened(slot, text)
            following.append(text[self._fed[slot] + 1 :][: len(features)])
            parts.append(features)
        return following, parts[0] if len(parts) == 1 else torch.cat(parts)

    def _shortened(self, slot: int, text: Sequence[int]) -> Tensor:
        """Returns the (T, F E) features that wait; if they are many, appends all but the last one, and returns that.

        If that fails, the slot has a hole, and gets no draft until it begins anew.
        """
        features = self._joined(slot)
        self._has_seen[slot] = False
        if len(features) > TOGETHER:
            self._waiting[slot] = [self._waiting[slot][-1][-1:]]
            self._append(slot, text, features[:-1])
            features = features[-1:]
        return features

    def _append(self, slot: int, text: Sequence[int], features: Tensor) -> None:
        """Writes keys and values of (T, F E) features of one slot, in chunks."""
        for chunk in features.split(min(CHUNK, self.rows.most_at_once)):
            begin = self._fed[slot] + 1
            work = self._pass_of([slot], [text[begin : begin + len(chunk)]], chunk.device)
            inputs, side = self._pair(chunk, work)
            self.stack.append(inputs, work, side)
            self._fed[slot] += len(chunk)

    def _feed(self, slots: Sequence[int], following: Sequence[Sequence[int]], features: Tensor) -> None:
        """Runs the block over the next positions of some slots: (M, F E) features, and the tokens after them."""
        work = self._pass_of(slots, following, features.device)
        inputs, side = self._pair(features, work)
        outputs = self._finish(self.stack.run(inputs, work, side).to(self._dtype))
        set_last(self._last, slots, outputs, work.offsets)
        for slot, tokens in zip(slots, following, strict=True):
            self._fed[slot] += len(tokens)
            self._waiting[slot], self._has_last[slot] = [], True

    def _pass_of(
        self, slots: Sequence[int], following: Sequence[Sequence[int]], device: torch.device, **options: bool
    ) -> Pass:
        fed = [self._fed[slot] for slot in slots]
        rows = [self.rows.make_room(*each) for each in zip(slots, fed, map(len, following), strict=True)]
        return Pass.of_chains(following, slots=slots, prefix_lens=rows, first_positions=fed, device=device, **options)
