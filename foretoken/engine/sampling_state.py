"""Sampling parameters and token histories of running sequences, as tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from foretoken.engine.sequence import slot_of
from foretoken.sampling.batch import History, HistoryTable, SamplingBatch
from foretoken.sampling.grammar import GrammarMask

if TYPE_CHECKING:
    import torch

    from foretoken.engine.sequence import Sequence


class SamplingState:
    """Tensors of the sequences in slots, kept from one iteration to the next.

    Attributes:
        table: Tokens of each slot's sequence that processors read.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.table = HistoryTable(num_slots, vocab_size, device)
        self._vocab_size, self._device = vocab_size, device
        self._batch: tuple[list[Sequence], SamplingBatch] | None = None

    def batch(self, sequences: list[Sequence]) -> SamplingBatch:
        """Returns the parameters as tensors; rebuilds them only when the batch changes."""
        if self._batch is None or self._batch[0] != sequences:
            requests = [s.sampling for s in sequences]
            self._batch = (list(sequences), SamplingBatch.build(requests, self._vocab_size, self._device))
        return self._batch[1]

    def masked_batch(self, sequences: list[Sequence]) -> SamplingBatch:
        """Returns `batch` with the masks of the sequences' grammars."""
        batch = self.batch(sequences)
        if all(s.grammar is None for s in sequences):
            return batch
        mask = GrammarMask([s.grammar for s in sequences])
        return replace(batch, processors=(mask, *batch.processors))

    def histories(self, sequences: list[Sequence], batch: SamplingBatch) -> History | None:
        """Returns the tokens that processors of a batch read; None without processors."""
        if not batch.processors:
            return None
        return self.table.view(
            [slot_of(s) for s in sequences], [s.tokens for s in sequences], [s.num_prompt for s in sequences],
            batch.tail_len,
        )  # fmt: skip
