"""The tables kernels read say what the masks say."""

import torch
from hypothesis import given
from passes import some_passes
from torch import Tensor

from foretoken.attention.layout import AttentionLayout
from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree, TreeRow, ancestor_mask


def unpacked(words: Tensor, width: int) -> Tensor:
    """(M, W) bool of (M, N32) int32."""
    bits = (words.unsqueeze(-1) >> torch.arange(32)) & 1
    return bits.flatten(1)[:, :width].bool()


def test_tables_of_trees_are_their_masks() -> None:
    parents = [[-1, 0, 0, 1, 1, 2, *range(5, 69)], [-1, 0]]
    tree = TokenTree.from_rows([TreeRow([0] * len(row), row) for row in parents])
    work = Pass.of_tree(tree, slots=[4, 1], prefix_lens=[5, 900], last_position=999)
    tables = AttentionLayout(work).tables()
    assert tables.words is not None
    assert torch.equal(unpacked(tables.words[:70], 70), ancestor_mask(tree.parents)[0])
    assert torch.equal(unpacked(tables.words[70:], 2), ancestor_mask(tree.parents)[1, :2, :2])
    assert (tables.slots.tolist(), tables.prefix.tolist()) == ([4, 1], [5, 900])
    assert tables.starts.tolist() == tables.node_starts.tolist() == [0, 70, 72]
    assert (tables.max_prefix, tables.max_tokens, tables.max_nodes) == (900, 70, 70)
    assert tables.written_slots.tolist() == [4] * 70 + [1] * 2
    assert tables.written_rows.tolist() == [*range(5, 75), 900, 901]


@given(work=some_passes())
def test_tables_of_any_pass_are_its_masks(work: Pass) -> None:
    layout = AttentionLayout(work)
    tables = layout.tables()
    for row, (slot, prefix) in enumerate(zip(work.slots, work.prefix_lens, strict=True)):
        mask, tokens, rows = layout.mask(row, None), layout.tokens_of(row), layout.rows_of(row)
        num_nodes = layout.num_keys(row) - prefix
        expected = torch.ones(tokens.stop - tokens.start, num_nodes, dtype=torch.bool)
        expected = expected if mask is None else mask[:, prefix:]
        assert tables.written_slots[tokens].tolist() == [slot] * (tokens.stop - tokens.start)
        assert tables.written_rows[tokens].tolist() == list(range(rows.start, rows.stop))
        if tables.words is None:
            assert torch.equal(expected, torch.ones(num_nodes, num_nodes, dtype=torch.bool).tril()[-len(expected) :])
        else:
            assert torch.equal(unpacked(tables.words[tokens], num_nodes), expected)


def test_chains_need_no_words() -> None:
    assert AttentionLayout(Pass.of_chains([[5, 6, 7]], slots=[0], prefix_lens=[3])).tables().words is None
