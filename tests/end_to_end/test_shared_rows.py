"""Sequences that share too few KV rows: some are preempted and read again, rows move, and every text stays the same.

Slow because every kind of state that is kept by slot has an engine of its own.
"""

from functools import cache
from typing import Any
from unittest import mock

import pytest
from end_to_end.poison import poison_caches
from end_to_end.request_mix import plain_mix, references
from end_to_end.same_text import assert_same_text
from end_to_end.tiny_llms import RUNNERS, drafters, llm, target, tokenizer
from tiny_models import VOCAB_SIZE, tiny_model

from foretoken import LLM, RequestOutput, SamplingParams
from foretoken.core.errors import ConfigError, ModelError
from foretoken.core.records import GenerationMetrics
from foretoken.decoder.slot_cache import GRANULE, RowPool
from foretoken.runner.decoders import probe_layer_shapes

DRAFTERS = {runner: drafters(dtype=dtype) for runner, dtype in RUNNERS.items()}
CONTEXT_LEN = 90
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}
# Prompt lengths, and how each is sampled: those that come later are preempted by those before them.
REQUESTS: list[tuple[int, dict[str, Any]]] = [
    (9, {"temperature": 0.0}),
    (5, {"temperature": 0.8, "seed": 1}),
    (12, {"temperature": 0.0, **PENALTIES, "logprobs": 1}),
    (7, {"temperature": 0.8, "seed": 2, "n": 3}),
    (30, {"temperature": 0.8, "seed": 3, **PENALTIES}),
    (21, {"temperature": 0.0, "prompt_logprobs": 2}),
    (9, {"temperature": 0.9, "seed": 4, "min_tokens": 30}),
    (40, {"temperature": 0.0, "max_tokens": 4}),
]
PROMPTS = [[3 + (5 * k + 7 * i + k * i * i) % (VOCAB_SIZE - 3) for i in range(n)] for k, (n, _) in enumerate(REQUESTS)]
NAMES = [f"request {index}" for index in range(len(REQUESTS))]
# One of every kind of state that is kept by slot.
KINDS = [
    "none", "draft itself", "draft itself tree", "draft dynamic", "hydra++", "eagle", "eagle dynamic", "eagle3",
    "falcon", "medusa", "mlp_speculator", "early exit", "early exit dynamic", "ngram", "suffix", "lookahead",
    "recycling", "heads", "raises",
]  # fmt: skip
ALIKE = {"draft itself", "eagle", "medusa", "early exit"}  # whose state is kept like another's, or less of it
CASES = [
    *(pytest.param(name, "lean-native", marks=pytest.mark.slow if name in ALIKE else []) for name in KINDS),
    ("draft itself tree", "generic"), ("eagle", "lean-stock"),
    pytest.param("none", "lean-stock", marks=pytest.mark.slow),
    *(
        pytest.param(drafter, "generic", marks=pytest.mark.slow)
        for drafter in ("none", "eagle dynamic", "early exit", "lookahead")
    ),
    pytest.param("draft itself tree", "lean-stock", marks=pytest.mark.slow),
]  # fmt: skip


def params() -> list[SamplingParams]:
    """Of all requests."""
    return [SamplingParams(**{"max_tokens": 45, "ignore_eos": True, **keys}) for _, keys in REQUESTS]


def memory_of(num_rows: int, runner: str) -> int:
    """Bytes of so many KV rows."""
    dtype = RUNNERS[runner]
    shapes = probe_layer_shapes(target("llama", dtype))
    return num_rows * dtype.itemsize * sum(s.num_heads * (s.key_width + s.value_width) for s in shapes)


@cache
def plain(runner: str) -> tuple[RequestOutput, ...]:
    """Plain decoding of all of them, one at a time, in rows of their own."""
    engine = llm({}, max_num_seqs=1, max_model_len=CONTEXT_LEN, runner=runner, enable_prefix_caching=False)
    assert not engine.target.cache.is_shared
    return tuple(engine.generate(PROMPTS, params()))


