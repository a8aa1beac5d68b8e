"""Targets with recurrent layers write plain decoding's text with drafts, in batches, behind prefixes and preempted."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from end_to_end.same_text import assert_same_text
from end_to_end.tiny_heads import head
from end_to_end.tiny_llms import drafters
from tiny_models import RECURRENT_ARCHITECTURES, tiny_model

from foretoken import LLM, RequestOutput, SamplingParams

PROMPTS = [[5], [7, 8, 9] * 4, [40, 3, 12, 9, 61, 17], list(range(3, 20))]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, logprobs=2),
    SamplingParams(temperature=0.8, seed=1, max_tokens=24),
    SamplingParams(temperature=0.0, max_tokens=24, repetition_penalty=1.2),
    SamplingParams(temperature=0.9, seed=2, max_tokens=24, top_p=0.9),
]
FIRST = ("qwen3_5", "lfm2", "bamba", "falcon_h1", "jamba", "mamba2")  # one of each kind of layer
CASES = ["ngram tree", "suffix tree", "recycling", "oracle tree", "medusa", "hydra", "eagle", "eagle3"]


@cache
def module(architecture: str) -> Any:
    return tiny_model(architecture, dtype=torch.float64 if architecture == "lfm2" else torch.float32)


@cache
def plain(architecture: str) -> list[RequestOutput]:
    """Plain decoding, one at a time."""
    return LLM(module(architecture), max_num_seqs=1).generate(PROMPTS, PARAMS)


@cache
def known(architecture: str) -> list[list[int]]:
    return [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in plain(architecture)]


@pytest.mark.parametrize("architecture", RECURRENT_ARCHITECTURES)
def test_text_with_lookups_is_plain_decodings(architecture: str) -> None:
    made = drafters(architecture, torch.float32)
    for name in ("ngram tree", "oracle tree"):
        llm = LLM(module(architecture), max_num_seqs=3, **made[name](known(architecture)))
        assert_same_text(llm.generate(PROMPTS, PARAMS), plain(architecture), [name] * len(PROMPTS), tolerance=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", FIRST)
@pytest.mark.parametrize("name", CASES)
def test_text_with_any_drafter_is_plain_decodings(architecture: str, name: str) -> None:
    made = drafters(architecture, torch.float32)
    made |= {each: head(each, architecture, steps=25, num_speculative_tokens=3) for each in ("eagle", "eagle3")}
    llm = LLM(module(architecture), max_num_seqs=3, **made[name](known(architecture)))
    assert_same_text(llm.generate(PROMPTS, PARAMS), plain(architecture), [name] * len(PROMPTS), tolerance=1e-4)


LONG = [3 + (5 * place) % 40 for place in range(30)]


def without_cache(architecture: str, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    return LLM(module(architecture), max_num_seqs=1, enable_prefix_caching=False).generate(prompts, params)


@pytest.mark.parametrize("architecture", FIRST)
def test_completions_of_one_prompt_begin_before_its_last_token(architecture: str) -> None:
    params = SamplingParams(temperature=0.9, seed=4, n=4, max_tokens=16)
    llm = LLM(module(architecture), max_num_seqs=4, speculative_config={"method": "ngram", "prompt_lookup_min": 1})
    assert_same_text(
        llm.generate([LONG], params), without_cache(architecture, [LONG], params), ["four"], tolerance=1e-4
    )
    hits = next(each.value for each in llm.get_metrics() if each.name == "vllm:prefix_cache_hits")
    assert hits == 3 * (len(LONG) - 1)


@pytest.mark.parametrize("architecture", FIRST)
def test_the_next_turn_of_a_chat_begins_behind_the_last_one(architecture: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    llm = LLM(module(architecture), max_num_seqs=2, speculative_config={"method": "ngram", "prompt_lookup_min": 1})
    (first,) = llm.generate([LONG], params)
    turns = [[*LONG, *first.outputs[0].token_ids, 7, 8, 9], [*LONG[:20], 1, 2, 3]]
    (second, other) = llm.generate(turns, params)
    assert_same_text([second, other], without_cache(architecture, turns, params), ["next", "other"], tolerance=1e-4)
    assert second.num_cached_tokens >= len(LONG)
    assert other.num_cached_tokens == 0  # no state is kept inside a text


@pytest.mark.parametrize("architecture", ["qwen3_5", "lfm2"])
def test_a_slot_whose_request_was_aborted(architecture: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    want = without_cache(architecture, [LONG, LONG[5:], LONG[9:]], params)
    llm = LLM(module(architecture), max_num_seqs=1, speculative_config={"method": "ngram", "prompt_lookup_min": 1})
    chunks = llm.stream(LONG, params)
    for _ in range(3):
        next(chunks)
    chunks.close()
    assert_same_text(llm.generate([LONG, LONG[5:], LONG[9:]], params), want, ["a", "b", "c"], tolerance=1e-4)
