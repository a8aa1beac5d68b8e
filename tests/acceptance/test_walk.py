"""Matching all nodes at once against walking down from the root."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.acceptance.walk import accept_chosen, accept_greedy
from foretoken.core.token_tree import TokenTree, TreeRow

VOCAB = 3  # few tokens, so that siblings hold the same one and long paths survive


@st.composite
def batches(draw: st.DrawFn) -> tuple[TokenTree, torch.Tensor]:
    """Ragged trees, some nodes cut off from their parents as the guard does, and a chosen token after every node."""
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, draw(st.integers(1, 12))))]
        rows.append(TreeRow([draw(st.integers(0, VOCAB - 1)) for _ in parents], parents))
    tree = TokenTree.from_rows(rows)
    for node in draw(st.lists(st.integers(1, 11), max_size=2)):
        if node < tree.width:
            tree.parents[:, node] = -1
    chosen = draw(st.lists(st.integers(0, VOCAB - 1), min_size=tree.tokens.numel(), max_size=tree.tokens.numel()))
    return tree, torch.tensor(chosen).view(tree.tokens.shape)


@given(case=batches())
def test_all_nodes_at_once(case: tuple[TokenTree, torch.Tensor]) -> None:
    tree, chosen = case
    walked = accept_greedy(tree, lambda nodes: chosen.gather(1, nodes.unsqueeze(1))[:, 0])
    matched = accept_chosen(tree, chosen)
    assert torch.equal(matched.path, walked.path)
    assert torch.equal(matched.num_accepted, walked.num_accepted)
    assert torch.equal(matched.next_token, walked.next_token)
