"""Target logits that are not finite end their own request, after what plain decoding would still have emitted."""

from typing import Any

import pytest
import torch
from end_to_end.tiny_llms import drafters, llm
from pairwise import slow_products

from foretoken import LLM, SamplingParams
from foretoken.core.passes import Pass
from foretoken.decoder.base import PassOutput

DRAFTERS = drafters()
PROMPTS = [[5], [6, 7], [8, 9, 10]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20, logprobs=1),
    SamplingParams(temperature=0.8, seed=1, max_tokens=20, repetition_penalty=1.2),
    SamplingParams(temperature=0.9, seed=2, max_tokens=20, top_k=9, top_p=0.9),
]


def spoil(
    engine: LLM, victim: int, position: int, value: float, monkeypatch: pytest.MonkeyPatch, tokens: Any = slice(None)
) -> None:
    """Makes the target's logits of one sequence bad, for some tokens, at every node of one position."""
    original = engine.target.run

    def run(work: Pass) -> PassOutput:
        output = original(work)
        ready = [s for s in engine._engine._scheduler.running if s.num_cached == len(s.tokens) - 1]
        for sequence, start, end in zip(ready, work.offsets, work.offsets[1:], strict=False):
            if sequence.request_id == str(victim):
                bad = start + (work.positions[start:end] == position).nonzero()[:, 0]
                output.logits[bad, tokens] = value
        return output

    monkeypatch.setattr(engine.target, "run", run)


@pytest.mark.parametrize(
    ("drafter", "value"),
    slow_products(
        ["none", "oracle [3, 0, 5]", "draft itself tree"], [float("-inf"), float("nan"), float("inf")], each=1
    ),
)
def test_only_the_request_with_bad_logits_ends(drafter: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = llm({}, max_num_seqs=1).generate(PROMPTS, PARAMS)
    known = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in plain]
    for victim, prompt in enumerate(PROMPTS):
        engine = llm(DRAFTERS[drafter](known), max_num_seqs=3)
        spoil(engine, victim, len(prompt) + 5, value, monkeypatch)
        outputs = engine.generate(PROMPTS, PARAMS)
        for index, (got, want) in enumerate(zip(outputs, plain, strict=True)):
            completion, expected = got.outputs[0], want.outputs[0]
            if index != victim:
                assert completion.token_ids == expected.token_ids
                assert completion.finish_reason == "length"
                continue
            # The bad row is the one that decides token 6: position len(prompt) + 5 holds token 5.
            assert completion.token_ids == expected.token_ids[:6]
            assert completion.finish_reason == "error"
            assert completion.text == llm({}).tokenizer.decode(completion.token_ids)
            assert got.metrics.num_emitted == 6
            assert completion.logprobs is None or len(completion.logprobs) == 6
        monkeypatch.undo()
        assert engine.generate(PROMPTS, PARAMS)[victim].outputs[0].token_ids == plain[victim].outputs[0].token_ids


@pytest.mark.parametrize("bias", [None, {0: -1.0}])  # with one, outcomes come from tensors, not from chosen tokens
@pytest.mark.parametrize("drafter", ["none", "oracle [3, 0, 5]", "draft itself tree"])
def test_a_path_that_goes_on_behind_a_bad_row_ends_there(
    drafter: str, bias: dict[int, float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An infinite logit at the very token that follows: acceptance walks on, plain decoding would not."""
    params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=1, logit_bias=bias)
    plain = llm({}, max_num_seqs=1).generate(PROMPTS[0], params)[0].outputs[0]
    engine = llm(DRAFTERS[drafter]([[*PROMPTS[0], *plain.token_ids]]))
    spoil(engine, 0, len(PROMPTS[0]) + 5, float("inf"), monkeypatch, tokens=plain.token_ids[6])
    completion = engine.generate(PROMPTS[0], params)[0].outputs[0]
    assert (completion.token_ids, completion.finish_reason) == (plain.token_ids[:6], "error")
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 6


def test_bad_rows_off_the_path_are_nobodys_business(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong drafts may overflow the target: their rows decide nothing."""
    params = SamplingParams(temperature=0.0, max_tokens=20)
    plain = llm({}).generate([5], params)[0].outputs[0].token_ids
    engine = llm(DRAFTERS["random wide"](None))
    original = engine.target.run

    def run(work: Pass) -> PassOutput:
        output = original(work)
        _root, *drafted = work.tokens.tolist()
        output.logits[torch.tensor([False] + [token not in plain for token in drafted])] = float("nan")
        return output

    monkeypatch.setattr(engine.target, "run", run)
    completion = engine.generate([5], params)[0].outputs[0]
    assert (completion.token_ids, completion.finish_reason) == (plain, "length")


def test_some_minus_infinities_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models mask padding ids of their vocabulary that way."""
    engine = llm({})
    original = engine.target.run

    def run(work: Pass) -> PassOutput:
        output = original(work)
        output.logits[:, 40:] = float("-inf")
        return output

    monkeypatch.setattr(engine.target, "run", run)
    completion = engine.generate([5], SamplingParams(temperature=1.0, seed=0, max_tokens=20))[0].outputs[0]
    assert completion.finish_reason == "length"
    assert max(completion.token_ids) < 40
