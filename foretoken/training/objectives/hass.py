"""The objective of HASS: EAGLE's over several steps, each from the head's own features of the steps before.

No gradient flows from a step into earlier ones; all have the same weight. The objective adds the cross-entropy over the
target's most probable tokens. The head is EAGLE's.

Source: Zhang et al. 2024 (arXiv 2408.15766), sections 3.1 and 3.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field
from typing_extensions import override

from foretoken.heads.eagle import EagleConfig
from foretoken.training.objectives.eagle import EagleObjective, default_sizes

if TYPE_CHECKING:
    from foretoken.training.losses import LossWeights

__all__ = ["CONFIG", "OBJECTIVE", "default_sizes"]


class HassObjective(EagleObjective):
    """Published weights.

    Attributes:
        passes: Steps that are aligned with drafting.
        top_weight: Weight of -sum of p log q over the target's most probable tokens.
        num_top: The number of these tokens.
    """

    is_detached: ClassVar[bool] = True

    passes: int = Field(default=3, ge=1)
    top_weight: float = Field(default=1.0, ge=0)
    num_top: int = Field(default=10, ge=1)

    @property
    @override
    def distance_weights(self) -> LossWeights:
        """The weights of EAGLE's distances and of `top_weight`."""
        return super().distance_weights._replace(top=self.top_weight, num_top=self.num_top)


CONFIG, OBJECTIVE = EagleConfig, HassObjective
