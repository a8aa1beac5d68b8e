"""The objective of EAGLE: the next feature and, with a tenth of the weight, the target's distribution, one step ahead.

Source: Li et al. 2024 (arXiv 2401.15077), section 4.2; the noise is that of the released code, which grows for shorter
windows.

Letters: S positions of a window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field
from typing_extensions import override

from foretoken.heads.eagle import EagleConfig
from foretoken.training.objectives.base import layer_like
from foretoken.training.unrolling import UnrolledObjective

if TYPE_CHECKING:
    from foretoken.models.loading import LoadedModel

_WINDOW = 512  # window length of the published noise


class EagleObjective(UnrolledObjective):
    """Published weights.

    Attributes:
        noise: Uniform noise on features, within noise * 512 / S; 0 for none.
    """

    kl_weight: float = Field(default=0.1, ge=0)
    feature_weight: float = Field(default=1.0, ge=0)
    noise: float = Field(default=0.1, ge=0)

    @override
    def noise_bound(self, num_positions: int, size: int) -> float:
        """See `Objective`."""
        return self.noise * _WINDOW / num_positions


def default_sizes(target: LoadedModel) -> dict[str, Any]:
    """Returns values of `EagleConfig`: a decoder block like the target's."""
    return {"layer": layer_like(target)}


CONFIG, OBJECTIVE = EagleConfig, EagleObjective
