"""The tables kernels read say what the masks say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foretoken.attention.layout import AttentionLayout
from foretoken.attention.tables import packed_bits
from foretoken.core.token_tree import TokenTree, TreeRow


def unpacked(words: Tensor, width: int) -> Tensor:
    """(B, T, W) bool of (B, T, N32) int32."""
    bits = (words.unsqueeze(-1) >> torch.arange(32)) & 1
    return bits.flatten(2)[:, :, :width].bool()


@pytest.mark.parametrize("width", [1, 2, 31, 32, 33, 64, 65, 340, 512])
def test_bits_of_masks(width: int) -> None:
    visible = torch.rand(2, 3, width, generator=torch.Generator().manual_seed(width)) < 0.5
    visible[:, :, -1] = True
    assert torch.equal(unpacked(packed_bits(visible), width), visible)


def test_tables_of_trees_are_their_masks() -> None:
    parents = [[-1, 0, 0, 1, 1, 2, *range(5, 69)], [-1, 0]]
    tree = TokenTree.from_rows([TreeRow([0] * len(row), row) for row in parents])
    layout = AttentionLayout(
        slots=[4, 1], prefix=[5, 900], positions=tree.depths + torch.tensor([[5], [900]]), tree=tree
    )
    tables = layout.tables()
    assert tables.words is not None
    assert torch.equal(unpacked(tables.words, tree.width), tree.ancestor_mask())
    assert (tables.slots.tolist(), tables.prefix.tolist(), tables.max_prefix) == ([4, 1], [5, 900], 900)
    assert torch.equal(tables.scratch_positions, tables.positions)


def test_chains_need_no_words() -> None:
    layout = AttentionLayout(slots=[0], prefix=[3], positions=torch.tensor([[3, 4, 5]]))
    assert layout.tables().words is None
