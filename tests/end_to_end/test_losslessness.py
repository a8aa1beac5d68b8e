"""Whatever the drafter, the tree and the batch: the text is the text of plain decoding, to the last log-probability.

Slow because every drafter builds an engine, and heads are trained before.
"""

from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from end_to_end.drafter_cases import (
    AT_LEAST,
    BATCHES,
    NAMES,
    WITH_OWN_ROWS,
    Case,
    chosen_cases,
    kind_of,
    met,
    other_cases,
    product_of_all,
)
from end_to_end.poison import poison_caches
from end_to_end.request_mix import CONTEXT_LEN, plain_mix, references, request_mix, with_predictions
from end_to_end.same_text import assert_same_text
from end_to_end.tiny_heads import STEP_HEADS, head
from end_to_end.tiny_llms import RUNNERS, drafters, llm
from pairwise import slow_products
from tiny_models import tiny_model

from foretoken import SamplingParams
from foretoken.core.records import GenerationMetrics, StepRecord
from foretoken.drafters.native.heads import HeadKernels

DRAFTERS = {runner: drafters(dtype=dtype) for runner, dtype in RUNNERS.items()}
TRACED = {"none", "draft tree", "draft itself dynamic", "heads", "hydra", "two lookups"}  # what traces cost, no more
# Without poison a drafter may read what it must not, and with it what it must read may be gone: one of them on each.
CLEAN = [("draft itself tree", "generic"), ("eagle dynamic", "lean-stock"), ("draft widths", "lean-native")]


def check(case: Case, *, is_poisoned: bool = True) -> GenerationMetrics:
    """The text is plain decoding's, and as much is accepted as the case must."""
    drafter, runner, batch, _ = case
    mix, plain = ([each[place] for place in case.requests()] for each in (request_mix(), plain_mix(runner)))
    records: list[StepRecord] = []
    is_predicted = batch == 3 or "prediction" in drafter  # every drafter with predictions and without
    engine = llm(
        DRAFTERS[runner][drafter](references(plain_mix())), max_num_seqs=batch, max_model_len=CONTEXT_LEN,
        runner=runner, trace=drafter in TRACED, on_step=records.append,
    )  # fmt: skip
    if is_poisoned:
        poison_caches(engine)
    with mock.patch.object(HeadKernels, "fill", autospec=True, side_effect=HeadKernels.fill) as native_call:
        got = engine.generate(with_predictions(plain, is_any=is_predicted), [r.params for r in mix])
    assert_same_text(got, plain, [r.name for r in mix])
    assert all((step.trace is not None) == (drafter in TRACED) for record in records for step in record.sequences)
    assert native_call.called or drafter not in STEP_HEADS or RUNNERS[runner] == torch.float64
    metrics = GenerationMetrics.total(output.metrics for output in got)
    assert metrics.mean_acceptance_length >= case.accepts_at_least
    return metrics


@pytest.mark.parametrize(
    "case",
    [*chosen_cases(), *(pytest.param(case, marks=pytest.mark.slow) for case in other_cases())],
    ids=lambda case: f"{case.drafter}-{case.runner}-{case.batch}-{case.quarters[0]}",
)
def test_text_is_plain_decodings(case: Case) -> None:
    """Rows that were never committed are NaN, and more sequences than slots make slots be used again."""
    metrics = check(case)
    if case.batch == 3:
        assert metrics.accepted_by["prediction"] > 0, "whatever the drafters"


@pytest.mark.parametrize(("drafter", "runner"), CLEAN)
def test_without_poison(drafter: str, runner: str) -> None:
    check(Case(drafter, runner, 8, (0, 2)), is_poisoned=False)


@pytest.mark.parametrize(
    ("drafter", "runner"), slow_products(["none", "oracle tree", "draft itself"], list(RUNNERS), each=1)
)
def test_control_one_committed_row_is_noticed(drafter: str, runner: str) -> None:
    """The same poison one row further up must end every request that decodes on."""
    mix = [r for r in request_mix() if r.params.n == 1 and r.params.max_tokens == 24]
    engine = llm(
        DRAFTERS[runner][drafter](references(plain_mix(runner))), max_num_seqs=4, max_model_len=CONTEXT_LEN,
        runner=runner,
    )  # fmt: skip
    poison_caches(engine, start=-1)
    got = engine.generate([r.prompt for r in mix], [r.params for r in mix])
    # A pass that reaches the end in one go never meets the poisoned row.
    assert {o.outputs[0].finish_reason for o in got if o.metrics.steps > 1} == {"error"}


def test_the_cases_cover() -> None:
    """All drafters, and every two of what drafts, its shape, its depth, runner, batch and request."""
    chosen, everything = chosen_cases(), [*chosen_cases(), *other_cases()]
    assert len(chosen) < 1.2 * len(NAMES)
    assert {case.drafter for case in chosen} == set(NAMES)
    kinds = {kind_of(drafter)[0] for drafter in NAMES}
    for request in range(len(request_mix())):
        own = [case for case in chosen if request in case.requests()]
        assert {kind_of(case.drafter)[0] for case in own} == kinds
        assert {(case.batch, case.runner) for case in own} == set(product(BATCHES, RUNNERS))
    for kind in kinds:
        own = [case for case in chosen if kind_of(case.drafter)[0] == kind]
        assert {case.runner for case in own} == set(RUNNERS)
        assert {case.batch for case in own} == set(BATCHES)
    assert set().union(*map(met, chosen)) == set().union(*map(met, product_of_all()))
    assert {case.drafter for case in chosen if case.accepts_at_least > 1} == set(AT_LEAST)
    assert {case.drafter for case in chosen if case.accepts_at_least >= WITH_OWN_ROWS.get(case.drafter, 99)} == {
        *WITH_OWN_ROWS
    }
    for drafter in NAMES:
        own = [case for case in everything if case.drafter == drafter]
        assert {case.runner for case in own} == set(RUNNERS)
        assert {case.batch for case in own} == set(BATCHES)
        assert {place for case in own for place in case.requests()} == set(range(len(request_mix())))
    for case in everything:
        params = [request_mix()[place].params for place in case.requests()]
        assert {each.temperature > 0 for each in params} == {False, True}
        assert sum(each.n for each in params) > case.batch


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


@pytest.mark.parametrize(
    ("drafter", "runner"),
    [
        pytest.param(drafter, runner, marks=[] if place == index % 3 else pytest.mark.slow)
        for index, drafter in enumerate(["none", "draft tree", "draft itself", "oracle tree"])
        for place, runner in enumerate(RUNNERS)
    ],
)
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
