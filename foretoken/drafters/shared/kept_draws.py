"""How drafts are chosen, kept from one proposal to the next: the requests of a batch mostly stay, positions move on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from foretoken.core.backend import integers_on
from foretoken.sampling.draft_draws import DraftDraws

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from foretoken.drafters.base import DraftContext
    from foretoken.trees.pruning import Pruning


class KeptDraws:
    """The draws of the last proposal."""

    def __init__(self, *, greedy: bool, pruning: Pruning | None = None) -> None:
        """Nothing is kept yet.

        Args:
            greedy: Whether all requests are drafted greedily.
            pruning: See `DraftDraws`.
        """
        self._is_greedy, self._pruning = greedy, pruning
        self._draws: DraftDraws | None = None
        self._are_coupled: list[bool] = []

    def of(self, context: DraftContext, rows: Sequence[int], device: torch.device) -> tuple[Tensor, DraftDraws]:
        """Roots and draws of some sequences of a batch.

        Args:
            context: Of the whole batch.
            rows: B of its sequences, ascending.
            device: Where trees lie.

        Returns:
            (B,) int64 root tokens, and the draws of these sequences.
        """
        texts = [context.tokens[row] for row in rows]
        last = [[tokens[-1] for tokens in texts], [len(tokens) - 1 for tokens in texts]]
        roots, positions = integers_on(last, device).unbind()
        sampling, are_coupled = context.sampling, [context.is_coupled[row] for row in rows]
        if len(rows) < len(context.slots):
            sampling = sampling.select(torch.tensor(rows, device=device))
        draws = self._draws
        if draws is None or draws.batch is not sampling or self._are_coupled != are_coupled:
            draws = DraftDraws.build(sampling, are_coupled, positions, greedy=self._is_greedy)
            self._draws, self._are_coupled = draws, are_coupled
        return roots, replace(draws, root_positions=positions, pruning=self._pruning)
