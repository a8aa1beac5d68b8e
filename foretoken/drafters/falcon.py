"""Falcon: drafts blocks of several tokens per pass; the tokens of a block are independent.

Within a block the children of a node do not depend on its token, so a tree is the cross product of the block's best
tokens, within its shape. Each node that ends a block and has children gets a block of its own.

Source: Gao et al. 2024 (arXiv 2412.12639).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from foretoken.drafters.base import TargetReads
from foretoken.drafters.heads.drafter import HeadDrafter
from foretoken.drafters.heads.falcon_blocks import FalconBlocks
from foretoken.drafters.heads.loading import HeadOptions
from foretoken.heads.falcon import FalconHead
from foretoken.trees.choices import TreeShape
from foretoken.trees.dynamic import begin_expansion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from foretoken.drafters.base import DraftContext, Drafter, TargetHandle
    from foretoken.sampling.draft_draws import DraftDraws
    from foretoken.trees.dynamic import AnyShape
    from foretoken.trees.expansion import Expansion


class Options(HeadOptions):
    """Options of Falcon."""


class FalconDrafter(HeadDrafter):
    """Drafts a block of levels at once."""

    name = "falcon"
    reads = TargetReads(taps=("final",))  # the network reads all positions

    @property
    def head(self) -> FalconHead:
        """The network."""
        head = self.loaded.head
        assert isinstance(head, FalconHead), "`load_head` checks the method"
        return head

    def features_for(self, target: TargetHandle) -> FalconBlocks:
        """Returns the network's state of every slot."""
        loaded = self.loaded
        self._blocks = FalconBlocks(
            self.head, loaded.parts, target, dtype=loaded.dtype, num_expanded=self._most_blocks(),
            quantization=loaded.quantization,
        )  # fmt: skip
        return self._blocks

    def _most_blocks(self) -> int:
        """Returns the most blocks of a draft, timed chains included."""
        options, config = self.options, self.head.config
        if options.tree == "dynamic":
            shape = options.dynamic_shape(config.steps)  # as wide as the widest trees that may be chosen
            of_trees = shape.top_k * (shape.depth // config.block)
        else:  # every block but the first begins below K nodes and ends above one
            of_trees = max(options.shape(lambda: TreeShape(())).num_nodes, options.max_nodes) // 2
        return max(of_trees, config.steps // config.block)

    def _expanded(self, context: DraftContext, rows: Sequence[int], shape: AnyShape) -> Expansion:
        slots, texts = [context.slots[row] for row in rows], [context.tokens[row] for row in rows]
        outputs = self._features.of(slots, texts)
        roots, draws = self._draws.of(context, rows, self._target.device)
        expansion = begin_expansion(shape, roots, draws)
        self._blocks.fill(expansion, slots, outputs)
        return expansion

    @override
    def trial(self, shape: TreeShape, roots: Tensor, draws: DraftDraws) -> None:
        config = self.head.config
        outputs = torch.zeros(1, config.block, config.hidden_size, device=roots.device, dtype=self.loaded.dtype)
        self._blocks.fill(begin_expansion(shape, roots, draws), [0], outputs)


def create(options: Options) -> Drafter:
    """See `foretoken.drafters.registry`."""
    return FalconDrafter(options)
