"""Which rule verifies which request, and several rules over one batch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.tiny_llms import noisy_directory, target
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import VOCAB, Batch, batches, chains

from foretoken import LLM
from foretoken.acceptance.select import LOSSLESS_RULES, AcceptancePolicy, accept
from foretoken.core.errors import ConfigError
from foretoken.core.sampling_params import SamplingParams
from foretoken.core.token_tree import DraftDistributions, DrawKind, TokenTree, TreeRow
from foretoken.sampling.batch import SamplingBatch, SamplingRequest
from foretoken.sampling.node_scores import NodeScores
from foretoken.trees.merge import compacted


def sampled(parents: list[int], kinds: list[int], *, others: list[TreeRow] | None = None) -> TokenTree:
    """One tree with a distribution, perhaps among others."""
    tree = TokenTree.from_rows([TreeRow([0] * len(parents), parents), *(others or [])])
    padded = torch.tensor(kinds + [0] * (tree.width - len(kinds))).expand(tree.batch_size, -1)
    rows = torch.full((tree.batch_size, 1, 3), 1 / 3)
    siblings = max(map(parents.count, parents))
    distributions = DraftDistributions(kinds=padded, rows=rows, row_of=padded * 0, max_siblings=siblings)
    return replace(tree, distributions=distributions)


DRAWN, CHOSEN, DISTINCT = DrawKind.INDEPENDENT.value, DrawKind.ONE_HOT.value, DrawKind.WITHOUT_REPLACEMENT.value
CHAIN = sampled([-1, 0, 1], [0, DRAWN, DRAWN])
TREE = sampled([-1, 0, 0], [0, DISTINCT, DISTINCT])
CUT_TREE = sampled([-1, 0, 1, 2, 2], [0, DRAWN, DRAWN, DISTINCT, DISTINCT])  # its siblings are left out below
CUT_TREE = compacted(CUT_TREE, torch.tensor([[True, True, True, False, False]])).narrowed()
MIXED_CHAIN = sampled([-1, 0, 1], [0, DRAWN, CHOSEN])
CHOSEN_TREE = sampled([-1, 0, 0], [DRAWN, CHOSEN, CHOSEN])  # the root's kind means nothing
RAGGED_CHAINS = sampled([-1, 0, 1], [0, DRAWN, DRAWN], others=[TreeRow([0], [-1])])
ONE_HOT_CHAIN, ONE_HOT_TREE = replace(CHAIN, distributions=None), replace(TREE, distributions=None)


@pytest.mark.parametrize(
    ("rule", "tree", "is_greedy", "is_seeded", "expected"),
    [
        ("auto", CHAIN, True, False, "greedy"),
        ("auto", TREE, True, True, "greedy"),
        ("auto", CHAIN, False, True, "coupled"),
        ("auto", TREE, False, True, "coupled"),
        ("auto", ONE_HOT_TREE, False, False, "coupled"),
        ("auto", CHAIN, False, False, "block"),
        ("auto", RAGGED_CHAINS, False, False, "block"),
        ("auto", TREE, False, False, "sequential"),
        ("auto", MIXED_CHAIN, False, False, "sequential"),
        ("auto", CUT_TREE, False, False, "sequential"),
        ("block", CUT_TREE, False, False, "sequential"),
        ("block", CHAIN, False, True, "block"),
        ("block", TREE, False, False, "sequential"),
        ("block", ONE_HOT_CHAIN, False, False, "sequential"),
        ("block", CHAIN, True, False, "greedy"),
        ("sequential", CHAIN, False, True, "sequential"),
        ("sequential", ONE_HOT_TREE, False, False, "sequential"),
        ("traversal", TREE, False, True, "traversal"),
        ("traversal", CHAIN, False, False, "traversal"),
        ("traversal", MIXED_CHAIN, False, False, "traversal"),
        ("traversal", ONE_HOT_TREE, False, False, "sequential"),
        ("traversal", CHOSEN_TREE, False, False, "sequential"),
        ("traversal", TREE, True, False, "greedy"),
        ("coupled", TREE, False, False, "coupled"),
        ("coupled", TREE, True, False, "greedy"),
        ("lenient", CHAIN, False, False, "lenient"),
        ("lenient", ONE_HOT_CHAIN, True, False, "lenient"),
        ("lenient", MIXED_CHAIN, False, True, "lenient"),
        ("lenient", TREE, False, False, "sequential"),
        ("lenient", ONE_HOT_TREE, True, False, "greedy"),
        ("typical", TREE, False, False, "typical"),
        ("typical", TREE, True, False, "typical"),
    ],
)
def test_rule_for(rule: str, tree: TokenTree, is_greedy: bool, is_seeded: bool, expected: str) -> None:
    policy = AcceptancePolicy(rule=rule)
    assert policy.rule_for(tree, is_greedy=is_greedy, is_seeded=is_seeded) == expected
    assert policy.is_lossy == (rule in ("lenient", "typical"))


@pytest.mark.parametrize("rule", ["auto", "block"])
def test_drawn_chains_that_others_may_join_are_no_blocks(rule: str) -> None:
    policy = AcceptancePolicy(rule=rule)
    assert policy.rule_for(CHAIN, is_greedy=False, is_seeded=False) == "block"
    assert policy.rule_for(CHAIN, is_greedy=False, is_seeded=False, is_mixed=True) == "sequential"


@pytest.mark.parametrize("rule", [*LOSSLESS_RULES[1:], "auto", "lenient", "typical"])
@pytest.mark.parametrize("is_seeded", [True, False])
def test_drafts_share_the_targets_noise_only_under_coupling(rule: str, is_seeded: bool) -> None:
    """Drafts that look at the target's noise are biased under any other rule, on any tree."""
    policy = AcceptancePolicy(rule=rule)
    if policy.is_coupled(is_seeded=is_seeded):
        rules = {policy.rule_for(tree, is_greedy=False, is_seeded=is_seeded) for tree in (CHAIN, TREE, ONE_HOT_TREE)}
        assert rules == {"coupled"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rule": "blok"}, "acceptance rule 'blok' does not exist. Did you mean 'block'? Known: auto, block, "),
        ({"rule": "greedy"}, "acceptance rule 'greedy' does not exist"),
        ({"lenience": 0.0}, "'lenience' is 0.0. Expected above 0 and at most 1."),
        ({"lenience": 1.5}, "'lenience' is 1.5. Expected"),
        ({"lenience": float("nan")}, "'lenience' is nan. Expected"),
        ({"posterior_threshold": 0.0}, "'posterior_threshold' is 0.0. Expected above 0 and at most 1."),
        ({"posterior_alpha": 2}, "'posterior_alpha' is 2. Expected above 0 and at most 1."),
        ({"typical_end": "sample"}, "'typical_end' is 'sample'. Expected 'draw' or 'argmax'."),
    ],
)
def test_policy_refuses(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        AcceptancePolicy(**settings)
    assert message in str(error.value)


def scores_of(batch: Batch, is_greedy: list[bool]) -> NodeScores:
    requests = [
        SamplingRequest(params=SamplingParams(temperature=0.0 if greedy else 1.0), seed=int(seed))
        for greedy, seed in zip(is_greedy, batch.seeds, strict=True)
    ]
    tree = batch.tree
    return NodeScores(
        tree=tree,
        logits=batch.log_probs.flatten(0, 1),
        starts=torch.arange(tree.batch_size) * tree.width,
        batch=SamplingBatch.build(requests, VOCAB),
        history=None,
    )


@given(batch=batches())
@settings(max_examples=20)
def test_a_policy_says_how_typical_paths_end(batch: Batch) -> None:
    """With the argmax the last token is the target's most probable one after the path; the path is the same."""
    rules, scores = ["typical"] * batch.tree.batch_size, scores_of(batch, [False] * batch.tree.batch_size)
    drawn, best = (
        accept(scores, rules, AcceptancePolicy(rule="typical", typical_end=end), batch.root_positions)
        for end in ("draw", "argmax")
    )
    assert torch.equal(drawn.path, best.path)
    last = torch.cat([torch.zeros_like(batch.root_positions).unsqueeze(1), best.path], dim=1).amax(1)
    distributions = scores.log_probs(last)
    assert torch.equal(best.next_token, distributions.argmax(1))


def assert_each_row_gets_its_rule(batch: Batch, rules: list[str]) -> None:
    policy = AcceptancePolicy()
    is_greedy = [rule == "greedy" for rule in rules]
    together = accept(scores_of(batch, is_greedy), rules, policy, batch.root_positions)
    for row, rule in enumerate(rules):
        only = batch.alone(row)
        alone = accept(scores_of(only, [is_greedy[row]]), [rule], policy, only.root_positions)
        depth = alone.path.shape[1]
        assert together.path[row].tolist() == alone.path[0].tolist() + [-1] * (together.path.shape[1] - depth)
        assert together.num_accepted[row] == alone.num_accepted[0]
        assert together.next_token[row] == alone.next_token[0]
        torch.testing.assert_close(together.lossy_tv[row].double(), alone.lossy_tv[0].double(), equal_nan=True)


@settings(max_examples=40)
@given(batch=batches(max_nodes=12), data=st.data())
def test_rules_side_by_side_on_trees(batch: Batch, data: st.DataObject) -> None:
    names = st.sampled_from(["greedy", "coupled", "sequential", "traversal", "typical"])
    assert_each_row_gets_its_rule(batch, [data.draw(names) for _ in range(batch.tree.batch_size)])


@settings(max_examples=40)
@given(batch=chains(), data=st.data())
def test_rules_side_by_side_on_chains(batch: Batch, data: st.DataObject) -> None:
    names = st.sampled_from([*LOSSLESS_RULES, "lenient", "typical"])
    assert_each_row_gets_its_rule(batch, [data.draw(names) for _ in range(batch.tree.batch_size)])


def documented_rules() -> dict[str, str]:
    """Each rule of docs/lossless.md, and which text it promises a seeded request."""
    page = (Path(__file__).parents[2] / "docs" / "lossless.md").read_text(encoding="utf-8")
    table = page.partition("## Acceptance rules")[2].split("\n\n")[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]
    place = rows[0].index("text of a seeded request")
    return {row[0].strip("`"): row[place] for row in rows[2:]}


@pytest.mark.parametrize("rule", sorted({*LOSSLESS_RULES, "auto"}))
def test_a_seed_gives_the_text_that_the_documentation_promises(rule: str) -> None:
    """Two trees from the same drafter: a named rule need not write plain decoding's text, `auto` and `coupled` do."""
    promised = "plain decoding's" if rule == "auto" else documented_rules()[rule]
    params = [SamplingParams(temperature=0 if rule == "greedy" else 1, seed=seed, max_tokens=24) for seed in range(4)]
    texts = []
    for tree in (None, {"widths": [2, 2]}, "chain"):
        config: dict[str, Any] = {"method": "draft_model", "model": noisy_directory(), "tree": tree}
        config |= {} if rule == "greedy" else {"acceptance": rule}
        engine = LLM(target(), speculative_config=None if tree is None else config)
        texts.append([each.outputs[0].token_ids for each in engine.generate([[5, 6, 7]] * 4, params)])
    assert (texts[0] == texts[1] == texts[2]) == (promised == "plain decoding's")
    assert promised.startswith(("plain decoding's", "another"))
