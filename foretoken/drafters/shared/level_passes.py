"""Passes over a draft level by level, for drafters whose nodes lie in a KV cache behind those of the levels above.

Letters: B sequences, P nodes of a level that are fed, W nodes that were fed so far.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from foretoken.core.backend import integers_on
from foretoken.core.passes import Pass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.trees.expansion import Frontier


class LevelPasses:
    """The passes over the levels below the roots, from the first one on; the roots lie in the prefix.

    Attributes:
        tokens: (B, W) int64.
        parents: (B, W) int64, parents among the nodes that were fed, -1 below the roots.
    """

    def __init__(self, slots: Sequence[int], prefix_lens: Sequence[int], device: torch.device) -> None:
        """Before the first level.

        Args:
            slots: Cache slots of the B sequences.
            prefix_lens: Committed rows of each.
            device: Where trees lie.
        """
        self._slots, self._prefix_lens = slots, prefix_lens
        self.tokens = self.parents = torch.zeros(len(slots), 0, dtype=torch.int64, device=device)
        self._positions = self.tokens  # (B, W)
        self._next_positions = integers_on(prefix_lens, device).unsqueeze(1)
        self._above: range | None = None  # nodes of the level above

    def next(self, frontier: Frontier) -> Pass:
        """The pass over a frontier, without logits. A node of depth d stands d - 1 positions behind the prefix."""
        tokens, origins = frontier
        (batch, count), earlier = tokens.shape, self.tokens.shape[1]
        if self._above is None:
            parents = torch.full_like(tokens, -1)
        elif origins is None:
            parents = torch.arange(self._above.start, self._above.stop, device=tokens.device).expand(batch, -1)
        else:
            parents = (origins + self._above.start).expand(batch, -1)
        self._above = range(earlier, earlier + count)
        self.tokens = torch.cat([self.tokens, tokens], dim=1)
        self.parents = torch.cat([self.parents, parents], dim=1)
        self._positions = torch.cat([self._positions, self._next_positions.expand(batch, count)], dim=1)
        self._next_positions = self._next_positions + 1
        return Pass(
            tokens=tokens.flatten(),
            positions=self._positions.flatten(),
            parents=self.parents.flatten(),
            slots=self._slots,
            prefix_lens=self._prefix_lens,
            offsets=range(0, batch * count + 1, count),
            num_earlier=[earlier] * batch,
            logit_rows=None,
        )
