"""What a drafter is, what it is told, and the options that all methods share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationInfo, field_validator, model_validator

from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError, nearest_name_hint
from foretoken.core.validation import validated
from foretoken.trees.choices import OF_LANGUAGE_MODELS, TreeShape
from foretoken.trees.dynamic import DynamicShape
from foretoken.trees.pruning import Pruning
from foretoken.trees.published import PUBLISHED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor

    from foretoken.core.passes import Pass
    from foretoken.core.sampling_params import SamplingParams
    from foretoken.core.taps import Tap
    from foretoken.core.token_tree import TokenTree
    from foretoken.decoder.base import PassOutput
    from foretoken.hf.loading import LoadedModel
    from foretoken.runner.cost_curve import CostCurve
    from foretoken.sampling.batch import SamplingBatch
    from foretoken.trees.dynamic import AnyShape

LONGEST_CHAIN = 16  # drafted tokens a pass when nothing else sets a bound


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetReads:
    """What a drafter reads of the target's passes.

    Attributes:
        taps: Features, see `foretoken.core.taps`; they come with `Committed.features`, in this order.
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
        model: The loaded target, for drafters that share its embedding and LM head (`foretoken.hf.parts.target_parts`).
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


TreeOption = str | InstanceOf[TreeShape]
_OWN_TREES = ("chain", "tree", "dynamic")
_TREE_TOP_K = 10  # EAGLE's


