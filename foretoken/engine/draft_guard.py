"""Between drafter and target: whatever a drafter does, a legal tree over the right roots comes out.

A drafter that raises or returns what is no tree costs the draft of that iteration; a token outside the vocabulary or
past the context limit costs its subtree. After several failures in a row the drafter is switched off for good, which is
said once.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from operator import le
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from foretoken.core.token_tree import DrawKind, TokenTree

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
        self._failures: Counter[str] = Counter()  # in a row, by call

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
        tree, error = None, None
        if self._drafter is not None and max(context.max_depth) > 0:
            try:
                draft = self._drafter.propose(context)
                error = find_fault(draft, context.roots, self._max_nodes, self._device)
                if error is None:
                    tree = make_legal(draft, self._vocab_size, context.max_depth)
            except Exception as err:  # noqa: BLE001 - a drafter is foreign code: whatever it raises must not cost text
                error = f"{type(err).__name__}: {err}"
            self._count("propose", error)
        return SafeDraft(TokenTree.roots(context.roots, device=self._device) if tree is None else tree, error)

    def commit(self, committed: Committed) -> None:
        """Passes on what was committed."""
        if self._drafter is None:
            return
        error = None
        try:
            self._drafter.commit(committed)
        except Exception as err:  # noqa: BLE001 - as above
            error = f"{type(err).__name__}: {err}"
        self._count("commit", error)

    def release(self, slot: int) -> None:
        """Passes on that a slot is free."""
        if self._drafter is None:
            return
        error = None
        try:
            self._drafter.release(slot)
        except Exception as err:  # noqa: BLE001 - as above
            error = f"{type(err).__name__}: {err}"
        self._count("release", error)

    def _count(self, call: str, error: str | None) -> None:
        """Switches the drafter off after too many failures in a row; calls that succeed excuse only themselves."""
        self._failures[call] = 0 if error is None else self._failures[call] + 1
        if self._failures[call] >= _FAILURES_IN_A_ROW and self._drafter is not None:
            _log.warning(
                "drafter '%s' failed %d times in a row in %s and is switched off; decoding goes on without it: %s",
                self._drafter.name, self._failures[call], call, error,
            )  # fmt: skip
            self._drafter = None


def find_fault(tree: TokenTree, roots: Sequence[int], max_nodes: int, device: torch.device | None = None) -> str | None:
    """What makes a tree unusable as a whole, or None.

    Args:
        tree: As the drafter returned it.
        roots: The root tokens it must start from.
        max_nodes: Widest tree the cache has room for.
        device: Where it must lie; None for anywhere.
    """
    batch, width = len(roots), tree.tokens.shape[-1]
    if tree.tokens.shape != (batch, width) or width > max_nodes:
        return f"tree of shape {tuple(tree.tokens.shape)}; expected ({batch}, at most {max_nodes})"
    for name, shape in (("parents", (batch, width)), ("depths", (batch, width)), ("num_nodes", (batch,))):
        if getattr(tree, name).shape != shape:
            return f"{name} of shape {tuple(getattr(tree, name).shape)}; expected {shape}"
    for name in ("tokens", "parents", "depths", "num_nodes"):
        part: Tensor = getattr(tree, name)
        if part.dtype != torch.int64 or (device is not None and part.device.type != device.type):
            place = "" if device is None else f" on {device}"
            return f"{name} of type {part.dtype} on {part.device}; expected int64{place}"
    if tree.vouched is not None:
        return None if tree.vouched.roots == tuple(roots) else "tree with wrong root"
    if not 0 <= tree.max_depth < width:
        return f"max_depth {tree.max_depth}; expected at least 0 and below the width, {width}"
    node = torch.arange(width, device=tree.tokens.device)
    is_real = node < tree.num_nodes.unsqueeze(1)
    has_parent = is_real & (node > 0)
    parents = tree.parents.clamp(0, width - 1)
    faults = torch.stack([
        ((tree.num_nodes < 1) | (tree.num_nodes > width)).any(),
        (tree.tokens[:, 0] != torch.tensor(roots, device=node.device)).any() | (tree.parents[:, 0] != -1).any(),
        (has_parent & ((tree.parents < 0) | (tree.parents >= node))).any() | (~is_real & (tree.parents != -1)).any(),
        (has_parent & (tree.depths != tree.depths.gather(1, parents) + 1)).any() | (tree.depths[:, 0] != 0).any(),
        (tree.depths > tree.max_depth).any(),
    ])  # fmt: skip
    messages = (
        "num_nodes outside 1..width", "wrong root", "parents that do not come before their children", "wrong depths",
        "max_depth too small",
    )  # fmt: skip
    found = [message for message, is_fault in zip(messages, faults.tolist(), strict=True) if is_fault]
    return f"tree with {found[0]}" if found else None


def make_legal(tree: TokenTree, vocab_size: int, max_depth: Sequence[int]) -> TokenTree:
    """Cuts off nodes that can never be accepted: tokens outside the vocabulary, and nodes too deep.

    A cut node loses its parent, so nothing reaches it or its subtree. A draft law that is not a law, or that speaks of
    cut nodes, is dropped: every node then counts as one-hot, which is true of any token. So are scores and sources,
    which nothing here reads, when their shape is wrong.

    Args:
        tree: A structurally sound tree.
        vocab_size: V.
        max_depth: Deepest node allowed in each sequence.
    """
    vouched = tree.vouched
    if vouched is not None and vouched.num_tokens <= vocab_size and all(map(le, vouched.depths, max_depth)):
        return tree
    limit = torch.tensor(max_depth, device=tree.tokens.device).unsqueeze(1)
    is_cut = (tree.tokens < 0) | (tree.tokens >= vocab_size) | (tree.depths > limit)
    scores, source = (
        None if part is None or part.shape != tree.tokens.shape else part for part in (tree.scores, tree.source)
    )
    legal = replace(
        tree,
        tokens=tree.tokens.clamp(0, vocab_size - 1),
        parents=torch.where(is_cut, -1, tree.parents),
        scores=scores,
        source=source,
    )
    return legal if legal.law is None or _has_law(legal, is_cut, vocab_size) else replace(legal, law=None)


def _has_law(tree: TokenTree, is_cut: Tensor, vocab_size: int) -> bool:
    """Whether the draft law can be what the whole tree was drawn from: distributions that allow every drawn token."""
    law, (batch, width) = tree.law, tree.tokens.shape
    if law is None or law.kinds.shape != (batch, width) or law.row_of.shape != (batch, width):
        return False
    if law.rows.shape[0] != batch or law.rows.shape[2:] != (vocab_size,) or not 0 <= law.max_siblings < width:
        return False
    is_drawn = (law.kinds != DrawKind.ONE_HOT) & (tree.parents >= 0)
    row = law.row_of.clamp(0, law.rows.shape[1] - 1)
    prob = law.rows[torch.arange(batch, device=row.device).unsqueeze(1), row, tree.tokens]
    sums = law.rows.sum(2)
    siblings = torch.zeros_like(tree.parents).scatter_add_(1, tree.parents.clamp_min(0), is_drawn.to(torch.int64))
    is_sound = (
        ((row == law.row_of) & (prob > 0) & (law.kinds <= max(DrawKind)) & (law.kinds > 0) | ~is_drawn).all()
        & (((sums - 1).abs() < 1e-3) | (sums == 0)).all()
        & (law.rows >= 0).all()
        & (siblings <= law.max_siblings).all()
        & ~is_cut.any()
    )
    return bool(is_sound)
