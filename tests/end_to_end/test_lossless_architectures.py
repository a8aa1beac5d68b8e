"""The same promise over other architectures in float32.

Slow because every architecture is decoded plainly and with several drafters by every runner.
"""

from functools import cache
from itertools import product

import pytest
import torch
from end_to_end.same_text import PARAMS, PROMPTS, assert_same_text
from end_to_end.tiny_heads import head
from end_to_end.tiny_llms import drafters
from tiny_models import ARCHITECTURES, LEAN_ARCHITECTURES, tiny_model

from foretoken import LLM, RequestOutput

# GPT-2 learns positions; the others slide windows, cap scores, route experts, hold sinks, or compress KV.
CHOSEN = ("gpt2", "mistral", "gemma2", "gemma3", "qwen3", "mixtral", "gpt_oss", "deepseek_v3", "cohere", "opt")


DRAFTERS = ("ngram tree", "draft itself tree", "draft", "oracle tree", "eagle", "eagle3")
# What the lean decoder knows, on both of its kernels; the rest runs on the transformers model.
RUNNERS = {
    architecture: [
        *(["lean-native", "lean-stock"] if architecture in LEAN_ARCHITECTURES else []),
        *(["generic"] if architecture in CHOSEN else []),
    ]
    for architecture in dict.fromkeys((*CHOSEN, *LEAN_ARCHITECTURES))
}
# Where an architecture has several runners, its drafters are dealt out to them, to each architecture's in another
# order: every drafter meets every architecture and every runner. `test_the_cases_cover` counts. On native kernels,
# which are fast, all of them run, on others one or two, and the rest is slow.
CASES = [
    (architecture, runner, DRAFTERS[(place - index) % len(runners) :: len(runners)])
    for index, (architecture, runners) in enumerate(RUNNERS.items()) for place, runner in enumerate(runners)
]  # fmt: skip


def now_and_slow(place: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The drafters of a case that always run, and its others."""
    _, runner, names = CASES[place]
    if runner == "lean-native":
        return names, ()
    chosen = [names[place % len(names)], *(["oracle tree"] if len(names) == len(DRAFTERS) else [])]
    return tuple(dict.fromkeys(chosen)), tuple(name for name in names if name not in chosen)


def test_the_cases_cover() -> None:
    """Every pair of architecture and runner that are served, and every drafter with each of them."""
    pairs = {(drafter, architecture, runner) for architecture, runner, drafters in CASES for drafter in drafters}
    assert {(drafter, architecture) for drafter, architecture, _ in pairs} == set(product(DRAFTERS, RUNNERS))
    assert {(drafter, runner) for drafter, _, runner in pairs} == set(
        product(DRAFTERS, ("generic", "lean-native", "lean-stock"))
    )
    assert {(architecture, runner) for _, architecture, runner in pairs} == {
        *product(CHOSEN, ("generic",)), *product(LEAN_ARCHITECTURES, ("lean-native", "lean-stock")),
    }  # fmt: skip
    always = {(drafter, CASES[place][1]) for place in range(len(CASES)) for drafter in now_and_slow(place)[0]}
    assert always >= set(product(DRAFTERS, ("lean-native",)))
    assert len(always) > 15


@cache
def plain(architecture: str, runner: str) -> list[RequestOutput]:
    """Plain decoding, one at a time."""
    return LLM(tiny_model(architecture), max_num_seqs=1, runner=runner).generate(PROMPTS, PARAMS)


@pytest.mark.parametrize(
    ("architecture", "runner", "names"),
    [
        *((architecture, runner, now_and_slow(place)[0]) for place, (architecture, runner, _) in enumerate(CASES)),
        *(
            pytest.param(architecture, runner, now_and_slow(place)[1], marks=pytest.mark.slow)
            for place, (architecture, runner, _) in enumerate(CASES) if runner != "lean-native"
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else ", ".join(each),
)  # fmt: skip
def test_text_is_plain_decodings(architecture: str, runner: str, names: tuple[str, ...]) -> None:
    assert architecture in ARCHITECTURES
    module = tiny_model(architecture)
    known = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in plain(architecture, runner)]
    makers = drafters(architecture, torch.float32)
    # Trained for a few steps, so that some drafts are accepted and others are not.
    makers |= {name: head(name, architecture, steps=25, num_speculative_tokens=3) for name in ("eagle", "eagle3")}
    for name in names:
        speculative = LLM(module, max_num_seqs=3, runner=runner, **makers[name](known))
        assert_same_text(
            speculative.generate(PROMPTS, PARAMS), plain(architecture, runner), [name] * len(PROMPTS), tolerance=1e-4
        )
