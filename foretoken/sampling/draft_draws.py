"""Chooses draft tokens from a drafter's distribution, for each request as its acceptance rule needs.

Greedy requests take the most probable tokens. Coupled requests use the target's noise of each position, so that drafts
agree with the target. All others draw with the drafter's noise and keep the distribution they were drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.core.backend import reads_are_free
from foretoken.sampling.batch import SamplingBatch, warp
from foretoken.sampling.noise import Purpose

if TYPE_CHECKING:
    from foretoken.trees.merge import Pruning
    from foretoken.trees.stopping import PathFloors, StopRule


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftDraws:
    """How drafts of B sequences are chosen; a sequence that is neither coupled nor sampled is drafted greedily.

    Attributes:
        root_positions: (B,) int64, absolute position of each root.
        is_coupled: (B,) bool.
        is_sampled: (B,) bool.
        has_coupled: False only if no `is_coupled` is true; known on the host.
        has_sampled: False only if no `is_sampled` is true; known on the host.
        is_drawn_for_all: True only if no sequence is drafted greedily; known on the host.
        pruning: Thresholds of improbable tokens to leave out; None keeps all tokens.
        stop: Decides after which tokens a draft ends; None for full depth. Replaces `pruning`.
        floors: Ends chains whose path is improbable; None for full depth. Only without `pruning` and `stop`.
    """

    batch: SamplingBatch
    root_positions: Tensor
    is_coupled: Tensor
    is_sampled: Tensor
    has_coupled: bool
    has_sampled: bool
    is_drawn_for_all: bool
    pruning: Pruning | None = None
    stop: StopRule | None = None
    floors: PathFloors | None = None

    @classmethod
    def build(
        cls, batch: SamplingBatch, is_coupled: Sequence[bool], root_positions: Tensor, *, greedy: bool = False
    ) -> DraftDraws:
        """Decides how each request's drafts are chosen; `greedy`: all greedily. `root_positions`: (B,) int64."""
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
    def looks_at_levels(self) -> bool:
        """Whether the tokens of a level decide what is drafted below them."""
        return self.pruning is not None or self.stop is not None

    @property
    def is_plain(self) -> bool:
        """Whether temperature alone changes draft distributions."""
        truncation = (self.batch.top_k, self.batch.top_p, self.batch.min_p)
        return not (self.has_coupled or self.has_sampled) or all(limit is None for limit in truncation)

    def select(self, rows: Tensor) -> DraftDraws:
        """Returns the draws of some sequences, which may repeat; rows: (R,) int64."""
        # Without the fields that draws do not read but that may be as large as logits.
        return replace(
            self, batch=replace(self.batch, processors=()).select(rows), root_positions=self.root_positions[rows],
            is_coupled=self.is_coupled[rows], is_sampled=self.is_sampled[rows],
        )  # fmt: skip

    def along_chains(self, logits: Tensor, rows: Tensor, depths: Tensor) -> Tensor:
        """Returns the (R,) int64 tokens after some nodes of chains, as their levels would choose them.

        Args:
            logits: (R, V) float32, the drafter's after each node.
            rows: (R,) int64, the sequence of each node.
            depths: (R,) int64, of each node.
        """
        own = self.select(rows)
        return own.keys(logits.unsqueeze(1), [depths], depths)[1].topk(1, dim=2).indices[:, 0, 0]

    def keys(self, logits: Tensor, nodes: Sequence[int | Tensor], depth: int | Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys for the nodes of one level; their children are the tokens with the largest keys, in order.

        Args:
            logits: (B, P, V) float32, the drafter's after each node; or (B, 1, V) for all nodes.
            nodes: Indices of the P nodes in the tree, for all sequences or (B,) int64; they key the drafter's own
                noise.
            depth: Of the nodes, for all sequences or (B,) int64; keys the shared noise.

        Returns:
            Draft log-probabilities in the shape of `logits`, warped if a draw is made; and keys: these plus the noise,
            (B, P, V), or (B, 1, V) if every request's keys are the same after all nodes. The largest keys are draws
            without replacement, in order (Gumbel top-k).
        """
        log_probs, keys = self.guesses(logits, depth)
        if self.has_sampled:
            noise, vocab_size = self.batch.noise, logits.shape[2]
            own = [noise.gumbel(self.root_positions, Purpose.DRAFT, vocab_size, lane=node) for node in nodes]
            keys = torch.where(_by_sequence(self.is_sampled), keys + torch.stack(own, dim=1), keys)
        return log_probs, keys

    def guesses(self, logits: Tensor, depth: int | Tensor) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities as `keys` does, and keys: the largest keys are the target's most probable choices.

        Nothing is drawn: the keys are the log-probabilities, plus the target's noise for coupled requests. Arguments as
        in `keys`; both results have the shape of `logits`.
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
        """Returns the log-probability that each token is the target's choice, as the drafter knows it.

        For coupled requests the noise of the target is given: the draft distribution times exp(noise), normalised. For
        all others the draft distribution. Arguments: both results of `keys` or `guesses`, in one shape.
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
        # Without the fields that warping does not read but that are as large as the logits.
        batch = replace(self.batch, processors=()).select(rows)
        return warp(logits.flatten(0, 1), batch).view_as(logits)


def stated_probs(log_probs: Tensor) -> Tensor:
    """Returns the draft probabilities that a tree states: 0 in place of those below the smallest normal number.

    Subnormal numbers are rounded so coarsely that the later siblings of a very probable token would be verified with
    another distribution than they were drawn from. A token with a stated probability of 0 counts as chosen. This keeps
    the target distribution: if the draw is among the other tokens, these have the stated distribution.
    """
    probs = log_probs.exp()
    return probs.masked_fill_(probs < torch.finfo(probs.dtype).tiny, 0.0)


def possible_draws(batch: SamplingBatch, is_coupled: Sequence[bool], *, greedy: bool) -> tuple[bool, bool]:
    """Returns whether there may be coupled and sampled requests, without reading the device.

    Greedy requests among others may count as either: this costs work and does not change results.
    """
    may_draw = not (greedy or batch.is_all_greedy)
    return may_draw and any(is_coupled), may_draw and not all(is_coupled)


def _by_sequence(flags: Tensor) -> Tensor:
    """(B,) as (B, 1, 1)."""
    return flags.view(-1, 1, 1)
