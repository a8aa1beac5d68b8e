"""Gives each drafter its own random numbers, so that draws of one drafter are independent of draws of another.

Random numbers are keyed by a request's seed, position and node. Two drafters that draw for the same request in one
iteration would share them. A node drawn beside a rejected sibling with the same numbers is then no draw from its own
distribution, which biases the output. Every drafter but the first therefore gets other seeds for requests with sampled
drafts. Coupled requests keep their seeds, because their drafts use the target's noise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from foretoken.drafters.base import DraftContext
    from foretoken.sampling.batch import SamplingBatch


class DraftNoise:
    """Contexts with each drafter's own noise; kept between proposals while the batch stays the same."""

    def __init__(self) -> None:
        self._batch: SamplingBatch | None = None
        self._are_coupled: list[bool] = []
        self._kept: dict[int, SamplingBatch] = {}

    def of(self, context: DraftContext, drafter: int) -> DraftContext:
        """Returns a context with a drafter's own noise.

        Args:
            context: Of the batch.
            drafter: The drafter's index. Index 0 keeps the requests' own noise.
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
