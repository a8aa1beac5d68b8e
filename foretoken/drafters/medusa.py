"""Medusa: heads on the target's last feature, each of which guesses one of the tokens ahead whatever the others say.

Source: Cai et al. 2024 (arXiv 2401.10774).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from foretoken.drafters.captured_growth import CapturedGrowth
from foretoken.drafters.heads import HeadOptions, LastFeatures, LoadedHead, Proposal, head_shape, load_head, timed
from foretoken.heads.medusa import MedusaHeads

if TYPE_CHECKING:
    from torch import Tensor

    from foretoken.core.taps import Tap
    from foretoken.core.token_tree import TokenTree
    from foretoken.drafters.base import Committed, DraftContext, Drafter, TargetFacts
    from foretoken.trees.choices import TreeShape
    from foretoken.trees.growth import TreeGrowth


class Options(HeadOptions):
    """Options of Medusa."""


class MedusaDrafter:
    """Drafts with independent heads, all evaluated at once, at the last committed position alone."""

    name = "medusa"
    taps: tuple[Tap, ...] = ("final",)

    def __init__(self, options: Options, target: TargetFacts, loaded: LoadedHead) -> None:
        head = loaded.head
        assert isinstance(head, MedusaHeads), "`load_head` checks the method"
        self._options, self._head, self._parts, self._device = options, head, loaded.parts, target.device
        self._grower = CapturedGrowth(self._fill, target.device)
        self._features = LastFeatures(
            target.num_slots, head.config.hidden_size, device=target.device, dtype=head.weight.dtype
        )
        self.shape = head_shape(options, loaded, target, self._draft_seconds)
        self.max_nodes = self.shape.num_nodes

    @torch.inference_mode()
    def propose(self, context: DraftContext) -> TokenTree:
        """See `Drafter`."""
        proposal = Proposal(context, self.shape, self._features.is_known, self._options, self._device)
        if not proposal.rows:
            return proposal.without_drafts()
        return proposal.grown(self._grower, self._features.of(proposal.slots))

    def commit(self, committed: Committed) -> None:
        """See `Drafter`."""
        self._features.learn(committed)

    def release(self, slot: int) -> None:
        """See `Drafter`."""
        self._features.forget(slot)

    def _fill(self, growth: TreeGrowth, features: Tensor) -> None:
        """Fills a tree from (B, E) features: a level is drafted by one head, whatever node it is after."""
        logits = self._head.all_logits(features, self._parts, growth.shape.depth).float()
        for depth in range(growth.shape.depth):
            growth.expand(growth.parents_at(depth), logits[:, depth : depth + 1])

    @torch.inference_mode()
    def _draft_seconds(self, shape: TreeShape) -> float:
        """Seconds of the heads for one sequence."""
        return timed(
            lambda: self._head.all_logits(self._features.of([0]), self._parts, shape.depth).float().topk(10, dim=2),
            self._features.of([0]).device,
        )


def create(options: Options, target: TargetFacts) -> Drafter:
    """See `foretoken.drafters.registry`."""
    return MedusaDrafter(options, target, load_head(options, target, "medusa"))
