"""What iterations report: bounds, sums, and that a request's metrics are the sum of its parts."""

import math
from collections import Counter

import pytest
from end_to_end.request_mix import CONTEXT_LEN, plain_mix, references, request_mix
from end_to_end.tiny_llms import drafters, llm
from pairwise import slow_products

from foretoken import LLM, RequestOutput, SamplingParams
from foretoken.core.records import GenerationMetrics, StepRecord
from foretoken.decoder.cuda_graphs import WARM_UPS
from foretoken.drafters.base import Committed
from foretoken.drafting.drafting import Drafting
from foretoken.engine import acceptor, loop
from foretoken.trees import dynamic

DRAFTERS = drafters()


def run(drafter: str, batch: int) -> tuple[LLM, list[RequestOutput], list[StepRecord]]:
    """Half of the mix under a drafter, with every iteration's record."""
    mix, known, records = request_mix()[batch % 2 :: 2], references(plain_mix()), []
    engine = llm(DRAFTERS[drafter](known), max_num_seqs=batch, max_model_len=CONTEXT_LEN, on_step=records.append)
    return engine, engine.generate([r.prompt for r in mix], [r.params for r in mix]), records


@pytest.mark.parametrize(
    ("batch", "drafter"),
    slow_products([4, 1], ["none", "ngram", "draft tree", "oracle [3, 0, 5]", "oracle tree", "random wide"], each=1),
)
def test_bounds_and_sums(drafter: str, batch: int) -> None:
    engine, outputs, records = run(drafter, batch)
    steps: dict[str, list] = {output.request_id: [] for output in outputs}
    for record in records:
        assert 1 <= len(record.sequences) <= batch
        assert record.draft_error is None
        assert record.lossy_tv == 0.0
        assert min(record.seconds.draft, record.seconds.verify, record.seconds.accept, record.seconds.commit) > 0
        assert record.seconds.total == pytest.approx(
            record.seconds.draft + record.seconds.verify + record.seconds.accept + record.seconds.commit
        )
        for step in record.sequences:
            steps[step.request_id].append(step)
            assert 1 <= step.num_emitted <= step.num_accepted + 1 <= step.tree_depth + 1
            assert (
                step.tree_depth
                <= step.num_drafted
                < record.num_tokens
                <= engine.target.max_nodes * len(record.sequences)
            )
            assert sum(step.accepted_by.values()) == step.num_accepted
            assert step.num_drafted <= (step.num_proposed or 0)
    assert any(step.num_proposed for mine in steps.values() for step in mine) == (drafter != "none")
    for output in outputs:
        metrics, mine = output.metrics, steps[output.request_id]
        assert metrics.steps == sum(not s.ends_prompt for s in mine)
        assert metrics.num_prefill_emitted == sum(s.ends_prompt for s in mine)
        assert metrics.num_emitted == sum(len(c.token_ids) for c in output.outputs) == sum(s.num_emitted for s in mine)
        assert metrics.num_drafted == sum(s.num_drafted for s in mine)
        assert metrics.num_accepted == sum(s.num_accepted for s in mine) == metrics.accepted_by.total()
        decoded = sum(s.num_emitted for s in mine if not s.ends_prompt)
        assert metrics.mean_acceptance_length == pytest.approx(decoded / max(metrics.steps, 1))
        rates = [
            sum(s.num_accepted >= depth for s in mine) / sum(s.tree_depth >= depth for s in mine)
            for depth in range(1, max(s.tree_depth for s in mine) + 1)
        ]
        assert metrics.acceptance_by_depth == pytest.approx(rates)
        assert metrics.lossy_tv == 0.0


