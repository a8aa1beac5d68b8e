"""What a slot still holds is not read again: the text stays that of plain decoding, and drafters lose nothing.

Slow because every kind of state that is kept by slot has an engine of its own.
"""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from end_to_end.poison import poison_caches
from end_to_end.prefix_mix import CONTEXT_LEN, TEXTS, plain_prefix_mix, prefix_mix
from end_to_end.request_mix import plain_mix, references
from end_to_end.same_text import assert_same_text
from end_to_end.tiny_heads import HEADS
from end_to_end.tiny_llms import RUNNERS, draft_model, drafters, llm, target
from pairwise import slow_products

from foretoken import LLM, RequestOutput, SamplingParams
from foretoken.core.records import GenerationMetrics
from foretoken.core.token_tree import common_prefix_len

DRAFTERS = {runner: drafters(dtype=dtype) for runner, dtype in RUNNERS.items()}
# One of every kind of state that a drafter keeps by slot: rows of a draft model, of a head's block, of an LSTM; the
# last feature alone; tables of its own; none at all; several together.
KINDS = [
    "none", "draft itself", "draft itself tree", "draft dynamic", "draft intersection", "draft text", "hydra++",
    "eagle", "eagle dynamic", "eagle3", "falcon", "medusa", "spire", "mlp_speculator", "early exit", "ngram", "suffix",
    "prediction", "rest", "lookahead", "recycling", "oracle tree", "heads", "draft, suffix and recycling", "raises",
]  # fmt: skip
# Those whose drafts do not depend on what was written before, and not on the clock.
STEADY = {
    "draft itself", "draft itself tree", "draft dynamic", "draft intersection", "draft text", "hydra++", "eagle",
    "eagle dynamic", "eagle3", "falcon", "medusa", "spire", "mlp_speculator", "oracle tree",
}  # fmt: skip
# Those whose state is kept like that of another kind, or less of it.
ALIKE = {"draft itself", "draft intersection", "eagle", "medusa"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def engine_with(drafter: str, runner: str, **more: Any) -> LLM:
    """An engine over fewer slots than there are requests."""
    is_trained = bool({"heads", *HEADS} & {drafter, drafter.removesuffix(" dynamic")})
    known = references(plain_mix() if is_trained else plain_prefix_mix())  # heads are those of other tests
    arguments = {"max_num_seqs": 3, "max_model_len": CONTEXT_LEN, "runner": runner, **more}
    return llm(DRAFTERS[runner][drafter](known), **arguments)


def generated(engine: LLM) -> list[RequestOutput]:
    """The mix."""
    return engine.generate([r.salted for r in prefix_mix()], [r.params for r in prefix_mix()])


def num_cached(outputs: list[RequestOutput]) -> int:
    """Prompt tokens that were not read."""
    return sum(output.metrics.num_cached_tokens for output in outputs)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("drafter", "runner"),
    [
        *(pytest.param(name, "lean-native", marks=slow if name in ALIKE else []) for name in KINDS),
        ("draft itself tree", "generic"), ("eagle", "lean-stock"),
        *(pytest.param("none", runner, marks=slow) for runner in ("generic", "lean-stock")),
        *(pytest.param(name, "generic", marks=slow) for name in sorted(STEADY - {"draft itself tree"})),
        *(pytest.param(name, "lean-stock", marks=slow) for name in ("draft itself tree", "hydra++")),
    ],
)  # fmt: skip
def test_text_is_plain_decodings(drafter: str, runner: str) -> None:
    engine = engine_with(drafter, runner)
    poison_caches(engine)
    got = generated(engine)
    assert_same_text(got, plain_prefix_mix(runner), [r.name for r in prefix_mix()])
    # An LSTM's state is that of its last position, so that only whole texts can be gone on from.
    assert num_cached(got) > (0 if drafter == "falcon" else 150)
    if drafter in STEADY and runner != "lean-stock":
        read = generated(engine_with(drafter, runner, enable_prefix_caching=False))
        assert num_cached(read) == 0
        totals = [GenerationMetrics.total(o.metrics for o in each) for each in (got, read)]
        lengths = [total.num_emitted / (total.steps + total.num_prefill_emitted) for total in totals]
        assert lengths[0] > 0.93 * lengths[1]  # behind a prefix that is the whole prompt, heads draft a pass later


