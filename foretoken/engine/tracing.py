"""Traces of verified trees: the target's distribution at every node, from the logits that acceptance used.

A trace costs a pass over the vocabulary for each node, and one transfer to the host. Traces change no text.

Letters: B sequences, N nodes, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.acceptance.decisions import KeyedDecisions
from foretoken.core.records import TreeTrace
from foretoken.core.token_tree import PROBE
from foretoken.sampling.batch import best_possible, warp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.core.token_tree import TokenTree
    from foretoken.engine.verification import Outcome
    from foretoken.sampling.node_scores import NodeScores

_DRAFTERS = PROBE - 1  # bits of the drafters in `TokenTree.source`
_COLUMNS = ("token", "parent", "depth", "drafters", "probe", "score", "draft_prob", "prob", "target", "target_prob")


def traced(
    scores: NodeScores,
    rules: Sequence[str],
    root_positions: Tensor,
    outcomes: Sequence[Outcome],
    credit: Callable[[int], Sequence[str]],
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
    values: list[float], rule: str, outcome: Outcome, *, has_scores: bool, credit: Callable[[int], Sequence[str]]
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


def _answers(scores: NodeScores, rules: Sequence[str], root_positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
