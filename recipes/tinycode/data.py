"""Training batches as a pure function of (seed, step): nothing to save, any step can be recomputed.

One step in `LONG_EVERY` uses windows of the full context length, the others short ones, at equal tokens a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

LONG_EVERY = 8


@dataclass(slots=True, kw_only=True)
class Batches:
    """Random windows without replacement within an epoch; each epoch shifts the window grid.

    Attributes:
        stream: (tokens,) uint16, documents packed with `<|endoftext|>` between.
        tokens_per_step: tokens of each batch, a multiple of `long_len`.
        short_len, long_len: window lengths in tokens.
        seed: fixes the order of all windows.
    """

    stream: np.ndarray
    tokens_per_step: int
    short_len: int = 256
    long_len: int = 1024
    seed: int = 0
    _orders: dict[int, tuple[int, int, np.ndarray]] = field(default_factory=dict)

    def _window(self, length: int, index: int) -> np.ndarray:
        """Return the `index`-th window of this length: (length + 1,) token ids."""
        count = len(self.stream) // length - 2
        epoch, position = divmod(index, count)
        if length not in self._orders or self._orders[length][0] != epoch:
            rng = np.random.default_rng((self.seed, length, epoch))
            self._orders[length] = (epoch, int(rng.integers(length)), rng.permutation(count))
        _, offset, order = self._orders[length]
        start = int(order[position]) * length + offset
        return self.stream[start : start + length + 1]

    def batch(self, step: int) -> Tensor:
        """Return the batch of this step: (B, T + 1) int64; columns 1.. are the labels of columns ..T."""
        is_long = step % LONG_EVERY == LONG_EVERY - 1
        length = self.long_len if is_long else self.short_len
        kind_step = step // LONG_EVERY if is_long else step - step // LONG_EVERY
        size = self.tokens_per_step // length
        rows = [self._window(length, kind_step * size + row) for row in range(size)]
        return torch.from_numpy(np.stack(rows).astype(np.int64))


def held_out_windows(stream: np.ndarray, count: int, length: int) -> Tensor:
    """Return `count` evenly spread windows of the held-out stream: (count, length + 1) int64."""
    starts = np.linspace(0, len(stream) - length - 1, count).astype(int)
    return torch.from_numpy(np.stack([stream[s : s + length + 1] for s in starts]).astype(np.int64))
