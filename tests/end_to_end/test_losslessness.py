"""Whatever the drafter, the tree and the batch: the text is the text of plain decoding, to the last log-probability."""

from __future__ import annotations

from itertools import chain, product
from typing import Any
from unittest import mock

import pytest
import torch
from end_to_end.request_mix import CONTEXT_LEN, plain_mix, references, request_mix, with_predictions
from end_to_end.same_text import assert_same_text
from end_to_end.tiny_heads import STEP_HEADS, head
from end_to_end.tiny_llms import RUNNERS, drafters, llm
from tiny_models import tiny_model

from foretoken import SamplingParams
from foretoken.core.records import StepRecord
from foretoken.core.results import GenerationMetrics
from foretoken.decoder.native_head import HeadKernels

DRAFTERS = {runner: drafters(dtype=dtype) for runner, dtype in RUNNERS.items()}
NAMES = list(DRAFTERS["generic"])
TRACED = {"none", "draft tree", "draft itself dynamic", "heads", "hydra", "two lookups"}  # what traces cost, no more
# A Latin square: every drafter with every runner, every drafter with every batch size, every batch size on every
# runner. A drafter meets half of the mix in the batch of eight, and a quarter of it in each of the smaller ones: so
# every drafter meets every request, and greedy and sampled ones on every runner. In all batches there are more
# sequences than slots. `test_the_cases_cover` counts.
BATCHES = (8, 3, 1)
CASES = [
    (name, BATCHES[(drafter + runner) % 3], runner_name)
    for drafter, name in enumerate(NAMES) for runner, runner_name in enumerate(RUNNERS)
]  # fmt: skip
# Tokens a pass that a drafter must reach on the mix, so that commits and bonus tokens are known to have been tested.
# Measured on the generic runner over the whole mix: 10 % above these. The half of it that the larger batch has must
# bring half of what is above one token, on every runner.
AT_LEAST = {
    "draft": 1.75, "draft itself": 2.9, "draft tree": 2.1, "draft itself tree": 4.0, "draft choices": 2.0,
    "draft widths": 2.1, "draft intersection": 1.4, "draft intersection dynamic": 1.7, "draft text": 1.1,
    "oracle [2]": 2.2, "oracle [3, 0, 5]": 2.5, "oracle tree": 2.5, "ngram tree": 1.02, "suffix tree": 1.02,
    "medusa": 2.2, "hydra": 3.0, "hydra++": 3.6, "mlp_speculator": 3.0,
    "draft dynamic": 2.1, "draft itself dynamic": 2.8, "medusa dynamic": 1.9, "hydra dynamic": 3.0,
    "mlp_speculator dynamic": 2.9, "eagle": 3.0, "eagle3": 2.4, "eagle dynamic": 2.65, "eagle3 dynamic": 2.1,
    "falcon": 3.3, "falcon dynamic": 2.85, "eagle choices": 2.65, "eagle3 chain": 2.2,
    "lookahead": 1.02, "recycling": 1.2, "sampled draft and lookahead": 2.2,
    "prediction": 1.6, "rest": 2.3, "rest tree": 2.6,
}  # fmt: skip


def part_of(drafter: str, batch: int) -> list[int]:
    """Which requests of the mix a drafter meets in batches of a size."""
    quarters = {3: (0,), 1: (1,), 8: (2, 3)}[batch]
    return [place for place in range(len(request_mix())) if (place + NAMES.index(drafter)) % 4 in quarters]


