"""Trees under a grammar: forbidden nodes go, drawn ones and probes stay, forced chains come, others are left alone."""

import torch
from end_to_end.tiny_llms import PIECES, tokenizer
from tiny_models import EOS_ID, VOCAB_SIZE

from foretoken import SamplingParams
from foretoken.core.token_tree import PROBE, DraftDistributions, DrawKind, TokenTree, TreeRow
from foretoken.grammars.compiling import Grammars
from foretoken.grammars.drafts import GrammarBounds, constrained_tree
from foretoken.sampling.node_scores import GrammarState
from tests.tree_checks import check_tree

A, B, T, H, E = (PIECES.index(piece) for piece in (b"a", b"b", b"t", b"h", b"e"))
FORCED = 4


def state(regex: str) -> GrammarState:
    params = SamplingParams(structured_outputs={"regex": regex})
    found = Grammars(tokenizer(), VOCAB_SIZE, [EOS_ID]).state_of(params)
    assert found is not None
    return found


def bounds(regex: str, max_depth: int = 9, max_nodes: int = 32) -> GrammarBounds:
    return GrammarBounds(state=state(regex), max_depth=max_depth, max_nodes=max_nodes)


def test_forbidden_nodes_go_and_forced_chains_come() -> None:
    """The second sequence has no grammar."""
    row = TreeRow([9, A, T, B, H, B], [-1, 0, 0, 1, 1, 4])
    tree = TokenTree.from_rows([row, row])
    found = constrained_tree(tree, [bounds("(a|b)(b|hth)e"), None], source=FORCED)
    check_tree(found.tree)
    ours, other = found.tree.rows()
    assert other == row
    # 9 ─ a ─┬─ b ─ e, and h ─ the rest of "hth", then "e"; the b below h is forbidden.
    assert list(ours.tokens[:4]) == [9, A, B, H]
    assert sorted(ours.parents[4:]) == [2, 3, 5, 6]
    assert sorted(ours.tokens[4:]) == sorted([E, T, H, E])
    assert found.num_forced == 4
    assert found.tree.source is not None
    assert found.tree.source[0].tolist()[4:] == [FORCED] * 4
    assert found.tree.source[1].tolist()[1:6] == [1] * 5
    facts = found.tree.host_facts
    assert facts is not None
    assert list(facts.num_nodes) == [8, 6]


def test_nothing_to_change_is_the_tree_itself() -> None:
    tree = TokenTree.from_rows([TreeRow([9, A, B], [-1, 0, 0])])
    assert constrained_tree(tree, [bounds("[ab]{2,9}")], source=FORCED).tree is tree


def test_chains_stay_within_depth_and_room() -> None:
    text = "abbabbabbabbabbabbabba"
    roots = TokenTree.roots([9])
    for depth, nodes, length in ((9, 32, 9), (0, 32, 0), (40, 5, 4), (40, 512, 16)):
        found = constrained_tree(roots, [bounds(text, depth, nodes)], source=FORCED)
        assert found.num_forced == length
        assert found.tree.rows()[0].tokens[1:] == state(text).forced[:length]


def test_drawn_nodes_and_probes_stay() -> None:
    """To leave a drawn node out for its token would bias what is generated; probes are no part of the text."""
    row = TreeRow([9, T, H, T, T], [-1, 0, 1, 0, 3])
    kinds = torch.tensor([[0, DrawKind.INDEPENDENT, DrawKind.ONE_HOT, DrawKind.ONE_HOT, DrawKind.ONE_HOT]])
    drafts = DraftDistributions(
        kinds=kinds, rows=torch.full((1, 1, VOCAB_SIZE), 1 / VOCAB_SIZE), row_of=torch.tensor([[-1, 0, -1, -1, -1]]),
        max_siblings=1,
    )  # fmt: skip
    tree = TokenTree.from_rows([row])
    source = torch.tensor([[1, 1, 1, 1 | PROBE, 1 | PROBE]])
    marked = TokenTree(
        tokens=tree.tokens, parents=tree.parents, depths=tree.depths, num_nodes=tree.num_nodes, max_depth=2,
        source=source, distributions=drafts,
    )  # fmt: skip
    found = constrained_tree(marked, [bounds("[ab]{2,9}")], source=FORCED).tree
    assert found.rows()[0] == TreeRow([9, T, T, T], [-1, 0, 0, 2])
    assert found.source is not None
    assert (found.source[0] & PROBE != 0).tolist() == [False, False, True, True]
    assert found.distributions is not None
    assert found.distributions.kinds[0].tolist() == [0, 1, 0, 0]
