"""The first weights of an EAGLE head: the linear map of (embedding, feature) that is nearest to the next feature.

Steps of gradient descent find that map slowly, for features have a few directions that are ten times as wide as the
others. Solved at once, it guessed better on SmolLM2 than 150,000 tokens of training did; see "First weights of EAGLE
heads by least squares" in `benchmarks/NOTES.md`.

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

TOKENS_AN_INPUT = 100  # that the map is fitted to, for each of its 2 E inputs; 36 follow the noise, see the notes
_FEWEST_AN_INPUT = 8  # a choice: a map through fewer points follows their noise, and the head starts as it was
_RIDGE = 1e-3  # added to the mean square of each input, relative; a choice: 1e-4 to 1e-2 guess alike in the notes


class LinearStart:
    """Moments of (embedding, feature) and the next feature, over positions of texts, summed in float64 on the CPU.

    The map should be fitted to `num_tokens` tokens.
    """

    def __init__(self, head: EagleHead, parts: TargetParts) -> None:
        self._head, self._parts = head, parts
        size = head.config.width
        rows = 2 * size + (head.fc.bias is not None)
        self._moments = torch.zeros(rows, rows + size, dtype=torch.float64)
        self.num_tokens, self._num_added = TOKENS_AN_INPUT * rows, torch.zeros((), dtype=torch.float64)

    def add(self, tokens: Tensor, features: Tensor) -> None:
        """Adds the positions of (B, S) int64 tokens with (B, S, E) features, a sequence at a time."""
        for text, known in zip(tokens, features, strict=True):
            embedded, now, following = self._parts.embed(text[1:]), known[:-1], known[1:]
            one = [torch.ones_like(now[:, :1])] if self._head.fc.bias is not None else []
            values = torch.cat([embedded.to(now.dtype), now, *one, following], dim=1)
            self._moments += (values[:, : len(self._moments)].T @ values).to("cpu", torch.float64)
            self._num_added += len(now)

    def finish(self, summed: Callable[[Tensor], Tensor]) -> None:
        """Writes the map to the head's `fc`; summed: over all processes.

        `fc` stays as it is if positions are too few for its inputs, or their values are not finite.
        """
        moments = summed(self._moments)
        if float(summed(self._num_added)) < _FEWEST_AN_INPUT * len(moments):
            return
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
