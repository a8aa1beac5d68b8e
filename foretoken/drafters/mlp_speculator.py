"""The MLP speculator: a small recurrence over drafted tokens that starts from the target's last feature.

Source: Wertheimer et al. 2024 (arXiv 2404.19124).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretoken.drafters.heads import HeadDrafter, HeadOptions, step_head

if TYPE_CHECKING:
    from torch import Tensor

    from foretoken.drafters.base import Drafter


class Options(HeadOptions):
    """Options of an MLP speculator."""


class MlpSpeculatorDrafter(HeadDrafter):
    """Evaluates a stage at every node that has children."""

    name = "mlp_speculator"

    def state_of(self, features: Tensor) -> Tensor:
        """(B, W), the recurrence's first state."""
        return step_head(self.loaded.head).encode(features)


def create(options: Options) -> Drafter:
    """See `foretoken.drafters.registry`."""
    return MlpSpeculatorDrafter(options)
