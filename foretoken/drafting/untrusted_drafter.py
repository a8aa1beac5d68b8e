"""Isolates a drafter from another package: the drafter gets copies, and the engine takes a copy of its tree.

Nothing that the drafter does to its arguments reaches the engine, during a call or later. The engine ignores what it
cannot check: guarantees about the trees (`HostFacts`) and draft distributions. The drafter's tokens count as chosen,
which is lossless for any token. Torch settings that the drafter changes are restored after each call.

Letters: B sequences, N nodes.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from foretoken.core.backend import restored_torch_state
from foretoken.core.errors import PassError, TreeError
from foretoken.core.token_tree import PROBE, TokenTree
from foretoken.drafters.base import Committed, DraftContext, Verified
from foretoken.drafting.draft_guard import find_misfit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.drafters.base import Drafter, DraftRequest, TargetHandle, TargetReads
    from foretoken.sampling.batch import SamplingBatch

_TREE_TENSORS = ("tokens", "parents", "depths", "num_nodes", "scores", "source")


class UntrustedDrafter:
    """A `Drafter` that stands between the engine and an untrusted drafter.

    Attributes:
        name: See `Drafter`; read once, as are the two below.
        reads: See `Drafter`.
        nodes_by_depth: See `Drafter`.
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
        """Returns a copy of the drafter's tree.

        Raises:
            TreeError: When the result cannot be copied: no tree, too wide, or of other types.
        """
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
        return self._copied_tree(draft, len(context.slots))

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

    def _copied_tree(self, draft: object, batch: int) -> TokenTree:
        """Copies the fields that can be checked into new tensors; does not read their values."""
        misfit = find_misfit(draft, batch, self.nodes_by_depth[-1], self._device)
        if misfit is not None or not isinstance(draft, TokenTree):
            raise TreeError(str(misfit))
        shape = draft.tokens.shape
        return TokenTree(
            tokens=self._copied(draft.tokens, shape),
            parents=self._copied(draft.parents, shape),
            depths=self._copied(draft.depths, shape),
            num_nodes=self._copied(draft.num_nodes, shape[:1]),
            max_depth=draft.max_depth,
            scores=self._copied(draft.scores, shape, torch.float32) if _is_like(draft.scores, draft) else None,
            source=self._copied(draft.source, shape) & PROBE if _is_like(draft.source, draft) else None,
        )

    def _copied(self, part: Any, shape: torch.Size, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device).copy_(part)


def _read_once(draft: object) -> object:
    """Returns a tree of the fields that can be checked, each read once: the drafter may change them later."""
    if not isinstance(draft, TokenTree):
        return draft
    return TokenTree(
        tokens=draft.tokens,
        parents=draft.parents,
        depths=draft.depths,
        num_nodes=draft.num_nodes,
        max_depth=draft.max_depth,
        scores=draft.scores,
        source=draft.source,
    )


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
