"""Targets with recurrent layers write plain decoding's text with drafts, in batches, behind prefixes and preempted."""

from functools import cache
from typing import Any

import pytest
import torch
from end_to_end.same_text import PARAMS, PROMPTS, assert_same_text
from end_to_end.tiny_heads import head
from end_to_end.tiny_llms import drafters
from tiny_models import RECURRENT_ARCHITECTURES, tiny_model

from foretoken import LLM, RequestOutput, SamplingParams

FIRST = ("qwen3_5", "lfm2", "bamba", "falcon_h1", "jamba", "mamba2")  # one of each kind of layer
CASES = ["ngram tree", "suffix tree", "recycling", "oracle tree", "medusa", "hydra", "eagle", "eagle3", "hass"]

TRAINED = ("eagle", "eagle3", "hass")


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


STOCK = ("qwen3_5", "bamba", "lfm2", "falcon_h1")
SLOW_STOCK = [pytest.param(each, "lean-stock", marks=pytest.mark.slow) for each in STOCK]


@pytest.mark.parametrize(
    ("architecture", "runner"),
    [
        *((each, "auto") for each in RECURRENT_ARCHITECTURES),
        *((each, "lean-stock") for each in STOCK[:2]),
        *SLOW_STOCK[2:],
    ],
)
def test_text_with_lookups_is_plain_decodings(architecture: str, runner: str) -> None:
    made = drafters(architecture, torch.float32)
    for name in ("ngram tree", "oracle tree", *(["oracle [3, 0, 5]"] if runner == "lean-stock" else [])):
        llm = LLM(module(architecture), max_num_seqs=3, runner=runner, **made[name](known(architecture)))
        assert_same_text(llm.generate(PROMPTS, PARAMS), plain(architecture), [name] * len(PROMPTS), tolerance=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "runner"), [*((each, "auto") for each in FIRST), *SLOW_STOCK])
@pytest.mark.parametrize("name", CASES)
def test_text_with_any_drafter_is_plain_decodings(architecture: str, runner: str, name: str) -> None:
    made = drafters(architecture, torch.float32)
    made |= {each: head(each, architecture, steps=25, num_speculative_tokens=3) for each in TRAINED}
    llm = LLM(module(architecture), max_num_seqs=3, runner=runner, **made[name](known(architecture)))
    assert_same_text(llm.generate(PROMPTS, PARAMS), plain(architecture), [name] * len(PROMPTS), tolerance=1e-4)


def accepted(llm: LLM) -> dict[str, float]:
    """How often drafts were verified, and how many of their tokens were accepted."""
    names = [f"vllm:spec_decode_num_{kind}" for kind in ("drafts", "draft_tokens", "accepted_tokens")]
    return {each.name: each.value for each in llm.get_metrics() if each.name in names}


@pytest.mark.parametrize("architecture", ["qwen3_5", "lfm2"])
@pytest.mark.parametrize("name", CASES)
def test_drafts_are_accepted_alike_on_both_runners(architecture: str, name: str) -> None:
    """Heads read the features of recurrent layers, lookups nothing: as many tokens a pass, the same texts."""
    target = tiny_model(architecture)
    texts = known(architecture)
    made = drafters(architecture, torch.float32)
    made |= {each: head(each, architecture, steps=25, num_speculative_tokens=3) for each in TRAINED}
    outputs, counts = [], []
    for runner in ("generic", "lean-native"):
        # All prompts are read in the first pass: how many a pass beside decoding reads depends on its seconds.
        llm = LLM(target, max_num_seqs=4, runner=runner, **made[name](texts))
        outputs.append(llm.generate(PROMPTS, PARAMS))
        counts.append(accepted(llm))
    assert_same_text(*outputs, [name] * len(PROMPTS), tolerance=1e-4)
    assert counts[0] == counts[1]
    kind = "drafts" if name in {"ngram tree", "suffix tree"} else "accepted_tokens"  # random text hardly repeats itself
    assert counts[0][f"vllm:spec_decode_num_{kind}"] > 0


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


@pytest.mark.parametrize("architecture", ["qwen3_5", "lfm2"])
def test_the_next_turn_begins_before_a_drafted_stop_token(architecture: str) -> None:
    """The draft goes on behind the stop token, and the target agrees: the text ends before it all the same."""
    plain_params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    text = list(without_cache(architecture, [LONG], plain_params)[0].outputs[0].token_ids)
    stop = next(at for at in range(6, 20) if text.index(text[at]) == at)
    llm = LLM(
        module(architecture), max_num_seqs=2,
        speculative_config={"method": "oracle", "references": [[*LONG, *text]], "pattern": [4], "tree": "chain"},
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop_token_ids=[text[stop]])
    (first,) = llm.generate([LONG], params)
    turn = [*LONG, *first.outputs[0].token_ids, 7, 8, 9]
    (second,) = llm.generate([turn], plain_params)
    assert second.num_cached_tokens == len(turn) - 4
    assert_same_text([second], without_cache(architecture, [turn], plain_params), ["next"], tolerance=1e-4)


def test_prompts_that_share_a_beginning_do_not_wait_for_each_other() -> None:
    """No state is kept inside a prompt, so nothing could be reused: all are read in the first pass."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    llm = LLM(module("qwen3_5"), max_num_seqs=4)
    passes, run = [], llm.target.run
    llm.target.run = lambda work: passes.append(work) or run(work)  # type: ignore[method-assign]
    llm.generate([[*LONG, 50 + each, 7] for each in range(4)], params)
    assert len(passes) == params.max_tokens


def test_an_iteration_that_fails_while_rows_are_moved_is_repeated() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    want = without_cache("qwen3_5", PROMPTS[1:3], params)
    told = [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in want]
    llm = LLM(
        module("qwen3_5"), max_num_seqs=2,
        speculative_config={"method": "oracle", "references": told, "pattern": [3], "tree": "tree"},
    )  # fmt: skip
    move, failures = llm.target.cache.move_rows, [torch.OutOfMemoryError("out of memory")]

    def fail_once(*arguments: Any) -> None:
        if failures:
            raise failures.pop()
        move(*arguments)

    llm.target.cache.move_rows = fail_once  # type: ignore[method-assign]
    assert_same_text(llm.generate(PROMPTS[1:3], params), want, ["a", "b"], tolerance=1e-4)
    assert not failures
