"""The objective of the MLP speculator: all stages with the same weight, as in the published runs.

Source: Wertheimer et al. 2024 (arXiv 2404.19124), section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foretoken.heads.mlp_speculator import MlpSpeculatorConfig
from foretoken.training.objectives.base import Objective

if TYPE_CHECKING:
    from foretoken.models.loading import LoadedModel


class MlpSpeculatorObjective(Objective):
    """All stages alike, distilled from the target; the published weights are `ce_weight` 1 and `kl_weight` 0."""


def default_sizes(target: LoadedModel) -> dict[str, Any]:
    """Returns values of `MlpSpeculatorConfig`: the inner width is the target's."""
    return {"inner_dim": target.config.hidden_size}


CONFIG, OBJECTIVE = MlpSpeculatorConfig, MlpSpeculatorObjective
