"""Calls a drafter, validates its trees and survives its failures, so that the target always gets a valid tree.

A drafter that raises or returns no tree costs the draft of that iteration. A token outside the vocabulary or beyond the
context limit costs its subtree. After several failures in a row the drafter is switched off for good, with one log
message. Only Ctrl-C passes.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from operator import le
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from foretoken.core.checks import shown
from foretoken.core.errors import described
from foretoken.core.token_tree import PROBE, DraftDistributions, DrawKind, TokenTree
from foretoken.drafters.base import Committed, Lookup, PrefixKeeper

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.drafters.base import DraftContext, Drafter, DraftRequest

_STRUCTURE = (
    "num_nodes outside 1..width", "wrong root", "parents that do not come before their children", "wrong depths",
    "max_depth too small",
)  # fmt: skip


class Finding(NamedTuple):
    """The result of checking a drafter's tree.

    Attributes:
        fault: Reason why the whole tree is unusable, or None.
        num_proposed: Nodes of each of B sequences without roots and probes; None if there is a fault, or if only the
            device has the number.
    """

    fault: str | None
    num_proposed: Sequence[int] | None = None


def find_misfit(tree: object, batch: int, max_nodes: int, device: torch.device | None = None) -> str | None:
    """Returns what is wrong with a tree, without reading its values; None if nothing is.

    Args:
        tree: As the drafter returned it.
        batch: B.
        max_nodes: Widest tree that the cache has room for.
        device: Where the tree must lie; None for anywhere.
    """
    if not isinstance(tree, TokenTree):
        return f"propose returned {shown(tree)}; expected a TokenTree"
    parts = (("tokens", tree.tokens), ("parents", tree.parents), ("depths", tree.depths), ("num_nodes", tree.num_nodes))
    misfit = _find_wrong_tensor(parts, device)
    if misfit is not None:
        return misfit
    width = tree.tokens.shape[-1] if tree.tokens.dim() else 0
    if tree.tokens.shape != (batch, width) or not 0 < width <= max_nodes:
        return f"tree of shape {tuple(tree.tokens.shape)}; expected ({batch}, at most {max_nodes})"
    for name, part in parts:
        shape = (batch,) if name == "num_nodes" else (batch, width)
        if part.shape != shape:
            return f"{name} of shape {tuple(part.shape)}; expected {shape}"
    if type(tree.max_depth) is not int or not 0 <= tree.max_depth < width:
        return f"max_depth {shown(tree.max_depth)}; expected an int, at least 0 and below the width, {width}"
    return None


def _find_wrong_tensor(parts: Sequence[tuple[str, object]], device: torch.device | None) -> str | None:
    """Returns what is wrong with the type of a named part of a tree; None if nothing is."""
    for name, part in parts:
        if type(part) is not Tensor:
            return f"{name} {shown(part)}; expected a tensor"
        if part.dtype != torch.int64 or (device is not None and part.device.type != device.type):
            place = "" if device is None else f" on {device}"
            return f"{name} of type {part.dtype} on {part.device}; expected int64{place}"
        if part.layout != torch.strided:
            return f"{name} of layout {part.layout}; expected a dense tensor"
    return None


def find_fault(tree: TokenTree, roots: Sequence[int], max_nodes: int, device: torch.device | None = None) -> Finding:
    """Checks a tree and counts its nodes; synchronises once if the tree has no `host_facts`.

    Args:
        tree: As the drafter returned it.
        roots: The root tokens that it must start from.
        max_nodes: Widest tree that the cache has room for.
        device: Where the tree must lie; None for anywhere.
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

    A cut node loses its parent, so that nothing reaches its subtree. Invalid draft distributions, and distributions
    that name cut nodes, are dropped: every node then counts as one-hot, which is lossless for any token. Scores and
    sources of a wrong shape are dropped too.
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
    return (
        type(part) is Tensor
        and part.shape == tree.tokens.shape
        and part.dtype == dtype
        and part.device == tree.tokens.device
        and part.layout == torch.strided
    )


def _has_valid_distributions(tree: TokenTree, is_cut: Tensor, vocab_size: int) -> bool:
    """Whether every drawn node has a positive probability in its draft distribution."""
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


def within_node_limits(tree: TokenTree, limits: Sequence[int | None]) -> TokenTree:
    """Returns the first nodes of each tree, which form a tree too.

    In a tree with a limit every token counts as chosen, not drawn, even if no node is cut: the number of nodes may
    depend on what was drawn. Trees without a limit keep their draft distributions.

    Args:
        tree: Of B sequences.
        limits: B, most nodes of each, root included; None for no limit.
    """
    facts, drafts, widest = tree.host_facts, tree.distributions, tree.width
    most_nodes = [widest if most is None else most for most in limits]
    counts = [widest] * len(limits) if facts is None else facts.num_nodes
    fits = all(most is None or count <= most for count, most in zip(counts, limits, strict=True))
    if fits and (drafts is None or not any(limits)):
        return tree
    tree = tree.first_nodes(min(max(most_nodes), widest))
    device, drafts = tree.tokens.device, tree.distributions
    most_of_each = torch.tensor(most_nodes, device=device)
    is_cut = torch.arange(tree.width, device=device) >= most_of_each.unsqueeze(1)
    if drafts is not None:
        is_limited = torch.tensor([[most is not None] for most in limits], device=device)
        drafts = replace(
            drafts,
            kinds=drafts.kinds.masked_fill(is_limited, DrawKind.ONE_HOT),
            row_of=drafts.row_of.masked_fill(is_limited, -1),
        )
    return replace(
        tree,
        tokens=tree.tokens.masked_fill(is_cut, 0),
        parents=tree.parents.masked_fill(is_cut, -1),
        depths=tree.depths.masked_fill(is_cut, 0),
        scores=None if tree.scores is None else tree.scores.masked_fill(is_cut, 0.0),
        source=None if tree.source is None else tree.source.masked_fill(is_cut, 0),
        num_nodes=torch.minimum(tree.num_nodes, most_of_each),
        distributions=drafts,
        host_facts=None,
    )


