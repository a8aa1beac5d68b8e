"""The oracle is right as often as its script says, and never by accident."""

from typing import Any

import pytest
from drafting_contexts import attached, begin, context, verified
from tiny_models import VOCAB_SIZE

from foretoken.drafters.base import Committed
from foretoken.drafters.oracle import Options, OracleDrafter
from tests.tree_checks import check_tree

TEXT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]


def oracle(pattern: tuple[int, ...], **options: Any) -> OracleDrafter:
    """An oracle that knows one text."""
    options = {"references": [TEXT, [1, 2]], "pattern": pattern, **options}
    made: OracleDrafter = attached(OracleDrafter(Options(method="oracle", **options)))
    return made


def commit(drafter: OracleDrafter, slot: int = 0) -> None:
    """One verified pass."""
    drafter.commit(Committed(slots=[slot], starts=[0], tokens=[[5]], features=None, verified=verified()))


def test_a_chain_is_right_as_far_as_the_script_says() -> None:
    drafter = oracle((2, 0, 3))
    for right in (2, 0, 3, 2):
        for _ in range(2):  # a proposal may be thrown away: only a verified pass moves the script on
            tokens = drafter.propose(context([TEXT[:4]])).rows()[0].tokens
            wrong = [(token + 2) % VOCAB_SIZE for token in TEXT[4 + right : 7]]
            assert tokens == [8, *TEXT[4 : 4 + right], *wrong]
        commit(drafter)


def test_with_siblings_the_right_node_comes_second() -> None:
    tree = oracle((1,), tree="tree", num_speculative_tokens=2).propose(context([TEXT[:1]]))
    check_tree(tree)
    assert tree.rows()[0] == ([5, 7, 6, 8, 9], [-1, 0, 0, 2, 2])  # wrong, right, then wrong and twice wrong


def test_it_stays_within_depth_and_text() -> None:
    drafter = oracle((4,))
    assert drafter.propose(context([TEXT[:8]], max_depth=1)).rows()[0].tokens == [12, 13]
    assert drafter.propose(context([TEXT[:8]], max_depth=9)).rows()[0].tokens == [12, 13, 14]
    assert drafter.propose(context([TEXT[:8]], max_depth=0)).width == 1
    assert list(drafter.nodes_by_depth) == [1, 2, 3, 4, 5]
    assert list(oracle((4,), tree="tree").nodes_by_depth) == [1, 3, 5, 7, 9]


def test_an_unknown_text_gets_no_draft_and_slots_are_forgotten() -> None:
    drafter = oracle((2,))
    assert drafter.propose(context([[3, 3]])).width == 1
    assert drafter.propose(context([TEXT[:2]])).width == 3, "another text may fit where the first does not"
    drafter.release(0)
    begin(drafter, 0)
    assert drafter.propose(context([TEXT[:2]])).rows()[0].tokens == [6, 7, 8]
    commit(drafter)
    drafter.release(0)
    begin(drafter, 0)
    assert drafter.propose(context([TEXT[:2]])).rows()[0].tokens == [6, 7, 8], "the script begins again too"


@pytest.mark.parametrize("prefilled", [True, False])
def test_prefill_is_no_pass_of_the_script(prefilled: bool) -> None:
    drafter = oracle((1, 0))
    if prefilled:
        drafter.commit(Committed(slots=[0], starts=[0], tokens=[[5]], features=None))
    assert drafter.propose(context([TEXT[:2]])).rows()[0].tokens == [6, 7]
