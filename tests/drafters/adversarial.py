"""Drafters that misbehave, to show that a drafter can cost speed but never text."""

from typing import ClassVar, Literal

import torch
from pydantic import Field

from foretoken.core.token_tree import DraftDistributions, DrawKind, TokenTree
from foretoken.drafters.base import (
    Committed,
    DraftContext,
    Drafter,
    DrafterOptions,
    DraftRequest,
    TargetHandle,
    TargetReads,
)
from foretoken.trees.choices import TreeShape

Behaviour = Literal[
    "random", "raises", "raises_in_commit", "out_of_vocabulary", "nan", "eos", "duplicates", "empty", "too_deep",
    "too_wide", "wrong_root", "wrong_depths", "wrong_parents",
]  # fmt: skip
BEHAVIOURS: tuple[Behaviour, ...] = Behaviour.__args__  # type: ignore[attr-defined]


class Options(DrafterOptions):
    """Options of the adversarial drafter.

    Attributes:
        behaviour: What it does wrong.
        seed: Of its random tokens.
    """

    can_adapt_depth: ClassVar[bool] = False

    behaviour: Behaviour = "random"
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)


class AdversarialDrafter:
    """Proposes random trees with one thing wrong in them."""

    reads = TargetReads()

    def __init__(self, options: Options) -> None:
        self._options = options
        self.name = f"adversarial:{options.behaviour}"
        self._shape = options.shape(lambda: TreeShape.cartesian((3, 2, 1)))
        self.nodes_by_depth = (1, self._shape.num_nodes)
        self._generator = torch.Generator().manual_seed(options.seed)

    def attach(self, target: TargetHandle) -> None:
        """Learns what a token can be."""
        self._target = target

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Keeps no state."""

    def propose(self, context: DraftContext) -> TokenTree:
        """See `Drafter`; raises or returns rubbish, as its behaviour says."""
        behaviour = self._options.behaviour
        if behaviour == "raises":
            raise RuntimeError("this drafter always fails")
        depth = 0 if behaviour == "empty" else 40 if behaviour == "too_deep" else min(context.max_depth)
        shape = TreeShape.chain(depth) if behaviour == "too_deep" else self._shape.truncated(depth)
        if behaviour == "too_wide":
            shape = TreeShape.cartesian((500,))
        batch, nodes, device = len(context.slots), shape.num_nodes, self._target.device
        tokens = torch.randint(self._target.vocab_size, (batch, nodes), generator=self._generator)
        if behaviour == "out_of_vocabulary":
            tokens += self._target.vocab_size - 2
            tokens[:, nodes // 2 :] -= 2 * self._target.vocab_size
        elif behaviour == "eos":
            tokens[:] = getattr(self._target.tokenizer, "eos_token_id", None) or 0
        elif behaviour == "duplicates":
            tokens[:] = tokens[:, -1:]
        if behaviour != "wrong_root":
            tokens[:, 0] = torch.tensor(context.roots)
        parents, depths = torch.tensor(shape.parents).repeat(batch, 1), torch.tensor(shape.depths).repeat(batch, 1)
        if behaviour == "wrong_depths":
            depths[:, 1:] += 3
        elif behaviour == "wrong_parents":
            parents[:, 1:] = nodes
        distributions = None
        if behaviour == "nan":
            rows = torch.full((batch, 1, self._target.vocab_size), float("nan"), dtype=torch.float32)
            kinds = torch.full((batch, nodes), DrawKind.INDEPENDENT.value)
            kinds, rows = kinds.to(device), rows.to(device)
            distributions = DraftDistributions(kinds=kinds, rows=rows, row_of=torch.zeros_like(kinds), max_siblings=3)
        return TokenTree(
            tokens=tokens.to(device),
            parents=parents.to(device),
            depths=depths.to(device),
            num_nodes=torch.full((batch,), nodes, device=device),
            max_depth=int(depths.max()),
            distributions=distributions,
        )

    def commit(self, committed: Committed) -> None:
        """See `Drafter`."""
        if self._options.behaviour == "raises_in_commit":
            raise RuntimeError("this drafter always fails")

    def release(self, slot: int) -> None:
        """Keeps no state."""


def create(options: Options) -> Drafter:
    """See `foretoken.drafters.registry`."""
    return AdversarialDrafter(options)
