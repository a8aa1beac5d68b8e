"""The objective of EAGLE-3: the target's distributions over several steps of the head's own states, later ones less.

The gradient flows through all steps. Over a draft vocabulary, the target's distribution is its part in that vocabulary;
positions whose choice lies outside teach nothing.

With s_j the sum of pass j's losses over its supervised positions and n_j their number, the loss is

    (s_0 + 0.8 s_1 + ... + 0.8^6 s_6) / n_0

so that a position has the same weight in every pass. The released code and SpecForge also divide the sums of all passes
by one count, but by that of all tokens of the batch, padding and prompts included.

Source: Li et al. 2025 (arXiv 2503.01840), section 3.1 (training-time test); weights as in the released code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field
from typing_extensions import override

from foretoken.heads.eagle3 import Eagle3Config
from foretoken.training.objectives.base import layer_like
from foretoken.training.unrolling import UnrolledObjective

if TYPE_CHECKING:
    from torch import Tensor

    from foretoken.models.loading import LoadedModel


class Eagle3Objective(UnrolledObjective):
    """Published weights."""

    head_decay: float = Field(default=0.8, gt=0, le=1)
    passes: int = Field(default=7, ge=1)

    @override
    def divisors(self, counts: Tensor) -> Tensor:
        """Returns the first pass's positions for all passes."""
        return counts[:1].expand_as(counts)


def default_sizes(target: LoadedModel) -> dict[str, Any]:
    """Returns values of `Eagle3Config`: the published taps, and a decoder block like the target's."""
    last = target.num_layers
    published = (2, last // 2, last - 3)
    is_deep = last >= 7
    return {"boundaries": published if is_deep else tuple(range(last + 1))[-3:], "layer": layer_like(target)}


CONFIG, OBJECTIVE = Eagle3Config, Eagle3Objective
