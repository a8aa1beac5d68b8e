"""What a drafter's tree has to be before the target sees it.

A tree is refused as a whole where its shape, types or structure are wrong, and cut where single tokens are impossible.
Types and shapes are known on the host; a look at the values costs one synchronisation, which a tree that its producer
guarantees (`TokenTree.host_facts`) is spared.

Letters: B sequences, N nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from operator import le
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from foretoken.core.checks import shown
from foretoken.core.token_tree import PROBE, DraftDistributions, DrawKind, TokenTree

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_STRUCTURE = (
    "num_nodes outside 1..width", "wrong root", "parents that do not come before their children", "wrong depths",
    "max_depth too small",
)  # fmt: skip


class Finding(NamedTuple):
    """What a look at a drafter's tree gives.

    Attributes:
        fault: What makes it unusable as a whole, or None.
        num_proposed: Its nodes of each of B sequences, neither roots nor probes counted; None where there is a fault,
            and where only the device knows.
    """

    fault: str | None
    num_proposed: Sequence[int] | None = None


def find_misfit(tree: object, batch: int, max_nodes: int, device: torch.device | None = None) -> str | None:
    """What can be told to be wrong with a tree without a look at its values, or None.

    Args:
        tree: As the drafter returned it.
        batch: B.
        max_nodes: Widest tree the cache has room for.
        device: Where it must lie; None for anywhere.
    """
    if not isinstance(tree, TokenTree):
        return f"propose returned {shown(tree)}; expected a TokenTree"
    return next(_misfits(tree, batch, max_nodes, device), None)


def _misfits(tree: TokenTree, batch: int, max_nodes: int, device: torch.device | None) -> Iterator[str]:
    """`find_misfit` of a tree; each look relies on that nothing was found before."""
    place = "" if device is None else f" on {device}"
    parts = {name: getattr(tree, name) for name in ("tokens", "parents", "depths", "num_nodes")}
    for name, part in parts.items():
        if type(part) is not Tensor:
            yield f"{name} {shown(part)}; expected a tensor"
        if part.dtype != torch.int64 or (device is not None and part.device.type != device.type):
            yield f"{name} of type {part.dtype} on {part.device}; expected int64{place}"
        if part.layout != torch.strided:
            yield f"{name} of layout {part.layout}; expected a dense tensor"
    width = tree.tokens.shape[-1] if tree.tokens.dim() else 0
    if tree.tokens.shape != (batch, width) or not 0 < width <= max_nodes:
        yield f"tree of shape {tuple(tree.tokens.shape)}; expected ({batch}, at most {max_nodes})"
    for name, part in parts.items():
        shape = (batch,) if name == "num_nodes" else (batch, width)
        if part.shape != shape:
            yield f"{name} of shape {tuple(part.shape)}; expected {shape}"
    if type(tree.max_depth) is not int or not 0 <= tree.max_depth < width:
        yield f"max_depth {shown(tree.max_depth)}; expected an int, at least 0 and below the width, {width}"


def find_fault(tree: TokenTree, roots: Sequence[int], max_nodes: int, device: torch.device | None = None) -> Finding:
    """Whether a tree is usable, and how much it proposes; synchronises once where it has no `host_facts`.

    Args:
        tree: As the drafter returned it.
        roots: The root tokens it must start from.
        max_nodes: Widest tree the cache has room for.
        device: Where it must lie; None for anywhere.
    """
    misfit = find_misfit(tree, len(roots), max_nodes, device)
    if misfit is not None:
        return Finding(misfit)
    if tree.host_facts is not None:
        if list(tree.host_facts.roots) != list(roots):
            return Finding("tree with wrong root")
        return Finding(None, [count - 1 for count in tree.host_facts.num_nodes] if tree.source is None else None)
    width = tree.width
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
    is_proposed, source = tree.parents >= 0, tree.source
    if source is not None and _fits(source, tree, torch.int64):
        is_proposed &= (source & PROBE) == 0
    values = torch.cat([faults.long(), is_proposed.sum(1)]).tolist()
    found = [message for message, is_fault in zip(_STRUCTURE, values, strict=False) if is_fault]
    return Finding(f"tree with {found[0]}") if found else Finding(None, values[len(_STRUCTURE) :])


def cut_invalid_nodes(tree: TokenTree, vocab_size: int, max_depth: Sequence[int]) -> TokenTree:
    """Cuts off nodes that can never be accepted: tokens outside the vocabulary, and nodes too deep.

    A cut node loses its parent, so nothing reaches it or its subtree. Draft distributions that are none, or that speak
    of cut nodes, are dropped: every node then counts as one-hot, which is true of any token. So are scores and sources,
    which nothing here reads, when their shape is wrong.

    Args:
        tree: A tree in which `find_fault` finds nothing.
        vocab_size: V.
        max_depth: Deepest node allowed in each sequence.
    """
    facts = tree.host_facts
    if facts is not None and facts.num_tokens <= vocab_size and all(map(le, facts.depths, max_depth)):
        return tree
    limit = torch.tensor(max_depth, device=tree.tokens.device).unsqueeze(1)
    is_cut = (tree.tokens < 0) | (tree.tokens >= vocab_size) | (tree.depths > limit)
    scores = tree.scores if _fits(tree.scores, tree, torch.float32) else None
    source = tree.source if _fits(tree.source, tree, torch.int64) else None
    valid = replace(
        tree,
        tokens=tree.tokens.clamp(0, vocab_size - 1),
        parents=torch.where(is_cut, -1, tree.parents),
        scores=scores,
        source=source,
        host_facts=None,
    )
    return (
        valid
        if valid.distributions is None or _has_valid_distributions(valid, is_cut, vocab_size)
        else replace(valid, distributions=None)
    )


def _fits(part: object, tree: TokenTree, dtype: torch.dtype) -> bool:
    """Whether something is a tensor with a value for every node of a tree, where the tree lies."""
    return (
        type(part) is Tensor
        and part.shape == tree.tokens.shape
        and part.dtype == dtype
        and part.device == tree.tokens.device
        and part.layout == torch.strided
    )


def _has_valid_distributions(tree: TokenTree, is_cut: Tensor, vocab_size: int) -> bool:
    """Whether the whole tree may have been drawn from its draft distributions: each allows what was drawn from it."""
    drafts, (batch, width) = tree.distributions, tree.tokens.shape
    if not isinstance(drafts, DraftDistributions) or not all(
        type(part) is Tensor for part in (drafts.kinds, drafts.rows, drafts.row_of)
    ):
        return False
    if drafts.kinds.shape != (batch, width) or drafts.row_of.shape != (batch, width):
        return False
    if drafts.kinds.dtype != torch.int64 or drafts.row_of.dtype != torch.int64 or not drafts.rows.is_floating_point():
        return False
    if drafts.rows.shape[0] != batch or drafts.rows.shape[2:] != (vocab_size,) or type(drafts.max_siblings) is not int:
        return False
    if not 0 <= drafts.max_siblings < width:
        return False
    is_drawn = (drafts.kinds != DrawKind.ONE_HOT) & (tree.parents >= 0)
    row = drafts.row_of.clamp(0, drafts.rows.shape[1] - 1)
    prob = drafts.rows[torch.arange(batch, device=row.device).unsqueeze(1), row, tree.tokens]
    sums = drafts.rows.sum(2)
    siblings = torch.zeros_like(tree.parents).scatter_add_(1, tree.parents.clamp_min(0), is_drawn.to(torch.int64))
    is_possible = (
        ((row == drafts.row_of) & (prob > 0) & (drafts.kinds <= max(DrawKind)) & (drafts.kinds > 0) | ~is_drawn).all()
        & (((sums - 1).abs() < 1e-3) | (sums == 0)).all()
        & (drafts.rows >= 0).all()
        & (siblings <= drafts.max_siblings).all()
        & ~is_cut.any()
    )
    return bool(is_possible)
