"""Iterations of decoding by hand: a function stands for the target, and trees are verified greedily."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from drafting_contexts import context

from foretoken.core.token_tree import TokenTree
from foretoken.drafters.base import Committed, Verified

Ranking = Callable[[Sequence[int]], Sequence[int]]  # of a text: the tokens after it, the most probable first


def texts_of(tree: TokenTree, row: int, text: Sequence[int]) -> list[list[int]]:
    """The text down to each node of a tree over a text's last token."""
    tokens, parents = tree.rows()[row]
    paths: list[list[int]] = [list(text)]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append([*paths[parent], token])
    return paths


def step(
    drafter: Any,
    texts: Sequence[list[int]],
    ranking: Ranking,
    *,
    change: Callable[[TokenTree], TokenTree] = lambda tree: tree,
    num_ids: int | None = None,
    **bounds: Any,
) -> TokenTree:
    """One iteration: every text grows by accepted tokens and the target's own.

    Args:
        drafter: Attached, with a sequence in each of the slots 0, 1, …
        texts: One a slot; they grow.
        ranking: The target.
        change: What happens to the tree before it is verified, as a merge.
        num_ids: See `TargetReads.top_k`; those that the drafter reads where None.
        **bounds: Of the context.

    Returns:
        What was verified.
    """
    tree = change(drafter.propose(context(texts, **bounds)))
    paths, top, offsets = [], [], [0]
    for row, text in enumerate(texts):
        best = [list(ranking(path)) for path in texts_of(tree, row, text)]
        top += best
        offsets.append(len(top))
        paths.append(accepted(tree, row, [each[0] for each in best]))
    committed = [[text[-1], *(int(tree.tokens[row, node]) for node in paths[row])] for row, text in enumerate(texts)]
    drafter.commit(
        Committed(
            slots=range(len(texts)),
            starts=[len(text) - 1 for text in texts],
            tokens=committed,
            features=None,
            verified=Verified(
                tree=tree, paths=paths, offsets=offsets,
                top_ids=torch.tensor(top)[:, : num_ids or drafter.reads.top_k],
            ),
        )
    )  # fmt: skip
    for row, text in enumerate(texts):
        text.extend([*committed[row][1:], top[offsets[row] + [0, *paths[row]][-1]][0]])
    return tree


def accepted(tree: TokenTree, row: int, best: Sequence[int]) -> list[int]:
    """The nodes that follow the target's tokens, probes left out."""
    walked = tree.without_probes()
    path, node = [], 0
    while True:
        below = [
            child
            for child in range(1, int(walked.num_nodes[row]))
            if int(walked.parents[row, child]) == node and int(walked.tokens[row, child]) == best[node]
        ]
        if not below:
            return path
        node = below[0]
        path.append(node)
