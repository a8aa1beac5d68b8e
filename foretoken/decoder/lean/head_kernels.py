"""Drafts whole trees with a head in one call of the native kernels: all steps and choices of children.

Letters: B sequences, E hidden size.
"""

from __future__ import annotations

from ctypes import addressof, byref, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch

from foretoken.core.backend import runs_cpu_kernels
from foretoken.core.errors import PassError
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.lean.build import native_library
from foretoken.decoder.lean.native_head import NativeAutoregressiveHead, NativeHead
from foretoken.decoder.lean.structures import DraftArguments, Draw, Status
from foretoken.decoder.lean.threads import kernel_threads
from foretoken.trees.dynamic import DynamicExpansion

if TYPE_CHECKING:
    from torch import Tensor

    from foretoken.core.passes import Pass
    from foretoken.decoder.block_stack import BlockStack
    from foretoken.decoder.lean.native_head import AutoregressiveSteps, HeadSteps
    from foretoken.trees.dynamic import ShapedExpansion


class NativeDraft:
    """Draft trees for the kernels.

    Attributes:
        arguments: See `kernels/interface.h`; valid as long as this object lives.
    """

    def __init__(self, expansion: ShapedExpansion, vocab_size: int, *, is_shared: bool = False) -> None:
        """Takes addresses.

        Args:
            expansion: Accepted by `can_draft`; the kernels fill it.
            vocab_size: V.
            is_shared: Whether one row of logits serves all nodes of a level; of static trees alone.
        """
        tree, draws = expansion.tensors(vocab_size, is_shared=is_shared), expansion.draws
        each = zip(draws.is_coupled.tolist(), draws.is_sampled.tolist(), strict=True)
        codes = [Draw.COUPLED if coupled else Draw.SAMPLED if sampled else Draw.GREEDILY for coupled, sampled in each]
        kinds, scales = (c_int64 * len(codes))(*codes), draws.batch.temperature.reciprocal()
        seeds, positions = draws.batch.noise.seeds.contiguous(), draws.root_positions.contiguous()
        self._held = [tree, kinds, scales, seeds, positions]
        self.arguments = DraftArguments(
            num_sequences=len(tree.tokens),
            num_nodes=len(tree.parents),
            num_candidates=tree.num_candidates,
            num_rows=0 if tree.rows is None else tree.rows.shape[1],
            vocab=vocab_size,
            parents=tree.parents.data_ptr(),
            ranks=tree.ranks.data_ptr(),
            draws=addressof(kinds),
            inverse_temperature=scales.data_ptr(),
            seeds=seeds.data_ptr(),
            root_positions=positions.data_ptr(),
            tokens=tree.tokens.data_ptr(),
            scores=tree.scores.data_ptr(),
            kinds=_address(tree.kinds),
            row_of=_address(tree.row_of),
            rows=_address(tree.rows),
            node_parents=_address(tree.node_parents),
            node_numbers=_address(tree.node_numbers),
            candidates=_address(tree.candidates),
            path_scores=_address(tree.path_scores),
            candidate_parents=_address(tree.candidate_parents),
        )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def can_draft(expansion: ShapedExpansion, width: int) -> bool:
    """Decides whether the kernels can choose children: on a CPU, with temperature as the only processor.

    They draft whole trees. Pruned trees need one level at a time, so that nothing is drafted below a pruned node.

    Args:
        expansion: A tree of roots.
        width: Logits of a draft model or head; the candidates must not outnumber them.
    """
    is_here = runs_cpu_kernels(expansion.roots.device)
    is_whole = expansion.draws.pruning is None
    return is_here and is_whole and expansion.draws.is_plain and expansion.num_candidates <= width


