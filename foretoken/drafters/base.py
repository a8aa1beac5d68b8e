"""What a drafter is, and what it is told.

Everything that a file with a drafter needs can be imported from here, the options of `foretoken.drafters.options` too.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from foretoken.drafters.options import DrafterOptions, TreeOption

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor

    from foretoken.core.passes import Pass, Tap
    from foretoken.core.sampling_params import SamplingParams
    from foretoken.core.token_tree import TokenTree
    from foretoken.decoder.base import PassOutput
    from foretoken.models.loading import LoadedModel
    from foretoken.runner.costs import CostCurve
    from foretoken.sampling.batch import SamplingBatch

__all__ = [
    "Committed",
    "DraftContext",
    "DraftRequest",
    "Drafter",
    "DrafterOptions",
    "Lookup",
    "MeasuredDrafter",
    "Prefix",
    "PrefixKeeper",
    "TargetHandle",
    "TargetReads",
    "TreeOption",
    "Verified",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetReads:
    """What a drafter reads of the target's passes.

    Attributes:
        taps: Features, see `foretoken.core.passes`; they come with `Committed.features`, in this order.
        top_k: Most probable tokens wanted at every verified node, see `Verified.top_ids`; 0 for none.
        is_last_enough: Whether `commit` need only be called before a proposal: iterations that no draft follows are
            left out then, and their features are not read.
    """

    taps: tuple[Tap, ...] = ()
    top_k: int = 0
    is_last_enough: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetHandle:
    """What a drafter is given of the target, once, when the target can run.

    Model and tokenizer are the target's own: a drafter that changes them changes what the target writes.

    Attributes:
        name: The target's directory or id.
        vocab_size: V, width of the target's logits.
        context_len: Most tokens of a sequence.
        num_slots: Sequences held at once; slots are 0 … `num_slots` - 1.
        device: Where trees must lie.
        dtype: Of the target; a draft model takes the same.
        runner: Which runner a draft model should run on, see `foretoken.runner.runner`.
        tokenizer: The target's tokenizer, or None.
        model: The loaded target, for drafters that share its embedding and LM head (`target_parts`).
        run: One pass of the target, for drafters that run the target itself: tokens behind the committed rows of some
            slots, whose rows the next verification writes anew. Trusted drafters only, others get a `PassError`.
        draft_trees: Trees of the target's own in one call, where its decoder can, see `Runner.draft_trees`; likewise.
        measured_costs: Gives `costs`.
    """

    name: str
    vocab_size: int
    context_len: int
    num_slots: int
    device: torch.device
    dtype: torch.dtype
    runner: str
    tokenizer: Any
    model: LoadedModel
    run: Callable[[Pass], PassOutput]
    draft_trees: Callable[..., bool]
    measured_costs: Callable[[], CostCurve]

    @property
    def costs(self) -> CostCurve:
        """Seconds of a target pass by its number of tokens, on this machine; measured when first asked for."""
        return self.measured_costs()


class Prefix(NamedTuple):
    """First positions of a text that are in the target's KV already, as another text left them.

    Both texts have the same tokens at these positions and at the one after them.

    Attributes:
        slot: That of the other text, which goes on in it or is over; it may be the very slot of this one.
        length: Positions.
    """

    slot: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """A sequence that begins in a slot.

    Attributes:
        request_id: Unique in the life of an engine; completions of one request share it.
        prompt: Token ids of the prompt. Not to be changed, see `DraftContext.tokens`.
        params: What the request asks for.
        prediction: Token ids that the output probably repeats in part, as OpenAI's `prediction`; None without any.
        cache_salt: What this request wrote is proposed only to requests with the same salt; None shares with all that
            have none either.
        prefix: Of the prompt, what the target does not read again; None where it reads all. See `PrefixKeeper`.
    """

    request_id: str
    prompt: Sequence[int]
    params: SamplingParams
    prediction: Sequence[int] | None = None
    cache_salt: str | None = None
    prefix: Prefix | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftContext:
    """What a drafter may look at when it proposes.

    Attributes:
        slots: B slots; a drafter keeps its state by slot.
        tokens: All committed tokens of each sequence, the root last. Not to be changed: the methods of the package get
            the engine's own lists and parameters, other drafters copies.
        max_depth: How deep a drafted token may lie in each sequence: what the controller allows, and the request still
            needs.
        max_nodes: Most nodes of each tree, root included, that the controller allows.
        sampling: Sampling parameters and noise of the B requests, the processors of their logits among them.
        is_coupled: Whether each request is verified by coupling, so that drafts should share the target's noise.
    """

    slots: Sequence[int]
    tokens: Sequence[Sequence[int]]
    max_depth: Sequence[int]
    max_nodes: Sequence[int]
    sampling: SamplingBatch
    is_coupled: Sequence[bool]

    @property
    def roots(self) -> list[int]:
        """The root token of each sequence."""
        return [tokens[-1] for tokens in self.tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What the target said of a batch of trees.

    Attributes:
        tree: The B trees that were verified, merged with other drafters' where there are several.
        paths: Accepted nodes of each, in order, the root left out.
        offsets: B + 1; node i of sequence b is row `offsets[b] + i` of what is below.
        top_ids: (M, k) int64, the target's most probable tokens after every node of every tree, the best first, no more
            than the vocabulary has and perhaps more than were asked for; None where no drafter reads them.
    """

    tree: TokenTree
    paths: Sequence[Sequence[int]]
    offsets: Sequence[int]
    top_ids: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """Positions that just entered the target's KV for good, at prefill and after every accepted path; packed.

    After a verification these are the root and the accepted path; the token after them, the new root, is not among
    them. The last part of a prompt likewise ends with the root, after which the target has chosen a token.

    Attributes:
        slots: B slots.
        starts: First new position of each.
        tokens: Tokens at the new positions of each, one at least.
        features: (P, F, D) tapped features of these positions, one sequence after another; None without taps.
        verified: What the verification said; None after a part of a prompt.
    """

    slots: Sequence[int]
    starts: Sequence[int]
    tokens: Sequence[Sequence[int]]
    features: Tensor | None
    verified: Verified | None = None

    @property
    def lengths(self) -> list[int]:
        """New positions of each sequence."""
        return [len(ids) for ids in self.tokens]

    @property
    def offsets(self) -> list[int]:
        """B + 1, where the features of each sequence begin."""
        return [0, *accumulate(self.lengths)]


