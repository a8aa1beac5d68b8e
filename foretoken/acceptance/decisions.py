"""Random choices of acceptance rules, behind an interface that tests can enumerate.

Rules ask a `Decisions` object instead of drawing numbers. Tests can therefore enumerate every outcome with its exact
probability, while the engine answers from position-keyed noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from foretoken.sampling.batch import best_possible
from foretoken.sampling.noise import KeyedNoise, Purpose

LogProbs = Callable[[Tensor], Tensor]
"""(B,) int64 nodes -> (B, V) log-probabilities of the token after each node, warped by the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """The result of an acceptance rule.

    Attributes:
        path: (B, D) int64, accepted nodes at depth 1.., -1 past the last.
        num_accepted: (B,) int64.
        next_token: (B,) int64, the correction or bonus token.
        lossy_tv: (B,) total-variation distance spent by a lossy rule, summed over tested positions; 0 when lossless.
    """

    path: Tensor
    num_accepted: Tensor
    next_token: Tensor
    lossy_tv: Tensor


class Decisions(Protocol):
    """Makes the three kinds of random choice; `lane` tells apart choices of one kind within one iteration."""

    def target_token(self, log_probs: Tensor, depth: int) -> Tensor:
        """Returns (B,) int64 target tokens, drawn from `log_probs`, (B, V); -1 if none is possible.

        The draw belongs to position `depth + 1` after the root and is the same in every iteration.
        """

    def accept(self, target_prob: Tensor, draft_prob: Tensor, lane: int) -> Tensor:
        """Returns (B,) bool, true with probability min(1, target / draft), both (B,); never if target_prob is 0."""

    def token(self, probs: Tensor, lane: int) -> Tensor:
        """Draws from a residual or bonus distribution, (B, V) summing to 1; (B,) int64, -1 if none is possible."""


@dataclass(frozen=True, slots=True)
class KeyedDecisions:
    """Decisions from position-keyed noise.

    Target tokens are keyed by their absolute position, so they do not depend on drafter or tree. Everything else is
    keyed by the root's position. No two iterations of a sequence share a root position, so no number is used twice.

    Attributes:
        noise: The requests' random numbers.
        root_positions: (B,) int64, absolute position of the root.
    """

    noise: KeyedNoise
    root_positions: Tensor

    def target_token(self, log_probs: Tensor, depth: int) -> Tensor:
        """Draws with the noise of the token's absolute position."""
        positions = self.root_positions + (depth + 1)
        return best_possible(log_probs + self.noise.gumbel(positions, Purpose.TARGET, log_probs.shape[1]))

    def accept(self, target_prob: Tensor, draft_prob: Tensor, lane: int) -> Tensor:
        """Tests u q < p, u keyed by root position and lane. Strict: u <= p/q would accept p = 0 at u = 0."""
        return self.noise.uniform(self.root_positions, Purpose.ACCEPT, lane) * draft_prob < target_prob

    def token(self, probs: Tensor, lane: int) -> Tensor:
        """Draws with the noise of root position and lane."""
        noise = self.noise.gumbel(self.root_positions, Purpose.RESIDUAL, probs.shape[1], lane)
        return best_possible(probs.log() + noise)


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Returns the distribution of the correction token after a rejection.

    Args:
        target_probs: (B, V), rows sum to 1, or to less if the caller has scaled them.
        draft_probs: (B, V), rows sum to 1.

    Returns:
        (B, V), norm(max(p - q, 0)); norm(p) where that is 0 throughout: a branch that rounding alone can reach.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), section 2.3.
    """
    rest = (target_probs - draft_probs).clamp_min(0)
    return normalised(torch.where((rest > 0).any(1, keepdim=True), rest, target_probs))


def normalised(weights: Tensor) -> Tensor:
    """Returns weights, (B, V) and not negative, divided by their sum; rows of zeros stay zero.

    There is no lower bound on the sum: a bound would leave rows of small weights with a sum below 1.
    """
    total = weights.sum(1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)
