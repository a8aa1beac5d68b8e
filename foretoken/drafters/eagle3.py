"""EAGLE-3: a decoder block over three fused features that predicts tokens directly.

Source: Li et al. 2025 (arXiv 2503.01840).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretoken.drafters.autoregressive import AutoregressiveDrafter
from foretoken.drafters.heads import HeadOptions

if TYPE_CHECKING:
    from foretoken.drafters.base import Drafter
    from foretoken.models.loading import LoadedModel


class Options(HeadOptions):
    """Options of EAGLE-3."""


class Eagle3Drafter(AutoregressiveDrafter):
    """Drafts with an EAGLE-3 head."""

    name = "eagle3"


def create_for(options: Options, model: LoadedModel) -> Drafter:
    """See `foretoken.drafters.registry`."""
    return Eagle3Drafter(options, model)
