"""Walking down a tree in plain Python and by operations on tensors."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.acceptance.rules import _walk_on_device, accept_chosen, accept_greedy
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
def test_every_walk_goes_the_same_way(case: tuple[TokenTree, torch.Tensor]) -> None:
    tree, chosen = case

    def choose(nodes: torch.Tensor) -> torch.Tensor:
        return chosen.gather(1, nodes.unsqueeze(1))[:, 0]

    walked = _walk_on_device(tree, lambda nodes, _: choose(nodes))
    for again in (accept_greedy(tree, choose), accept_chosen(tree, chosen)):
        assert torch.equal(again.path, walked.path)
        assert torch.equal(again.num_accepted, walked.num_accepted)
        assert torch.equal(again.next_token, walked.next_token)
