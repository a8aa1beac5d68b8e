"""A target whose distribution depends on the path through penalties, seen through `NodeScores` as the engine does."""

import torch
from torch import Tensor

from foretoken.acceptance.rules import Acceptance, Decisions, LogProbs
from foretoken.acceptance.sampled_rules import accept_sequential
from foretoken.core.sampling_params import SamplingParams
from foretoken.core.token_tree import TokenTree
from foretoken.sampling.batch import History, HistoryTable, SamplingBatch, SamplingRequest
from foretoken.sampling.node_scores import NodeScores

# Exact in float32, the type of the batch's parameters.
PRESENCE, FREQUENCY = 1.5, 0.75

_extended = History.extended


def raw_logits(vocab: int) -> Tensor:
    """(V,), the model's answer everywhere: only the penalties tell contexts apart."""
    return torch.linspace(1.0, 0.0, vocab, dtype=torch.float64)


def penalised_target(vocab: int, depth: int) -> Tensor:
    """(C, V), the distribution after every context, token by token from the definition of the penalties."""
    contexts: list[list[int]] = [[]]
    for context in contexts:
        if len(context) < depth:
            contexts.extend([*context, token] for token in range(vocab))
    logits = raw_logits(vocab)
    rows = []
    for context in contexts:
        counts = [context.count(token) for token in range(vocab)]
        penalty = [PRESENCE * (n > 0) + FREQUENCY * n for n in counts]
        rows.append((logits - torch.tensor(penalty, dtype=torch.float64)).softmax(0))
    return torch.stack(rows)


def penalised_rule(tree: TokenTree, log_probs: LogProbs, decisions: Decisions) -> Acceptance:
    """The sequential test over the engine's own view of the target; the table's log-probabilities are not looked at."""
    assert tree.distributions is not None
    batch, vocab = tree.batch_size, tree.distributions.rows.shape[2]
    params = SamplingParams(presence_penalty=PRESENCE, frequency_penalty=FREQUENCY)
    table = HistoryTable(1, vocab)
    table.start(0, [0], needs_counts=True)
    same = torch.zeros(batch, dtype=torch.int64)
    scores = NodeScores(
        tree=tree,
        logits=raw_logits(vocab).expand(batch, tree.width, vocab).flatten(0, 1),
        starts=torch.arange(batch) * tree.width,
        batch=SamplingBatch.build([SamplingRequest(params=params, seed=0)], vocab).select(same),
        history=table.view([0], [[0]], [1], 0).select(same),
    )
    return accept_sequential(tree, scores.log_probs, decisions)


def without_the_path(history: History, path: Tensor) -> History:
    """A broken `History.extended`: every node is penalised like the root."""
    return history


def without_the_node_itself(history: History, path: Tensor) -> History:
    """A broken `History.extended`: one token late."""
    is_last = torch.arange(path.shape[1]) == (path >= 0).sum(1, keepdim=True) - 1
    return _extended(history, path.masked_fill(is_last, -1))