@pytest.mark.parametrize(("drafter", "batch", "runner"), CASES)
def test_text_is_plain_decodings(drafter: str, batch: int, runner: str) -> None:
    part = part_of(drafter, batch)
    mix, plain = [request_mix()[place] for place in part], [plain_mix(runner)[place] for place in part]
    known = references(plain_mix())
    records: list[StepRecord] = []
    is_predicted = batch == 3 or "prediction" in drafter  # every drafter with predictions and without
    engine = llm(
        DRAFTERS[runner][drafter](known), max_num_seqs=batch, max_model_len=CONTEXT_LEN, runner=runner,
        trace=drafter in TRACED, on_step=records.append,
    )  # fmt: skip
    with mock.patch.object(HeadKernels, "fill", autospec=True, side_effect=HeadKernels.fill) as native_call:
        got = engine.generate(with_predictions(plain, is_any=is_predicted), [r.params for r in mix])
    assert_same_text(got, plain, [r.name for r in mix])
    assert all((step.trace is not None) == (drafter in TRACED) for record in records for step in record.sequences)
    assert native_call.called or drafter not in STEP_HEADS or RUNNERS[runner] == torch.float64
    metrics = GenerationMetrics.total(output.metrics for output in got)
    at_least = AT_LEAST.get(drafter, 1.0) if batch == 8 else 1.0
    assert metrics.mean_acceptance_length >= 1 + (at_least - 1) / 2
    if batch == 3:
        assert metrics.accepted_by["prediction"] > 0, "whatever the drafters"


def test_the_cases_cover() -> None:
    """Every pair of drafter, runner and batch; every drafter all requests, greedy and sampled ones on each runner."""
    assert {(drafter, runner) for drafter, _, runner in CASES} == set(product(NAMES, RUNNERS))
    assert {(drafter, batch) for drafter, batch, _ in CASES} == set(product(NAMES, BATCHES))
    assert {(batch, runner) for _, batch, runner in CASES} == set(product(BATCHES, RUNNERS))
    for drafter in NAMES:
        assert sorted(chain(*(part_of(drafter, batch) for batch in BATCHES))) == list(range(len(request_mix())))
        for batch in BATCHES:
            params = [request_mix()[place].params for place in part_of(drafter, batch)]
            assert {each.temperature > 0 for each in params} == {False, True}
            assert sum(each.n for each in params) > batch


@pytest.mark.parametrize(
    "arguments",
    [{}, {"tree": "dynamic", "num_speculative_tokens": 3, "tree_top_k": 4, "max_nodes": 12}],
    ids=["static", "dynamic"],
)
@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_prompts_of_many_times_the_length_of_training(name: str, arguments: dict[str, Any]) -> None:
    """Heads that never saw such positions go on drafting, and what is written is the text of plain decoding."""
    known = references(plain_mix())
    longest = max(map(len, known))  # of the texts that heads were trained on
    prompts = [list(max(known, key=len)) * 8, list(known[0][:5])]
    module = tiny_model("llama", dtype=torch.float64, max_position_embeddings=9 * longest)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    plain = llm({}, module=module).generate(prompts, params)
    got = llm(head(name, **{"num_speculative_tokens": 3, **arguments})(known), module=module).generate(prompts, params)
    assert_same_text(got, plain, ["long", "short"])
    assert len(got[0].prompt_token_ids) == 8 * longest
    assert all(output.metrics.draft_errors == 0 for output in got)
    assert all(output.metrics.drafted_at_depth[1] >= output.metrics.steps - 2 for output in got)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("drafter", ["none", "draft tree", "draft itself", "oracle tree"])
def test_prompts_in_chunks_change_nothing(drafter: str, runner: str) -> None:
    """Long prompts are fed over several iterations while neighbours decode."""
    mix, plain = request_mix(), plain_mix(runner)
    engine = llm(DRAFTERS[runner][drafter](references(plain)), max_num_seqs=4, max_model_len=CONTEXT_LEN, runner=runner)
    engine.target.prefill_chunk = 3
    got = engine.generate([r.prompt for r in mix], [r.params for r in mix])
    assert_same_text(got, plain, [r.name for r in mix])


def test_the_mix_stops_in_every_way() -> None:
    """The comparison above is worth what the plain texts contain."""
    completions = [c for output in plain_mix() for c in output.outputs]
    named = {request.name: output for request, output in zip(request_mix(), plain_mix(), strict=True)}
    reasons = {(c.finish_reason, type(c.stop_reason)) for c in completions}
    assert reasons == {("length", type(None)), ("stop", type(None)), ("stop", str), ("stop", int)}
    assert any(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) == CONTEXT_LEN for o in plain_mix())
    assert any("\ufffd" in c.text for c in completions)
    assert len({tuple(c.token_ids) for c in named["three completions"].outputs}) == 3, (
        "seeded completions of one prompt differ"
    )
