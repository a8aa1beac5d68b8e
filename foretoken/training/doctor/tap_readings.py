"""The features of a head that taps the target's blocks, and those that are taken for them by mistake.

Programs number taps differently: an id may name the boundary between blocks, or the block whose output it is, one less.
A head that is read by the wrong numbering gets the features of the block before or after every one that it was trained
on.

Letters: B texts, S positions, F taps, E hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from foretoken.training.teacher import Teacher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from foretoken.core.passes import Tap
    from foretoken.models.loading import LoadedModel

BLOCK_BEFORE, BLOCK_AFTER = "one block earlier", "one block later"
MOVED_BLOCKS = {BLOCK_BEFORE: -1, BLOCK_AFTER: 1}


def moved_taps(taps: Sequence[Tap], by: int, num_layers: int) -> tuple[Tap, ...] | None:
    """All taps so many blocks later, `final` where it is; None where there is no such block, or nothing moves."""
    moved = tuple(tap if tap == "final" else tap + by for tap in taps)
    is_there = all(tap == "final" or 0 <= tap <= num_layers for tap in moved)
    return moved if is_there and moved != tuple(taps) else None


def read_taps(target: LoadedModel, tokens: Tensor, taps: Sequence[Tap]) -> dict[str | None, Tensor]:
    """Features of some taps and of their neighbours, of one run of the target.

    Args:
        target: The target.
        tokens: (B, S) int64.
        taps: F taps.

    Returns:
        (B, S, F E) float32 by reading: of the taps themselves under None, and `BLOCK_BEFORE` and `BLOCK_AFTER` where
        these blocks are there.
    """
    wanted: dict[str | None, tuple[Tap, ...]] = {None: tuple(taps)}
    for name, by in MOVED_BLOCKS.items():
        moved = moved_taps(taps, by, target.num_layers)
        if moved is not None:
            wanted[name] = moved
    numbers = sorted({tap for each in wanted.values() for tap in each if tap != "final"})
    order: tuple[Tap, ...] = (*numbers, "final")
    found = Teacher(target, order).read(tokens)
    parts = dict(zip(order, found.chunk(len(order), dim=-1), strict=True))
    return {name: torch.cat([parts[tap] for tap in each], dim=-1).float() for name, each in wanted.items()}
