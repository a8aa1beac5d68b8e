"""The contract of a drafter, the values that it gets, and the options that all methods share.

A file with a drafter imports everything from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationInfo, field_validator, model_validator

from foretoken.core.checks import shown, validated
from foretoken.core.errors import ConfigError, nearest_name_hint
from foretoken.trees.choices import OF_LANGUAGE_MODELS, PUBLISHED, TreeShape
from foretoken.trees.dynamic import AnyShape, DynamicShape
from foretoken.trees.merge import Pruning
from foretoken.trees.stopping import PathFloors, StopRule

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from foretoken.core.passes import Pass, Tap
    from foretoken.core.sampling_params import SamplingParams
    from foretoken.core.token_tree import TokenTree
    from foretoken.decoder.base import PassOutput
    from foretoken.models.loaded import LoadedModel
    from foretoken.runner.costs import CostCurve
    from foretoken.runner.runner import Runner
    from foretoken.sampling.batch import SamplingBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetReads:
    """The outputs of the target's passes that a drafter reads.

    Attributes:
        taps: Features, see `foretoken.core.passes`; `Committed.features` has them in this order.
        top_k: Most probable tokens needed at every verified node, see `Verified.top_ids`; 0 for none.
        is_last_enough: Whether `commit` is only needed before a proposal. Iterations without a later draft are then
            left out, and their features are not read.
        attention_tokens: Last tokens of a prompt whose attention weights are needed, see `Committed.attention`; 0 for
            no weights.
        attention_every: Verifications from one with weights of its first and last nodes to the next; 0 for none.
    """

    taps: tuple[Tap, ...] = ()
    top_k: int = 0
    is_last_enough: bool = False
    attention_tokens: int = 0
    attention_every: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetHandle:
    """A drafter's access to the target, given once, when the target can run.

    Model and tokenizer are the target's own: a drafter that changes them changes the output.

    Attributes:
        name: The target's directory or id.
        vocab_size: V, width of the target's logits.
        context_len: Most tokens of a sequence.
        num_slots: Sequences held at once; slots are 0 … `num_slots` - 1.
        dtype: Of the target; a draft model takes the same.
        runner: Runner for a draft model, see `foretoken.runner.runner`.
        model: The loaded target, for drafters that share its embedding and LM head (`target_parts`).
        run: Runs one pass of the target, for drafters that run the target itself. Its tokens stand behind the committed
            rows of some slots; the next verification overwrites their rows. Trusted drafters only: others get
            `PassError`.
        target_runner: Runs the target, for drafters that draft with it or copy its KV rows. Trusted drafters only:
            others get None.
        measured_costs: Returns `costs`.
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
    target_runner: Runner | None
    measured_costs: Callable[[], CostCurve]

    @property
    def costs(self) -> CostCurve:
        """Seconds of a target pass by its number of tokens, on this machine; measured at the first use."""
        return self.measured_costs()


