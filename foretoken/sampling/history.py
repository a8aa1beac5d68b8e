"""Token history that processors read: counts, the last few tokens, the output length; one state per slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


class Counts(NamedTuple):
    """Which tokens occurred in the prompt and in the output.

    Attributes:
        in_prompt: (B, V) bool, tokens of the prompt.
        in_output: (B, V) int32, occurrences in the output.
    """

    in_prompt: Tensor
    in_output: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The tokens of B sequences as processors see them.

    Attributes:
        prompt_seen: (B, V) bool, tokens of the prompt; None if no processor reads counts.
        output_counts: (B, V) int32, occurrences in the output; None if no processor reads counts.
        tail: (B, L) int64, the last L tokens, -1 before the beginning.
        num_output: (B,) int64, output tokens so far.
    """

    prompt_seen: Tensor | None
    output_counts: Tensor | None
    tail: Tensor
    num_output: Tensor

    @property
    def counts(self) -> Counts:
        """Occurrences of every token, for processors that read counts."""
        if self.prompt_seen is None or self.output_counts is None:
            raise ValueError("a processor reads counts that it did not declare, so they were not kept")
        return Counts(self.prompt_seen, self.output_counts)

    def last_tokens(self, count: int) -> Tensor:
        """(B, count) int64, the last tokens, -1 before the beginning; count: at most the tail's length."""
        return self.tail[:, self.tail.shape[1] - count :]

    def select(self, rows: Tensor) -> History:
        """Returns the histories of some sequences; rows: (R,) int64."""
        return History(
            prompt_seen=None if self.prompt_seen is None else self.prompt_seen[rows],
            output_counts=None if self.output_counts is None else self.output_counts[rows],
            tail=self.tail[rows],
            num_output=self.num_output[rows],
        )

    def extended(self, path: Tensor) -> History:
        """Returns a new history with the tokens along a path appended.

        Args:
            path: (B, D) int64, tokens in order, -1 past the end.
        """
        if path.shape[1] == 0:
            return self
        on_path = path >= 0
        counts = self.output_counts
        if counts is not None:
            counts = counts.scatter_add(1, path.clamp_min(0), on_path.to(counts.dtype))
        lengths = on_path.sum(1)
        joined = torch.cat([self.tail, path], dim=1)
        # The tail ends where the path ends: entry i of the new tail is entry i + length of the joined tokens.
        index = torch.arange(self.tail.shape[1], device=path.device) + lengths.unsqueeze(1)
        return History(
            prompt_seen=self.prompt_seen,
            output_counts=counts,
            tail=joined.gather(1, index),
            num_output=self.num_output + lengths,
        )


class NodeView(NamedTuple):
    """The tokens before R nodes of trees, as processors see them.

    Attributes:
        history: Committed tokens and the drafted path down to each node.
        path: (R, D) int64, the drafted part alone, -1 past the end.
    """

    history: History
    path: Tensor


class HistoryTable:
    """Histories of the running sequences by slot; counts exist only for sequences that need them."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._seen: list[Tensor | None] = [None] * num_slots
        self._counts: list[Tensor | None] = [None] * num_slots

    def start(self, slot: int, prompt: Sequence[int], *, needs_counts: bool) -> None:
        """Starts a sequence in a slot, and forgets the sequence before."""
        self._seen[slot] = self._counts[slot] = None
        if needs_counts:
            seen = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            seen[torch.tensor(prompt, dtype=torch.int64, device=self._device)] = True
            self._seen[slot] = seen
            self._counts[slot] = torch.zeros(self._vocab_size, dtype=torch.int32, device=self._device)

    def append(self, slot: int, tokens: Sequence[int]) -> None:
        """Counts generated tokens of a slot."""
        counts = self._counts[slot]
        if counts is not None:
            ids = torch.tensor(tokens, dtype=torch.int64, device=self._device)
            counts.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def view(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]], num_prompt: Sequence[int], tail_len: int
    ) -> History:
        """Returns the history of some slots.

        Args:
            slots: B slots.
            tokens: All committed tokens of each.
            num_prompt: Prompt length of each.
            tail_len: L.
        """
        device = self._device
        has_counts = any(self._counts[slot] is not None for slot in slots)
        empty_seen = torch.zeros(self._vocab_size, dtype=torch.bool, device=device)
        empty_counts = torch.zeros(self._vocab_size, dtype=torch.int32, device=device)
        tails = [([-1] * tail_len + list(ids[-tail_len:]))[-tail_len:] if tail_len else [] for ids in tokens]

        def stack(table: Sequence[Tensor | None], empty: Tensor) -> Tensor:
            rows = [table[slot] for slot in slots]
            return torch.stack([empty if row is None else row for row in rows])

        return History(
            prompt_seen=stack(self._seen, empty_seen) if has_counts else None,
            output_counts=stack(self._counts, empty_counts) if has_counts else None,
            tail=torch.tensor(tails, dtype=torch.int64, device=device).view(len(slots), tail_len),
            num_output=torch.tensor([len(t) - p for t, p in zip(tokens, num_prompt, strict=True)], device=device),
        )
