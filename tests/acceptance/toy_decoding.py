"""Whole sequences of a toy target by speculative iterations with the engine's real keys, thousands of rows at once.

The target is a table over the last two tokens, the draft another; a context (x, y) has number x * V + y. All rows
start from the same context, each with its own seed, and the root's position advances as in the engine.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from drafting import random_table
from torch import Tensor

from foretoken.acceptance.rules import Acceptance, Decisions, KeyedDecisions, LogProbs
from foretoken.core.token_tree import DraftDistributions, DrawKind, TokenTree
from foretoken.sampling.noise import KeyedNoise, Purpose
from foretoken.trees.choices import TreeShape

VOCAB, LENGTH, START = 4, 3, 12
FIRST_POSITION = 11

DraftNoise = Callable[[KeyedNoise, Tensor, int, int], Tensor]
"""(noise, root positions, node, depth) -> (B, V): what is added to log q to choose the children of a node."""


def own_noise(noise: KeyedNoise, root_positions: Tensor, node: int, depth: int) -> Tensor:
    """The drafter's."""
    return noise.gumbel(root_positions, Purpose.DRAFT, VOCAB, lane=node)


def shared_noise(noise: KeyedNoise, root_positions: Tensor, node: int, depth: int) -> Tensor:
    """The target's own at that position: coupled drafting."""
    return noise.gumbel(root_positions + depth + 1, Purpose.TARGET, VOCAB)


def target_table() -> Tensor:
    """(V * V, V) float64."""
    return random_table(VOCAB, 3, seed=21)[: VOCAB * VOCAB]


def draft_table() -> Tensor:
    """(V * V, V) float64, far enough from the target's that rejections and residuals of several tokens are common."""
    table = target_table() + 3 * random_table(VOCAB, 3, seed=22)[: VOCAB * VOCAB]
    return table / table.sum(1, keepdim=True)


def joint_distribution() -> Tensor:
    """(V ** LENGTH,), the target distribution of the first tokens after START."""
    table, distribution, context = target_table(), torch.ones(1, dtype=torch.float64), torch.tensor([START])
    for _ in range(LENGTH):
        distribution = (distribution[:, None] * table[context]).flatten()
        context = (context[:, None] % VOCAB * VOCAB + torch.arange(VOCAB)).flatten()
    return distribution


def propose(
    shape: TreeShape, context: Tensor, noise: KeyedNoise, positions: Tensor, draw: DraftNoise, kind: DrawKind
) -> tuple:
    """Trees drawn from the draft table, siblings of a kind, and the (B, N) contexts of their nodes."""
    batch, nodes, parents = len(context), shape.num_nodes, shape.parents
    contexts = context.unsqueeze(1).repeat(1, nodes)
    tokens = torch.zeros(batch, nodes, dtype=torch.int64)
    table = draft_table()
    rows = []
    for node in range(nodes):
        distribution = table[contexts[:, node]]
        rows.append(distribution)
        children = [child for child, parent in enumerate(parents) if parent == node]
        if children:
            keys = distribution.log() + draw(noise, positions, node, shape.depths[node])
            tokens[:, children] = keys.topk(len(children), dim=1).indices
            for order, child in enumerate(children[1:] if kind == DrawKind.INDEPENDENT else [], start=1):
                own = draw(noise, positions, order * nodes + node, shape.depths[node])
                tokens[:, child] = (distribution.log() + own).argmax(1)
            contexts[:, children] = contexts[:, node : node + 1] % VOCAB * VOCAB + tokens[:, children]
    widest = max(parents.count(node) for node in range(nodes))
    kind = kind if widest > 1 else DrawKind.INDEPENDENT
    row_of = torch.tensor(parents).expand(batch, -1)
    tree = TokenTree(
        tokens=tokens,
        parents=row_of,
        depths=torch.tensor(shape.depths).expand(batch, -1),
        num_nodes=torch.full((batch,), nodes),
        max_depth=shape.depth,
        distributions=DraftDistributions(
            kinds=torch.full((batch, nodes), kind.value), rows=torch.stack(rows, 1), row_of=row_of, max_siblings=widest
        ),
    )
    return tree, contexts


Rule = Callable[[TokenTree, LogProbs, Decisions], Acceptance]


def generate(
    rule: Rule,
    shape: TreeShape,
    seeds: Tensor,
    *,
    draw: DraftNoise = own_noise,
    kind: DrawKind = DrawKind.WITHOUT_REPLACEMENT,
    is_one_hot: bool = False,
    position_step: int = 1,
) -> Tensor:
    """The first LENGTH tokens of every row.

    Args:
        rule: What is tested.
        shape: Of the drafts.
        seeds: (B,).
        draw: Noise of the drafts.
        kind: How siblings are drawn.
        is_one_hot: Hides the draft distributions from the rule, as for drafts that share the target's noise.
        position_step: How far an emitted token moves the root; 0 reuses every number in the next iteration.
    """
    batch = len(seeds)
    noise, index, table = KeyedNoise(seeds), torch.arange(batch), target_table().log()
    context, length = torch.full((batch,), START), torch.zeros(batch, dtype=torch.int64)
    text = torch.zeros(batch, LENGTH + (shape.depth + 1) * LENGTH, dtype=torch.int64)
    while int(length.min()) < LENGTH:
        positions = FIRST_POSITION + length * position_step
        tree, contexts = propose(shape, context, noise, positions, draw, kind)
        tree = replace(tree, distributions=None) if is_one_hot else tree

        def log_probs(nodes: Tensor, contexts: Tensor = contexts) -> Tensor:
            return table[contexts[index, nodes]]

        result = rule(tree, log_probs, KeyedDecisions(noise, positions))
        last = torch.cat([torch.zeros(batch, 1, dtype=torch.int64), result.path], 1)[index, result.num_accepted]
        emitted = torch.cat([tree.path_tokens(last), last[:, None]], dim=1)
        emitted[index, result.num_accepted] = result.next_token
        for step in range(emitted.shape[1]):
            is_emitted = step <= result.num_accepted
            column = (length + step).clamp_max(text.shape[1] - 1)
            text[index, column] = torch.where(is_emitted, emitted[:, step], text[index, column])
        context = contexts[index, last] % VOCAB * VOCAB + result.next_token
        length = length + result.num_accepted + 1
    return text[:, :LENGTH]


def plain_text(seeds: Tensor) -> Tensor:
    """One token at a time, argmax(log p + g) at each position: what coupled text must equal."""
    noise, context, tokens = KeyedNoise(seeds), torch.full((len(seeds),), START), []
    for step in range(LENGTH):
        positions = torch.full((len(seeds),), FIRST_POSITION + step + 1)
        drawn = (target_table()[context].log() + noise.gumbel(positions, Purpose.TARGET, VOCAB)).argmax(1)
        tokens.append(drawn)
        context = context % VOCAB * VOCAB + drawn
    return torch.stack(tokens, 1)
