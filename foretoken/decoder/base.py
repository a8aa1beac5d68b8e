"""What turns tokens into logits: the one thing in which the runners differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from foretoken.core.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from foretoken.core.passes import Pass
    from foretoken.trees.dynamic import ShapedExpansion


class UnsuitableError(ModelError):
    """A decoder does not know the model's architecture, or cannot run on this machine: another one has to serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOutput:
    """What a pass gives back.

    Attributes:
        logits: (R, V) float32, of `Pass.logit_rows`; None where none were wanted.
        features: (M, F, D) in the model's dtype, tapped features in the order asked for, or None without taps
            and where the pass wants none.
        chosen: (R,) int64, the token after each row as `Pass.choice` says, the lowest among equals; -1 where the
            greatest logit is not finite. None where the decoder chooses none; impossible tokens then have their logits.
    """

    logits: Tensor | None
    features: Tensor | None
    chosen: Tensor | None = None


class Decoder(Protocol):
    """One forward pass over new tokens of several sequences, on a slot cache it was made for.

    Attributes:
        name: Named in reports.
        is_exact: Whether a token gets the same bits whatever else is in its pass and whatever the number of threads.
            Speculative and plain decoding then agree bit for bit; without it they round differently, and two tokens
            whose scores agree to the last bits can swap.
    """

    name: str
    is_exact: bool

    def run(self, work: Pass) -> PassOutput:
        """Computes every token of a pass; writes the keys and values of each to the cache row of its node.

        Raises:
            PassError: When something does not fit the model or the cache, or a weight's memory was freed.
        """
        ...


@runtime_checkable
class TreeDrafting(Protocol):
    """What some decoders can besides: draft whole trees in one call, where others need a pass for each level."""

    def draft_trees(self, work: Pass, expansion: ShapedExpansion, *, vocab_size: int, last_position: int) -> bool:
        """Runs a pass that ends with the roots, and fills the trees below them from what the model says after them.

        Node i of a tree, levels that have children only, goes to the i-th cache row behind the pass.

        Args:
            work: Chains of the B sequences of the expansion, with the logits after the last token of each.
            expansion: Trees of roots; filled.
            vocab_size: V, one past the greatest token that may be drafted; fewer or more logits are padded or cut.
            last_position: Greatest position of a node; deeper ones get it.

        Returns:
            Whether it was done. False, and nothing has happened, where requests are drafted as it cannot.

        Raises:
            PassError: See `Decoder.run`.
        """
        ...
