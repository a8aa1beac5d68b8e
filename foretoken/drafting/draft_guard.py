"""Calls a drafter, validates its trees and survives its failures, so that the target always gets a valid tree.

A drafter that raises or returns no tree costs the draft of that iteration. A token outside the vocabulary or beyond the
context limit costs its subtree. After several failures in a row the drafter is switched off for good, with one log
message. Only Ctrl-C passes.

A drafter from another package gets copies, and the engine takes a copy of its tree (`UntrustedDrafter`). Nothing that
the drafter does to its arguments reaches the engine, during a call or later. The engine ignores what it cannot check:
guarantees about the trees (`HostFacts`) and draft distributions. The drafter's tokens count as chosen, which is
lossless for any token. Torch settings that the drafter changes are restored after each call.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from itertools import takewhile
from operator import le
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from foretoken.core.backend import restored_torch_state
from foretoken.core.checks import shown
from foretoken.core.errors import PassError, TreeError, described
from foretoken.core.token_tree import PROBE, DraftDistributions, DrawKind, TokenTree
from foretoken.drafters.base import Committed, DraftContext, Lookup, PrefixKeeper, Verified

if TYPE_CHECKING:
    from foretoken.drafters.base import Drafter, DraftRequest, TargetHandle, TargetReads
    from foretoken.sampling.batch import SamplingBatch

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
    """Returns what is wrong with a tree over B sequences, without reading its values; None if nothing is.

    `max_nodes`: widest tree that the cache has room for. `device`: where the tree must lie; None for anywhere.
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
    """Checks a tree over some roots and counts its nodes; synchronises once if the tree has no `host_facts`.

    `max_nodes` and `device`: see `find_misfit`.
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
    """Cuts each tree to its first nodes, as many as its limit, root included; None for no limit.

    In a tree with a limit every token counts as chosen, not drawn, even if no node is cut: the number of nodes may
    depend on what was drawn. Trees without a limit keep their draft distributions.
    """
    facts, drafts, widest = tree.host_facts, tree.distributions, tree.width
    most_nodes = [widest if most is None else most for most in limits]
    counts = [widest] * len(limits) if facts is None else facts.num_nodes
    fits = all(most is None or count <= most for count, most in zip(counts, limits, strict=True))
    if fits and (drafts is None or not any(limits)):
        return tree
    tree = tree.first_nodes(min(max(most_nodes), widest))
    device = tree.tokens.device
    most_of_each = torch.tensor(most_nodes, device=device)
    is_cut = torch.arange(tree.width, device=device) >= most_of_each.unsqueeze(1)
    tree = tree.mapped(lambda values, padding: values.masked_fill(is_cut, padding))
    drafts = tree.distributions
    if drafts is not None:
        is_limited = torch.tensor([[most is not None] for most in limits], device=device)
        drafts = replace(
            drafts,
            kinds=drafts.kinds.masked_fill(is_limited, DrawKind.ONE_HOT),
            row_of=drafts.row_of.masked_fill(is_limited, -1),
        )
    return replace(tree, num_nodes=torch.minimum(tree.num_nodes, most_of_each), distributions=drafts)


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
        self._guarded("begin", slot, request)
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
        found = self._guarded("reusable", slot, length)
        return 0 if found is None else min(max(found, 0), length)

    def propose(self, context: DraftContext) -> SafeDraft:
        """Returns the drafter's tree without invalid and too deep nodes, or the roots alone."""
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
        found = self._guarded("continue_from", slot, tokens, path, depth) if self.can_continue else None
        return list(takewhile(lambda token: 0 <= token < self._vocab_size, (found or [])[:depth]))

    def commit(self, committed: Committed) -> None:
        """Tells the drafter what was committed."""
        self._guarded("commit", committed)

    def release(self, slot: int) -> None:
        """Tells the drafter that a slot is free."""
        self._guarded("release", slot)

    def _guarded(self, method: str, *arguments: Any) -> Any:
        """Returns the result of a method of the drafter; None if it raises, which is counted, or is switched off."""
        if self._drafter is None:
            return None
        try:
            result = getattr(self._drafter, method)(*arguments)
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


_TREE_TENSORS = ("tokens", "parents", "depths", "num_nodes", "scores", "source")


