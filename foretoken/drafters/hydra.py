"""Hydra and Hydra++: heads that read earlier drafted tokens, evaluated at each node of the tree.

Hydra++ reads the target's features through a decoder block of its own, see `PrefixFeatures`.

Source: Ankner et al. 2024 (arXiv 2402.05109).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from foretoken.drafters.head_features import PrefixFeatures
from foretoken.drafters.heads import HeadDrafter, HeadOptions
from foretoken.heads.hydra import HydraHeads

if TYPE_CHECKING:
    from foretoken.drafters.base import Drafter, TargetHandle
    from foretoken.drafters.head_features import KeptFeatures


class Options(HeadOptions):
    """Options of Hydra."""


class HydraDrafter(HeadDrafter):
    """Evaluates a head at every node that has children."""

    name = "hydra"

    def features_for(self, target: TargetHandle) -> KeptFeatures:
        """Returns the last features, through the decoder block of Hydra++ if the head has one."""
        head = self.loaded.head
        assert isinstance(head, HydraHeads), "`load_head` checks the method"
        if head.prefix is None:
            return super().features_for(target)
        self.reads = replace(self.reads, is_last_enough=False)  # the block reads all positions
        return PrefixFeatures(head.prefix, target, self.loaded.dtype, quantization=self.loaded.quantization)


def create(options: Options) -> Drafter:
    """See `foretoken.drafters.registry`."""
    return HydraDrafter(options)