def engine_with(drafter: str, runner: str, **more: Any) -> LLM:
    """An engine whose five sequences have rows for one and a half of them when they end, for two when they begin."""
    known = references(plain_mix())  # heads of other tests, which have some drafts accepted here as well
    made = DRAFTERS[runner][drafter](known)
    with_nodes = llm(made, max_num_seqs=1, max_model_len=CONTEXT_LEN, runner=runner).target.max_nodes
    num_rows = max((CONTEXT_LEN + with_nodes) * 3 // 2, CONTEXT_LEN + 2 * with_nodes) // GRANULE * GRANULE
    made = DRAFTERS[runner][drafter](known)  # a drafter belongs to one engine
    arguments = {"max_num_seqs": 5, "max_model_len": CONTEXT_LEN, "runner": runner, **more}
    engine = llm(made, kv_cache_memory_bytes=memory_of(num_rows, runner), **arguments)
    assert engine.target.cache.num_rows == num_rows
    return engine


@pytest.mark.parametrize(("drafter", "runner"), CASES)
def test_text_is_plain_decodings(drafter: str, runner: str) -> None:
    engine = engine_with(drafter, runner)
    poison_caches(engine)
    got = engine.generate(PROMPTS, params())
    assert_same_text(got, plain(runner), NAMES)
    total = GenerationMetrics.total(output.metrics for output in got)
    assert total.num_preemptions > 0
    values = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()}
    assert values["vllm:num_preemptions"] == total.num_preemptions
    assert values["vllm:prompt_tokens"] == sum(len(o.prompt_token_ids) * len(o.outputs) for o in got)
    assert values["vllm:kv_cache_usage_perc"] == 0.0
    assert engine._engine.num_free_slots == 5


@pytest.mark.parametrize("keeps_prefixes", [False, True])
def test_without_and_with_prefixes(keeps_prefixes: bool) -> None:
    engine = engine_with("draft itself tree", "lean-native", enable_prefix_caching=keeps_prefixes)
    for _ in range(2):
        assert_same_text(engine.generate(PROMPTS, params()), plain("lean-native"), NAMES)


@pytest.mark.parametrize(
    "runner", [pytest.param(name, marks=[] if name == "lean-native" else pytest.mark.slow) for name in RUNNERS]
)
def test_control_rows_that_stay_behind_are_noticed(runner: str) -> None:
    """Rows that are not copied to where their slot goes on change what is written."""
    engine, reserve = engine_with("none", runner), RowPool.reserve

    def forgetful(pool: RowPool, slot: int, count: int) -> Any:
        moves = reserve(pool, slot, count)
        return moves and moves[1:]

    with mock.patch.object(RowPool, "reserve", forgetful), pytest.raises(AssertionError, match="completion"):
        assert_same_text(engine.generate(PROMPTS, params()), plain(runner), NAMES)


def test_the_longest_sequence_has_room_alone() -> None:
    engine = engine_with("draft itself tree", "lean-native")
    long = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)  # to the end of the context
    outputs = engine.generate(PROMPTS[:3], long)
    assert [len(o.prompt_token_ids) + len(o.outputs[0].token_ids) for o in outputs] == [CONTEXT_LEN] * 3


def test_one_that_was_preempted_can_be_aborted() -> None:
    engine = engine_with("none", "lean-native")
    streams = engine.stream(PROMPTS[:5], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    for _ in streams:
        if any(s.metrics.num_preemptions and s.slot is None for s in engine._engine._scheduler.all()):
            break
    else:
        pytest.fail("nobody was preempted")
    num_begun = sum(s.has_begun for s in engine._engine._scheduler.all())  # others are not counted
    streams.close()
    assert not engine._engine.has_work
    values = {(m.name, m.labels.get("finished_reason")): getattr(m, "value", None) for m in engine.get_metrics()}
    assert values["vllm:request_success", "abort"] == num_begun > 2
    assert_same_text(engine.generate(PROMPTS, params()), plain("lean-native"), NAMES)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (0, ConfigError, "kv_cache_memory_bytes is 0"),
        ("1G", ConfigError, "kv_cache_memory_bytes is '1G'"),
        (100, ModelError, "there is no memory for the KV cache"),
    ],
)
def test_memory_that_makes_no_sense(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        llm({}, kv_cache_memory_bytes=given)


def test_recurrent_layers_share_no_rows_and_the_context_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    module = tiny_model("qwen3_5")
    made = LLM(module, tokenizer=tokenizer(), max_num_seqs=2, kv_cache_memory_bytes=200_000)
    assert 16 <= made.target.context_len < module.config.max_position_embeddings
    assert f"the context is cut to {made.target.context_len}" in caplog.text
    with pytest.raises(ModelError, match=r"or raise kv_cache_memory_bytes\.$"):
        LLM(module, tokenizer=tokenizer(), max_num_seqs=2, kv_cache_memory_bytes=20_000)