class DrafterOptions(BaseModel):
    """Keys of `speculative_config` that every method takes; a method's own options derive from it.

    Values have exactly the types that are written here: neither true nor "3" nor 3.0 is a number of tokens.

    Attributes:
        method: Name of the method.
        model: Directory or hub id of the drafter's weights, for methods that have some.
        num_speculative_tokens: Depth of a draft; None lets the engine choose it from measured costs and acceptance.
        tree: "chain", "tree" (the method's own branching shape), "dynamic" (the most probable nodes of each draft, see
            `foretoken.trees.dynamic`), the name of a published tree (see `foretoken.trees.published`), Medusa choices
            such as [[0], [1], [0, 0]], or {"widths": [3, 2, 1]}; both become a `TreeShape` here.
        max_nodes: Most nodes of a tree, root included. Of dynamic trees, EAGLE's `total_token` and SGLang's
            `num_draft_tokens`; `num_speculative_tokens` is then EAGLE's `depth` and one, and SGLang's `num_steps`.
        tree_top_k: Of dynamic trees: candidates of each node, and nodes expanded a level. EAGLE's `top_k`, SGLang's
            `eagle_topk`. None for 10, or for fewer where the engine chooses how much is drafted and wide passes cost
            much.
        pruning: Thresholds below which drafted nodes are left out before the target sees them, and not drafted from:
            some of "token_probability", "path_probability" and "entropy_weighted", see `foretoken.trees.pruning`. For
            methods whose drafts have probabilities.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )  # fmt: skip
    is_trusted: ClassVar[bool] = (
        False  # gets the engine's own values, and its word is taken; see `trust_drafter` of LLM
    )
    can_adapt_depth: ClassVar[bool] = True  # whether drafts of any depth up to the greatest make sense
    has_dynamic_trees: ClassVar[bool] = False  # whether it drafts level by level, by probabilities of its own
    prunable_by: ClassVar[frozenset[str]] = frozenset()  # keys of `pruning`: all where there are draft distributions
    can_prune_tree: ClassVar[bool] = False  # whether "tree" is drafted at once, at the same cost whatever is kept of it

    method: str
    model: str | None = None
    num_speculative_tokens: int | None = Field(default=None, ge=1, le=64)
    tree: TreeOption = "chain"
    max_nodes: int = Field(default=64, ge=2, le=512)
    tree_top_k: int | None = Field(default=None, ge=1, le=64)
    pruning: InstanceOf[Pruning] | None = None

    @field_validator("tree", mode="before")
    @classmethod
    def _tree(cls, value: Any) -> Any:
        """A known name, or a shape.

        Raises:
            ConfigError: For anything else.
        """
        if isinstance(value, TreeShape):
            return value
        if not isinstance(value, str):
            return TreeShape.parse(value)
        if value not in (*_OWN_TREES, *PUBLISHED):
            raise ConfigError(
                f"there is no tree {shown(value)}. {nearest_name_hint(shown(value), (*_OWN_TREES, *PUBLISHED))}"
            )
        return value

    @field_validator("pruning", mode="before")
    @classmethod
    def _pruning(cls, value: Any, info: ValidationInfo) -> Any:
        """Thresholds that the method's drafts can be held against.

        Raises:
            ConfigError: For anything else.
        """
        if value is None:
            return None
        pruning = value if isinstance(value, Pruning) else validated(Pruning, value, "pruning")
        unknown = sorted(pruning.keys - cls.prunable_by)
        if unknown:
            expected = f"Expected {' or '.join(sorted(cls.prunable_by))}" if cls.prunable_by else "Leave 'pruning' out"
            raise ConfigError(
                f"method '{info.data.get('method')}' cannot prune by '{unknown[0]}': its drafts have no such "
                f"probabilities. {expected}."
            )
        return pruning

    @model_validator(mode="after")
    def _dynamic(self) -> Self:
        """Dynamic trees are asked for where there are some.

        Raises:
            ConfigError: Elsewhere.
        """
        if self.tree == "dynamic" and not self.has_dynamic_trees:
            raise ConfigError(
                f"method '{self.method}' has no dynamic trees. Expected a method that drafts level by level by "
                'probabilities of its own, or another tree, as "chain".'
            )
        if self.tree != "dynamic" and self.tree_top_k is not None:
            raise ConfigError(
                f"tree_top_k is {self.tree_top_k}, which only dynamic trees have: leave it out, or set 'tree' to "
                "'dynamic'."
            )
        return self

    @property
    def is_adaptive(self) -> bool:
        """Whether a controller chooses how much is drafted: for chains and own trees whose size nobody fixed."""
        return self.can_adapt_depth and self.tree in _OWN_TREES and self.num_speculative_tokens is None

    @property
    def chain_len(self) -> int:
        """Most tokens of a chain."""
        return min(self.num_speculative_tokens or LONGEST_CHAIN, self.max_nodes - 1)

    def dynamic_shape(self, greatest_depth: int, costs: Callable[[], CostCurve] | None = None) -> DynamicShape:
        """The dynamic trees asked for.

        Args:
            greatest_depth: Most levels that the method drafts.
            costs: Gives what passes of the target cost; None where that does not count.
        """
        top_k = self.tree_top_k
        if top_k is None:
            top_k = _TREE_TOP_K if costs is None or not self.is_adaptive else _affordable_top_k(costs())
        return DynamicShape(top_k=top_k, depth=min(self.chain_len, greatest_depth), max_nodes=self.max_nodes)

    def language_model_shape(self, costs: Callable[[], CostCurve] | None = None) -> AnyShape:
        """The trees asked for, dynamic or static, of drafters that are language models; costs: see `dynamic_shape`."""
        if self.tree == "dynamic":
            return self.dynamic_shape(LONGEST_CHAIN, costs)
        return self.shape(lambda: TreeShape.from_choices(OF_LANGUAGE_MODELS))

    def shape(self, branching: Callable[[], TreeShape]) -> TreeShape:
        """The static shape asked for.

        Args:
            branching: Gives what "tree" means for the method.
        """
        if self.tree == "chain":
            return TreeShape.chain(self.chain_len)
        if self.tree == "tree":
            return branching() if self.num_speculative_tokens is None else branching().truncated(self.chain_len)
        return TreeShape.from_choices(PUBLISHED[self.tree]) if isinstance(self.tree, str) else self.tree


def _affordable_top_k(costs: CostCurve) -> int:
    """Candidates of a node where large trees do not pay: the root of the nodes of a pass a third dearer than one.

    Every candidate is fed to the drafter at the next level, and trees that pay are hardly ever wider than that.
    """
    nodes = max(width for width in range(1, _TREE_TOP_K**2 + 1) if costs(width) <= 4 / 3 * costs(1))
    return max(2, math.ceil(math.sqrt(nodes)))
