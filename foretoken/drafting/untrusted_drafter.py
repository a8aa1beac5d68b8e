"""A drafter that is not part of the package, kept at arm's length: it gets copies, and a copy of its tree is taken.

Nothing it does to what it was handed, during a call or later, reaches the engine, and nothing it says is believed that
cannot be checked: neither what it guarantees of its trees nor the distributions it claims to have drawn them from. Its
tokens then count as chosen, for which acceptance is lossless whatever they are. What it switches on in torch ends with
each call.

Letters: B sequences, N nodes.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from foretoken.core.errors import PassError, TreeError
from foretoken.core.token_tree import PROBE, TokenTree
from foretoken.core.torch_state import restored_torch_state
from foretoken.drafters.base import Committed, DraftContext, Verified
from foretoken.drafting.draft_guard import find_misfit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.drafters.base import Drafter, DraftRequest, TargetHandle, TargetReads
    from foretoken.sampling.batch import SamplingBatch

_TREE_TENSORS = ("tokens", "parents", "depths", "num_nodes", "scores", "source")


class UntrustedDrafter:
    """Stands between the engine and a drafter; itself a `Drafter`.

    Attributes:
        name: See `Drafter`; what the drafter said when it was made, as the two below.
        reads: Likewise.
        nodes_by_depth: Likewise.
    """

    def __init__(
        self, drafter: Drafter, *, name: str, reads: TargetReads, nodes_by_depth: Sequence[int], device: torch.device
    ) -> None:
        """Takes a drafter whose attributes have been read and checked; device: where its trees must lie."""
        self.name, self.reads, self.nodes_by_depth = name, reads, nodes_by_depth
        self._drafter, self._device = drafter, device
        self._sampling: tuple[SamplingBatch, SamplingBatch] | None = None  # the engine's, and the copy of it

    def attach(self, target: TargetHandle) -> None:
        """Hands on everything but the run of the target, whose rows it could overwrite."""
        with restored_torch_state():
            self._drafter.attach(replace(target, run=_no_run, draft_trees=_no_run))

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Hands on a copy."""
        prediction = None if request.prediction is None else list(request.prediction)
        theirs = replace(request, prompt=list(request.prompt), params=copy(request.params), prediction=prediction)
        with restored_torch_state():
            self._drafter.begin(slot, theirs)

    def propose(self, context: DraftContext) -> TokenTree:
        """A copy of the drafter's tree.

        Raises:
            TreeError: When it cannot be copied, being no tree, too wide or of other types.
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
        """Hands on a copy."""
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
        """A copy of a batch's parameters that shares no tensor with it, made once for each batch."""
        if self._sampling is None or self._sampling[0] is not sampling:
            rows = torch.arange(len(sampling.greedy), device=sampling.greedy.device)
            self._sampling = sampling, sampling.select(rows)
        return self._sampling[1]

    def _copied_tree(self, draft: object, batch: int) -> TokenTree:
        """What can be checked of a tree, in tensors of our own; no look at their values."""
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
        """A copy, of this shape even where the drafter gives the tensor another one meanwhile."""
        return torch.empty(shape, dtype=dtype, device=self._device).copy_(part)


def _read_once(draft: object) -> object:
    """A tree with the fields that can be checked, each read once: they may change under our eyes."""
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
    """Whether something is a dense tensor of numbers with a value for every node."""
    return type(part) is Tensor and part.shape == tree.tokens.shape and part.layout == torch.strided


def _copied_verdict(verified: Verified) -> Verified:
    """A copy that shares nothing with the engine's values; draft distributions, which are large, are left out."""
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
    """What a drafter that is not trusted gets in place of what runs the target.

    Raises:
        PassError: Always.
    """
    del arguments, more
    raise PassError("a drafter that runs the target could overwrite its cache. Pass trust_drafter=True to LLM.")
