"""Synthetic acceptance through the engine: drafters without trained weights get the rates that were asked for."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from end_to_end.tiny_llms import drafters, llm
from pairwise import slow_products

from foretoken import LLM, SamplingParams
from foretoken.acceptance.select import joint_rates
from foretoken.core.errors import ConfigError, RequestError
from foretoken.core.records import GenerationMetrics, StepRecord
from foretoken.core.results import Counter, RequestOutput
from foretoken.drafting import choice

CONDITIONAL = [0.8, 0.7, 0.6]
SYNTHETIC = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": joint_rates(CONDITIONAL)}
TINYCODE = {"method": "hydra", "tree": "chain", "num_speculative_tokens": 3}
PROMPT = "def read_config(path):\n"


def config_of(name: str) -> dict[str, Any]:
    """The configuration of a drafter of the tests."""
    config: dict[str, Any] = drafters()[name]([[5, 6, 7, 8, 9, 10] * 6])["speculative_config"]
    return config


def tiny(name: str, **more: Any) -> LLM:
    """A tiny target with a drafter of the tests, drafts accepted synthetically."""
    return llm({"speculative_config": {**config_of(name), **SYNTHETIC}}, **more)


def lengths_of(records: Sequence[StepRecord], depth: int) -> np.ndarray:
    """Accepted tokens of each sequence and iteration whose tree is that deep."""
    steps = [step for record in records for step in record.sequences]
    return np.array([step.num_accepted for step in steps if step.tree_depth == depth])


def tinycode_run(batch_size: int, temperature: float, max_tokens: int) -> tuple[list[StepRecord], list[RequestOutput]]:
    """Four texts."""
    records: list[StepRecord] = []
    engine = LLM(
        "models/tinycode", speculative_config={**TINYCODE, **SYNTHETIC}, max_num_seqs=batch_size, on_step=records.append
    )
    params = [
        SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed, ignore_eos=True) for seed in range(4)
    ]
    return records, engine.generate([PROMPT] * 4, params)


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.8, marks=pytest.mark.slow)])
def test_a_thousand_iterations_have_the_rates(temperature: float) -> None:
    """In batches of 4, within 0.01: the mean acceptance length, and the acceptance at each position."""
    records, _ = tinycode_run(4, temperature, 760)
    lengths = lengths_of(records, 3)
    assert len(lengths) > 1000
    assert 1 + lengths.mean() == pytest.approx(1 + sum(np.cumprod(CONDITIONAL)), abs=0.01)
    for position, rate in enumerate(np.cumprod(CONDITIONAL), start=1):
        assert (lengths >= position).mean() == pytest.approx(rate, abs=0.01)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_depend_on_the_seed_alone(temperature: float) -> None:
    """Neither on the batch nor on the engine; greedy texts too, for the seed sets where the schedule begins."""
    alone, together = (tinycode_run(size, temperature, 30)[1] for size in (1, 4))
    assert [each.outputs[0].token_ids for each in alone] == [each.outputs[0].token_ids for each in together]
    assert len({tuple(each.outputs[0].token_ids) for each in alone}) > 1


def test_every_result_says_that_it_is_synthetic(caplog: pytest.LogCaptureFixture) -> None:
    records: list[StepRecord] = []
    with caplog.at_level(logging.WARNING, "foretoken"):
        engine = tiny("random hydra", on_step=records.append)
    assert "texts are not the target's" in caplog.text
    assert engine.is_lossy
    assert engine.acceptance == "synthetic"
    metrics = engine.generate([5, 6], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))[0].metrics
    assert all(record.is_synthetic for record in records)
    assert metrics.num_synthetic == metrics.steps == metrics.as_dict()["num_synthetic"] > 0
    assert math.isnan(metrics.lossy_tv)
    counts = {each.name: each.value for each in engine.get_metrics() if isinstance(each, Counter)}
    assert counts["foretoken:synthetic_passes"] == counts["foretoken:target_passes"] == metrics.steps
    plain = llm({"speculative_config": config_of("random hydra")})
    assert (plain.is_lossy, plain.acceptance) == (False, "auto")
    output = plain.generate([5, 6], SamplingParams(temperature=0.0, max_tokens=9))[0]
    assert output.metrics.num_synthetic == 0


@pytest.mark.parametrize(
    ("name", "params"),
    slow_products(
        ["random hydra", "medusa choices", "random wide", "eagle dynamic"],
        [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}, {"logit_bias": {3: 1}}],
        each=1,
    ),
)
def test_trees_accept_along_the_best_children(name: str, params: dict[str, Any]) -> None:
    """Every accepted node is the best child of the one before, and no path is shorter than scheduled but at a leaf."""
    records: list[StepRecord] = []
    engine = tiny(name, on_step=records.append, trace=True, max_num_seqs=3)
    asked = [SamplingParams(**{"temperature": 0.0, "max_tokens": 40, "seed": i, **params}) for i in range(3)]
    engine.generate([[5, 6], [7], [8, 9, 10]], asked)
    traces = [step.trace for record in records for step in record.sequences]
    assert any(trace is not None and len(trace.path) > 1 for trace in traces)
    for trace in traces:
        assert trace is not None
        assert trace.rule == "synthetic"
        for parent, node in zip([0, *trace.path], trace.path, strict=False):
            children = [at for at, above in enumerate(trace.parents) if above == parent]
            best = children if trace.scores is None else sorted(children, key=lambda at: -trace.scores[at])  # type: ignore[index]
            assert node == best[0]


def test_end_stop_and_length_still_hold() -> None:
    ended = tiny("eos").generate([5], SamplingParams(temperature=0.0, max_tokens=60))[0].outputs[0]
    assert ended.finish_reason == "stop"
    free = tiny("random hydra")
    whole = free.generate([5, 6], SamplingParams(temperature=0.0, max_tokens=31, seed=4, ignore_eos=True))[0].outputs[0]
    assert (len(whole.token_ids), whole.finish_reason) == (31, "length")
    stop = whole.text[7:9]
    params = SamplingParams(temperature=0.0, max_tokens=31, seed=4, ignore_eos=True, stop=[stop])
    cut = free.generate([5, 6], params)[0].outputs[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.text == whole.text[: whole.text.index(stop)]


def test_a_request_without_drafts_has_the_targets_text() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompt = {"prompt_token_ids": [5, 6], "speculative": {"enabled": False}}
    assert tiny("random hydra").generate(prompt, params)[0].outputs[0].token_ids == (
        llm({}).generate([5, 6], params)[0].outputs[0].token_ids
    )


def test_controllers_see_synthetic_lengths_as_real_ones() -> None:
    """A controller that learns drafts from records: it hears of high rates, and of rates of zero."""
    taus = []
    for rates in ([1.0, 1.0, 1.0], [0.0]):
        config = {"method": "ngram", "prompt_lookup_min": 1, "rejection_sample_method": "synthetic"}
        records: list[StepRecord] = []
        engine = llm({"speculative_config": {**config, "synthetic_acceptance_rates": rates}}, on_step=records.append)
        engine.generate([[5, 6] * 5], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
        metrics = GenerationMetrics.total([])
        for record in records:
            for step in record.sequences:
                metrics.add_step(step, record)
        taus.append(metrics.mean_acceptance_length)
        if rates == [0.0]:
            assert metrics.num_accepted == 0
        else:
            assert metrics.num_accepted > 0
    assert taus[0] > 1.2
    assert taus[1] == 1.0


def test_acceptance_is_not_kept_for_real_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(choice, "pair_key", lambda *given: asked.append(given))
    arguments = config_of("two lookups adaptive")
    llm({"speculative_config": {**arguments, **SYNTHETIC}})
    assert not asked
    llm({"speculative_config": arguments})
    assert len(asked) == 1


@pytest.mark.parametrize("promise", [{"allowed_token_ids": [5]}, {"bad_words": [[5]]}, {"min_tokens": 3}])
def test_requests_that_promise_something_of_the_text_are_refused(promise: dict[str, Any]) -> None:
    (name,) = promise
    with pytest.raises(RequestError, match=f"{name} cannot be kept: acceptance is synthetic"):
        tiny("random hydra").generate([5], SamplingParams(**promise))


def test_more_rates_than_a_draft_has_tokens_are_refused() -> None:
    config = {**config_of("random hydra"), "num_speculative_tokens": 2, "tree": "chain", **SYNTHETIC}
    with pytest.raises(ConfigError, match="rates for 3 tokens, but drafts are at most 2 deep"):
        llm({"speculative_config": config})
    enough = {**config, "synthetic_acceptance_rates": [0.5, 0.25, 0.0]}
    assert llm({"speculative_config": enough}).acceptance == "synthetic"
