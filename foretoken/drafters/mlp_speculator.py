"""The MLP speculator: a small recurrence over drafted tokens, begun from the target's last feature.

Source: Wertheimer et al. 2024 (arXiv 2404.19124).
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

if TYPE_CHECKING:
    from foretoken.core.taps import Tap
    from foretoken.core.token_tree import TokenTree
    from foretoken.drafters.base import Committed, DraftContext, Drafter, TargetFacts


class Options(HeadOptions):
    """Options of an MLP speculator."""


class MlpSpeculatorDrafter:
    """Drafts a stage at every node that has children."""

    name = "mlp_speculator"
    taps: tuple[Tap, ...] = ("final",)

    def __init__(self, options: Options, target: TargetFacts, loaded: LoadedHead) -> None:
        self._options, self._head, self._device = options, loaded.head, target.device
        self._grower = CapturedGrowth(partial(grow, loaded.head, loaded.parts), target.device)
        self._features = LastFeatures(
            target.num_slots,
            loaded.head.config.hidden_size,
            device=target.device,
            dtype=next(loaded.head.parameters()).dtype,
        )
        self.shape = head_shape(
            options, loaded, target, lambda shape: chain_seconds(shape, loaded, self._features.of([0]))
        )
        self.max_nodes = self.shape.num_nodes

    @torch.inference_mode()
    def propose(self, context: DraftContext) -> TokenTree:
        """See `Drafter`."""
        proposal = Proposal(context, self.shape, self._features.is_known, self._options, self._device)
        if not proposal.rows:
            return proposal.without_drafts()
        return proposal.grown(self._grower, self._head.encode(self._features.of(proposal.slots)))

    def commit(self, committed: Committed) -> None:
        """See `Drafter`."""
        self._features.learn(committed)

    def release(self, slot: int) -> None:
        """See `Drafter`."""
        self._features.forget(slot)


def create(options: Options, target: TargetFacts) -> Drafter:
    """See `foretoken.drafters.registry`."""
    return MlpSpeculatorDrafter(options, target, load_head(options, target, "mlp_speculator"))
