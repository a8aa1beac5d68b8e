"""The first weights of an EAGLE head: the linear map of (embedding, feature) that is nearest to the next feature.

Steps of gradient descent find that map slowly, for features have a few directions that are ten times as wide as the
others. Solved at once, it guesses as well as after some 200,000 tokens of training; see "First weights of EAGLE heads
by least squares" in `benchmarks/NOTES.md`.

Letters: B sequences, S positions, E hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from foretoken.heads.eagle import EagleHead
    from foretoken.models.parts import TargetParts

TOKENS = 1 << 16  # that the map is fitted to; a choice: 2 E of them are unknowns of each value, a few thousand
_RIDGE = 1e-3  # added to the mean square of each input, relative; a choice: without it few tokens fit at random


class LinearStart:
    """Moments of (embedding, feature) and the next feature, over positions of texts, summed in float64."""

    def __init__(self, head: EagleHead, parts: TargetParts) -> None:
        """Begins with no position."""
        self._head, self._parts = head, parts
        size, weight = head.config.width, head.fc.weight
        rows = 2 * size + (head.fc.bias is not None)
        self._moments = torch.zeros(rows, rows + size, dtype=torch.float64, device=weight.device)

    def add(self, tokens: Tensor, features: Tensor) -> None:
        """Adds the positions of (B, S) int64 tokens with (B, S, E) features."""
        embedded, now, following = self._parts.embed(tokens[:, 1:]), features[:, :-1], features[:, 1:]
        one = [torch.ones_like(now[..., :1])] if self._head.fc.bias is not None else []
        values = torch.cat([embedded.to(now.dtype), now, *one, following], dim=-1).flatten(0, 1)
        self._moments += (values[:, : len(self._moments)].T @ values).double()

    def finish(self, summed: Callable[[Tensor], Tensor]) -> None:
        """Writes the map to the head's `fc`, which stays as it is if no input varies; summed: over all processes."""
        moments = summed(self._moments)
        gram, cross = moments.split([len(moments), moments.shape[1] - len(moments)], dim=1)
        size = gram.diagonal()
        ridge = _RIDGE * torch.where(size > 0, size, size.amax())
        solution, info = torch.linalg.solve_ex(gram + torch.diag(ridge), cross)
        if int(info) or not bool(solution.isfinite().all()):
            return
        with torch.no_grad():
            fc, inputs = self._head.fc, self._head.fc.weight.shape[1]
            fc.weight.copy_(solution[:inputs].T)
            if fc.bias is not None:
                fc.bias.copy_(solution[inputs])
