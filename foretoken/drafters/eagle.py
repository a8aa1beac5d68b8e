"""EAGLE: a decoder block that predicts the target's features. Also EAGLE-2's dynamic trees and HASS's weights.

Source: Li et al. 2024 (arXiv 2401.15077 and 2406.16858), Zhang et al. 2024 (2408.15766).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretoken.drafters.autoregressive import AutoregressiveDrafter
from foretoken.drafters.heads import HeadOptions

if TYPE_CHECKING:
    from foretoken.drafters.base import Drafter
    from foretoken.models.loading import LoadedModel


class Options(HeadOptions):
    """Options of EAGLE."""


class EagleDrafter(AutoregressiveDrafter):
    """Drafts with an EAGLE head."""

    name = "eagle"


def create_for(options: Options, model: LoadedModel) -> Drafter:
    """See `foretoken.drafters.registry`."""
    return EagleDrafter(options, model)
