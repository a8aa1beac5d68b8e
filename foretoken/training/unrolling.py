"""Objectives of autoregressive heads: train several steps of a draft, the later ones on the head's own states.

Drafts from neighbouring positions teach nearly the same. Following only every few of them beyond the first step gives
the same gradient on average, for a fraction of the work.

Letters: B sequences, S positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field
from typing_extensions import override

from foretoken.heads.autoregressive import AutoregressiveHead
from foretoken.training.objectives.base import Fed, Objective

if TYPE_CHECKING:
    from collections.abc import Iterator

    from foretoken.heads.base import Head, HeadConfig
    from foretoken.models.parts import TargetParts
    from foretoken.training.objectives.base import Examples


class UnrolledObjective(Objective):
    """The common part of the objectives of `AutoregressiveHead`.

    Attributes:
        passes: Steps that are unrolled, K at most.
        stride: Distance of positions whose drafts are followed beyond the first step, with a new offset in each batch;
            1 as published.
    """

    is_detached: ClassVar[bool] = False  # whether no gradient flows from a step into earlier ones

    passes: int = Field(default=1, ge=1)
    stride: int = Field(default=1, ge=1)

    @override
    def steps(self, config: HeadConfig) -> int:
        """Returns `passes`, K at most."""
        return min(self.passes, config.steps)

    @override
    def fed(self, head: Head, given: Examples, parts: TargetParts) -> Iterator[Fed]:
        """Yields the steps; draws from torch's global generator unless all drafts are followed."""
        assert isinstance(head, AutoregressiveHead), "the objective's configuration says so"
        offset = int(torch.randint(self.stride, ())) if self.stride > 1 else 0
        starts = slice(offset, None, self.stride)
        steps = head.unrolled(given.features, given.tokens, parts, starts=starts, is_detached=self.is_detached)
        for index, hidden in enumerate(steps):
            yield Fed(hidden, offset, self.stride) if index else Fed(hidden)
