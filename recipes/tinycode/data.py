"""Training batches as a pure function of (seed, step, window length): nothing to save, any step can be recomputed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


@dataclass(slots=True, kw_only=True)
class Batches:
    """Random windows without replacement within an epoch; each epoch shifts the window grid.

    Attributes:
        stream: (tokens,) int16 on the device of the model, documents packed with `<|endoftext|>` between.
        tokens_per_step: tokens of each batch, a multiple of every window length.
        seed: fixes the order of all windows.
    """

    stream: Tensor
    tokens_per_step: int
    seed: int = 0
    _orders: dict[int, tuple[int, int, np.ndarray]] = field(default_factory=dict)

    def starts(self, step: int, length: int) -> np.ndarray:
        """Return where the windows of this step begin in the stream: (B,) int64.

        Step n takes the n-th group of windows of this length, so the steps of a run never share a window of one length
        within an epoch, whatever the lengths of the steps between.
        """
        count = len(self.stream) // length - 2
        size = self.tokens_per_step // length
        starts = []
        for index in range(step * size, (step + 1) * size):
            epoch, position = divmod(index, count)
            if length not in self._orders or self._orders[length][0] != epoch:
                rng = np.random.default_rng((self.seed, length, epoch))
                self._orders[length] = (epoch, int(rng.integers(length)), rng.permutation(count))
            _, offset, order = self._orders[length]
            starts.append(int(order[position]) * length + offset)
        return np.array(starts)

    def batch(self, step: int, length: int) -> Tensor:
        """Return the batch of this step: (B, length + 1) int64; columns 1.. are the labels of the columns before."""
        starts = torch.from_numpy(self.starts(step, length)).to(self.stream.device, non_blocking=True)
        return self.stream[starts[:, None] + torch.arange(length + 1, device=starts.device)].long()


def load_stream(path: Path) -> Tensor:
    """Map a token file of `recipes.tinycode.tokenizer` into memory: (tokens,) int16, not to be written to."""
    return torch.from_numpy(np.load(path, mmap_mode="c").view(np.int16))


def held_out_windows(stream: Tensor, count: int, length: int) -> Tensor:
    """Return `count` evenly spread windows of the held-out stream: (count, length + 1) int64."""
    starts = np.linspace(0, len(stream) - length - 1, count).astype(int)
    return torch.stack([stream[s : s + length + 1] for s in starts]).long()
