"""Hydra and Hydra++: heads that read the tokens drafted before theirs, evaluated at each node of the tree.

Hydra++ reads the target's features through a decoder block of its own, see `prefix_features`.

Source: Ankner et al. 2024 (arXiv 2402.05109).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from foretoken.drafters.captured_growth import CapturedGrowth
from foretoken.drafters.heads import (
    HeadOptions,
    LastFeatures,
    LoadedHead,
    Proposal,
    chain_seconds,
    grow,
    head_shape,
    load_head,
)
from foretoken.drafters.prefix_features import PrefixFeatures
from foretoken.heads.hydra import HydraHeads

if TYPE_CHECKING:
    from foretoken.core.taps import Tap
    from foretoken.core.token_tree import TokenTree
    from foretoken.drafters.base import Committed, DraftContext, Drafter, TargetFacts


class Options(HeadOptions):
    """Options of Hydra."""


class HydraDrafter:
    """Drafts a head at every node that has children."""

    name = "hydra"
    taps: tuple[Tap, ...] = ("final",)

    def __init__(self, options: Options, target: TargetFacts, loaded: LoadedHead) -> None:
        head = loaded.head
        assert isinstance(head, HydraHeads), "`load_head` checks the method"
        self._options, self._device = options, target.device
        size, dtype = head.config.hidden_size, head.weight.dtype
        self._grower = CapturedGrowth(partial(grow, head, loaded.parts), target.device)
        self._features: LastFeatures | PrefixFeatures
        if head.prefix is None:
            self._features = LastFeatures(target.num_slots, size, device=target.device, dtype=dtype)
        else:
            self._features = PrefixFeatures(head.prefix, target, dtype)
        start = torch.zeros(1, size, device=target.device, dtype=dtype)
        self.shape = head_shape(options, loaded, target, lambda shape: chain_seconds(shape, loaded, start))
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


def create(options: Options, target: TargetFacts) -> Drafter:
    """See `foretoken.drafters.registry`."""
    return HydraDrafter(options, target, load_head(options, target, "hydra"))
