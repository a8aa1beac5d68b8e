"""What a drafter is, what it is told, and the options that all methods share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, field_validator

from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError, nearest_name_hint
from foretoken.trees.choices import TreeShape
from foretoken.trees.published import PUBLISHED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor

    from foretoken.core.taps import Tap
    from foretoken.core.token_tree import TokenTree
    from foretoken.hf.loading import LoadedModel
    from foretoken.sampling.batch import SamplingBatch

LONGEST_CHAIN = 16  # drafted tokens a pass when nothing else sets a bound


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftContext:
    """What a drafter may look at when it proposes.

    Attributes:
        slots: B slots; a drafter keeps its state by slot.
        tokens: All committed tokens of each sequence, the root last. Not to be changed: the methods of the package get
            the engine's own lists and parameters, other drafters copies.
        max_depth: How deep a drafted token may lie in each sequence: the budget, or what the request still allows.
        sampling: Sampling parameters and noise of the B requests.
        is_coupled: Whether each request is verified by coupling, so that drafts should share the target's noise.
    """

    slots: Sequence[int]
    tokens: Sequence[Sequence[int]]
    max_depth: Sequence[int]
    sampling: SamplingBatch
    is_coupled: Sequence[bool]

    @property
    def roots(self) -> list[int]:
        """The root token of each sequence."""
        return [tokens[-1] for tokens in self.tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """Positions that just entered the target's KV for good, at prefill and after every accepted path.

    Attributes:
        slots: B slots.
        starts: First new position of each.
        lengths: New positions of each.
        features: (B, T, F, D) tapped features of these positions, rows past `lengths` arbitrary; None without taps.
    """

    slots: Sequence[int]
    starts: Sequence[int]
    lengths: Sequence[int]
    features: Tensor | None


class Drafter(Protocol):
    """Proposes a tree of candidate continuations for each sequence. Whatever it does can cost speed, never text.

    A drafter that changes the target's weights or the engine's code is no drafter; one that is trusted (see
    `DrafterOptions.is_trusted` and `trust_drafter` of `LLM`) answers for its draft distributions.

    Attributes:
        name: Shown in statistics. Read once, when the drafter is made, as the two below.
        taps: Target features it reads; empty for most.
        max_nodes: Widest tree it proposes, root included.
    """

    name: str
    taps: tuple[Tap, ...]
    max_nodes: int

    def propose(self, context: DraftContext) -> TokenTree:
        """A tree over each sequence's root. May be called and thrown away; an empty proposal is the root alone."""

    def commit(self, committed: Committed) -> None:
        """Learns what entered the target's KV."""

    def release(self, slot: int) -> None:
        """The slot's sequence is over; its state may be forgotten."""


def nodes_by_depth(drafter: Drafter) -> Sequence[int]:
    """Nodes, root included, of a drafter's trees that are 0, 1, 2, … deep: of its `shape`, or of chains without one."""
    shape: TreeShape | None = getattr(drafter, "shape", None)
    if shape is None:
        return range(1, drafter.max_nodes + 1)
    return [shape.truncated(depth).num_nodes for depth in range(shape.depth + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """What a drafter may know of the target when it is made.

    Model and tokenizer are the target's own: whoever changes them changes what the target writes. Everything else is a
    value.

    Attributes:
        name: The target's directory or id.
        vocab_size: Width of the target's logits.
        context_len: Most tokens of a sequence.
        num_slots: Sequences held at once.
        device: Where trees should lie.
        dtype: Of the target; a draft model takes the same.
        runner: Which runner a draft model should run on, see `foretoken.runner.runner`.
        tree_nodes: Nodes, root included, of the tree that pays best on this machine in this dtype, as far as the cost
            of the target's passes tells; measured when first asked for.
        pass_seconds: Seconds of a target pass by its number of tokens, likewise.
        tokenizer: The target's tokenizer, or None.
        model: The target itself, for heads that share its embedding and LM head; None where there is none.
    """

    name: str
    vocab_size: int
    context_len: int
    num_slots: int
    device: torch.device
    dtype: torch.dtype
    runner: str = "auto"
    tree_nodes: Callable[[], int] = lambda: 16
    pass_seconds: Callable[[int], float] = lambda tokens: 1.0 + tokens / 16
    tokenizer: Any = None
    model: LoadedModel | None = None


TreeOption = str | InstanceOf[TreeShape]
_OWN_TREES = ("chain", "tree")


class DrafterOptions(BaseModel):
    """Keys of `speculative_config` that every method takes; a method's own options derive from it.

    Values have exactly the types that are written here: neither true nor "3" nor 3.0 is a number of tokens.

    Attributes:
        method: Name of the method.
        model: Directory or hub id of the drafter's weights, for methods that have some.
        num_speculative_tokens: Depth of a draft; None lets the engine choose it from measured costs and acceptance.
        tree: "chain", "tree" (the method's own branching shape), the name of a published tree (see
            `foretoken.trees.published`), Medusa choices such as [[0], [1], [0, 0]], or {"widths": [3, 2, 1]}; both
            become a `TreeShape` here.
        max_nodes: Most nodes of a tree, root included.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )  # fmt: skip
    is_trusted: ClassVar[bool] = (
        False  # gets the engine's own values, and its word is taken; see `trust_drafter` of LLM
    )
    can_adapt_depth: ClassVar[bool] = True
    can_adapt_tree: ClassVar[bool] = False  # whether "tree" is a fixed shape that the drafter shows as `shape`

    method: str
    model: str | None = None
    num_speculative_tokens: int | None = Field(default=None, ge=1, le=64)
    tree: TreeOption = "chain"
    max_nodes: int = Field(default=64, ge=2, le=512)

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

    @property
    def adapts_depth(self) -> bool:
        """Whether the engine chooses the depth of each draft: for chains and own trees whose depth nobody fixed."""
        is_own = self.tree == "chain" or (self.can_adapt_tree and self.tree == "tree")
        return self.can_adapt_depth and is_own and self.num_speculative_tokens is None

    @property
    def chain_len(self) -> int:
        """Most tokens of a chain."""
        return min(self.num_speculative_tokens or LONGEST_CHAIN, self.max_nodes - 1)

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
