"""Acceptance of a verified batch: which nodes of each tree are kept, and the target's token after them.

The rules themselves are in `foretoken.acceptance`; here a batch gets the rule of each of its requests, the target's
distributions after the requests' parameters, and the quickest way to the same outcome. Sequences stay unchanged.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import torch

from foretoken.acceptance.rules import walk_chosen
from foretoken.acceptance.select import AcceptancePolicy, accept
from foretoken.acceptance.synthetic import walk_synthetic
from foretoken.core.backend import has_triton_kernels, integers_on, reads_are_free
from foretoken.core.errors import described
from foretoken.engine.tracing import traced
from foretoken.engine.verification import (
    Outcome,
    greatest_on_host,
    outcomes_of_paths,
    outcomes_on_host,
    token_choice,
)
from foretoken.sampling.node_scores import NodeScores

if TYPE_CHECKING:
    from torch import Tensor

    from foretoken.acceptance.synthetic import LengthSchedule
    from foretoken.core.passes import TokenChoice
    from foretoken.core.records import TreeTrace
    from foretoken.core.token_tree import TokenTree
    from foretoken.decoder.base import PassOutput
    from foretoken.drafting.drafting import Drafting
    from foretoken.engine.sequence import SamplingState, Sequence
    from foretoken.engine.verification import Verification
    from foretoken.sampling.batch import SamplingBatch

_log = logging.getLogger(__name__)


class Acceptor:
    """Accepts drafts by a policy, which may be replaced between iterations."""

    def __init__(
        self, policy: AcceptancePolicy, sampling: SamplingState, drafting: Drafting, impossible_ids: Tensor | None
    ) -> None:
        """`impossible_ids`: (U,) int64, token ids that are never generated; None for none."""
        self.policy = policy
        self._sampling, self._drafting, self._impossible_ids = sampling, drafting, impossible_ids

    @property
    def policy(self) -> AcceptancePolicy:
        """How sampled requests are verified."""
        return self._policy

    @policy.setter
    def policy(self, policy: AcceptancePolicy) -> None:
        self._policy, self._is_lossy, self._synthetic = policy, policy.is_lossy, policy.schedule()
        self._are_coupled = {is_seeded: policy.is_coupled(is_seeded=is_seeded) for is_seeded in (False, True)}

    @property
    def is_synthetic(self) -> bool:
        """Whether the policy sets the accepted lengths, whatever the target says; see `walk_synthetic`."""
        return self._synthetic is not None

    def is_coupled(self, sequence: Sequence) -> bool:
        """Whether drafts of a sequence are drawn with the target's own random numbers."""
        return self._are_coupled[sequence.is_seeded]

    def choice(self, asked: Verification, device: torch.device) -> TokenChoice | None:
        """Returns how a decoder may choose tokens itself; None if it is to take the greatest logits."""
        is_plain = self._impossible_ids is None
        if not asked.sequences or (is_plain and self._sampling.batch(asked.sequences).is_all_greedy):
            return None
        return token_choice(asked.sequences, asked.offsets, self._impossible_ids, device)

    def exclude_impossible(self, logits: Tensor) -> Tensor:
        """Sets logits (R, V) of tokens that are never generated to -inf, in place, and returns them."""
        if self._impossible_ids is not None:
            with torch.inference_mode():  # they may be an inference tensor, which nothing else may write to
                logits[..., self._impossible_ids] = float("-inf")
        return logits

    def outcomes(self, asked: Verification, output: PassOutput) -> tuple[list[Outcome], float]:
        """Returns the outcome of each sequence, and the mean total variation distance that a lossy rule allowed."""
        batch = self._sampling.masked(self._sampling.batch(asked.sequences))
        tree, logits = asked.tree.without_probes(), output.needed_logits
        if self._synthetic is not None:
            outcomes = self._synthetic_outcomes(self._synthetic, asked, tree, batch, output)
            return outcomes, math.nan if tree.max_depth else 0.0
        if batch.is_all_greedy and not self._is_lossy:
            rules = ["greedy"] * len(asked.sequences)
        else:
            rules = self._rules(asked.sequences, tree, output)
        if not batch.processors and reads_are_free(tree.tokens.device) and {"greedy", "drawn"}.issuperset(rules):
            chosen = greatest_on_host(logits) if output.chosen is None else output.chosen.tolist()
            return outcomes_of_paths(tree, walk_chosen(tree, chosen, asked.offsets)), 0.0
        scores, roots = self._node_scores(asked, tree, batch, output)
        acceptance = accept(scores, rules, self._policy, roots)
        lossy_tv = 0.0
        if self._is_lossy and asked.trees is not None:  # trees only: roots of prompts that end are never lossy
            lossy_tv = float(acceptance.lossy_tv[: asked.trees.num_sequences].mean())
        return outcomes_on_host(scores, acceptance), lossy_tv

    def traces(self, asked: Verification, output: PassOutput, outcomes: list[Outcome]) -> list[TreeTrace | None]:
        """Returns a trace of each tree, see `TreeTrace`; None for each if tracing raises, which is logged."""
        try:
            with torch.no_grad():
                batch = self._sampling.masked(self._sampling.batch(asked.sequences))
                scores, roots = self._node_scores(asked, asked.tree, batch, output)
                rules = self._rules(asked.sequences, asked.tree.without_probes(), output)
                unmasked = None if output.chosen is None else self._impossible_ids
                return [*traced(scores, rules, roots, outcomes, self._drafting.credit, unmasked)]
        except Exception as err:  # noqa: BLE001 - a trace must not end requests
            _log.warning("an iteration could not be traced: %s", described(err))
            _log.debug("where the trace failed", exc_info=err)
            return [None] * len(asked.sequences)

    def _synthetic_outcomes(
        self, schedule: LengthSchedule, asked: Verification, tree: TokenTree, batch: SamplingBatch, output: PassOutput
    ) -> list[Outcome]:
        """Returns the outcome of each tree: each draft of a sequence has the next accepted length of the schedule."""
        sequences, logits = asked.sequences, output.needed_logits
        lengths = [schedule.length(s.sampling.seed, s.metrics.drafted_at_depth[1]) for s in sequences]
        are_chosen = batch.is_all_greedy or (
            output.chosen is not None and all(s.params.is_plain or s.params.is_greedy for s in sequences)
        )
        if are_chosen and not batch.processors and reads_are_free(tree.tokens.device):
            chosen = greatest_on_host(logits) if output.chosen is None else output.chosen.tolist()
            return outcomes_of_paths(tree, walk_synthetic(tree, chosen, asked.offsets, lengths))
        scores, roots = self._node_scores(asked, tree, batch, output)
        rules, wanted = ["synthetic"] * len(sequences), integers_on(lengths, tree.tokens.device)
        return outcomes_on_host(scores, accept(scores, rules, self._policy, roots, wanted))

    def _rules(self, sequences: list[Sequence], tree: TokenTree, output: PassOutput) -> list[str]:
        has_kernels = output.chosen is not None or has_triton_kernels(tree.tokens.device)
        are_merged = self._drafting.are_merged
        return [
            self._policy.rule_for(
                tree, is_greedy=s.params.is_greedy, is_seeded=s.is_seeded, row=row,
                is_plain=s.params.is_plain and has_kernels, is_mixed=are_merged or s.grammar is not None,
            )
            for row, s in enumerate(sequences)
        ]  # fmt: skip

    def _node_scores(
        self, asked: Verification, tree: TokenTree, batch: SamplingBatch, output: PassOutput
    ) -> tuple[NodeScores, Tensor]:
        """Returns the target's distributions at the nodes of trees, and the (B,) int64 positions of the roots."""
        positions = [len(s.tokens) - 1 for s in asked.sequences]
        starts, roots = integers_on([asked.offsets[:-1], positions], tree.tokens.device).unbind()
        scores = NodeScores(
            tree=tree,
            logits=output.needed_logits,
            starts=starts,
            has_row_for_each=asked.offsets[-1] == tree.tokens.numel(),
            batch=batch,
            history=self._sampling.histories(asked.sequences, batch),
            chosen=output.chosen,
        )
        return scores, roots
