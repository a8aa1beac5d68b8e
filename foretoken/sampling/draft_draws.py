"""Chooses draft tokens from a drafter's distribution, for each request as its acceptance rule needs it.

Greedy requests take the most probable tokens. Coupled requests share the target's noise, position by position, which is
what makes guesses agree. All others draw with the drafter's noise and carry the distribution they were drawn from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.core.backend import reads_are_free
from foretoken.sampling.batch import warp
from foretoken.sampling.noise import Purpose

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.sampling.batch import SamplingBatch
    from foretoken.trees.pruning import Pruning


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftDraws:
    """How drafts of B sequences are chosen; a sequence that is neither coupled nor sampled is drafted greedily.

    Attributes:
        batch: Sampling parameters of the requests.
        root_positions: (B,) int64, absolute position of each root.
        is_coupled: (B,) bool.
        is_sampled: (B,) bool.
        has_coupled: False only where `is_coupled` is nowhere true; known on the host.
        has_sampled: Likewise of `is_sampled`.
        is_drawn_for_all: True only where no sequence is drafted greedily; known on the host.
        pruning: Which of the tokens chosen are left out for being improbable; None to keep all.
    """

    batch: SamplingBatch
    root_positions: Tensor
    is_coupled: Tensor
    is_sampled: Tensor
    has_coupled: bool
    has_sampled: bool
    is_drawn_for_all: bool
    pruning: Pruning | None = None

    @classmethod
    def build(
        cls, batch: SamplingBatch, is_coupled: Sequence[bool], root_positions: Tensor, *, greedy: bool = False
    ) -> DraftDraws:
        """Decides for each request.

        Args:
            batch: Sampling parameters of the B requests.
            is_coupled: Whether each is verified by coupling.
            root_positions: (B,) int64.
            greedy: Draft all requests greedily.
        """
        has_coupled, has_sampled = possible_draws(batch, is_coupled, greedy=greedy)
        if not (has_coupled or has_sampled):
            none = torch.zeros_like(batch.greedy)
            return cls(
                batch=batch, root_positions=root_positions, is_coupled=none, is_sampled=none, has_coupled=False,
                has_sampled=False, is_drawn_for_all=False,
            )  # fmt: skip
        coupled = torch.tensor(is_coupled, device=root_positions.device)
        if not batch.is_any_greedy:
            return cls(
                batch=batch, root_positions=root_positions, is_coupled=coupled, is_sampled=~coupled,
                has_coupled=has_coupled, has_sampled=has_sampled, is_drawn_for_all=True,
            )  # fmt: skip
        draws = ~batch.greedy
        if reads_are_free(root_positions.device):  # elsewhere an exact answer would cost a synchronisation
            has_coupled, has_sampled = bool((draws & coupled).any()), bool((draws & ~coupled).any())
        return cls(
            batch=batch,
            root_positions=root_positions,
            is_coupled=draws & coupled,
            is_sampled=draws & ~coupled,
            has_coupled=has_coupled,
            has_sampled=has_sampled,
            is_drawn_for_all=False,
        )

    @property
    def is_plain(self) -> bool:
        """Whether nothing but temperature changes draft distributions."""
        truncation = (self.batch.top_k, self.batch.top_p, self.batch.min_p)
        return not (self.has_coupled or self.has_sampled) or all(limit is None for limit in truncation)

    def keys(self, logits: Tensor, nodes: Sequence[int], depth: int) -> tuple[Tensor, Tensor]:
        """What the children of some nodes of one level are chosen by: the tokens with the largest keys, in order.

        Args:
            logits: (B, P, V) float32, the drafter's after each node; or (B, 1, V), which then serves them all.
            nodes: Indices of the P nodes in the tree, which key the drafter's own noise.
            depth: Their depth, which keys the shared noise.

        Returns:
            Draft log-probabilities in the shape of `logits`, warped where a draw is made; and keys, these with the
            noise added, (B, P, V) or, where every request's keys are the same after all nodes, (B, 1, V).
            The largest keys are draws without replacement, in order (Gumbel top-k).
        """
        log_probs, keys = self.guesses(logits, depth)
        if self.has_sampled:
            noise, vocab_size = self.batch.noise, logits.shape[2]
            own = [noise.gumbel(self.root_positions, Purpose.DRAFT, vocab_size, lane=node) for node in nodes]
            keys = torch.where(_by_sequence(self.is_sampled), keys + torch.stack(own, dim=1), keys)
        return log_probs, keys

    def guesses(self, logits: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """What the target most probably chooses after some nodes of one level: the tokens with the largest keys.

        Args:
            logits: (B, P, V) float32, the drafter's after each node; or (B, 1, V), which then serves them all.
            depth: Of the nodes, which keys the shared noise.

        Returns:
            Draft log-probabilities as of `keys`; and keys, which are these, of coupled requests with the noise added
            that the target chooses with. Nothing is drawn. Both in the shape of `logits`.
        """
        if not (self.has_coupled or self.has_sampled):
            log_probs = logits.log_softmax(2)
            return log_probs, log_probs
        log_probs = self._warped(logits)
        if not self.is_drawn_for_all:
            is_drawn = _by_sequence(self.is_coupled | self.is_sampled)
            log_probs = torch.where(is_drawn, log_probs, logits.log_softmax(2))
        if not self.has_coupled:
            return log_probs, log_probs
        shared = self.batch.noise.gumbel(self.root_positions + depth + 1, Purpose.TARGET, logits.shape[2])
        noisy = log_probs + shared.unsqueeze(1)
        if self.is_drawn_for_all and not self.has_sampled:
            return log_probs, noisy
        return log_probs, torch.where(_by_sequence(self.is_coupled), noisy, log_probs)

    def likelihoods(self, log_probs: Tensor, keys: Tensor) -> Tensor:
        """How probable each token is the target's choice, as far as the drafter knows.

        For coupled requests given the noise that the target chooses with: the draft distribution times exp(noise),
        normalised. For all others the draft distribution.

        Args:
            log_probs: (B, P, V) or (B, 1, V), see `keys` or `guesses`.
            keys: In the same shape, likewise.

        Returns:
            Log-probabilities in that shape.
        """
        if not self.has_coupled:
            return log_probs
        given_noise = keys.log_softmax(2)
        return torch.where(_by_sequence(self.is_coupled), given_noise, log_probs)

    def _warped(self, logits: Tensor) -> Tensor:
        """(B, P, V) log-probabilities after each request's temperature and truncation."""
        batch_size, num_nodes, _ = logits.shape
        if num_nodes == 1:
            return warp(logits[:, 0], self.batch).unsqueeze(1)
        rows = torch.arange(batch_size, device=logits.device).repeat_interleave(num_nodes)
        # Without what warping does not read but would be as large as the logits.
        batch = replace(self.batch, processors=()).select(rows)
        return warp(logits.flatten(0, 1), batch).view_as(logits)


def possible_draws(batch: SamplingBatch, is_coupled: Sequence[bool], *, greedy: bool) -> tuple[bool, bool]:
    """Whether there may be coupled and sampled requests, told without a look at the device.

    Greedy requests among others may count as either: work for nothing, and no other result.

    Args:
        batch: Sampling parameters.
        is_coupled: Whether each is verified by coupling.
        greedy: Whether all are drafted greedily.
    """
    may_draw = not (greedy or batch.is_all_greedy)
    return may_draw and any(is_coupled), may_draw and not all(is_coupled)


def _by_sequence(flags: Tensor) -> Tensor:
    """(B,) as (B, 1, 1)."""
    return flags.view(-1, 1, 1)
