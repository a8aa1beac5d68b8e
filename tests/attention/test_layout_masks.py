"""Pictures of what each query of a pass sees."""

import pytest
import torch

from foretoken.attention.layout import AttentionLayout
from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree, TreeRow, ancestor_mask

# root ─┬─ 1 ─── 3
#       └─ 2 ─┬─ 4
#             └─ 5
TREE = TokenTree.from_rows([TreeRow([9, 1, 2, 3, 4, 5], [-1, 0, 0, 1, 2, 2])])


def picture(text: str) -> list[list[int]]:
    """Rows of 0 and 1; a bar between prefix and scratch rows is only for the eye."""
    return [[int(sign) for sign in line if sign in "01"] for line in text.strip().splitlines()]


def tree_layout(*prefix: int) -> AttentionLayout:
    tree = TREE.select(torch.zeros(len(prefix), dtype=torch.int64))
    return AttentionLayout(Pass.of_tree(tree, slots=range(len(prefix)), prefix_lens=prefix, last_position=99))


def chain_layout(tokens: int, prefix: int) -> AttentionLayout:
    return AttentionLayout(Pass.of_chains([[5] * tokens], slots=[0], prefix_lens=[prefix]))


def mask_of(layout: AttentionLayout, window: int | None, row: int = 0) -> list[list[int]]:
    mask = layout.mask(row, window)
    assert mask is not None
    tokens = layout.tokens_of(row)
    assert mask.shape == (tokens.stop - tokens.start, layout.num_keys(row))
    return mask.int().tolist()


def test_tree_sees_the_prefix_and_its_ancestors() -> None:
    assert mask_of(tree_layout(3), None) == picture("""
        111 | 100000
        111 | 110000
        111 | 101000
        111 | 110100
        111 | 101010
        111 | 101001
    """)


def test_tree_in_a_window_of_two_positions() -> None:
    # Positions: prefix 0 1 2, root 3, nodes 1 and 2 at 4, the others at 5. A window of 2 is the node and its parent,
    # however many rows lie between them.
    assert mask_of(tree_layout(3), 2) == picture("""
        001 | 100000
        000 | 110000
        000 | 101000
        000 | 010100
        000 | 001010
        000 | 001001
    """)


def test_tree_in_a_window_that_reaches_into_the_prefix() -> None:
    assert mask_of(tree_layout(3), 4) == picture("""
        111 | 100000
        011 | 110000
        011 | 101000
        001 | 110100
        001 | 101010
        001 | 101001
    """)


def test_tree_without_a_prefix() -> None:
    assert mask_of(tree_layout(0), None) == ancestor_mask(TREE.parents)[0].int().tolist()


@pytest.mark.parametrize("window", [9, 10, 1000])
def test_window_as_long_as_all_rows_hides_nothing(window: int) -> None:
    layout = tree_layout(3)
    assert layout.mask(0, window) is layout.mask(0, None)  # computed once, shared by all such layers


def test_prompt_is_causal() -> None:
    layout = chain_layout(3, prefix=2)
    assert mask_of(layout, None) == picture("""
        11 | 100
        11 | 110
        11 | 111
    """)
    assert mask_of(layout, 3) == picture("""
        11 | 100
        01 | 110
        00 | 111
    """)


def test_level_after_earlier_scratch_rows() -> None:
    # Nodes 3, 4, 5 are fed after rows of the root's children: their positions are one past those.
    layout = AttentionLayout(
        Pass(
            tokens=torch.tensor([3, 4, 5]),
            positions=torch.tensor([4, 4, 5, 5, 5]),
            parents=torch.tensor([-1, -1, 0, 1, 1]),
            slots=[0],
            prefix_lens=[4],
            offsets=[0, 3],
            num_earlier=[2],
            logit_rows=None,
        )
    )
    assert mask_of(layout, None) == picture("""
        1111 | 10 | 100
        1111 | 01 | 010
        1111 | 01 | 001
    """)
    assert mask_of(layout, 3) == picture("""
        0001 | 10 | 100
        0001 | 01 | 010
        0001 | 01 | 001
    """)


def test_single_token_sees_all_and_needs_no_mask() -> None:
    layout = AttentionLayout(Pass.of_chains([[5], [6]], slots=[0, 1], prefix_lens=[5, 2]))
    assert layout.mask(0, None) is None
    assert layout.mask(1, 3) is None  # three rows, a window of three
    assert mask_of(layout, 3) == picture("000111")


def test_sequences_of_a_pass_have_their_own_lengths() -> None:
    layout = tree_layout(1, 4)
    assert [layout.num_keys(0), layout.num_keys(1)] == [7, 10]
    assert mask_of(layout, None, 0) == mask_of(tree_layout(1), None)
    assert mask_of(layout, 3, 1) == mask_of(tree_layout(4), 3)


@pytest.mark.parametrize("window", [None, 3])
def test_a_chunk_of_a_prompt_beside_a_tree(window: int | None) -> None:
    tree = Pass.of_tree(TREE, slots=[0], prefix_lens=[3], last_position=99)
    both = AttentionLayout(tree.with_chains(Pass.of_chains([[7] * 3], slots=[1], prefix_lens=[2])))
    assert mask_of(both, window, 0) == mask_of(tree_layout(3), window)
    assert mask_of(both, window, 1) == mask_of(chain_layout(3, prefix=2), window)
