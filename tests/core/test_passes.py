"""What a pass is made of: trees without their padding, chunks of prompts, and both together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foretoken.core.passes import Pass
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


def test_logits_belong_to_the_first_of_both() -> None:
    chains = Pass.of_chains([[4]], slots=[1], prefix_lens=[0], has_last_logits=True)
    with pytest.raises(ValueError, match="logits belong to the first"):
        verification(TREES).with_chains(chains)


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
