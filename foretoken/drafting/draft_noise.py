"""Random numbers of several drafters: what one draws tells nothing of what another draws.

Numbers are keyed by a request's seed, position and node. Two drafters that draw for the same request in one iteration
would share them, and a node drawn along with a sibling that was rejected is no draw from its own distribution any more,
which biases what is generated. So every drafter but the first gets other seeds for requests that it draws for. Coupled
requests keep theirs: their drafts go by the target's noise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from foretoken.drafters.base import DraftContext
    from foretoken.sampling.batch import SamplingBatch


class DraftNoise:
    """Contexts as each of several drafters gets them; kept from one proposal to the next while the batch stays."""

    def __init__(self) -> None:
        """Nothing is kept yet."""
        self._batch: SamplingBatch | None = None
        self._are_coupled: list[bool] = []
        self._kept: dict[int, SamplingBatch] = {}

    def of(self, context: DraftContext, drafter: int) -> DraftContext:
        """A context with a drafter's own noise.

        Args:
            context: Of the batch.
            drafter: The drafter's place among the engine's; the first one keeps the requests' own noise.
        """
        batch, are_coupled = context.sampling, list(context.is_coupled)
        if not drafter or batch.is_all_greedy or all(are_coupled):
            return context
        if self._batch is not batch or self._are_coupled != are_coupled:
            self._batch, self._are_coupled, self._kept = batch, are_coupled, {}
        own = self._kept.get(drafter)
        if own is None:
            rows = torch.tensor([not each for each in are_coupled], device=batch.greedy.device)
            own = self._kept[drafter] = replace(batch, noise=batch.noise.of_drafter(drafter, rows))
        return replace(context, sampling=own)
