"""The objective of EAGLE-3: the target's distributions over several steps of the head's own states, later ones less.

The gradient goes through all steps. Over a draft vocabulary the target's distribution is what of it lies there, and
positions at which its choice lies elsewhere teach nothing.

Source: Li et al. 2025 (arXiv 2503.01840), section 3.1 (training-time test); weights as in the released code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field
from typing_extensions import override

from foretoken.heads.eagle3 import Eagle3Config
from foretoken.training.layer_sizes import layer_like
from foretoken.training.objectives.base import Objective
from foretoken.training.unrolling import unrolled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from foretoken.heads.base import Head, HeadConfig
    from foretoken.hf.loading import LoadedModel
    from foretoken.hf.parts import TargetParts
    from foretoken.training.objectives.base import Examples, Fed


class Eagle3Objective(Objective):
    """Published weights.

    Attributes:
        passes: Steps that are unrolled.
        stride: Every how many positions a draft is followed beyond its first step, from another one in each batch; 1 as
            published.
    """

    head_decay: float = Field(default=0.8, gt=0, le=1)
    passes: int = Field(default=7, ge=1)
    stride: int = Field(default=1, ge=1)

    @override
    def steps(self, config: HeadConfig) -> int:
        """See `Objective`."""
        return min(self.passes, config.steps)

    @override
    def fed(self, head: Head, given: Examples, parts: TargetParts) -> Iterator[Fed]:
        """See `Objective`."""
        return unrolled(head, given.features, given.tokens, parts, stride=self.stride)


def default_sizes(target: LoadedModel) -> dict[str, Any]:
    """Values of `Eagle3Config`: the published taps, and a decoder block like the target's own."""
    last = target.num_layers
    published = (2, last // 2, last - 3)
    is_deep = last >= 7
    return {"boundaries": published if is_deep else tuple(range(last + 1))[-3:], "layer": layer_like(target)}


CONFIG, OBJECTIVE = Eagle3Config, Eagle3Objective