@pytest.mark.parametrize(("drafter", "runner"), slow_products(["none", "draft itself tree"], list(RUNNERS), each=1))
def test_control_one_row_too_many_is_noticed(drafter: str, runner: str) -> None:
    """The row of one token that is not the prompt's changes what is written."""

    def too_long(first: list[int], second: list[int]) -> int:
        return common_prefix_len(first, second) + 2  # the token after a prefix is shared as well

    engine = engine_with(drafter, runner)
    with (
        mock.patch("foretoken.engine.scheduler.common_prefix_len", too_long),
        pytest.raises(AssertionError, match="completion"),
    ):
        assert_same_text(generated(engine), plain_prefix_mix(runner), [r.name for r in prefix_mix()])


@pytest.mark.parametrize("drafter", ["none", "draft itself", "eagle", "suffix"])
def test_prefixes_are_shared_by_requests_of_one_salt(drafter: str) -> None:
    engine, prompt = engine_with(drafter, "generic"), TEXTS[0]

    def cached(salt: str | None) -> int | None:
        (output,) = engine.generate({"prompt_token_ids": prompt, "cache_salt": salt}, GREEDY)
        return output.num_cached_tokens

    assert [cached(salt) for salt in (None, "mine", "yours", "mine", None)] == [0, 0, 0, 39, 39]


def test_prompts_whose_tokens_are_scored_are_read_as_a_whole() -> None:
    engine = engine_with("none", "generic")
    scored = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=1)
    first, again, after = (engine.generate([TEXTS[0]], params)[0] for params in (scored, scored, GREEDY))
    assert (first.num_cached_tokens, again.num_cached_tokens, after.num_cached_tokens) == (0, 0, 39)
    assert again.prompt_logprobs == first.prompt_logprobs
    assert len(again.prompt_logprobs or ()) == 40


@pytest.mark.parametrize(
    ("drafter", "runner"),
    [
        *((drafter, "lean-native") for drafter in ("none", "draft itself", "hydra++", "eagle", "falcon", "spire")),
        ("draft itself", "generic"), ("hydra++", "lean-stock"),
        *(pytest.param(name, "generic", marks=slow) for name in ("none", "hydra++", "eagle", "falcon", "spire")),
        *(
            pytest.param(name, "lean-stock", marks=slow)
            for name in ("none", "draft itself", "eagle", "falcon", "spire")
        ),
    ],
)  # fmt: skip
def test_a_conversation_goes_on_where_it_was(drafter: str, runner: str) -> None:
    """All of a text but its last token is there when the next turn repeats it, and its slot goes on."""
    engine = engine_with(drafter, runner)
    plain = llm({}, max_num_seqs=1, max_model_len=CONTEXT_LEN, runner=runner, enable_prefix_caching=False)
    prompt, params = TEXTS[0][:20], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    for turn in range(4):
        (got,), (want,) = engine.generate([prompt], params), plain.generate([prompt], params)
        assert_same_text([got], [want], [f"turn {turn}"])
        known = len(prompt) - 5 if turn else 0
        # A pair of a feature and the token after it is fed with the next proposal only, and a head knows as much.
        assert got.num_cached_tokens is not None
        assert known - (drafter not in ("none", "draft itself")) <= got.num_cached_tokens <= known
        prompt = [*prompt, *got.outputs[0].token_ids, 9, 5 + turn, 7, 11]


@pytest.mark.parametrize(
    ("prefill_chunk", "drafter"),
    slow_products([16, 64], ["none", "draft itself", "hydra++", "eagle", "suffix"], each=1),
)
def test_a_prompt_of_several_completions_is_read_once(drafter: str, prefill_chunk: int) -> None:
    runner = "generic" if drafter == "none" else "lean-native"
    engine = engine_with(drafter, runner, max_num_seqs=6)
    plain = llm({}, max_num_seqs=6, max_model_len=CONTEXT_LEN, runner=runner, enable_prefix_caching=False)
    engine.target.prefill_chunk = prefill_chunk
    params = SamplingParams(temperature=0.8, seed=1, n=4, max_tokens=12, ignore_eos=True)
    got, want = engine.generate([TEXTS[0], TEXTS[1]], params), plain.generate([TEXTS[0], TEXTS[1]], params)
    assert_same_text(got, want, ["first", "second"])
    for output in got:  # a head's state ends a position before its last feature
        assert 3 * 37 <= output.metrics.num_cached_tokens <= 3 * 39


def test_who_waits_for_a_prompt_keeps_its_place() -> None:
    engine, order = engine_with("none", "generic", max_num_seqs=3), []
    engine.target.prefill_chunk = 16
    salted = {"prompt_token_ids": TEXTS[0], "cache_salt": "mine"}
    for chunk in engine.stream([TEXTS[0], TEXTS[0], TEXTS[0][:4] + TEXTS[1], salted], GREEDY):
        order += [chunk.prompt_index] * (chunk.prompt_index not in order)
    assert order == [0, 1, 2, 3]
    others = engine.generate([TEXTS[1], [*TEXTS[1][:20], 3, 4], salted], GREEDY)
    assert [output.num_cached_tokens for output in others] == [0, 19, 39]


