"""Tiny models for the lean decoders, and the check that a decoder is exact."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import random_model
from tree_decoding import SLOTS, decode, logits_by_sequence

from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.models.loading import wrap_model
from foretoken.runner.runner import Runner

LEAN = ("lean-native", "lean-stock")
TOLERANCE = 1e-5  # relative to the largest logit, float32


def runner(config: Any, kind: str, dtype: torch.dtype = torch.float32, **more: Any) -> Runner:
    """A runner with four slots over a random model."""
    return Runner(wrap_model(random_model(config, dtype=dtype), name="tiny"), num_slots=4, runner=kind, **more)


def assert_like_generic(config: Any, kind: str) -> None:
    """Logits over prompts, trees and commits are those of the generic decoder."""
    ours, theirs = (decode(runner(config, k, max_nodes=12), rounds=4) for k in (kind, "generic"))
    for a, b in zip(ours, theirs, strict=True):
        for row in range(len(SLOTS)):
            mine, reference = a.logits(row), b.logits(row)
            assert (mine - reference).abs().max() <= TOLERANCE * reference.abs().max()


def assert_exact(made: Runner) -> None:
    """A path in a tree, in a batch, on two threads: bit for bit what one token at a time gives on one.

    Args:
        made: With four slots and at least 40 nodes.
    """
    prompt, path = [5, 9, 3, 60, 21, 8, 30, 33, 2], [7, 11, 13, 4, 40]
    made.prefill(0, prompt, 0)
    alone = []
    for depth, token in enumerate(path):
        alone.append(made.verify([0], [len(prompt) + depth], TokenTree.roots([token])).logits[0])  # type: ignore[index]
    # The path in the middle of a tree: every second node is a stranger.
    tokens, parents, nodes = [path[0], 50], [-1, 0], [0]
    for token in path[1:]:
        parents += [nodes[-1], nodes[-1]]
        nodes.append(len(tokens))
        tokens += [token, 51]
    tree = TreeRow(tokens, parents)
    wide = TreeRow(tokens + [52] * (38 - len(tokens)), parents + [0] * (38 - len(parents)))
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for slot, other in ((1, 3), (2, 0)):
                for start in range(0, len(prompt), 4):
                    made.prefill(slot, prompt[start : start + 4], start)
                made.prefill(other, [3, 4], 0)
                for rows in ([tree], [wide], [wide, TreeRow([6, 7], [-1, 0])], [TreeRow([6], [-1]), tree]):
                    at = next(i for i, row in enumerate(rows) if len(row.tokens) > 2)
                    slots = [other, other][: len(rows)]
                    slots[at] = slot
                    lengths = [2] * len(rows)
                    lengths[at] = len(prompt)
                    trees = TokenTree.from_rows(rows)
                    logits = logits_by_sequence(made.verify(slots, lengths, trees), trees)[at]
                    for node, expected in zip(nodes, alone, strict=True):
                        assert torch.equal(logits[node], expected)
    finally:
        torch.set_num_threads(threads)