class UntrustedDrafter:
    """A `Drafter` that stands between the engine and an untrusted drafter.

    `name`, `reads` and `nodes_by_depth` are read once.
    """

    def __init__(
        self, drafter: Drafter, *, name: str, reads: TargetReads, nodes_by_depth: Sequence[int], device: torch.device
    ) -> None:
        """Takes a drafter and its attributes, which have been read and checked; device: where its trees must lie."""
        self.name, self.reads, self.nodes_by_depth = name, reads, nodes_by_depth
        self._drafter, self._device = drafter, device
        self._sampling: tuple[SamplingBatch, SamplingBatch] | None = None  # the engine's, and its copy

    def attach(self, target: TargetHandle) -> None:
        """Passes on everything but the target's runner and `run`, which could overwrite its rows."""
        with restored_torch_state():
            self._drafter.attach(replace(target, run=_no_run, target_runner=None))

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Passes on a copy of the request."""
        prediction = None if request.prediction is None else list(request.prediction)
        theirs = replace(request, prompt=list(request.prompt), params=copy(request.params), prediction=prediction)
        with restored_torch_state():
            self._drafter.begin(slot, theirs)

    def propose(self, context: DraftContext) -> TokenTree:
        """Returns a copy of the drafter's tree; raises `TreeError` if it is no tree, too wide, or of other types."""
        theirs = DraftContext(
            slots=list(context.slots),
            tokens=[list(tokens) for tokens in context.tokens],
            max_depth=list(context.max_depth),
            max_nodes=list(context.max_nodes),
            sampling=self._copied_sampling(context.sampling),
            is_coupled=list(context.is_coupled),
        )
        with restored_torch_state():
            draft = _read_once(self._drafter.propose(theirs))
        misfit = find_misfit(draft, len(context.slots), self.nodes_by_depth[-1], self._device)
        if misfit is not None or not isinstance(draft, TokenTree):
            raise TreeError(str(misfit))
        return self._copied_tree(draft)

    def commit(self, committed: Committed) -> None:
        """Passes on a copy."""
        features, verified = committed.features, committed.verified
        theirs = Committed(
            slots=list(committed.slots),
            starts=list(committed.starts),
            tokens=[list(tokens) for tokens in committed.tokens],
            features=None if features is None else features.clone(),
            verified=None if verified is None else _copied_verdict(verified),
        )
        with restored_torch_state():
            self._drafter.commit(theirs)

    def release(self, slot: int) -> None:
        """See `Drafter`."""
        with restored_torch_state():
            self._drafter.release(slot)

    def _copied_sampling(self, sampling: SamplingBatch) -> SamplingBatch:
        """Returns a copy of a batch's parameters that shares no tensor with it; one copy per batch."""
        if self._sampling is None or self._sampling[0] is not sampling:
            rows = torch.arange(len(sampling.greedy), device=sampling.greedy.device)
            self._sampling = sampling, sampling.select(rows)
        return self._sampling[1]

    def _copied_tree(self, draft: TokenTree) -> TokenTree:
        """Copies the fields that can be checked into new tensors; does not read their values."""
        shape = draft.tokens.shape
        return replace(
            draft,
            tokens=self._copied(draft.tokens, shape),
            parents=self._copied(draft.parents, shape),
            depths=self._copied(draft.depths, shape),
            num_nodes=self._copied(draft.num_nodes, shape[:1]),
            scores=self._copied(draft.scores, shape, torch.float32) if _is_like(draft.scores, draft) else None,
            source=self._copied(draft.source, shape) & PROBE if _is_like(draft.source, draft) else None,
        )

    def _copied(self, part: Any, shape: torch.Size, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device).copy_(part)


def _read_once(draft: object) -> object:
    """Returns a tree of the fields that can be checked, each read once: the drafter may change them later."""
    if not isinstance(draft, TokenTree):
        return draft
    parts: dict[str, Any] = {name: getattr(draft, name) for name in _TREE_TENSORS}
    return TokenTree(max_depth=draft.max_depth, **parts)


def _is_like(part: object, tree: TokenTree) -> bool:
    return type(part) is Tensor and part.shape == tree.tokens.shape and part.layout == torch.strided


def _copied_verdict(verified: Verified) -> Verified:
    """Returns a copy that shares no value with the engine; the large draft distributions are left out."""
    tree = verified.tree
    parts: dict[str, Any] = {
        name: None if (part := getattr(tree, name)) is None else part.clone() for name in _TREE_TENSORS
    }
    return Verified(
        tree=TokenTree(max_depth=tree.max_depth, **parts),
        paths=[list(path) for path in verified.paths],
        offsets=list(verified.offsets),
        top_ids=None if verified.top_ids is None else verified.top_ids.clone(),
    )


def _no_run(*arguments: Any, **more: Any) -> NoReturn:
    """Raises `PassError`: an untrusted drafter gets this in place of the target's `run`."""
    del arguments, more
    raise PassError("a drafter that runs the target could overwrite its cache. Pass trust_drafter=True to LLM.")
