"""Requests that allow no drafts or few nodes: their text and that of the others is what it is, others keep theirs."""

from collections import defaultdict
from typing import Any

import pytest
import torch
from end_to_end.request_mix import CONTEXT_LEN, plain_mix, references, request_mix
from end_to_end.tiny_llms import RUNNERS, drafters, llm

from foretoken import SamplingParams
from foretoken.core.records import SequenceStep, StepRecord
from foretoken.core.token_tree import DraftDistributions, DrawKind, TokenTree, TreeRow
from foretoken.drafting.draft_guard import within_node_limits
from tests.tree_checks import check_tree

DRAFTERS = {runner: drafters(dtype=dtype) for runner, dtype in RUNNERS.items()}
WAYS: list[dict[str, Any]] = [
    {}, {"speculative": {"enabled": False}}, {"speculative": {"max_nodes": 2}},
    {"speculative": {"enabled": True, "max_nodes": 5}}, {"speculative": {"enabled": False, "max_nodes": 5}},
]  # fmt: skip
MOST_DRAFTED = [1000, 0, 1, 4, 0]


NAMES = (
    "ngram", "ngram tree", "suffix tree adaptive", "two lookups", "lookahead", "recycling", "draft itself",
    "draft itself tree", "draft itself dynamic", "draft widths", "sampled draft and lookahead", "medusa", "heads",
    "oracle tree",
)  # fmt: skip


@pytest.mark.parametrize(
    ("drafter", "runner"),
    [
        *((name, "lean-native") for name in NAMES), ("draft itself tree", "generic"), ("two lookups", "lean-stock"),
        *(pytest.param(name, "generic", marks=pytest.mark.slow) for name in NAMES if name != "draft itself tree"),
    ],
)  # fmt: skip
def test_texts_are_those_of_plain_decoding(drafter: str, runner: str) -> None:
    """The whole mix, greedy and seeded, each request bounded in another way from batch to batch."""
    mix, plain = request_mix(), plain_mix(runner)
    steps: dict[str, list[SequenceStep]] = defaultdict(list)

    def note(record: StepRecord) -> None:
        for step in record.sequences:
            steps[step.request_id].append(step)

    engine = llm(
        DRAFTERS[runner][drafter](references(plain_mix())), max_num_seqs=4, max_model_len=CONTEXT_LEN, runner=runner,
        on_step=note,
    )  # fmt: skip
    prompts = [{"prompt_token_ids": each.prompt, **WAYS[i % len(WAYS)]} for i, each in enumerate(mix)]
    outputs = engine.generate(prompts, [each.params for each in mix])
    for output, want in zip(outputs, plain, strict=True):
        assert [c.token_ids for c in output.outputs] == [c.token_ids for c in want.outputs]
        assert [c.text for c in output.outputs] == [c.text for c in want.outputs]
    accepted = [0] * len(WAYS)
    for index, output in enumerate(outputs):
        way = index % len(WAYS)
        assert all(step.num_drafted <= MOST_DRAFTED[way] for step in steps[output.request_id])
        accepted[way] += output.metrics.num_accepted
    assert accepted[1] == accepted[4] == 0
    if drafter.startswith("draft itself"):
        assert accepted[0] > 20
        assert accepted[2] > 10
        assert accepted[3] > 10


@pytest.mark.parametrize("drafter", ["draft itself", "draft itself tree", "draft widths"])
def test_drawn_drafts_of_others_are_kept(drafter: str) -> None:
    """Without a seed tokens are drawn from the draft's distribution, which those of the bounded request must not spoil.

    Drafts of the target's own distribution are all accepted as long as they count as drawn.
    """
    records: list[StepRecord] = []
    engine = llm(DRAFTERS["generic"][drafter](None), max_num_seqs=2, on_step=records.append, seed=None)
    params = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True)
    bounded = {"prompt_token_ids": [6], "speculative": {"enabled": False}}
    free = engine.generate([{"prompt_token_ids": [5]}, bounded], params)[0]
    assert [step.num_drafted for record in records for step in record.sequences if step.request_id == "1"] == [0] * 30
    if drafter == "draft itself":
        steps = [step for record in records for step in record.sequences if step.request_id == free.request_id]
        assert all(step.num_accepted == step.tree_depth for step in steps)


def test_a_batch_without_drafts_leaves_the_controller_alone() -> None:
    """Requests that want none teach it nothing: those that come after are drafted for as if they had never been."""
    found = []
    for before in (0, 3):
        records: list[StepRecord] = []
        engine = llm(DRAFTERS["generic"]["draft itself"](None), max_num_seqs=2, on_step=records.append)
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        for _ in range(before):
            engine.generate({"prompt_token_ids": [6], "speculative": {"enabled": False}}, params)
        assert not any(record.asked for record in records)
        records.clear()
        engine.generate([5], params)
        found.append([step.num_drafted for record in records for step in record.sequences])
    assert found[0] == found[1]


def test_trees_are_cut_to_their_first_nodes() -> None:
    """Row 1 alone is cut; what is left of it counts as chosen, and row 0 keeps its draws."""
    tree = TokenTree.from_rows([TreeRow([1, 2, 3], [-1, 0, 0]), TreeRow([4, 5, 6, 7, 8], [-1, 0, 1, 1, 2])])
    kinds = torch.full((2, 5), DrawKind.INDEPENDENT)
    drawn = DraftDistributions(kinds=kinds, rows=torch.ones(2, 1, 9) / 9, row_of=kinds * 0, max_siblings=2)
    tree = TokenTree(
        tokens=tree.tokens, parents=tree.parents, depths=tree.depths, num_nodes=tree.num_nodes, max_depth=3,
        distributions=drawn,
    )  # fmt: skip
    cut = within_node_limits(tree, [None, 4])
    check_tree(cut.first_nodes(4))
    assert cut.width == 5, "row 0 may have as many"
    assert (
        cut.first_nodes(4).rows()
        == cut.rows()
        == [TreeRow([1, 2, 3], [-1, 0, 0]), TreeRow([4, 5, 6, 7], [-1, 0, 1, 1])]
    )
    assert cut.distributions is not None
    assert (cut.distributions.kinds[0] == DrawKind.INDEPENDENT).all()
    assert (cut.distributions.kinds[1] == DrawKind.ONE_HOT).all()
    assert (cut.distributions.row_of[1] == -1).all()
    assert within_node_limits(tree, [None, None]) is tree