_FAILURES_IN_A_ROW = 5
_log = logging.getLogger(__name__)


class SafeDraft(NamedTuple):
    """The result of asking a drafter.

    Attributes:
        tree: A valid tree.
        error: Reason why the drafter's own tree was dropped, or None.
        num_proposed: Nodes of each sequence before any cut; see `SequenceStep`.
    """

    tree: TokenTree
    error: str | None
    num_proposed: Sequence[int] | None


_Result = TypeVar("_Result")


class DraftGuard:
    """Calls a drafter and survives its failures.

    Attributes:
        name: The drafter's name; stays after the drafter is switched off.
        is_active: Whether the drafter has not been switched off.
    """

    def __init__(self, drafter: Drafter, *, vocab_size: int, max_nodes: int, device: torch.device) -> None:
        self._drafter: Drafter | None = drafter
        self.is_active = True
        self._vocab_size, self._max_nodes, self._device = vocab_size, max_nodes, device
        self.name, self._has_features = drafter.name, bool(drafter.reads.taps)
        self._failures: Counter[str] = Counter()  # in a row, by call
        self._logged: set[tuple[str, str]] = set()  # calls and kinds of failure that were logged

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Tells the drafter that a sequence begins."""
        if self._drafter is None:
            return
        self._guarded("begin", self._drafter.begin, slot, request)
        if request.prefix is not None and not isinstance(self._drafter, PrefixKeeper):
            tokens = request.prompt[: request.prefix.length]
            self.commit(Committed(slots=[slot], starts=[0], tokens=[tokens], features=None))

    def reusable(self, slot: int, length: int) -> int:
        """Returns how many of the first positions of a slot the drafter need not read again, see `PrefixKeeper`."""
        drafter = self._drafter
        if drafter is None:
            return length
        if not isinstance(drafter, PrefixKeeper):
            return 0 if self._has_features else length
        found = self._guarded("reusable", drafter.reusable, slot, length)
        return 0 if found is None else min(max(found, 0), length)

    def propose(self, context: DraftContext) -> SafeDraft:
        """Returns the drafter's tree without invalid nodes, or the roots alone.

        Args:
            context: Passed to the drafter; `max_depth` is enforced.
        """
        roots = [tokens[-1] for tokens in context.tokens]
        fault: str | None = None
        if self._drafter is not None:
            try:
                draft = self._drafter.propose(context)
                kind, (fault, num_proposed) = "tree", find_fault(draft, roots, self._max_nodes, self._device)
                if fault is None:
                    tree = cut_invalid_nodes(draft, self._vocab_size, context.max_depth)
                    self._failures["propose"] = 0
                    return SafeDraft(tree, None, num_proposed)
            except KeyboardInterrupt:
                raise
            except BaseException as err:  # noqa: BLE001 - as in `_guarded`
                kind, fault = type(err).__name__, described(err)
            self._count_failure("propose", kind, fault)
        return SafeDraft(TokenTree.roots(roots, device=self._device), fault, [0] * len(roots))

    @property
    def can_continue(self) -> bool:
        """Whether the drafter continues text that is not committed, see `Lookup`."""
        return isinstance(self._drafter, Lookup)

    def continue_from(self, slot: int, tokens: Sequence[int], path: Sequence[int], depth: int) -> list[int]:
        """Returns the tokens that a lookup proposes after a path, cut before the first invalid token; see `Lookup`."""
        drafter = self._drafter
        if not isinstance(drafter, Lookup):
            return []
        found = self._guarded("continue_from", drafter.continue_from, slot, tokens, path, depth)
        valid: list[int] = []
        for token in (found or [])[:depth]:
            if not 0 <= token < self._vocab_size:
                break
            valid.append(token)
        return valid

    def commit(self, committed: Committed) -> None:
        """Tells the drafter what was committed."""
        if self._drafter is None:
            return
        self._guarded("commit", self._drafter.commit, committed)

    def release(self, slot: int) -> None:
        """Tells the drafter that a slot is free."""
        if self._drafter is None:
            return
        self._guarded("release", self._drafter.release, slot)

    def _guarded(self, method: str, call: Callable[..., _Result], *arguments: Any) -> _Result | None:
        """Returns the result of a method of the drafter; counts and logs an exception, and returns None."""
        try:
            result = call(*arguments)
        except KeyboardInterrupt:
            raise
        except BaseException as err:  # noqa: BLE001 - SystemExit and the panics of Rust are no `Exception`
            self._count_failure(method, type(err).__name__, described(err))
            return None
        self._failures[method] = 0
        return result

    def _count_failure(self, call: str, kind: str, error: str) -> None:
        self._failures[call] += 1
        is_new = (call, kind) not in self._logged
        self._logged.add((call, kind))
        _log.log(
            logging.WARNING if is_new else logging.DEBUG, "drafter '%s' failed in %s; decoding goes on: %s",
            self.name, call, error,
        )  # fmt: skip
        if self._failures[call] >= _FAILURES_IN_A_ROW:
            _log.warning(
                "drafter '%s' failed %d times in a row in %s and is switched off; decoding goes on without it: %s",
                self.name, self._failures[call], call, error,
            )  # fmt: skip
            self._drafter, self.is_active = None, False
