"""What a pass is made of: trees without their padding, chunks of prompts, and both together."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.core.passes import Pass, TokenChoice
from foretoken.core.token_tree import TokenTree, TreeRow

# root ─┬─ 1 ─── 3        a root alone
#       └─ 2
TREES = TokenTree.from_rows([TreeRow([9, 1, 2, 3], [-1, 0, 0, 1]), TreeRow([8], [-1])])


def verification(tree: TokenTree, last_position: int = 99) -> Pass:
    return Pass.of_tree(tree, slots=[2, 0], prefix_lens=[5, 7], last_position=last_position)


def test_trees_lose_their_padding() -> None:
    work = verification(TREES)
    assert (work.num_sequences, work.num_tokens, list(work.offsets)) == (2, 5, [0, 4, 5])
    assert work.tokens.tolist() == [9, 1, 2, 3, 8]
    assert work.parents.tolist() == [-1, 0, 0, 1, -1]
    assert work.positions.tolist() == work.token_positions.tolist() == [5, 6, 6, 7, 7]
    assert work.logit_rows is not None
    assert work.logit_rows.tolist() == [0, 1, 2, 3, 4]
    assert work.has_all_logits


@pytest.mark.parametrize("is_known", [True, False])
def test_the_host_need_not_know_the_sizes(is_known: bool) -> None:
    tree = TREES if is_known else replace(TREES, host_facts=None)
    assert (tree.host_facts is not None) == is_known
    assert torch.equal(verification(tree).tokens, verification(TREES).tokens)


def test_positions_end_with_the_context() -> None:
    assert verification(TREES, last_position=6).positions.tolist() == [5, 6, 6, 6, 6]


@pytest.mark.parametrize(("has_last_logits", "rows"), [(True, [2, 3]), (False, None)])
def test_chains(has_last_logits: bool, rows: list[int] | None) -> None:
    work = Pass.of_chains([[4, 5, 6], [7]], slots=[1, 3], prefix_lens=[2, 0], has_last_logits=has_last_logits)
    assert work.is_causal
    assert work.positions.tolist() == [2, 3, 4, 0]
    assert work.parents.tolist() == [-1, 0, 1, -1]
    assert (None if work.logit_rows is None else work.logit_rows.tolist()) == rows
    assert not work.has_all_logits


def test_chunks_of_prompts_follow_trees() -> None:
    both = verification(TREES).with_chains(Pass.of_chains([[4, 5], [6]], slots=[1, 3], prefix_lens=[10, 0]))
    assert both.tokens.tolist() == [9, 1, 2, 3, 8, 4, 5, 6]
    assert both.parents.tolist() == [-1, 0, 0, 1, -1, -1, 0, -1]
    assert both.positions.tolist() == [5, 6, 6, 7, 7, 10, 11, 0]
    assert (both.slots, both.prefix_lens, both.offsets) == ([2, 0, 1, 3], [5, 7, 10, 0], [0, 4, 5, 7, 8])
    assert both.logit_rows is not None
    assert both.logit_rows.tolist() == [0, 1, 2, 3, 4]
    assert not both.has_all_logits
    assert not both.is_causal


def test_chunks_may_have_logits_too() -> None:
    """Of the roots that end prompts."""
    chains = Pass.of_chains([[4, 5], [6]], slots=[1, 3], prefix_lens=[0, 0], has_last_logits=True)
    both = verification(TREES).with_chains(chains)
    assert both.logit_rows is not None
    assert both.logit_rows.tolist() == [0, 1, 2, 3, 4, 6, 7]
    alone = Pass.of_chains([[4]], slots=[2], prefix_lens=[0]).with_chains(chains)
    assert alone.logit_rows is not None
    assert alone.logit_rows.tolist() == [2, 3]
    choice = TokenChoice(inverse_temperature=torch.zeros(5), seeds=torch.zeros(5, dtype=torch.int64))
    with pytest.raises(ValueError, match="after all rows"):
        replace(verification(TREES), choice=choice).with_chains(chains)


def test_nodes_of_earlier_passes_count_as_nodes_and_not_as_tokens() -> None:
    work = Pass(
        tokens=torch.tensor([3, 4, 5]),
        positions=torch.tensor([4, 4, 5, 5, 0]),
        parents=torch.tensor([-1, -1, 0, 1, -1]),
        slots=[0, 1],
        prefix_lens=[4, 0],
        offsets=[0, 2, 3],
        num_earlier=[2, 0],
        logit_rows=None,
    )
    assert list(work.node_offsets) == [0, 4, 5]
    assert work.token_positions.tolist() == [5, 5, 0]


@st.composite
def batches(draw: st.DrawFn) -> list[TreeRow]:
    """Trees of any sizes: roots alone, all equally wide, or ragged."""
    sizes = draw(st.one_of(
        st.lists(st.just(1), min_size=1, max_size=4),
        st.integers(1, 6).flatmap(lambda size: st.lists(st.just(size), min_size=1, max_size=3)),
        st.lists(st.integers(1, 6), min_size=1, max_size=4),
    ))  # fmt: skip
    return [
        TreeRow([draw(st.integers(0, 99)) for _ in range(size)],
                [-1, *(draw(st.integers(0, node)) for node in range(size - 1))])
        for size in sizes
    ]  # fmt: skip


@given(rows=batches(), prefix=st.lists(st.integers(0, 50), min_size=4, max_size=4), last=st.integers(0, 60),
       is_known=st.booleans())  # fmt: skip
def test_any_batch_is_packed_row_by_row(rows: list[TreeRow], prefix: list[int], last: int, is_known: bool) -> None:
    """Against lists made node by node."""
    tree = TokenTree.from_rows(rows)
    tree = tree if is_known else replace(tree, host_facts=None)
    slots, prefix = list(range(len(rows))), prefix[: len(rows)]
    work = Pass.of_tree(tree, slots=slots, prefix_lens=prefix, last_position=last)
    positions = []
    for row, length in zip(rows, prefix, strict=True):
        depths = [0]
        for parent in row.parents[1:]:
            depths.append(depths[parent] + 1)
        positions += [min(length + depth, last) for depth in depths]
    assert work.tokens.tolist() == [token for row in rows for token in row.tokens]
    assert work.parents.tolist() == [parent for row in rows for parent in row.parents]
    assert work.positions.tolist() == positions
    assert list(work.offsets) == [sum(len(row.tokens) for row in rows[:end]) for end in range(len(rows) + 1)]
    assert work.logit_rows is not None
    assert work.logit_rows.tolist() == list(range(work.num_tokens))
    assert work.is_causal == all(len(row.tokens) == 1 for row in rows)
    for tensor in (work.tokens, work.parents, work.positions, work.logit_rows):
        assert (tensor.dtype, tensor.dim()) == (torch.int64, 1)
    assert tree.depths.tolist() == TokenTree.from_rows(rows).depths.tolist(), "the tree stays as it was"


def test_a_step_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees of width 1 are roots, whoever made them: nobody waits for a device to say so."""

    def looked(tensor: torch.Tensor) -> Any:
        raise AssertionError("a tensor was read")

    roots = replace(TokenTree.roots([4, 5]), host_facts=None)
    monkeypatch.setattr(torch.Tensor, "tolist", looked)
    assert verification(roots).offsets == [0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": [], "prefix_lens": [], "offsets": [0]}, "a pass has at least one sequence"),
        ({"prefix_lens": [1]}, "1 prefixes of 2 sequences"),
        ({"offsets": [0, 5]}, "2 offsets of 2 sequences, expected one more"),
        ({"num_earlier": [1, 2, 3]}, "3 numbers of earlier nodes of 2 sequences"),
    ],
)
def test_sequences_agree_in_number(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        replace(verification(TREES), **changes)


def test_a_pass_moves_as_a_whole() -> None:
    work = verification(TokenTree.from_rows([TreeRow([1, 2, 3], [-1, 0, 0]), TreeRow([4], [-1])]))
    assert work.to(torch.device("cpu")) is work
    moved = work.to(torch.device("meta"))
    for name in ("tokens", "positions", "parents", "logit_rows"):
        part = getattr(moved, name)
        assert (part.device.type, part.dtype, part.shape) == ("meta", torch.int64, getattr(work, name).shape)
    assert (moved.slots, moved.prefix_lens, moved.offsets) == (work.slots, work.prefix_lens, work.offsets)
