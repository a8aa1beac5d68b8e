"""A drafter that is not part of the package, kept at arm's length: it gets copies, and a copy of its tree is taken.

Nothing it does to what it was handed, during a call or later, reaches the engine, and nothing it says is believed that
cannot be checked: neither what it guarantees of its trees nor the distributions it claims to have drawn them from. Its
tokens then count as chosen, for which acceptance is lossless whatever they are. What it switches on in torch ends with
each call.

Letters: B sequences, N nodes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.core.errors import TreeError
from foretoken.core.token_tree import TokenTree
from foretoken.drafters.base import Committed, DraftContext
from foretoken.engine.torch_state import restored_torch_state
from foretoken.engine.tree_checks import find_misfit
from foretoken.trees.choices import TreeShape

if TYPE_CHECKING:
    from foretoken.core.taps import Tap
    from foretoken.drafters.base import Drafter
    from foretoken.sampling.batch import SamplingBatch


class UntrustedDrafter:
    """Stands between the engine and a drafter; itself a `Drafter`.

    Attributes:
        name: See `Drafter`; what the drafter said when it was made, as the two below.
        taps: Likewise.
        max_nodes: Likewise.
        shape: The drafter's static shape, or None.
    """

    def __init__(
        self, drafter: Drafter, *, name: str, taps: tuple[Tap, ...], max_nodes: int, device: torch.device
    ) -> None:
        """Takes a drafter whose attributes have been read and checked; device: where its trees must lie."""
        self.name, self.taps, self.max_nodes = name, taps, max_nodes
        shape = getattr(drafter, "shape", None)
        self.shape = shape if isinstance(shape, TreeShape) else None
        self._drafter, self._device = drafter, device
        self._sampling: tuple[SamplingBatch, SamplingBatch] | None = None  # the engine's, and the copy of it

    def propose(self, context: DraftContext) -> TokenTree:
        """A copy of the drafter's tree.

        Raises:
            TreeError: When it cannot be copied, being no tree, too wide or of other types.
        """
        theirs = DraftContext(
            slots=list(context.slots),
            tokens=[list(tokens) for tokens in context.tokens],
            max_depth=list(context.max_depth),
            sampling=self._copied_sampling(context.sampling),
            is_coupled=list(context.is_coupled),
        )
        with restored_torch_state():
            draft = _read_once(self._drafter.propose(theirs))
        return self._copied_tree(draft, len(context.slots))

    def commit(self, committed: Committed) -> None:
        """See `Drafter`."""
        features = committed.features
        theirs = Committed(
            slots=list(committed.slots),
            starts=list(committed.starts),
            lengths=list(committed.lengths),
            features=None if features is None else features.clone(),
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
        misfit = find_misfit(draft, batch, self.max_nodes, self._device)
        if misfit is not None or not isinstance(draft, TokenTree):
            raise TreeError(str(misfit))
        shape = draft.tokens.shape
        return replace(
            draft,
            tokens=self._copied(draft.tokens, shape),
            parents=self._copied(draft.parents, shape),
            depths=self._copied(draft.depths, shape),
            num_nodes=self._copied(draft.num_nodes, shape[:1]),
        )

    def _copied(self, part: Tensor, shape: torch.Size) -> Tensor:
        """A copy, of this shape even where the drafter gives the tensor another one meanwhile."""
        return torch.empty(shape, dtype=torch.int64, device=self._device).copy_(part)


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
    )
