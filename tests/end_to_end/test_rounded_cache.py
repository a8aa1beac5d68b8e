"""Targets whose KV cache is in int8: their text is the same with and without drafts, however rows move."""

from functools import cache
from typing import Any

import pytest
import torch
from end_to_end.poison import poison_caches
from end_to_end.same_text import assert_same_text
from end_to_end.test_quantized_targets import BF16, DRAFTERS, PARAMS, PROMPTS
from end_to_end.tiny_llms import config, tokenizer
from pairwise import slow_products
from tiny_models import tiny_model

from foretoken import LLM, RequestOutput, SamplingParams
from foretoken.core.errors import ConfigError, ModelError
from foretoken.core.records import GenerationMetrics
from foretoken.models.loading import wrap_model

NAMES = [f"prompt {index}" for index in range(len(PROMPTS))]


def engine(arguments: dict[str, Any] | None = None, **more: Any) -> LLM:
    options: dict[str, Any] = {"tokenizer": tokenizer(), "kv_cache_dtype": "int8"} | more
    return LLM(tiny_model("llama", dtype=options.pop("weights", BF16)), **options, **(arguments or {}))


@cache
def plain_texts(quantization: str | None) -> list[RequestOutput]:
    """Plain decoding, one at a time."""
    return engine(max_num_seqs=1, quantization=quantization).generate(PROMPTS, PARAMS)


@pytest.mark.parametrize(("name", "quantization"), slow_products(list(DRAFTERS), [None, "int4"], each=1))
def test_text_is_plain_decodings(name: str, quantization: str | None) -> None:
    plain = plain_texts(quantization)
    known = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in plain]
    drafting = engine(DRAFTERS[name](known), max_num_seqs=3, quantization=quantization)
    assert drafting.target.cache.keys[0].dtype == torch.int8
    poison_caches(drafting)
    got = drafting.generate(PROMPTS, PARAMS)
    assert_same_text(got, plain, NAMES)
    assert all(output.metrics.draft_errors == 0 for output in got)


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    slow_products(["phi3", "gemma2", "qwen3", "qwen3_moe", "mistral"], [torch.float32, BF16], each=1),
)
def test_architectures(architecture: str, dtype: torch.dtype) -> None:
    made = [
        LLM(tiny_model(architecture, dtype=dtype), tokenizer=tokenizer(), kv_cache_dtype="int8", **arguments)
        for arguments in ({}, config("ngram", num_speculative_tokens=4)([]))
    ]
    assert {each.target.name for each in made} == {"lean-native"}
    plain, got = (each.generate(PROMPTS, PARAMS) for each in made)
    assert_same_text(got, plain, NAMES)


def test_rows_that_sequences_share_and_prefixes_that_stay() -> None:
    """Rows in int8 move between slots, and are read again, like any others."""
    prompts = [[3 + (5 * k + 7 * i) % 60 for i in range(9 + 4 * k)] for k in range(6)]
    params = [SamplingParams(temperature=0.8, seed=k, max_tokens=40, ignore_eos=True) for k in range(6)]
    plain = engine(max_num_seqs=1, max_model_len=90, enable_prefix_caching=False)
    expected, names = plain.generate(prompts, params), [f"prompt {k}" for k in range(6)]
    parts = (*plain.target.cache.keys, *plain.target.cache.values)
    memory = 160 * sum(part.shape[1] * part.shape[3] * part.itemsize for part in parts)
    drafting = engine(
        config("ngram", num_speculative_tokens=4)([]), max_num_seqs=5, max_model_len=90, kv_cache_memory_bytes=memory
    )
    assert drafting.target.cache.is_shared
    assert drafting.target.cache.num_rows == 160
    poison_caches(drafting)
    got = drafting.generate(prompts, params)
    assert_same_text(got, expected, names)
    assert GenerationMetrics.total(output.metrics for output in got).num_preemptions > 0
    assert_same_text(drafting.generate(prompts, params), expected, names)


def test_a_model_keeps_how_its_rows_are_stored() -> None:
    loaded = wrap_model(tiny_model("llama", dtype=BF16), name="tiny")
    made = LLM(loaded, tokenizer=tokenizer(), kv_cache_dtype="int8")
    assert made.target.model.kv_cache_dtype == "int8"
    assert loaded.kv_cache_dtype == "auto"
    again = LLM(made.target.model, tokenizer=tokenizer())
    assert again.target.cache.is_rounded
    assert_same_text(again.generate(PROMPTS, PARAMS), made.generate(PROMPTS, PARAMS), NAMES)


def test_refusals() -> None:
    for wrong in ("fp8", "INT8", 8, True):
        with pytest.raises(ConfigError, match=r"kv_cache_dtype is .*\. Expected auto for the model's dtype, or int8"):
            engine(kv_cache_dtype=wrong)
    for runner in ("lean-stock", "generic"):
        with pytest.raises(ModelError, match="no kernels for a KV cache in int8, only lean-native has"):
            engine(runner=runner)
    with pytest.raises(ModelError, match="no kernels for a KV cache in int8"):
        engine(weights=torch.float64)
    assert not engine(kv_cache_dtype="auto").target.cache.is_rounded


def test_a_model_without_native_kernels_is_refused_before_anything_is_timed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="foretoken")
    model = wrap_model(tiny_model("jamba"), name="tiny")
    with pytest.raises(
        ModelError, match=r"^runner 'auto' cannot run 'tiny'\. lean-native: JambaForCausalLM is not"
    ) as no:
        LLM(model, tokenizer=tokenizer(), kv_cache_dtype="int8")
    assert "generic: it has no kernels for a KV cache in int8" in str(no.value)
    assert "timing passes" not in caplog.text
