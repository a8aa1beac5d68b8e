"""Published policies: their schedules, SmartSpec against a search, and unchanged text through the engine."""

from typing import Any

import pytest
from drafters.drafting_contexts import record, step
from end_to_end.tiny_llms import llm

from foretoken import SamplingParams
from foretoken.core.records import StepRecord
from foretoken.drafting.policies import ByBatchSize, Heuristic, SmartSpec
from foretoken.runner.costs import CostCurve, PassCosts

NODES = [range(1, 10)]


def told(*steps: tuple[int, int]) -> StepRecord:
    """An iteration; steps: depth and accepted tokens of each sequence."""
    return record([step(range(n + 1), depth) for depth, n in steps], 1, verify=0.0)


def test_the_heuristic_goes_two_deeper_or_one_shallower() -> None:
    made, depths = Heuristic(64), []
    for steps in ([(5, 5)], [(7, 7), (7, 7)], [(9, 9), (9, 8)], [(0, 0)], *[[(8, 0)]] * 9):
        depths.append(made.allot(len(steps)).allowances[0].depth)
        made.learn_step(told(*steps))
    assert depths == [5, 7, 9, 8, 8, 7, 6, 5, 4, 3, 2, 1, 1]


def test_a_table_gives_the_depth_of_its_range() -> None:
    made = ByBatchSize(((2, 4, 3), (5, 8, 0)), 64)
    depths = [made.allot(batch).allowances[0].depth for batch in (1, 2, 4, 5, 8, 9)]
    assert depths == [0, 3, 3, 0, 0, 0]
    assert made.allot(5).is_empty
    assert made.allot(5).declined is None


@pytest.mark.parametrize("batch", [1, 4, 32])
@pytest.mark.parametrize("slope", [0.0, 0.02, 0.4])
@pytest.mark.parametrize("acceptance", [0.2, 0.6, 0.9])
def test_smartspec_takes_the_greatest_goodput(batch: int, slope: float, acceptance: float) -> None:
    """Against a search by the formulas of the paper; it ends where nothing pays at large batches."""
    made = SmartSpec(CostCurve((1, 16, 64), [1 + slope * n for n in (1, 16, 64)]), [[(1, 0.15), (4, 0.45)]], NODES, 9)
    for i in range(4000):
        made.learn_step(told((1, int((i * 0.6180339887) % 1 < acceptance))))

    def goodput(k: int) -> float:
        tokens = sum(acceptance**d for d in range(k + 1))
        return batch * tokens / ((0.05 + 0.1 * k if k else 0.0) + 1 + slope * batch * (k + 1))

    depth = made.allot(batch).allowances[0].depth
    assert goodput(depth) >= 0.99 * max(map(goodput, range(9)))
    if slope * batch > 1 and acceptance < 0.5:
        assert depth == 0


def test_smartspec_learns_what_a_draft_of_a_batch_costs() -> None:
    """Drafts of eight sequences take eight times as long as the timed ones of one sequence, so none pays there."""
    made = SmartSpec(CostCurve((1, 64), (1.0, 1.0)), [[(1, 0.15), (4, 0.45)]], NODES, 9)
    assert made.allot(8).allowances[0].depth >= 3
    for _ in range(200):
        made.learn_step(record([step([1, 2], 4)] * 8, 1, (0, 4, 8 * 0.45), verify=0.0))
    assert made.allot(8).is_empty
    assert made.allot(1).allowances[0].depth >= 1, "one sequence drafts as before"


TABLE = {"num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 2, 0], [3, 8, 2]]}


@pytest.mark.parametrize(
    ("config", "batch"),
    [
        ({"control": "fixed"}, 3), ({"control": "heuristic"}, 1), ({"control": "smartspec"}, 3), (TABLE, 1), (TABLE, 3),
    ],
)  # fmt: skip
def test_every_policy_leaves_the_text_as_it_is(
    config: dict[str, Any], batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = CostCurve((1, 64), (1.0, 1.0))  # else SmartSpec may find on a busy machine that nothing pays
    monkeypatch.setattr("foretoken.entrypoints.llm.pass_costs", lambda model, name: PassCosts(*[free] * 3))
    monkeypatch.setattr("foretoken.drafting.choice.time_drafts", lambda drafter, target: [])
    prompts = [[5, 6, 7, 5, 6], [8, 9, 8, 9, 8], [5, 5, 5, 5]]
    params = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.0)
    records: list[StepRecord] = []
    drafters = ["ngram", {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3}]
    made = llm({"speculative_config": {"drafters": drafters, **config}}, max_num_seqs=batch, on_step=records.append)
    plain = llm({}, max_num_seqs=batch).generate(prompts, params)
    assert [o.outputs[0].token_ids for o in made.generate(prompts, params)] == [o.outputs[0].token_ids for o in plain]
    assert any(step.num_drafted for each in records for step in each.sequences)
    if batch == 1 and "control" not in config:
        assert max(step.tree_depth for each in records for step in each.sequences) <= 3
