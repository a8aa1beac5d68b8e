"""Acceptance of a verified batch: the accepted nodes of each tree, the target's token after them, and traces.

The rules are in `foretoken.acceptance`. Here each request of a batch gets its rule and the target's distributions after
its parameters, in the quickest way to the same outcome. Sequences stay unchanged. A trace costs a pass over the
vocabulary for each node, and one transfer to the host. Traces change no text.

Letters: B sequences, N nodes, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from foretoken.acceptance.rules import Acceptance, ChosenPath, KeyedDecisions, walk_chosen
from foretoken.acceptance.select import AcceptancePolicy, LengthSchedule, accept, walk_synthetic
from foretoken.core.backend import has_triton_kernels, integers_on, reads_are_free
from foretoken.core.errors import described
from foretoken.core.passes import TokenChoice
from foretoken.core.records import TreeTrace
from foretoken.core.token_tree import PROBE, HostFacts, TokenTree
from foretoken.engine.iteration import Outcome, Verification
from foretoken.sampling.batch import SamplingBatch, best_possible, warp
from foretoken.sampling.node_scores import NodeScores

if TYPE_CHECKING:
    from foretoken.decoder.base import PassOutput
    from foretoken.drafting.drafting import Drafting
    from foretoken.engine.sequence import SamplingState, Sequence

_DRAFTERS = PROBE - 1  # bits of the drafters in `TokenTree.source`
_COLUMNS = ("token", "parent", "depth", "drafters", "probe", "score", "draft_prob", "prob", "target", "target_prob")
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
        """Tells a decoder how to choose tokens of requests that use temperature alone; None for the greatest logits.

        For other requests the decoder's choice is ignored.
        """
        impossible = self._impossible_ids
        if not asked.sequences or (impossible is None and self._sampling.batch(asked.sequences).is_all_greedy):
            return None
        params = [s.params for s in asked.sequences]
        scales = [p.inverse_temperature if p.is_plain else 0.0 for p in params]
        if not reads_are_free(device) or (impossible is None and not any(scales)):
            return None
        counts = np.diff(asked.offsets)
        seeds = np.array([s.sampling.seed for s in asked.sequences], dtype=np.int64)
        return TokenChoice(
            inverse_temperature=torch.from_numpy(np.repeat(np.array(scales, dtype=np.float32), counts)),
            seeds=torch.from_numpy(np.repeat(seeds, counts)),
            impossible_ids=impossible,
        )

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


def outcomes_on_host(scores: NodeScores, acceptance: Acceptance) -> list[Outcome]:
    """Brings all outcomes of an iteration to the host in one transfer; `scores` has the tree without probes."""
    tree, path, nodes = scores.tree, acceptance.path, acceptance.path.clamp_min(0)
    is_finite = scores.by_node(torch.isfinite(scores.logits.amax(1)))
    columns = [
        acceptance.num_accepted.unsqueeze(1), acceptance.next_token.unsqueeze(1), path, tree.tokens.gather(1, nodes),
        is_finite[:, :1], is_finite.gather(1, nodes),
    ]  # fmt: skip
    facts = _facts_of_drafts(tree)
    if facts is None:
        is_drafted = tree.parents >= 0
        columns += [is_drafted.sum(1, keepdim=True), (tree.depths * is_drafted).amax(1, keepdim=True)]
    if tree.source is not None:
        columns += [tree.source.gather(1, nodes), torch.where(tree.parents >= 0, tree.source, 0)]
    outcomes, depth = [], path.shape[1]
    for row, values in enumerate(torch.cat(columns, dim=1).tolist()):  # the synchronisation
        accepted, next_token = values[:2]
        on_path, tokens, is_valid = values[2 : 2 + depth], values[2 + depth : 2 + 2 * depth], values[2 + 2 * depth :]
        rest = values[3 + 3 * depth :]
        num_drafted, tree_depth = (facts.num_nodes[row] - 1, facts.depths[row]) if facts is not None else rest[:2]
        # Each token needs a finite row of logits at the root or on the path; the first bad row ends the sequence. A
        # row without a possible token draws -1: the request's parameters may exclude all tokens.
        num_valid = min([*is_valid[: accepted + 1], 0].index(0), accepted + (next_token >= 0))
        outcomes.append(
            Outcome(
                path=on_path[:accepted],
                tokens=[*tokens[:accepted], next_token],
                num_valid=num_valid,
                num_drafted=num_drafted,
                tree_depth=tree_depth,
                sources=rest[2 : 2 + accepted] if tree.source is not None else [1] * accepted,
                drafted=[1] * num_drafted if tree.source is None else [each for each in rest[2 + depth :] if each],
            )
        )
    return outcomes


def outcomes_of_paths(tree: TokenTree, paths: Seq[ChosenPath]) -> list[Outcome]:
    """Returns the outcomes of B accepted paths; a last token of -1 means that its logits are not finite.

    `tree` has no probes and lies on a device where reads are free.
    """
    facts = _facts_of_drafts(tree)
    rows: list[tuple[list[int], list[int], list[int]]] = []
    if facts is None:
        sources = torch.ones_like(tree.tokens) if tree.source is None else tree.source
        rows = list(zip(tree.parents.tolist(), tree.depths.tolist(), sources.tolist(), strict=True))
    outcomes = []
    for row, (path, tokens) in enumerate(paths):
        if facts is not None:
            num_drafted, tree_depth = facts.num_nodes[row] - 1, facts.depths[row]
            accepted, drafted = [1] * len(path), [1] * num_drafted
        else:
            parents, depths, of_nodes = rows[row]
            nodes = [node for node, parent in enumerate(parents) if parent >= 0]
            num_drafted, tree_depth = len(nodes), max([depths[node] for node in nodes], default=0)
            accepted = [of_nodes[node] for node in path]
            drafted = [of_nodes[node] for node in nodes if of_nodes[node]]
        outcomes.append(
            Outcome(
                path=path,
                tokens=tokens,
                num_valid=len(path) + (tokens[-1] >= 0),
                num_drafted=num_drafted,
                tree_depth=tree_depth,
                sources=accepted,
                drafted=drafted,
            )
        )
    return outcomes


def _facts_of_drafts(tree: TokenTree) -> HostFacts | None:
    """Returns host facts of trees without probes, if they hold all that outcomes need."""
    facts = tree.host_facts
    return facts if facts is not None and tree.source is None and facts.are_depths_exact else None


def greatest_on_host(logits: Tensor) -> list[int]:
    """Returns R tokens with the greatest logit of (R, V) float32 on a CPU, the lowest among equals.

    A token is -1 if the greatest logit is not finite.
    """
    rows = logits.numpy()  # NumPy's argmax is vectorised along a row, torch's is not
    best = rows.argmax(1)
    is_finite = np.isfinite(rows[np.arange(len(rows)), best])  # argmax treats NaN as the greatest
    tokens: list[int] = np.where(is_finite, best, -1).tolist()
    return tokens


def traced(
    scores: NodeScores,
    rules: Seq[str],
    root_positions: Tensor,
    outcomes: Seq[Outcome],
    credit: Callable[[int], Seq[str]],
    impossible_ids: Tensor | None,
) -> list[TreeTrace]:
    """Returns the traces of B trees as verified, probes included; one transfer to the host.

    Args:
        rules: B names, see `AcceptancePolicy.rule_for`.
        root_positions: (B,) int64.
        credit: Returns the names of the drafters in a bit set of `TokenTree.source`.
        impossible_ids: (U,) int64 token ids that are never generated, if the logits do not exclude them; else None.
    """
    if impossible_ids is not None:
        scores = replace(scores, logits=scores.logits.index_fill(1, impossible_ids, -math.inf))
    tree = scores.tree
    probs, targets, target_probs = _answers(scores, rules, root_positions)
    nothing = torch.full_like(probs, math.nan)
    source = torch.ones_like(tree.tokens) if tree.source is None else tree.source
    columns = [
        tree.tokens, tree.parents, tree.depths, source & _DRAFTERS, (source & PROBE) != 0,
        nothing if tree.scores is None else tree.scores, _draft_probs(tree, nothing), probs, targets, target_probs,
    ]  # fmt: skip
    packed = torch.stack([column.double() for column in columns], dim=2)  # ids and bit sets are far below 2^53
    positions, counts = root_positions.double().unsqueeze(1), tree.num_nodes.double().unsqueeze(1)
    values = torch.cat([positions, counts, packed.flatten(1)], dim=1).tolist()  # the synchronisation
    return [
        _trace(*each, has_scores=tree.scores is not None, credit=credit)
        for each in zip(values, rules, outcomes, strict=True)
    ]


def _trace(
    values: list[float], rule: str, outcome: Outcome, *, has_scores: bool, credit: Callable[[int], Seq[str]]
) -> TreeTrace:
    position, count, *packed = values
    of = {name: packed[index :: len(_COLUMNS)][: int(count)] for index, name in enumerate(_COLUMNS)}
    draft_probs = [_known(value) for value in of["draft_prob"]]
    return TreeTrace(
        rule="coupled" if rule == "drawn" else rule,
        position=int(position),
        tokens=list(map(int, of["token"])),
        parents=list(map(int, of["parent"])),
        depths=list(map(int, of["depth"])),
        drafters=[(), *(tuple(credit(int(bits))) for bits in of["drafters"][1:])],
        probes=frozenset(node for node, is_probe in enumerate(of["probe"]) if is_probe),
        scores=of["score"] if has_scores else None,
        draft_probs=draft_probs if any(value is not None for value in draft_probs) else None,
        token_probs=[None, *map(_known, of["prob"][1:])],
        target_tokens=list(map(int, of["target"])),
        target_probs=list(map(_known, of["target_prob"])),
        path=outcome.path,
        next_token=outcome.tokens[-1],
    )


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _draft_probs(tree: TokenTree, nothing: Tensor) -> Tensor:
    """Returns (B, N) draft probabilities of nodes, NaN for nodes that were chosen instead of drawn."""
    drafts = tree.distributions
    if drafts is None:
        return nothing
    sequence = torch.arange(tree.batch_size, device=tree.tokens.device).unsqueeze(1)
    probs = drafts.rows[sequence, drafts.row_of.clamp_min(0), tree.tokens].float()
    return torch.where(drafts.row_of >= 0, probs, nothing)


def _answers(scores: NodeScores, rules: Seq[str], root_positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the target's answer at every node; visits one node a sequence at a time, to bound memory by (B, V).

    Answers are (B, N) float32 probabilities of the nodes' tokens under their parents (NaN at roots), (B, N) int64
    tokens of the target, and (B, N) float32 probabilities of the target's tokens.
    """
    tree, batch, device = scores.tree, scores.batch, scores.logits.device
    # Acceptance used tokens drawn for all nodes at once; drawing them again could round differently.
    drawn = scores.drawn_everywhere(root_positions) if "drawn" in rules else None
    is_drawn = torch.tensor([rule == "drawn" for rule in rules], device=device)
    is_coupled = torch.tensor([rule == "coupled" for rule in rules], device=device)
    probs = torch.full(tree.tokens.shape, math.nan, device=device)
    targets, target_probs = torch.full_like(tree.tokens, -1), probs.clone()
    for node in range(tree.width):
        nodes = (tree.num_nodes - 1).clamp_max(node)
        logits = scores.processed(nodes)
        log_probs = torch.where(batch.greedy.unsqueeze(1), logits.log_softmax(1), warp(logits, batch))
        target = best_possible(log_probs)
        if batch.is_any_greedy:
            target = torch.where(batch.greedy, best_possible(logits), target)
        if "coupled" in rules:
            positions = root_positions + tree.depths.gather(1, nodes.unsqueeze(1))[:, 0]
            coupled = KeyedDecisions(batch.noise, positions).target_token(log_probs, 0)
            target = torch.where(is_coupled, coupled, target)
        if drawn is not None:
            target = torch.where(is_drawn, drawn[:, node], target)
        targets[:, node] = target
        target_probs[:, node] = log_probs.gather(1, target.clamp_min(0).unsqueeze(1))[:, 0].exp()
        probs = torch.where(tree.parents == node, log_probs.gather(1, tree.tokens).exp(), probs)
    return probs, targets, target_probs
