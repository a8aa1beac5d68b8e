"""Steps of an autoregressive head as objectives want them: of all drafts of a text, or of some after the first one.

Drafts that begin at neighbouring positions teach nearly the same. To follow only every few of them gives the same
gradient on average, for a fraction of the work.

Letters: B sequences, S positions, F taps, E hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from foretoken.heads.autoregressive import AutoregressiveHead
from foretoken.training.objectives.base import Fed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from foretoken.heads.base import Head
    from foretoken.hf.parts import TargetParts


def unrolled(
    head: Head, features: Tensor, tokens: Tensor, parts: TargetParts, *, stride: int, is_detached: bool = False
) -> Iterator[Fed]:
    """The steps of an `AutoregressiveHead`; draws from torch's global generator where not all drafts are followed.

    Args:
        head: The head.
        features: (B, S, F E).
        tokens: (B, S) int64.
        parts: What is shared with the target.
        stride: Every how many positions a draft is followed beyond its first step.
        is_detached: See `AutoregressiveHead.unrolled`.
    """
    assert isinstance(head, AutoregressiveHead), "the objective's configuration says so"
    offset = int(torch.randint(stride, ())) if stride > 1 else 0
    starts = slice(offset, None, stride)
    for index, hidden in enumerate(head.unrolled(features, tokens, parts, starts=starts, is_detached=is_detached)):
        yield Fed(hidden, offset, stride) if index else Fed(hidden)
