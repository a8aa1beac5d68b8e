"""Whole drafts by a head in one call of the native kernels: every level's step and the choice of its children.

Letters: B sequences, E hidden size.
"""

from __future__ import annotations

from ctypes import byref, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch

from foretoken.core.errors import PassError
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.lean.build import native_library
from foretoken.decoder.lean.native_children import NativeDraft, can_draft
from foretoken.decoder.lean.native_head import NativeHead
from foretoken.decoder.lean.structures import Status
from foretoken.decoder.lean.threads import kernel_threads
from foretoken.trees.dynamic import DynamicExpansion

if TYPE_CHECKING:
    from torch import Tensor

    from foretoken.decoder.lean.head_steps import HeadSteps
    from foretoken.trees.dynamic import ShapedExpansion


class HeadKernels:
    """Drafts with one head."""

    def __init__(self, head: HeadSteps) -> None:
        """Compiles the kernels where that has not been done yet.

        Raises:
            UnsuitableError: When a layer of the head is not native, or something is not as its sizes say.
        """
        self._head, self._native = head, NativeHead(head)
        self._is_shared = head.kind == "feature"
        self._library = native_library()
        self._library.foretoken_head_draft_bytes.restype = c_int64
        self._library.foretoken_head_draft.restype = c_int64
        self._idle: list[Tensor] = []  # workspaces; two Python threads never share one

    def can_fill(self, expansion: ShapedExpansion) -> bool:
        """Whether the kernels choose children as the requests need it, and the head has a step for every level.

        Where one row of logits serves a whole level, dynamic trees are chosen from all levels at once (`grow_levels`).
        """
        if self._is_shared and isinstance(expansion, DynamicExpansion):
            return False
        return expansion.depth <= len(self._head.steps) and can_draft(expansion, self._head.vocab_size)

    def fill(self, expansion: ShapedExpansion, features: Tensor) -> None:
        """Fills a tree.

        Args:
            expansion: A tree of roots for which `can_fill` holds; changed.
            features: (B, E) float32, the target's at the last committed position.

        Raises:
            PassError: When they do not fit, a root is not in the vocabulary, or there is no memory.
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
        """The head, described anew where a weight has moved.

        Raises:
            PassError: When a weight is no longer what the kernels can run on.
        """
        if self._native.has_moved():
            try:
                self._native = NativeHead(self._head)
            except UnsuitableError as err:
                raise PassError(str(err)) from err
        return self._native

    def _take_workspace(self, native: NativeHead, draft: NativeDraft, num_rows: c_int64) -> Tensor:
        """An idle workspace that is large enough, or a new one.

        Raises:
            PassError: When there is no memory for it.
        """
        size = self._library.foretoken_head_draft_bytes(byref(native.structure), byref(draft.arguments), num_rows)
        try:
            workspace = self._idle.pop()
        except IndexError:
            workspace = torch.empty(0, dtype=torch.uint8, device="cpu")
        if 0 <= size <= len(workspace):
            return workspace
        try:
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        except RuntimeError as err:  # torch has no type for it; a size below 0 stands for one beyond 64 bits
            raise PassError(
                f"there is no memory for drafts of {num_rows.value} rows. Draft for fewer at once."
            ) from err
