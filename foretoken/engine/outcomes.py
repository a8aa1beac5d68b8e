"""What one iteration decided, brought to the host, and what follows from it for caller, drafter and record.

Letters: B sequences, N nodes, V vocabulary, K tokens of one sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from foretoken.core.records import SequenceStep
from foretoken.drafters.base import Committed
from foretoken.engine.sequence import TokenScores

if TYPE_CHECKING:
    from foretoken.acceptance.decisions import Acceptance
    from foretoken.core.passes import Pass
    from foretoken.engine.sequence import Sequence
    from foretoken.sampling.node_scores import NodeScores


class Outcome(NamedTuple):
    """What acceptance decided for one sequence, on the host.

    Attributes:
        path: Accepted nodes in order.
        tokens: Accepted tokens and the correction or bonus token.
        num_valid: Leading tokens that rest on finite target logits and are possible under the request's parameters.
        num_drafted: Drafted nodes of its tree.
        tree_depth: Greatest depth of its tree.
    """

    path: list[int]
    tokens: list[int]
    num_valid: int
    num_drafted: int
    tree_depth: int


def outcomes_on_host(scores: NodeScores, acceptance: Acceptance) -> list[Outcome]:
    """Everything the host needs of an iteration in one transfer.

    Args:
        scores: The tree, and its logits, to tell whether those on the path are finite.
        acceptance: What survived.
    """
    tree, path, nodes = scores.tree, acceptance.path, acceptance.path.clamp_min(0)
    is_finite = scores.by_node(torch.isfinite(scores.logits.amax(1)))
    packed = torch.cat([
        acceptance.num_accepted.unsqueeze(1), acceptance.next_token.unsqueeze(1), tree.num_nodes.unsqueeze(1),
        tree.depths.amax(1, keepdim=True), path, tree.tokens.gather(1, nodes), is_finite[:, :1],
        is_finite.gather(1, nodes),
    ], dim=1)  # fmt: skip
    outcomes = []
    depth = path.shape[1]
    for row in packed.tolist():  # the synchronisation
        accepted, next_token, num_nodes, tree_depth = row[:4]
        on_path, tokens, is_valid = row[4 : 4 + depth], row[4 + depth : 4 + 2 * depth], row[4 + 2 * depth :]
        # One token rests on the root's row and on each row of the path; the first bad row ends plain decoding. A row
        # without a possible token, which finite logits may become under the request's parameters, draws -1.
        num_valid = min([*is_valid[: accepted + 1], 0].index(0), accepted + (next_token >= 0))
        outcomes.append(
            Outcome(
                path=on_path[:accepted],
                tokens=[*tokens[:accepted], next_token],
                num_valid=num_valid,
                num_drafted=num_nodes - 1,
                tree_depth=tree_depth,
            )
        )
    return outcomes


def token_scores(logits: Tensor, tokens: list[int], count: int) -> list[TokenScores]:
    """Log-probabilities at output tokens: one transfer to the host.

    Args:
        logits: (K, V) float32, the rows that decided the tokens.
        tokens: K tokens.
        count: How many of the most probable tokens.
    """
    log_probs = logits.log_softmax(1)
    top = log_probs.topk(min(count, logits.shape[1]), dim=1)
    chosen = log_probs.gather(1, torch.tensor(tokens, dtype=torch.int64, device=logits.device).unsqueeze(1))
    ranks = (log_probs > chosen).sum(1) + 1
    return [
        TokenScores(token=token, logprob=value, rank=rank, top=dict(zip(ids, values, strict=True)))
        for token, value, rank, ids, values in zip(
            tokens, chosen[:, 0].tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist(), strict=True
        )
    ]


def newly_committed(trees: Pass, outcomes: list[Outcome], features: Tensor | None) -> Committed:
    """What the drafter learns: root and path of every sequence entered the KV, with their features.

    Args:
        trees: The verification, of B sequences.
        outcomes: What was accepted.
        features: (M, F, D) tapped features of its tokens, perhaps followed by others, or None.
    """
    counts = [len(outcome.path) + 1 for outcome in outcomes]
    if features is not None:
        longest = max(counts)
        rows = [
            [start, *(start + node for node in outcome.path), *[start] * (longest - count)]
            for start, outcome, count in zip(trees.offsets[:-1], outcomes, counts, strict=True)
        ]
        features = features[torch.tensor(rows, dtype=torch.int64, device=features.device)]
    return Committed(slots=trees.slots, starts=trees.prefix_lens, lengths=counts, features=features)


def sequence_step(drafter: str, sequence: Sequence, outcome: Outcome, num_emitted: int) -> SequenceStep:
    """The record of one sequence's iteration.

    Args:
        drafter: Its name.
        sequence: The sequence.
        outcome: What was accepted.
        num_emitted: Tokens added to its output.
    """
    accepted = min(len(outcome.path), num_emitted)
    return SequenceStep(
        request_id=sequence.request_id,
        num_drafted=outcome.num_drafted,
        tree_depth=outcome.tree_depth,
        num_accepted=accepted,
        num_emitted=num_emitted,
        accepted_by={drafter: accepted} if accepted else {},
    )
