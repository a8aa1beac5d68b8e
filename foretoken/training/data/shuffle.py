"""A shuffled order computed position by position, without a table and the same with every library version.

It is a keyed permutation: a balanced Feistel network over the smallest power of four that holds the range, walked on
until it falls inside the range (Black and Rogaway 2002, "Ciphers with arbitrary finite domains", cycle walking).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from foretoken.sampling.noise import derive_seed, mix

_ROUNDS = 8


def shuffled(positions: np.ndarray, count: int, key: int) -> np.ndarray:
    """Where a permutation of 0..count-1 sends some positions.

    Args:
        positions: (n,) int64, each in 0..count-1.
        count: Size of the range, at least 1.
        key: Chooses the permutation; any integer.

    Returns:
        (n,) int64; all `count` positions together give every number once.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    keys = [derive_seed(key, number) for number in range(1, _ROUNDS + 1)]
    values = _encrypted(torch.from_numpy(np.asarray(positions, dtype=np.int64)), half, keys)
    outside = values >= count
    while bool(outside.any()):
        values = torch.where(outside, _encrypted(values, half, keys), values)
        outside = values >= count
    result: np.ndarray = values.numpy()
    return result


def _encrypted(values: Tensor, half: int, keys: list[int]) -> Tensor:
    """A permutation of the `2 * half`-bit numbers, int64 in and out."""
    mask = (1 << half) - 1
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (mix(right + key) & mask)
    return (left << half) | right