class HeadKernels:
    """Drafts with one head."""

    def __init__(self, head: HeadSteps) -> None:
        """Compiles the kernels if needed; raises `UnsuitableError` if a layer is not native or has a wrong size."""
        self._head, self._native = head, NativeHead(head)
        self._is_shared = head.kind == "feature"
        self._library = native_library()
        self._library.foretoken_head_draft_bytes.restype = c_int64
        self._library.foretoken_head_draft.restype = c_int64
        self._idle: list[Tensor] = []  # workspaces; two Python threads never share one

    def can_fill(self, expansion: ShapedExpansion) -> bool:
        """Decides whether the kernels can choose children for the requests, and the head has a step for every level.

        If one row of logits serves a whole level, `grow_levels` chooses dynamic trees from all levels at once.
        """
        if self._is_shared and isinstance(expansion, DynamicExpansion):
            return False
        return expansion.depth <= len(self._head.steps) and can_draft(expansion, self._head.vocab_size)

    def fill(self, expansion: ShapedExpansion, features: Tensor) -> None:
        """Fills a tree.

        Args:
            expansion: A tree of roots that `can_fill` accepts; changed.
            features: (B, E) float32, the target's at the last committed position.

        Raises:
            PassError: If the features do not fit, a root is not in the vocabulary, or memory is too small.
        """
        batch = len(expansion.roots)
        if features.shape != (batch, self._head.hidden_size) or features.dtype is not torch.float32:
            expected = (batch, self._head.hidden_size)
            raise PassError(f"features are {tuple(features.shape)} {features.dtype}. Expected {expected} float32.")
        features = features.contiguous()
        native = self._described()
        draft = NativeDraft(expansion, self._head.vocab_size, is_shared=self._is_shared)
        num_rows = c_int64(batch * (expansion.depth if self._is_shared else expansion.widest_level))
        workspace = self._take_workspace(native, draft, num_rows)
        status = self._library.foretoken_head_draft(
            byref(native.structure), byref(draft.arguments), c_void_p(features.data_ptr()), num_rows,
            c_int64(kernel_threads()), c_void_p(workspace.data_ptr()),
        )  # fmt: skip
        self._idle.append(workspace)
        if status == Status.TOKENS:
            roots, vocab = expansion.roots.tolist(), self._head.vocab_size
            raise PassError(f"the roots are {roots}. Expected ids below {vocab}, the head's vocabulary.")
        if status:
            raise PassError(f"the draft does not fit: {Status(status).name}. Expected a tree level by level.")

    def _described(self) -> NativeHead:
        """Returns the description of the head, renewed if a weight has moved."""
        if self._native.has_moved():
            try:
                self._native = NativeHead(self._head)
            except UnsuitableError as err:
                raise PassError(str(err)) from err
        return self._native

    def _take_workspace(self, native: NativeHead, draft: NativeDraft, num_rows: c_int64) -> Tensor:
        """Returns an idle workspace that is large enough, or a new one."""
        size = self._library.foretoken_head_draft_bytes(byref(native.structure), byref(draft.arguments), num_rows)
        try:
            workspace = self._idle.pop()
        except IndexError:
            workspace = torch.empty(0, dtype=torch.uint8, device="cpu")
        if 0 <= size <= len(workspace):
            return workspace
        try:
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        except RuntimeError as err:  # torch has no type for it; a negative size stands for one beyond 64 bits
            raise PassError(
                f"there is no memory for drafts of {num_rows.value} rows. Draft for fewer at once."
            ) from err


class AutoregressiveKernels:
    """Drafts with one head and the KV rows of its block."""

    def __init__(self, head: AutoregressiveSteps, stack: BlockStack) -> None:
        """Takes addresses.

        Args:
            head: The layers around the block.
            stack: The block; its cache has room for drafted nodes behind the committed rows.

        Raises:
            UnsuitableError: If the block does not run on the native kernels, or a layer of the head is not native or
                has a wrong size.
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
        """Decides whether there is a level, and the kernels can choose children for the requests."""
        return expansion.depth > 0 and can_draft(expansion, self._head.vocab_size)

    def draft(self, work: Pass, states: Tensor, expansion: ShapedExpansion) -> None:
        """Feeds pairs and fills the trees behind them; the rows of the pairs stay in the cache.

        Args:
            work: The pairs' tokens, positions and slots; `logit_rows` is the last pair of each sequence, which has the
                root and the feature before it. Drafted nodes use the cache rows behind the pairs.
            states: (M, W) float32, of committed positions.
            expansion: Trees of roots that `can_draft` accepts, of the sequences of the pass; changed.

        Raises:
            PassError: If something does not fit the block, the cache or the head, memory is too small, or a weight's
                memory was freed.
        """
        self._blocks.draft_head_trees(work, states, expansion, self._described())

    def _described(self) -> NativeAutoregressiveHead:
        if self._native.has_moved():
            try:
                self._native = NativeAutoregressiveHead(self._head)
            except UnsuitableError as err:
                raise PassError(str(err)) from err
        return self._native
