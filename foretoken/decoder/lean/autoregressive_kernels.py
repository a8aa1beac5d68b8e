"""Whole drafts by a head of one decoder block in one call of the native kernels.

A pass over the pairs that were committed since the last draft, then for each level that has children the block, the LM
head and the choice of the children.

Letters: B sequences, M pairs, W width of the block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretoken.core.errors import PassError
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.lean.autoregressive_steps import NativeAutoregressiveHead
from foretoken.decoder.lean.native_children import can_draft

if TYPE_CHECKING:
    from torch import Tensor

    from foretoken.core.passes import Pass
    from foretoken.decoder.block_stack import BlockStack
    from foretoken.decoder.lean.autoregressive_steps import AutoregressiveSteps
    from foretoken.trees.dynamic import ShapedExpansion


class AutoregressiveKernels:
    """Drafts with one head and the KV rows of its block."""

    def __init__(self, head: AutoregressiveSteps, stack: BlockStack) -> None:
        """Takes addresses.

        Args:
            head: What stands around the block.
            stack: The block; its cache has room for drafted nodes behind what is committed.

        Raises:
            UnsuitableError: When the block does not run on the native kernels, a layer of the head is not native, or
                something is not as its sizes say.
        """
        blocks = stack.native_blocks
        if blocks is None:
            raise UnsuitableError(f"the block runs on {stack.backend}. Expected the native kernels.")
        if (head.width, head.fuse is None) != (stack.hidden_size, stack.has_side):
            raise UnsuitableError(
                f"the head is {head.width} wide, {'without' if head.fuse is None else 'with'} a layer that fuses, and "
                f"the block {stack.hidden_size}, {'with' if stack.has_side else 'without'} a second input. Expected "
                "the same width, and one of the two."
            )
        self._head, self._native, self._blocks = head, NativeAutoregressiveHead(head), blocks

    def can_draft(self, expansion: ShapedExpansion) -> bool:
        """Whether there is a level, and the kernels choose children as the requests need it."""
        return expansion.depth > 0 and can_draft(expansion, self._head.vocab_size)

    def draft(self, work: Pass, states: Tensor, expansion: ShapedExpansion) -> None:
        """Feeds pairs and fills the trees behind them; leaves the rows of the pairs in the cache.

        Args:
            work: The pairs' tokens, their positions and slots; `logit_rows` is the last pair of each sequence, that of
                the root and the feature before it. Drafted nodes take the cache rows behind the pairs.
            states: (M, W) float32, of committed positions.
            expansion: Trees of roots for which `can_draft` holds, of the sequences of the pass; changed.

        Raises:
            PassError: When something does not fit the block, the cache or the head, there is no memory, or that of a
                weight was freed.
        """
        self._blocks.draft_head_trees(work, states, expansion, self._described())

    def _described(self) -> NativeAutoregressiveHead:
        """The head, described anew where a weight has moved.

        Raises:
            PassError: When a weight is no longer what the kernels can run on.
        """
        if self._native.has_moved():
            try:
                self._native = NativeAutoregressiveHead(self._head)
            except UnsuitableError as err:
                raise PassError(str(err)) from err
        return self._native