@pytest.mark.parametrize(
    ("is_free", "drafter"),
    slow_products([True, False], ["draft dynamic", "eagle dynamic", "eagle3 dynamic", "eagle"], each=1),
)
def test_acceptance_by_depth_is_that_of_the_verified_trees(
    drafter: str, is_free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamic trees differ in depth, which only the device knows where reads are not free."""
    for module in (dynamic, acceptor):
        monkeypatch.setattr(module, "reads_are_free", lambda _: is_free)
    reached, accepted = Counter[int](), Counter[int]()

    def counting(self: Drafting, committed: Committed) -> None:
        if committed.verified is not None:
            tree = committed.verified.tree
            for row, path in zip(tree.rows(), committed.verified.paths, strict=True):
                depths = [0]
                for parent in row.parents[1:]:
                    depths.append(depths[parent] + 1)
                reached.update(range(1, max(depths) + 1))
                accepted.update(range(1, len(path) + 1))
        commit(self, committed)

    commit = Drafting.commit
    monkeypatch.setattr(Drafting, "commit", counting)
    known = references(plain_mix())
    params = SamplingParams(temperature=0.0, max_tokens=23, ignore_eos=True)  # nothing stops inside a path
    engine = llm(DRAFTERS[drafter](known), max_num_seqs=3, max_model_len=CONTEXT_LEN)
    outputs = engine.generate([text[:6] for text in known[:4]], params)
    total = GenerationMetrics.total(output.metrics for output in outputs)
    assert dict(total.drafted_at_depth) == dict(reached)
    assert {depth: n for depth, n in total.accepted_at_depth.items() if n} == dict(accepted)
    assert total.acceptance_by_depth == [accepted[depth] / n for depth, n in sorted(reached.items())]
    assert sorted(reached) == list(range(1, max(reached) + 1))
    assert accepted[1]
    assert 0 < min(reached.values()) < max(reached.values())


def test_a_pass_that_stops_inside_the_path_counts_what_it_kept() -> None:
    """Tokens after the stop were accepted by the rule and emitted by nobody."""
    engine = llm({})
    plain = engine.generate([5], SamplingParams(temperature=0.0, max_tokens=12))[0]
    oracle = DRAFTERS["oracle [3, 0, 5]"]([[5, *plain.outputs[0].token_ids]])
    stop = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[plain.outputs[0].token_ids[1]])
    output = llm(oracle).generate([5], stop)[0]
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids[:2]
    assert (output.metrics.steps, output.metrics.num_emitted, output.metrics.num_accepted) == (1, 2, 2)


def test_a_scripted_oracle_is_accepted_by_the_script() -> None:
    """Three right, none right, five right: 4 + 1 + 6 tokens, and again."""
    plain = llm({}).generate([5], SamplingParams(temperature=0.0, max_tokens=22))[0].outputs[0].token_ids
    records: list[StepRecord] = []
    oracle = DRAFTERS["oracle [3, 0, 5]"]([[5, *plain]])
    metrics = (
        llm(oracle, on_step=records.append).generate([5], SamplingParams(temperature=0.0, max_tokens=22))[0].metrics
    )
    assert [record.sequences[0].num_emitted for record in records] == [4, 1, 6, 4, 1, 6]
    assert metrics.mean_acceptance_length == pytest.approx(22 / 6)
    assert metrics.accepted_by == Counter(oracle=16)


def test_total_adds_everything_and_changes_nothing() -> None:
    _, outputs, _ = run("draft tree", 4)
    parts = [output.metrics for output in outputs]
    before = [part.as_dict() for part in parts]
    total = GenerationMetrics.total(parts)
    for name, value in total.as_dict().items():
        if name.endswith("seconds") or name in ("steps", "num_emitted", "num_drafted", "num_accepted", "draft_errors"):
            assert value == pytest.approx(sum(part[name] for part in before))
    assert total.drafted_at_depth[1] == sum(part.drafted_at_depth[1] for part in parts)
    decoded = total.num_emitted - total.num_prefill_emitted
    assert total.mean_acceptance_length == pytest.approx(decoded / total.steps)
    assert [part.as_dict() for part in parts] == before
    assert GenerationMetrics.total([]).as_dict() == GenerationMetrics().as_dict()
    assert GenerationMetrics().mean_acceptance_length == 0.0


@pytest.mark.parametrize(("rule", "is_known"), [("lenient", True), ("typical", False)])
def test_lossy_rules_say_so(rule: str, is_known: bool) -> None:
    """Greedy text that the lenient rule bends costs total variation; the typical rule cannot tell how much."""
    config = {
        "method": "drafters.adversarial",
        "behaviour": "random",
        "tree": "chain",
        "acceptance": rule,
        "lenience": 0.05,
    }
    records: list[StepRecord] = []
    engine = llm({"speculative_config": config}, on_step=records.append)
    metrics = engine.generate([5], SamplingParams(temperature=0.0, max_tokens=60))[0].metrics
    if is_known:
        assert metrics.lossy_tv > 0.0
        assert metrics.lossy_tv == pytest.approx(sum(record.lossy_tv for record in records))
    else:
        assert math.isnan(metrics.lossy_tv)


def test_controllers_learn_nothing_from_iterations_that_captured_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such an iteration takes as long as a hundred others, and would end drafting for as long."""
    records: list[StepRecord] = []
    learned: list[StepRecord] = []
    monkeypatch.setattr(Drafting, "learn_step", lambda self, draft, record: learned.append(record))
    verify = loop.verification

    def captures(*arguments: object, **options: object) -> object:
        WARM_UPS.count += len(records) in (2, 3)
        return verify(*arguments, **options)

    monkeypatch.setattr(loop, "verification", captures)
    engine = llm({}, max_num_seqs=1, max_model_len=CONTEXT_LEN, on_step=records.append)
    engine.generate([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    kept = [record.seconds for number, record in enumerate(records) if number not in (2, 3)]
    assert [record.seconds for record in learned] == kept
    assert len(records) == len(kept) + 2
