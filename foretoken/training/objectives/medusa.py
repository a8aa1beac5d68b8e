"""The objective of Medusa heads: weights 0.8^i as published, by default towards the target's distribution.

Source: Cai et al. 2024 (arXiv 2401.10774), section 2.2; distillation as in section 2.3.2 for the backbone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from foretoken.heads.medusa import MedusaConfig
from foretoken.training.objectives.base import Objective

if TYPE_CHECKING:
    from foretoken.models.loading import LoadedModel


class MedusaObjective(Objective):
    """The published decay with distillation from the target."""

    head_decay: float = Field(default=0.8, gt=0, le=1)


def default_sizes(target: LoadedModel) -> dict[str, Any]:
    """Returns values of `MedusaConfig` for a target; the caller adds vocabulary and hidden size."""
    del target
    return {}


CONFIG, OBJECTIVE = MedusaConfig, MedusaObjective
