"""Medusa: independent heads on the target's last feature; head k guesses the token k positions ahead.

Source: Cai et al. 2024 (arXiv 2401.10774).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretoken.drafters.heads import HeadDrafter, HeadOptions
from foretoken.heads.medusa import MedusaHeads

if TYPE_CHECKING:
    from torch import Tensor

    from foretoken.drafters.base import Drafter
    from foretoken.trees.expansion import Expansion


class Options(HeadOptions):
    """Options of Medusa."""


class MedusaDrafter(HeadDrafter):
    """Drafts with independent heads, all evaluated at once at the last committed position."""

    name = "medusa"

    def fill(self, expansion: Expansion, state: Tensor) -> None:
        """Fills a tree from (B, E) features: one head drafts a whole level."""
        head = self.loaded.head
        assert isinstance(head, MedusaHeads), "`load_head` checks the method"
        expansion.grow_levels(head.all_logits(state, self.loaded.parts, expansion.depth).float())


def create(options: Options) -> Drafter:
    """See `foretoken.drafters.registry`."""
    return MedusaDrafter(options)
