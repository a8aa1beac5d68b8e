"""Recurrent layers on the native kernels: what is read again, cached or drafted has the bits of plain decoding."""

import random
from functools import cache
from typing import Any

import pytest
from tiny_models import VOCAB_SIZE, tiny_model

from foretoken import LLM, RequestOutput, SamplingParams

ARCHITECTURES = ("qwen3_5", "lfm2", "bamba")
LOOKUP = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 4}
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20, logprobs=1, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, max_tokens=20, logprobs=1, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=20, logprobs=1, repetition_penalty=1.1, ignore_eos=True),
]
COMMON = [random.Random(f"common {at}").randrange(3, VOCAB_SIZE) for at in range(40)]
PROMPTS = [[*COMMON, 10, 11, 12], [*COMMON, 20, 21], [30, 31, 30, 31, 30]]


@cache
def module(architecture: str) -> Any:
    return tiny_model(architecture, max_position_embeddings=200)


def engine(architecture: str, **more: Any) -> LLM:
    options = {"runner": "lean-native", "max_num_seqs": 3, "speculative_config": LOOKUP}
    return LLM(module(architecture), **options | more)


def bits(outputs: list[RequestOutput]) -> list[list[tuple[int, float]]]:
    """Tokens of all completions, with their log-probabilities."""
    return [
        [(token, told[token].logprob) for token, told in zip(each.token_ids, each.logprobs or [], strict=True)]
        for output in outputs
        for each in output.outputs
    ]


def plain(architecture: str, params: Any = PARAMS, prompts: list[list[int]] = PROMPTS, **more: Any) -> Any:
    """One sequence at a time, without drafts and without cached prefixes."""
    llm = engine(architecture, max_num_seqs=1, speculative_config=None, enable_prefix_caching=False, **more)
    return bits(llm.generate(prompts, params))


@pytest.mark.parametrize("keeps_rows", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_preempted_at_every_iteration(architecture: str, keeps_rows: bool) -> None:
    """Read again from the beginning, or from what its slot still holds, perhaps in another slot."""
    llm = engine(architecture)
    loop, scheduler = llm._engine, llm._engine._scheduler
    step, preempted = loop.step, []

    def preempting() -> None:
        step()
        if not keeps_rows and any(sequence.num_cached < len(sequence.tokens) - 1 for sequence in scheduler.running):
            return  # a prompt of two chunks would be read forever
        preempted.extend(sequence.request_id for sequence in scheduler.running)
        if keeps_rows:
            for sequence in scheduler.running[::-1]:
                scheduler._preempt(sequence)
        else:
            scheduler.forget_rows()

    loop.step = preempting  # type: ignore[method-assign]
    assert bits(llm.generate(PROMPTS, PARAMS)) == plain(architecture)
    assert len(preempted) > 20


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_keys_and_values_in_int8(architecture: str) -> None:
    """Drafted, behind a common beginning that the cache holds, and preempted: the text of plain decoding in int8."""
    expected = plain(architecture, kv_cache_dtype="int8")
    llm = engine(architecture, kv_cache_dtype="int8")
    assert llm.target.cache.is_rounded
    assert bits(llm.generate(PROMPTS, PARAMS)) == expected
    again = llm.generate(PROMPTS, PARAMS)
    assert bits(again) == expected
    assert min(int(each.num_cached_tokens or 0) for each in again[:2]) >= len(COMMON) - 1
    assert expected != plain(architecture)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_completions_of_one_prompt(architecture: str) -> None:
    params = SamplingParams(temperature=0.9, seed=4, n=4, max_tokens=16, logprobs=1)
    llm = engine(architecture, max_num_seqs=4)
    outputs = llm.generate(PROMPTS[:1], params)
    assert bits(outputs) == plain(architecture, params, PROMPTS[:1])
    hits = next(each.value for each in llm.get_metrics() if each.name == "vllm:prefix_cache_hits")
    assert hits == 3 * (len(PROMPTS[0]) - 1)
    assert len({tuple(each.token_ids) for each in outputs[0].outputs}) == 4
