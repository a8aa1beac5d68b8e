"""The tables made by a kernel are those that `TokenTree` defines."""

from __future__ import annotations

import pytest
import torch
from kernel_device import DEVICE, OnDevice, random_parents

pytest.importorskip("triton")

from foretoken.attention.triton_tables import TreeTables, tree_tables
from foretoken.core.token_tree import TokenTree, TreeRow


def tree_of(rows: list[list[int]]) -> TokenTree:
    return TokenTree.from_rows([TreeRow([0] * len(row), row) for row in rows])


def assert_tables(tree: TokenTree, prefix: list[int], last_position: int, tables: TreeTables) -> None:
    assert torch.equal(tables.words.cpu(), tree.ancestor_words().view(torch.int32))
    assert torch.equal(tables.depths.cpu(), tree.depths)
    expected = (torch.tensor(prefix).unsqueeze(1) + tree.depths).clamp_max(last_position)
    assert torch.equal(tables.positions.cpu(), expected.to(torch.int32))


def made(tree: TokenTree, prefix: list[int], last_position: int) -> TreeTables:
    return tree_tables(tree.parents.to(DEVICE), torch.tensor(prefix, dtype=torch.int32, device=DEVICE), last_position)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 31, 32, 33, 63, 64, 65, 127, 129, 340, 511, 512])
@pytest.mark.parametrize("reach", [1, 2, 7, 600])
def test_random_trees(nodes: int, reach: int) -> None:
    tree = tree_of([random_parents(nodes, reach, torch.Generator().manual_seed(nodes * 1000 + reach))])
    assert_tables(tree, [17], 1 << 20, made(tree, [17], 1 << 20))


def test_ragged_batches_with_padding() -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = [(1, 1), (512, 1), (2, 1), (70, 3), (300, 20), (33, 1)]
    tree = tree_of([random_parents(nodes, reach, generator) for nodes, reach in sizes])
    prefix = [0, 3, 131_000, 5, 2_000_000_000, 130_990]
    assert_tables(tree, prefix, 131_071, made(tree, prefix, 131_071))


def test_types_are_those_documented() -> None:
    tables = made(tree_of([[-1, 0, 0]]), [2], 9)
    assert [t.dtype for t in tables] == [torch.int32, torch.int64, torch.int32]
    assert [list(t.shape) for t in tables] == [[1, 3, 2], [1, 3], [1, 3]]


def test_buffers_are_filled_whole_and_nothing_is_read_or_allocated() -> None:
    tree = tree_of([random_parents(40, 4, torch.Generator().manual_seed(2)), [-1, 0, 0, 1]])
    parents, prefix = tree.parents.to(DEVICE), torch.tensor([4, 7], dtype=torch.int32, device=DEVICE)
    out = TreeTables.empty(2, 40, device=DEVICE)
    for buffer in out:
        buffer.fill_(-77)
    guarded = torch.full((2 * 40 * 2 + 8,), -77, dtype=torch.int32, device=DEVICE)
    out = out._replace(words=guarded[4:-4].view(2, 40, 2))
    with OnDevice() as calls:
        assert tree_tables(parents, prefix, 99, out=out) is out
    assert not calls.allocated
    assert_tables(tree, [4, 7], 99, out)
    assert guarded[:4].tolist() == guarded[-4:].tolist() == [-77] * 4


def test_only_the_tables_are_allocated() -> None:
    tree = tree_of([random_parents(20, 4, torch.Generator().manual_seed(3))])
    parents, prefix = tree.parents.to(DEVICE), torch.tensor([4], dtype=torch.int32, device=DEVICE)
    with OnDevice() as calls:
        tables = tree_tables(parents, prefix, 99)
    assert sorted(calls.allocated) == sorted(tuple(t.shape) for t in tables)
