"""Children in draft trees, chosen by the native kernels: what `Expansion.grow` does, in one call a level.

Letters: B sequences, P nodes of one level that have children, V vocabulary.
"""

from __future__ import annotations

from ctypes import addressof, byref, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch

from foretoken.core.backend import runs_cpu_kernels
from foretoken.core.errors import PassError
from foretoken.decoder.lean.build import native_library
from foretoken.decoder.lean.structures import DraftArguments, Draw, Status
from foretoken.decoder.lean.threads import kernel_threads

if TYPE_CHECKING:
    from torch import Tensor

    from foretoken.trees.dynamic import ShapedExpansion


class NativeDraft:
    """Trees under construction as the kernels see them.

    Attributes:
        arguments: See `kernels/interface.h`; valid as long as this lives.
    """

    def __init__(self, expansion: ShapedExpansion, vocab_size: int, *, is_shared: bool = False) -> None:
        """Takes addresses.

        Args:
            expansion: For which `can_draft` holds; filled as the kernels go.
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
    """Where a tensor lies."""
    return None if tensor is None else tensor.data_ptr()


def can_draft(expansion: ShapedExpansion, width: int) -> bool:
    """Whether the kernels choose as the requests need it: on a CPU, where nothing but temperature changes logits.

    They draft whole trees. Pruned ones are expanded level by level, so that nothing is drafted below what falls short.

    Args:
        expansion: A tree of roots.
        width: Logits that a draft model or a head gives; as many candidates must suffice.
    """
    is_here = runs_cpu_kernels(expansion.roots.device)
    is_whole = expansion.draws.pruning is None
    return is_here and is_whole and expansion.draws.is_plain and expansion.num_candidates <= width


def choose_children(draft: NativeDraft, depth: int, logits: Tensor, *, is_shared: bool = False) -> None:
    """Chooses the children of all nodes of one depth that have some.

    Args:
        draft: Filled down to this depth; changed.
        depth: Of the parents.
        logits: (B, P, W) float32, after each of them, of which the first V count; or (B, 1, W) where `is_shared`. Of
            dynamic trees changed.
        is_shared: Whether one row serves them all, as `draft` was told.

    Raises:
        PassError: When the logits do not fit, or the tree is no tree.
    """
    library, arguments = native_library(), draft.arguments
    library.foretoken_children_bytes.restype = c_int64
    library.foretoken_children.restype = c_int64
    width = c_int64(logits.shape[-1])
    if logits.dtype is not torch.float32 or not logits.is_contiguous() or not logits.is_cpu:
        raise PassError(f"logits are {logits.dtype} on {logits.device}. Expected contiguous float32 on a CPU.")
    size = library.foretoken_children_bytes(byref(arguments), width)
    space = torch.empty(size, dtype=torch.uint8, device="cpu")
    status = library.foretoken_children(
        byref(arguments), c_int64(depth), c_void_p(logits.data_ptr()), width, c_int64(is_shared),
        c_int64(kernel_threads()), c_void_p(space.data_ptr()),
    )  # fmt: skip
    if status:
        raise PassError(f"the draft does not fit: {Status(status).name}. Expected a tree level by level.")
