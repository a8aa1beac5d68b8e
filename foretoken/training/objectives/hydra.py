"""The objective of Hydra++ heads: the target's distributions alone, all heads with the same weight.

Source: Ankner et al. 2024 (arXiv 2402.05109), sections 4.2 and 4.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foretoken.heads.hydra import HydraConfig
from foretoken.training.objectives.base import Objective, layer_like

if TYPE_CHECKING:
    from foretoken.models.loading import LoadedModel


class HydraObjective(Objective):
    """Published weights: teacher 1, text 0, features 0."""


def default_sizes(target: LoadedModel) -> dict[str, Any]:
    """Returns values of `HydraConfig`: a decoder block like the target's."""
    return {"prefix": layer_like(target)}


CONFIG, OBJECTIVE = HydraConfig, HydraObjective