def test_rows_of_a_sequence_that_failed_are_not_used() -> None:
    engine = engine_with("none", "generic")
    with mock.patch.object(engine.target, "commit", side_effect=RuntimeError("no")):
        failed = engine.generate([TEXTS[1]], GREEDY)[0]
    assert failed.outputs[0].finish_reason == "error"
    assert engine.generate([TEXTS[1]], GREEDY)[0].num_cached_tokens == 0


def test_prompts_are_counted() -> None:
    engine = engine_with("none", "generic")
    engine.generate([TEXTS[0]] * 2, GREEDY)
    output = engine.generate([TEXTS[0]], SamplingParams(temperature=0.8, seed=1, n=2, max_tokens=4))[0]
    values = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()}
    assert (output.num_cached_tokens, output.metrics.num_cached_tokens, output.metrics.num_prefix_queries) == (
        39,
        78,
        80,
    )
    assert values["vllm:prefix_cache_queries"] == 160
    assert values["vllm:prefix_cache_hits"] == 78 + 39
    assert values["vllm:prompt_tokens"] == 160
    off = engine_with("none", "generic", enable_prefix_caching=False)
    assert [o.num_cached_tokens for o in off.generate([TEXTS[0]] * 4, GREEDY)] == [0] * 4


# What becomes of weights in place, so that torch counts it.
WRITES: dict[str, Callable[[Any], object]] = {
    "an optimizer's step": lambda module: torch.optim.SGD(with_gradients(module), lr=0.25).step(),
    "a fused optimizer's step": lambda module: torch.optim.AdamW(with_gradients(module), lr=0.25, fused=True).step(),
    "load_state_dict": lambda module: module.load_state_dict(
        {name: each * -0.7 for name, each in module.state_dict().items()}
    ),
    "one norm": torch.no_grad()(lambda module: module.model.norm.weight.copy_(torch.linspace(-1, 1, 32))),
    "inference mode": torch.inference_mode()(lambda module: module.model.layers[0].mlp.up_proj.weight.neg_()),
    "a buffer": lambda module: module.model.rotary_emb.inv_freq.mul_(0.3),
}

# Drafters beside which nothing but the target's rows can be old, or as with another.
OF_FEW_WEIGHTS = {*ALIKE, "draft dynamic", "draft text", "mlp_speculator", "oracle tree"}


def with_gradients(module: Any) -> list[torch.nn.Parameter]:
    parameters = list(module.parameters())
    for index, each in enumerate(parameters):
        each.grad = torch.full_like(each, (-1) ** index)
    return parameters


@cache
def of_new_weights(write: str, runner: str) -> list[RequestOutput]:
    """Plain decoding of the mix by a new engine over weights that were written to."""
    module = copy.deepcopy(target("llama", RUNNERS[runner]))
    WRITES[write](module)
    plain = llm(
        {}, module=module, max_num_seqs=1, max_model_len=CONTEXT_LEN, runner=runner, enable_prefix_caching=False
    )
    return plain.generate([r.prompt for r in prefix_mix()], [r.params for r in prefix_mix()])


@pytest.mark.parametrize(
    ("drafter", "runner", "write"),
    [
        *(("none", "lean-native", write) for write in WRITES),
        ("none", "generic", "inference mode"), ("none", "lean-stock", "one norm"),
        *(
            pytest.param("none", runner, write, marks=slow) for runner in ("generic", "lean-stock") for write in WRITES
            if (runner, write) not in (("generic", "inference mode"), ("lean-stock", "one norm"))
        ),
        *(
            pytest.param(drafter, "lean-native", "load_state_dict", marks=slow if drafter in OF_FEW_WEIGHTS else [])
            for drafter in (*sorted(STEADY), "early exit", "suffix")
        ),
        ("draft itself", "generic", "load_state_dict"), ("eagle", "lean-stock", "load_state_dict"),
        pytest.param("eagle", "generic", "load_state_dict", marks=slow),
        pytest.param("draft itself", "lean-stock", "load_state_dict", marks=slow),
    ],
)  # fmt: skip
def test_rows_of_old_weights_are_not_used(drafter: str, runner: str, write: str) -> None:
    module = copy.deepcopy(target("llama", RUNNERS[runner]))
    engine = engine_with(drafter, runner, module=module)
    before = generated(engine)
    WRITES[write](module)
    after = generated(engine)
    wanted = of_new_weights(write, runner)
    assert [o.outputs[0].token_ids for o in before] != [o.outputs[0].token_ids for o in wanted]
    assert_same_text(after, wanted, [r.name for r in prefix_mix()])
    assert num_cached(after) > (0 if drafter == "falcon" else 150), "rows of the new weights are used"


