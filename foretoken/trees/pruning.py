"""Pruning: removes drafted nodes that the drafter itself finds improbable, before the target sees them.

A node is pruned if

- its own probability after its parent is below `token_probability`;
- the product of these probabilities along its path is below `path_probability`;
- its own probability is below `entropy_weighted` * (1 - h). h is the entropy of the distribution after its parent
  divided by the greatest possible, ln V. The less certain the drafter is, the more candidates it keeps.

Each threshold that is set counts. Nothing is drafted below a pruned node. The probabilities are those of the draft
distribution. For coupled requests, whose noise is known, they are the probabilities that a candidate is the target's
choice given that noise, see `DraftDraws.likelihoods`.

A pruned node is removed if it was chosen. It stays, without descendants, if it was drawn from a draft distribution:
removing a draw because of its token would bias the output. Ending a chain after a draw does not bias the output,
because the decision depends only on that draw and the tokens before it.

The root always stays, so a fully pruned tree is a step of plain decoding.

Letters: B sequences, N nodes, V vocabulary.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from foretoken.core.errors import TreeError
from foretoken.trees.merge import prune

if TYPE_CHECKING:
    from torch import Tensor

    from foretoken.core.token_tree import TokenTree


class Pruning(BaseModel):
    """Thresholds, see the module; None for thresholds that are not set.

    Attributes:
        token_probability: Above 0, at most 1. Hugging Face calls it `assistant_confidence_threshold`.
        path_probability: Above 0, at most 1.
        entropy_weighted: Above 0, at most 1.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    token_probability: float | None = Field(default=None, gt=0.0, le=1.0)
    path_probability: float | None = Field(default=None, gt=0.0, le=1.0)
    entropy_weighted: float | None = Field(default=None, gt=0.0, le=1.0)

    @model_validator(mode="after")
    def _has_threshold(self) -> Self:
        if not self.keys:
            raise ValueError(f"there is no threshold; expected one of {', '.join(type(self).model_fields)}")
        return self

    @property
    def keys(self) -> frozenset[str]:
        """Names of the thresholds that are set."""
        return frozenset(key for key in type(self).model_fields if getattr(self, key) is not None)

    @property
    def looks_at_tokens(self) -> bool:
        """Whether there is a threshold on a node's own probability."""
        return self.token_probability is not None or self.entropy_weighted is not None

    def token_passes(self, own: Tensor, entropies: Tensor | None) -> Tensor:
        """Returns which nodes pass by their own probability; NaN does not pass if `looks_at_tokens`.

        Args:
            own: Log-probability of each node after its parent, in any shape.
            entropies: See `normalised_entropy`, in a shape that broadcasts; needed for `entropy_weighted`.

        Returns:
            Bool, in the shape of `own`.
        """
        result = torch.ones_like(own, dtype=torch.bool)
        if self.token_probability is not None:
            result &= own >= math.log(self.token_probability)
        if self.entropy_weighted is not None:
            assert entropies is not None, "options ask for it only where there are draft distributions"
            result &= own.exp() >= self.entropy_weighted * (1.0 - entropies)
        return result

    def path_passes(self, paths: Tensor) -> Tensor:
        """Returns bool, which nodes pass by the log-probabilities of their paths; NaN does not pass a threshold."""
        if self.path_probability is None:
            return torch.ones_like(paths, dtype=torch.bool)
        return paths >= math.log(self.path_probability)


def normalised_entropy(log_probs: Tensor) -> Tensor:
    """Returns the entropy divided by the greatest possible.

    Args:
        log_probs: (..., V), -inf for impossible tokens.

    Returns:
        (...), 0 to 1; NaN for rows that hold a NaN.
    """
    greatest = max(math.log(log_probs.shape[-1]), 1e-9)  # a single token has no entropy
    entropies: Tensor = torch.special.entr(log_probs.exp()).sum(-1) / greatest
    return entropies.clamp(0.0, 1.0)


def pruned(tree: TokenTree, pruning: Pruning) -> TokenTree:
    """Returns a whole tree without pruned nodes, for drafters that do not draft level by level, such as lookups.

    Drawn nodes and their ancestors stay. Synchronises with the host.

    Args:
        tree: With `scores`.
        pruning: Without `entropy_weighted`: a tree does not hold the distributions of chosen nodes.

    Raises:
        TreeError: When the tree has no scores.
    """
    if tree.scores is None:
        raise TreeError("a tree without scores cannot be pruned by probabilities. Expected scores, see TokenTree.")
    own = tree.scores - tree.scores.gather(1, tree.parents.clamp_min(0))
    # NaN below an impossible node, which is removed with that node
    return prune(tree, pruning.token_passes(own, None) & pruning.path_passes(tree.scores)).narrowed()