class Prefix(NamedTuple):
    """First positions of a text that are already in the target's KV cache, from another text.

    Both texts have the same tokens at these positions and at the next one. The other text, in `slot`, is running or
    finished; it may be in the slot of this text.
    """

    slot: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """A sequence that begins in a slot.

    Attributes:
        request_id: Unique in the life of an engine; completions of one request share it.
        prompt: Token ids of the prompt. Must not be changed, see `DraftContext.tokens`.
        params: Sampling parameters of the request.
        prediction: Token ids that the output probably repeats in part, as OpenAI's `prediction`; or None.
        cache_salt: Text of this request is proposed only to requests with the same salt; None is a salt of its own.
        prefix: Part of the prompt that the target does not read again; None if it reads all. See `PrefixKeeper`.
    """

    request_id: str
    prompt: Sequence[int]
    params: SamplingParams
    prediction: Sequence[int] | None = None
    cache_salt: str | None = None
    prefix: Prefix | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftContext:
    """The sequences of a batch and the bounds of their drafts.

    Attributes:
        slots: B slots; a drafter keeps its state by slot.
        tokens: All committed tokens of each sequence, the root last. Must not be changed: methods of this package get
            the engine's own lists and parameters, other drafters get copies.
        max_depth: Deepest node of each sequence, bounded by the controller and by what the request still needs.
        max_nodes: Most nodes of each tree, root included, that the controller allows.
        sampling: Sampling parameters, processors and noise of the B requests.
        is_coupled: Whether each request is verified by coupling, so that drafts should use the target's noise.
        floors: Ends chains whose path is improbable, for drafters with `follows_floors`; None for full depth.
    """

    slots: Sequence[int]
    tokens: Sequence[Sequence[int]]
    max_depth: Sequence[int]
    max_nodes: Sequence[int]
    sampling: SamplingBatch
    is_coupled: Sequence[bool]
    floors: PathFloors | None = None

    @property
    def roots(self) -> list[int]:
        """The root token of each sequence."""
        return [tokens[-1] for tokens in self.tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The target's answers to a batch of trees.

    Attributes:
        tree: The B trees that were verified; with several drafters the merged trees.
        paths: Accepted nodes of each, in order, without the root.
        offsets: B + 1; node i of sequence b is row `offsets[b] + i` of `top_ids`.
        top_ids: (M, k) int64, the target's most probable tokens after every node of every tree, best first. k is at
            most the vocabulary size and may exceed what was asked for. None if no drafter reads them.
    """

    tree: TokenTree
    paths: Sequence[Sequence[int]]
    offsets: Sequence[int]
    top_ids: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """Positions that entered the target's KV cache, at prefill and after every accepted path; packed.

    After a verification these are the root and the accepted path, without the new root, which follows them. The last
    part of a prompt also ends with the root, after which the target has chosen a token.

    Attributes:
        slots: B slots.
        starts: First new position of each.
        tokens: Tokens at the new positions of each, at least one.
        features: (P, F, D) tapped features of these positions, one sequence after another; None without taps.
        verified: Answers of the verification; None after a part of a prompt.
        attention: B times (L, Hk, rows) float32, by layer and KV head: softmax weights over the first rows of the
            sequence, summed over query heads and over some tokens: the last ones of a prompt, or the first and the last
            node of a tree. After a prompt these rows are those of all its tokens, after a verification those before the
            root. None for sequences without weights; None without any. See `TargetReads`.
    """

    slots: Sequence[int]
    starts: Sequence[int]
    tokens: Sequence[Sequence[int]]
    features: Tensor | None
    verified: Verified | None = None
    attention: Sequence[Tensor | None] | None = None

    @property
    def lengths(self) -> list[int]:
        """New positions of each sequence."""
        return [len(ids) for ids in self.tokens]

    @property
    def offsets(self) -> list[int]:
        """B + 1, where the features of each sequence begin."""
        return [0, *accumulate(self.lengths)]


class Drafter(Protocol):
    """Proposes a tree of candidate continuations for each sequence. A drafter affects speed, never the output.

    A drafter must not change the target's weights or the engine's code. A trusted drafter (`DrafterOptions.is_trusted`,
    `trust_drafter` of `LLM`) is responsible for its draft distributions and for the `HostFacts` of its trees. The three
    attributes are read when the drafter is made; `nodes_by_depth` of a trusted drafter again after `attach`, which may
    make it smaller.
    """

    @property
    def name(self) -> str:
        """Name in statistics."""

    @property
    def reads(self) -> TargetReads:
        """The outputs of the target that it reads."""

    @property
    def nodes_by_depth(self) -> Sequence[int]:
        """Most nodes, root included, of drafts at most 0, 1, 2, … deep; the cache has room for the last entry."""

    def attach(self, target: TargetHandle) -> None:
        """Prepares for a target, once: loads weights, allocates state; raises `ForetokenError` if it does not fit."""

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Starts a sequence in a slot. Nothing of it is committed yet, except the prefix of a `PrefixKeeper`."""

    def propose(self, context: DraftContext) -> TokenTree:
        """Returns a tree over each sequence's root; the root alone for no proposal. The engine may discard the tree."""

    def commit(self, committed: Committed) -> None:
        """Learns what entered the target's KV cache."""

    def release(self, slot: int) -> None:
        """Ends the slot's sequence; its state may be dropped."""


@runtime_checkable
class PrefixKeeper(Protocol):
    """Optional interface of a trusted drafter that can reuse a cached prefix.

    A prefix that the target does not read again is not committed to the drafter. `begin` names the prefix, and the
    drafter continues from its own state of that slot. Other drafters get the prefix as a part of the prompt without
    features; for drafters that read features the whole prompt is read again.
    """

    def reusable(self, slot: int, length: int) -> int:
        """Returns how many first positions of a slot a new sequence with the same first tokens can reuse, 0 … `length`.

        With several drafters a smaller number may be asked next; `begin` names a number that all accept.
        """


@runtime_checkable
class Lookup(Protocol):
    """Optional interface of a trusted drafter that continues drafts of other drafters by chains of its own."""

    def continue_from(self, slot: int, tokens: Sequence[int], path: Sequence[int], depth: int) -> Sequence[int]:
        """Returns at most `depth` tokens that probably follow a drafted path. Does not change later proposals.

        Args:
            tokens: All committed tokens of the sequence, as in `DraftContext`. Must not be changed.
            path: Drafted tokens after these, at least one.
        """


@runtime_checkable
class MeasuredDrafter(Protocol):
    """Optional interface of a trusted drafter with measured acceptance, which decides how deep first drafts are."""

    @property
    def expected_acceptance(self) -> Sequence[float]:
        """P(level d of a tree holds the target's token | the level above does), d = 1, 2, …; empty if unknown."""


@runtime_checkable
class FloorsFollower(Protocol):
    """Optional interface of a trusted drafter that ends chains by `DraftContext.floors`.

    With floors it may propose leaves beside the tokens of the chain, in at most as many nodes as its deepest draft.
    """

    @property
    def follows_floors(self) -> bool:
        """Whether its drafts are chains that may end at any level."""


READ_SHARE = 0.5  # of drafters that read whole texts; measured: 0.9 to 1.0 ms instead of 1.8, the 0.5B for the 1.5B


@runtime_checkable
class SparingReader(Protocol):
    """Optional interface of a trusted drafter that reads the tokens it missed faster than it drafts."""

    @property
    def read_share(self) -> float:
        """Seconds of reading a token, as a share of those that a token adds to a wide target pass times level / pass.

        `level` are the seconds of a drafted level, `pass` those of a target pass of one token; see `CostModel`.
        """


LONGEST_CHAIN = 16  # tokens per pass if nothing else sets a bound
TreeOption = str | InstanceOf[TreeShape]
_OWN_TREES = ("chain", "tree", "dynamic")
_TREE_TOP_K = 10  # EAGLE's


class DrafterOptions(BaseModel):
    """Keys of `speculative_config` that every method takes; a method's own options derive from this class.

    Attributes:
        method: Name of the method.
        model: Directory or hub id of the drafter's weights, for methods with weights.
        num_speculative_tokens: Depth of a draft; None lets the engine choose from measured costs and acceptance.
        tree: "chain", "tree" (the method's own branching shape), "dynamic" (the most probable nodes of each draft, see
            `foretoken.trees.dynamic`), the name of a published tree (see `foretoken.trees.choices`), Medusa choices
            such as [[0], [1], [0, 0]], or {"widths": [3, 2, 1]}; choices and widths become a `TreeShape`.
        max_nodes: Most nodes of a tree, root included. For dynamic trees, EAGLE's `total_token` and SGLang's
            `num_draft_tokens`; `num_speculative_tokens` is then EAGLE's `depth` plus 1, and SGLang's `num_steps`.
        tree_top_k: For dynamic trees: candidates of each node, and nodes expanded per level. EAGLE's `top_k`, SGLang's
            `eagle_topk`. None for 10, or fewer if the engine chooses how much is drafted and wide passes cost much.
        pruning: Thresholds of improbable nodes, which are removed before the target sees them: "token_probability",
            "path_probability", "entropy_weighted", see `foretoken.trees.merge`.
        stop: Decides after which tokens a draft ends. Made from "control" of `speculative_config`; None for full depth.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())
    is_trusted: ClassVar[bool] = False  # whether it gets the engine's own values and is believed, see `LLM`
    can_adapt_depth: ClassVar[bool] = True  # whether drafts of any depth up to the greatest make sense
    has_dynamic_trees: ClassVar[bool] = False  # whether it drafts level by level, by probabilities of its own
    has_static_trees: ClassVar[bool] = True  # whether `tree` may be a shape or its name
    prunable_by: ClassVar[frozenset[str]] = frozenset()  # keys of `pruning`: all for methods with draft distributions
    reads_predictions: ClassVar[bool] = False  # whether it drafts from `DraftRequest.prediction` alone
    can_prune_tree: ClassVar[bool] = False  # whether chains and "tree" are drafted at once, at one cost for any part

    method: str
    model: str | None = None
    num_speculative_tokens: int | None = Field(default=None, ge=1, le=64)
    tree: TreeOption = "chain"
    max_nodes: int = Field(default=64, ge=2, le=512)
    tree_top_k: int | None = Field(default=None, ge=1, le=64)
    pruning: InstanceOf[Pruning] | None = None
    stop: InstanceOf[StopRule] | None = None

    @field_validator("tree", mode="before")
    @classmethod
    def _tree(cls, value: Any) -> Any:
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
    def _has_such_trees(self) -> Self:
        if self.tree == "dynamic" and not self.has_dynamic_trees:
            raise ConfigError(
                f"method '{self.method}' has no dynamic trees. Expected a method that drafts level by level by "
                'probabilities of its own, or another tree, as "chain".'
            )
        if self.tree not in _OWN_TREES and not self.has_static_trees:
            raise ConfigError(
                f"method '{self.method}' has no static trees, and 'tree' is {shown(self.tree)}. Expected 'tree' to be "
                '"chain" or "tree".'
            )
        if self.tree != "dynamic" and self.tree_top_k is not None:
            raise ConfigError(
                f"tree_top_k is {self.tree_top_k}, which only dynamic trees have: leave it out, or set 'tree' to "
                "'dynamic'."
            )
        return self

    @model_validator(mode="after")
    def _stopping(self) -> Self:
        if self.stop is None:
            return self
        if not self.has_dynamic_trees or self.tree == "dynamic":
            what = "dynamic trees" if self.has_dynamic_trees else f"method '{self.method}'"
            raise ConfigError(
                f"'control' names a stop rule, which {what} cannot follow. Expected a chain or static tree of a method "
                "that drafts by probabilities of its own, or another control."
            )
        if self.pruning is not None:
            raise ConfigError("'pruning' stands beside a 'control' that is a stop rule. Expected one of them.")
        return self

    @property
    def is_adaptive(self) -> bool:
        """Whether a controller chooses how much is drafted: for chains and own trees without a fixed size."""
        return self.can_adapt_depth and self.tree in _OWN_TREES and self.num_speculative_tokens is None

    @property
    def may_end_anywhere(self) -> bool:
        """Whether drafts are chains that nothing else ends."""
        return self.tree == "chain" and self.is_adaptive and self.pruning is None and self.stop is None

    @property
    def chain_len(self) -> int:
        """Most tokens of a chain."""
        return min(self.num_speculative_tokens or LONGEST_CHAIN, self.max_nodes - 1)

    @property
    def shape_with_floors(self) -> TreeShape:
        """The trees of chains that end by `DraftContext.floors`: a second candidate costs no level.

        As many nodes as a whole chain; a quarter of them are second candidates, see NOTES, "Second candidates".
        """
        beside = self.chain_len // 4
        return TreeShape.comb(self.chain_len - beside, beside)

    def dynamic_shape(self, greatest_depth: int, costs: Callable[[], CostCurve] | None = None) -> DynamicShape:
        """Returns the dynamic trees asked for, at most `greatest_depth` deep.

        `costs` returns the seconds of target passes; None if costs do not count.
        """
        top_k = self.tree_top_k
        if top_k is None:
            top_k = _TREE_TOP_K if costs is None or not self.is_adaptive else _affordable_top_k(costs())
        return DynamicShape(top_k=top_k, depth=min(self.chain_len, greatest_depth), max_nodes=self.max_nodes)

    def language_model_shape(self, costs: Callable[[], CostCurve] | None = None) -> AnyShape:
        """Returns the trees asked for, of drafters that are language models; costs: see `dynamic_shape`."""
        if self.tree == "dynamic":
            return self.dynamic_shape(LONGEST_CHAIN, costs)
        return self.shape(lambda: TreeShape.from_choices(OF_LANGUAGE_MODELS))

    def shape(self, branching: Callable[[], TreeShape]) -> TreeShape:
        """Returns the static shape asked for; branching: returns the shape of "tree"."""
        if self.tree == "chain":
            return TreeShape.chain(self.chain_len)
        if self.tree == "tree":
            return branching() if self.num_speculative_tokens is None else branching().truncated(self.chain_len)
        return TreeShape.from_choices(PUBLISHED[self.tree]) if isinstance(self.tree, str) else self.tree


class LookupOptions(DrafterOptions):
    """Options of the package's drafters without weights, whose drafts take the same time at any size."""

    is_trusted: ClassVar[bool] = True
    can_prune_tree: ClassVar[bool] = True

    @property
    def nodes_by_depth(self) -> Sequence[int]:
        """See `Drafter`: of chains, and of trees with all nodes at any depth."""
        return range(1, self.chain_len + 2) if self.tree == "chain" else (1, *[self.max_nodes] * self.chain_len)


def by_depth(shape: AnyShape) -> list[AnyShape]:
    """Returns a shape cut off at depth 0, 1, 2, …; the last one is the whole shape."""
    return [shape.truncated(depth) for depth in range(shape.depth + 1)]


def _affordable_top_k(costs: CostCurve) -> int:
    """Returns the square root of the nodes of a pass that takes a third longer than a pass of one token."""
    nodes = max(width for width in range(1, _TREE_TOP_K**2 + 1) if costs(width) <= 4 / 3 * costs(1))
    return max(2, math.ceil(math.sqrt(nodes)))