class Drafter(Protocol):
    """Proposes a tree of candidate continuations for each sequence. Whatever it does can cost speed, never text.

    A drafter that changes the target's weights or the engine's code is no drafter; one that is trusted (see
    `DrafterOptions.is_trusted` and `trust_drafter` of `LLM`) answers for its draft distributions and for what its trees
    guarantee.

    The three attributes are read when the drafter is made. A trusted one's `nodes_by_depth` is read again once it is
    attached, by when it may have become smaller.
    """

    @property
    def name(self) -> str:
        """Shown in statistics."""

    @property
    def reads(self) -> TargetReads:
        """What it reads of the target."""

    @property
    def nodes_by_depth(self) -> Sequence[int]:
        """Most nodes, root included, of drafts that are at most 0, 1, 2, … deep; the cache has room for the last one.

        `range(1, 6)` for chains of four tokens, `(1, 3, 7)` for binary trees.
        """

    def attach(self, target: TargetHandle) -> None:
        """Prepares for a target, once: loads weights, allocates state.

        Raises:
            ForetokenError: When the drafter does not fit the target.
        """

    def begin(self, slot: int, request: DraftRequest) -> None:
        """A sequence begins in a slot; nothing of it is committed yet, but for a prefix of a `PrefixKeeper`'s."""

    def propose(self, context: DraftContext) -> TokenTree:
        """A tree over each sequence's root. May be called and thrown away; an empty proposal is the root alone."""

    def commit(self, committed: Committed) -> None:
        """Learns what entered the target's KV."""

    def release(self, slot: int) -> None:
        """The slot's sequence is over; its state may be forgotten."""


@runtime_checkable
class PrefixKeeper(Protocol):
    """What a trusted drafter may have besides: it needs not be told what it knows of another text's first positions.

    A prefix that the target does not read again is not committed to it: `begin` names it, and the drafter goes on from
    what it kept of that slot, whose sequence may be over. Other drafters get it as one more part of the prompt, without
    features; where they read features all of the prompt is read again for them.
    """

    def reusable(self, slot: int, length: int) -> int:
        """How many positions of a slot a sequence could begin with that has the same first tokens.

        Args:
            slot: Of a sequence that is running or over.
            length: Positions whose tokens are the same, as is the one after them.

        Returns:
            0 … `length`. With several drafters a smaller number may be asked about next, and `begin` names one that all
            agreed to.
        """


@runtime_checkable
class Lookup(Protocol):
    """What a trusted drafter may have besides: the continuation of text that is not committed.

    Chains that it gives are grafted below what other drafters propose, where there are several.
    """

    def continue_from(self, slot: int, tokens: Sequence[int], path: Sequence[int], depth: int) -> Sequence[int]:
        """What follows a drafted path. Changes nothing that is proposed or answered later.

        Args:
            slot: The sequence's.
            tokens: All its committed tokens, as of `DraftContext`. Not to be changed.
            path: Drafted tokens after these, at least one.
            depth: Most tokens wanted, at least 1.

        Returns:
            Nothing where there is no match.
        """


@runtime_checkable
class MeasuredDrafter(Protocol):
    """What a trusted drafter may have besides: how often it was right where that was measured before.

    It decides how deep the first drafts are; what is accepted of them counts more soon.
    """

    @property
    def expected_acceptance(self) -> Sequence[float]:
        """P(level d of a tree holds the target's token | the level above does), at depths 1, 2, …; empty if unknown."""
