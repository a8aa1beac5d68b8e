"""Options that all drafting methods share: how much is drafted, in which trees, and what is pruned."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationInfo, field_validator, model_validator

from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError, nearest_name_hint
from foretoken.core.validation import validated
from foretoken.trees.choices import OF_LANGUAGE_MODELS, PUBLISHED, TreeShape
from foretoken.trees.dynamic import DynamicShape
from foretoken.trees.pruning import Pruning

if TYPE_CHECKING:
    from collections.abc import Callable

    from foretoken.runner.costs import CostCurve
    from foretoken.trees.dynamic import AnyShape

LONGEST_CHAIN = 16  # tokens per pass if nothing else sets a bound
TreeOption = str | InstanceOf[TreeShape]
_OWN_TREES = ("chain", "tree", "dynamic")
_TREE_TOP_K = 10  # EAGLE's


class DrafterOptions(BaseModel):
    """Keys of `speculative_config` that every method takes; a method's own options derive from this class.

    Values must have exactly the declared types: neither true nor "3" nor 3.0 is a number of tokens.

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
            "path_probability", "entropy_weighted", see `foretoken.trees.pruning`. For methods whose drafts have
            probabilities.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )  # fmt: skip
    is_trusted: ClassVar[bool] = False  # whether it gets the engine's own values and is believed, see `LLM`
    can_adapt_depth: ClassVar[bool] = True  # whether drafts of any depth up to the greatest make sense
    has_dynamic_trees: ClassVar[bool] = False  # whether it drafts level by level, by probabilities of its own
    prunable_by: ClassVar[frozenset[str]] = frozenset()  # keys of `pruning`: all for methods with draft distributions
    reads_predictions: ClassVar[bool] = False  # whether it drafts from `DraftRequest.prediction` alone
    can_prune_tree: ClassVar[bool] = False  # whether "tree" is drafted at once, at the same cost for any part of it

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
        """Returns a known name or a shape; refuses other values."""
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
        """Refuses thresholds that the method's drafts cannot be compared with."""
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
        """Refuses options of dynamic trees for methods and trees without them."""
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
        """Whether a controller chooses how much is drafted: for chains and own trees without a fixed size."""
        return self.can_adapt_depth and self.tree in _OWN_TREES and self.num_speculative_tokens is None

    @property
    def chain_len(self) -> int:
        """Most tokens of a chain."""
        return min(self.num_speculative_tokens or LONGEST_CHAIN, self.max_nodes - 1)

    def dynamic_shape(self, greatest_depth: int, costs: Callable[[], CostCurve] | None = None) -> DynamicShape:
        """Returns the dynamic trees asked for.

        Args:
            greatest_depth: Most levels that the method drafts.
            costs: Returns the seconds of target passes; None if they do not count.
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


def _affordable_top_k(costs: CostCurve) -> int:
    """Returns the square root of the nodes of a pass that takes a third longer than a pass of one token.

    The next level feeds every candidate to the drafter, and trees that pay are rarely wider than that.
    """
    nodes = max(width for width in range(1, _TREE_TOP_K**2 + 1) if costs(width) <= 4 / 3 * costs(1))
    return max(2, math.ceil(math.sqrt(nodes)))