@pytest.mark.parametrize(
    ("drafter", "runner"),
    [
        *((drafter, "lean-native") for drafter in ("none", "draft itself", "eagle", "suffix")),
        ("draft itself", "generic"), ("none", "lean-stock"),
        *(pytest.param(drafter, "generic", marks=slow) for drafter in ("none", "eagle", "suffix")),
        *(pytest.param(drafter, "lean-stock", marks=slow) for drafter in ("draft itself", "eagle", "suffix")),
    ],
)  # fmt: skip
def test_requests_that_run_go_on_with_new_weights(drafter: str, runner: str) -> None:
    """Tokens before the write are the old model's; those after it are what the new one writes after that text."""
    module = copy.deepcopy(target("llama", RUNNERS[runner]))
    engine, params = engine_with(drafter, runner, module=module), SamplingParams(temperature=0.0, max_tokens=16)
    old = engine.generate(TEXTS, params)
    texts: list[list[int]] = [[], []]
    num_before: list[int] = []
    for chunk in engine.stream(TEXTS, params):
        texts[chunk.prompt_index] += chunk.token_ids
        if not num_before and min(map(len, texts)) >= 3 and chunk.prompt_index == 1:  # the iteration's last chunk
            num_before = list(map(len, texts))
            WRITES["load_state_dict"](module)
    for prompt, text, count, before in zip(TEXTS, texts, num_before, old, strict=True):
        assert text[:count] == before.outputs[0].token_ids[:count]
        plain = llm({}, module=module, max_num_seqs=1, max_model_len=CONTEXT_LEN, runner=runner)
        rest = SamplingParams(temperature=0.0, max_tokens=16 - count)
        assert text[count:] == plain.generate([prompt + text[:count]], rest)[0].outputs[0].token_ids
    assert texts[0] != old[0].outputs[0].token_ids


@pytest.mark.parametrize("quantization", ["int8", "none"])
def test_a_draft_model_follows_its_weights(quantization: str) -> None:
    """One that is the target in every weight, before and after, has as many drafts accepted as a new engine's."""
    module, draft = (copy.deepcopy(target("llama", torch.bfloat16)) for _ in range(2))
    make = draft_model(draft, num_speculative_tokens=3, quantization=quantization)
    arguments = {"module": module, "runner": "lean-native", "max_model_len": CONTEXT_LEN}
    engine = llm({"drafter": make, "trust_drafter": True}, **arguments)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    engine.generate(TEXTS, params)
    for each in (module, draft):
        WRITES["load_state_dict"](each)
    again = llm({"drafter": make, "trust_drafter": True}, **arguments)
    got, want = (GenerationMetrics.total(o.metrics for o in each.generate(TEXTS, params)) for each in (engine, again))
    assert (got.steps, got.num_accepted) == (want.steps, want.num_accepted)
    assert want.num_accepted > 2 * want.steps, "it drafts what the target says"


@pytest.mark.parametrize("runner", RUNNERS)
def test_writes_through_data_are_told(runner: str) -> None:
    """torch does not count them."""
    module = copy.deepcopy(target("llama", RUNNERS[runner]))
    engine = engine_with("none", runner, module=module)
    generated(engine)
    for each in module.parameters():
        each.data.mul_(-0.7)
    assert engine.reset_prefix_cache()
    assert_same_text(generated(engine), of_new_weights("load_state_dict", runner), [r.name for r in prefix_mix()])


def test_weights_that_cannot_be_run_on_end_requests_with_a_sentence() -> None:
    module = copy.deepcopy(target("llama", torch.bfloat16))
    engine = engine_with("none", "lean-native", module=module)
    weight = module.model.layers[0].mlp.up_proj.weight
    WRITES["load_state_dict"](module)
    kept = weight.data.clone()
    weight.untyped_storage().resize_(0)
    (failed,) = engine.generate([TEXTS[0]], GREEDY)
    assert failed.outputs[0].finish_reason == "error"
    assert "the memory of a weight" in str(failed.outputs[0].error)
    weight.untyped_storage().resize_(kept.nbytes)
    weight.data.copy_(kept)
    wanted = of_new_weights("load_state_dict", "lean-native")
    assert_same_text(generated(engine), wanted, [r.name for r in prefix_mix()])
