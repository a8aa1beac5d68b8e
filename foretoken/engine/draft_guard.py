"""Between drafter and target: whatever a drafter does, a legal tree over the right roots comes out.

A drafter that raises costs the draft of that iteration; a token outside the vocabulary or past the context limit costs
its subtree. After several failures in a row the drafter is switched off for good, which is said once.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from foretoken.core.token_tree import DraftLaw, TokenTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.drafters.base import Committed, DraftContext, Drafter

_FAILURES_IN_A_ROW = 5
_log = logging.getLogger(__name__)


class SafeDraft(NamedTuple):
    """A legal tree, and why the drafter's own was dropped if it was."""

    tree: TokenTree
    error: str | None


class DraftGuard:
    """Calls a drafter that is not trusted."""

    def __init__(self, drafter: Drafter | None, *, vocab_size: int, max_nodes: int, device: torch.device) -> None:
        self._drafter, self._vocab_size, self._max_nodes, self._device = drafter, vocab_size, max_nodes, device
        self._failures = 0

    @property
    def is_active(self) -> bool:
        """Whether there is a drafter and it has not been switched off."""
        return self._drafter is not None

    @property
    def name(self) -> str:
        """The drafter's name, empty without one."""
        return "" if self._drafter is None else self._drafter.name

    def propose(self, context: DraftContext) -> SafeDraft:
        """The drafter's tree made legal, or roots alone.

        Args:
            context: What the drafter is told; `max_depth` is enforced.
        """
        roots = TokenTree.roots(context.roots, device=self._device)
        if self._drafter is None or max(context.max_depth) <= 0:
            return SafeDraft(roots, None)
        try:
            tree = self._drafter.propose(context)
            error = find_fault(tree, context.roots, self._max_nodes)
        except Exception as err:  # noqa: BLE001 - a drafter is foreign code: whatever it raises must not cost text
            error = f"{type(err).__name__}: {err}"
        self._count(error)
        if error is not None:
            return SafeDraft(roots, error)
        return SafeDraft(make_legal(tree, self._vocab_size, context.max_depth), None)

    def commit(self, committed: Committed) -> None:
        """Passes on what was committed."""
        if self._drafter is None:
            return
        try:
            self._drafter.commit(committed)
        except Exception as err:  # noqa: BLE001 - as above
            self._count(f"{type(err).__name__}: {err}")

    def release(self, slot: int) -> None:
        """Passes on that a slot is free."""
        if self._drafter is None:
            return
        try:
            self._drafter.release(slot)
        except Exception as err:  # noqa: BLE001 - as above
            self._count(f"{type(err).__name__}: {err}")

    def _count(self, error: str | None) -> None:
        """Switches the drafter off after too many failures in a row."""
        self._failures = 0 if error is None else self._failures + 1
        if error is not None and self._failures >= _FAILURES_IN_A_ROW and self._drafter is not None:
            _log.warning(
                "drafter '%s' failed %d times in a row and is switched off; decoding goes on without it: %s",
                self._drafter.name, self._failures, error,
            )  # fmt: skip
            self._drafter = None


def find_fault(tree: TokenTree, roots: Sequence[int], max_nodes: int) -> str | None:
    """What makes a tree unusable as a whole, or None.

    Args:
        tree: As the drafter returned it.
        roots: The root tokens it must start from.
        max_nodes: Widest tree the cache has room for.
    """
    if tree.width > max_nodes or tree.batch_size != len(roots):
        return f"tree of shape {tuple(tree.tokens.shape)}; expected ({len(roots)}, at most {max_nodes})"
    node = torch.arange(tree.width, device=tree.tokens.device)
    is_real = node < tree.num_nodes.unsqueeze(1)
    has_parent = is_real & (node > 0)
    parents = tree.parents.clamp(0, tree.width - 1)
    faults = torch.stack([
        (tree.tokens[:, 0] != torch.tensor(roots, device=node.device)).any() | (tree.parents[:, 0] != -1).any(),
        (has_parent & ((tree.parents < 0) | (tree.parents >= node))).any() | (~is_real & (tree.parents != -1)).any(),
        (has_parent & (tree.depths != tree.depths.gather(1, parents) + 1)).any() | (tree.depths[:, 0] != 0).any(),
        (tree.depths > tree.max_depth).any(),
    ])  # fmt: skip
    messages = ("wrong root", "parents that do not come before their children", "wrong depths", "max_depth too small")
    found = [message for message, is_fault in zip(messages, faults.tolist(), strict=True) if is_fault]
    return f"tree with {found[0]}" if found else None


def make_legal(tree: TokenTree, vocab_size: int, max_depth: Sequence[int]) -> TokenTree:
    """Cuts off nodes that can never be accepted: tokens outside the vocabulary, and nodes too deep.

    A cut node loses its parent, so nothing reaches it or its subtree. A draft law that is not a law, or that speaks of
    cut nodes, is dropped: every node then counts as one-hot, which is true of any token.

    Args:
        tree: A structurally sound tree.
        vocab_size: V.
        max_depth: Deepest node allowed in each sequence.
    """
    limit = torch.tensor(max_depth, device=tree.tokens.device).unsqueeze(1)
    is_cut = (tree.tokens < 0) | (tree.tokens >= vocab_size) | (tree.depths > limit)
    law = tree.law if tree.law is not None and _is_law(tree.law, vocab_size) else None
    if not is_cut.any():
        return tree if law is tree.law else replace(tree, law=None)
    return replace(
        tree,
        tokens=tree.tokens.clamp(0, vocab_size - 1),
        parents=torch.where(is_cut, -1, tree.parents),
        law=None,
    )


def _is_law(law: DraftLaw, vocab_size: int) -> Tensor:
    """Whether the rows are distributions over the vocabulary and every drawn node has one; () bool."""
    if law.rows.shape[2] != vocab_size:
        return torch.tensor(False)
    sums = law.rows.sum(2)
    used = law.row_of[law.kinds != 0]
    is_sound = torch.isfinite(sums).all() & ((sums - 1).abs() < 1e-3).logical_or(sums == 0).all()
    return is_sound & (law.rows >= 0).all() & (used >= 0).all() & (used < law.rows.shape[1]).all()
