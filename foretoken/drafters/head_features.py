"""The target's features as the decoder block of a head reads them, at the last committed position of every slot.

The block's KV cache follows the target's: positions enter when they are committed, in order and with the target's own
features. Nothing is ever taken back. Committed features wait until the next proposal, and are then fed in one pass. No
work is done for sequences without drafts.

Letters: M positions of a pass, T positions and B slots of sequences, F features of a position, E hidden size, W width
of the stored outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from foretoken.core.passes import Pass
from foretoken.decoder.block_stack import BlockStack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.decoder.cuda_graphs import GraphCapture
    from foretoken.decoder.native_linear import Quantization
    from foretoken.decoder.slot_cache import SlotCache
    from foretoken.drafters.base import Committed, Prefix, TargetHandle
    from foretoken.heads.hydra import PrefixLayer


def rows_at(table: Tensor, slots: Sequence[int]) -> Tensor:
    """(B, E), some rows of a table; not a copy if they are contiguous."""
    first = slots[0]
    if list(slots) == list(range(first, first + len(slots))):
        return table[first : first + len(slots)]
    return table[torch.tensor(list(slots), device=table.device)]


def set_last(table: Tensor, slots: Sequence[int], rows: Tensor, offsets: Sequence[int]) -> None:
    """Sets rows of a table to the last rows of some sequences.

    Args:
        table: (S, E); changed.
        slots: B of its rows.
        rows: (M, E) of any dtype, one sequence after another.
        offsets: B + 1, where the rows of each sequence begin.
    """
    if len(slots) == 1:  # without index tensors, which take longer than the copy
        table[slots[0]] = rows[offsets[1] - 1]
        return
    if len(rows) > len(slots):
        rows = rows[torch.tensor([end - 1 for end in offsets[1:]], device=rows.device)]
    table[torch.tensor(list(slots), device=rows.device)] = rows.to(table.dtype)


class KeptFeatures(Protocol):
    """A store of the target's features, for drafts that begin at the last committed position."""

    def is_known(self, slot: int, length: int) -> bool:
        """Returns whether the needed features of positions 0 … `length - 1` are here."""

    def learn(self, committed: Committed) -> None:
        """Takes what entered the target's KV cache."""

    def of(self, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """(B, W), the first states of drafts.

        Args:
            slots: B slots.
            texts: The committed tokens of each, one more than features.
        """

    def reusable(self, slot: int, length: int) -> int:
        """See `foretoken.drafters.base.PrefixKeeper`."""

    def begin(self, slot: int, prefix: Prefix | None) -> None:
        """Starts a sequence in a slot, with a prefix as `reusable` allowed; None for nothing."""


class LastFeatures:
    """The target's feature at the last committed position of every slot."""

    def __init__(self, num_slots: int, hidden_size: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self._features = torch.zeros(num_slots, hidden_size, device=device, dtype=dtype)
        self._known = [0] * num_slots  # positions up to the stored feature

    def is_known(self, slot: int, length: int) -> bool:
        """Returns whether the feature of position `length - 1` is here."""
        return length > 0 and self._known[slot] == length

    def learn(self, committed: Committed) -> None:
        """Takes what entered the target's KV cache."""
        assert committed.features is not None, "the drafter taps features"
        set_last(self._features, committed.slots, committed.features[:, 0], committed.offsets)
        for slot, start, length in zip(committed.slots, committed.starts, committed.lengths, strict=True):
            self._known[slot] = start + length

    def of(self, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """(B, E), of some slots; see `KeptFeatures`."""
        del texts
        return rows_at(self._features, slots)

    def reusable(self, slot: int, length: int) -> int:
        """Returns `length`: only the last feature is needed, which comes with the next position."""
        del slot
        return length

    def begin(self, slot: int, prefix: Prefix | None) -> None:
        """See `KeptFeatures`."""
        del prefix
        self._known[slot] = 0


_TOGETHER = 32  # positions of a sequence that are fed in one pass with other sequences; longer parts are fed alone
_CHUNK = 512  # positions of a long part per pass


class WaitingPairs(NamedTuple):
    """Committed positions that the block has not read.

    Attributes:
        work: Their tokens, each the one after its features, with logits after the last position of each sequence.
        features: (M, F E).
    """

    work: Pass
    features: Tensor


class StackFeatures:
    """Features through a decoder block, see the module."""

    def __init__(
        self,
        encode: Callable[[Tensor, Pass], Tensor],
        cache: SlotCache,
        target: TargetHandle,
        *,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        """Starts without features.

        Args:
            encode: Feeds the block (M, F E) features of a pass and the tokens after them; returns (M, W), whose last
                rows are stored.
            cache: The block's.
            target: Gives slots and device.
            width: W.
            dtype: Of inputs and stored outputs.
        """
        self._encode, self._cache, self._dtype = encode, cache, dtype
        self._fed = [0] * target.num_slots  # positions in the cache
        # (T, F, E) each, committed after those
        self._waiting: list[list[Tensor]] = [[] for _ in range(target.num_slots)]
        self._has_seen = [False] * target.num_slots  # whether a draft has fed all that waits
        self._known = [0] * target.num_slots  # positions in the cache or waiting
        self._has_last = [False] * target.num_slots  # whether `_last` is of the last position in the cache
        self._last = torch.zeros(target.num_slots, width, device=target.device, dtype=dtype)

    def is_known(self, slot: int, length: int) -> bool:
        """Returns whether all features of positions 0 … `length - 1` are here, the last not only with a prefix."""
        # After a failed pass there are fewer: the slot gets no draft until it begins anew.
        here = self._fed[slot] + sum(map(len, self._waiting[slot]))
        return self._known[slot] == here == length and (self._has_last[slot] or bool(self._waiting[slot]))

    def learn(self, committed: Committed) -> None:
        """Takes what entered the target's KV cache."""
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

    def reusable(self, slot: int, length: int) -> int:
        """Returns the positions with features, at most `length`."""
        return min(length, self._fed[slot] + sum(map(len, self._waiting[slot])))

    def begin(self, slot: int, prefix: Prefix | None) -> None:
        """See `KeptFeatures`."""
        source, length = prefix or (slot, 0)
        fed = self._known[source] if self._has_seen[source] else self._fed[source]
        waiting, self._fed[slot] = list[Tensor](), min(fed, length)
        for part in self._waiting[source] if fed < length else ():
            waiting.append(part[: length - fed])
            fed += len(waiting[-1])
        if source != slot and self._fed[slot]:
            self._cache.copy_rows(source, slot, self._fed[slot])
        self._waiting[slot], self._known[slot] = waiting, length
        self._has_seen[slot] = self._has_last[slot] = False

    def of(self, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """(B, W), the block's output at the last position with features; feeds what waits.

        Args:
            slots: B slots.
            texts: The committed tokens of each, one more than features.
        """
        behind, following, parts = [], [], []
        for slot, text in zip(slots, texts, strict=True):
            if not self._waiting[slot]:
                continue
            features = self._joined(slot)
            self._waiting[slot], self._has_seen[slot] = [], False
            if len(features) > _TOGETHER:
                self._feed_alone(slot, text, features)
            else:
                behind.append(slot)
                following.append(text[self._fed[slot] + 1 :][: len(features)])
                parts.append(features)
        if behind:
            self._feed(behind, following, parts[0] if len(parts) == 1 else torch.cat(parts))
        return rows_at(self._last, slots)

    def waiting(self, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> WaitingPairs | None:
        """Returns what waits of some slots, for drafts that feed it themselves; None if nothing waits of one of them.

        Feeds all but the last position of long parts. The result keeps waiting, see `have_fed`.

        Args:
            slots: B slots.
            texts: As for `of`.
        """
        if not all(self._waiting[slot] for slot in slots):
            return None
        following, parts = [], []
        for slot, text in zip(slots, texts, strict=True):
            features = self._joined(slot)
            if len(features) > _TOGETHER:
                self._waiting[slot] = [self._waiting[slot][-1][-1:]]
                self._feed_alone(slot, text, features[:-1])
                features = features[-1:]
            following.append(text[self._fed[slot] + 1 :][: len(features)])
            parts.append(features)
        work = Pass.of_chains(
            following, slots=slots, prefix_lens=[self._fed[slot] for slot in slots], device=parts[0].device,
            has_last_logits=True,
        )  # fmt: skip
        return WaitingPairs(work, parts[0] if len(parts) == 1 else torch.cat(parts))

    def have_fed(self, slots: Sequence[int]) -> None:
        """Notes that the result of `waiting` is in the cache now.

        It keeps waiting until more comes: only that draft knows the block's output, so another draft before that feeds
        it again.
        """
        for slot in slots:
            self._has_seen[slot] = True

    def _joined(self, slot: int) -> Tensor:
        """(T, F E), the waiting features of a slot."""
        waiting = self._waiting[slot]
        return (waiting[0] if len(waiting) == 1 else torch.cat(waiting)).flatten(1).to(self._dtype)

    def _feed_alone(self, slot: int, text: Sequence[int], features: Tensor) -> None:
        """Feeds (T, F E) features of one slot in chunks."""
        for chunk in features.split(_CHUNK):
            begin = self._fed[slot] + 1
            self._feed([slot], [text[begin : begin + len(chunk)]], chunk)

    def _feed(self, slots: Sequence[int], following: Sequence[Sequence[int]], features: Tensor) -> None:
        """Runs the block over the next positions of some slots: (M, F E) features, and the tokens after them."""
        prefix_lens = [self._fed[slot] for slot in slots]
        work = Pass.of_chains(following, slots=slots, prefix_lens=prefix_lens, device=features.device)
        set_last(self._last, slots, self._encode(features, work), work.offsets)
        for slot, tokens in zip(slots, following, strict=True):
            self._fed[slot] += len(tokens)
            self._has_last[slot] = True


class PrefixFeatures(StackFeatures):
    """The target's features as the decoder block of Hydra++ reads them, at the last committed position of every slot.

    Attributes:
        stack: The block with its KV rows by slot.
    """

    def __init__(
        self,
        layer: PrefixLayer,
        target: TargetHandle,
        dtype: torch.dtype,
        *,
        capture: GraphCapture | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        """Starts without features.

        Args:
            layer: The block.
            target: Gives slots, context and device.
            dtype: Of the block.
            capture: Captures; None for CUDA graphs on GPUs and none elsewhere.
            quantization: Of the block's matrices, see `BlockStack`.
        """
        capacity = target.context_len
        self.stack = BlockStack(
            layer.as_blocks(capacity), num_slots=target.num_slots, capacity=capacity, capture=capture,
            quantization=quantization,
        )  # fmt: skip
        super().__init__(self.stack.run, self.stack.cache, target, width=layer.norm.shape[0], dtype=dtype)
