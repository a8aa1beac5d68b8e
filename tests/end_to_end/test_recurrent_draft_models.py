"""Draft models with recurrent layers, and targets with them: plain decoding's text, and the same tokens a pass."""

import weakref
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from end_to_end.same_text import PARAMS, PROMPTS, assert_same_text
from end_to_end.tiny_llms import WIDTHS, draft_model, noisy, noisy_directory, target

from foretoken import LLM, RequestOutput, SamplingParams
from foretoken.decoder.native_states import StateBlock
from foretoken.drafters.native.trees import draft_trees

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 4},
    "widths": {"tree": WIDTHS},
    "dynamic": {"tree": "dynamic", "num_speculative_tokens": 4, "tree_top_k": 4, "max_nodes": 12},
}
# A draft model that is the target with noise drafts tokens that are accepted; others draft some by chance.
PAIRS = [
    ("llama", "qwen3_5"), ("llama", "lfm2"), ("qwen3_5", "llama"), ("lfm2", "llama"), ("qwen3_5", "lfm2"),
    ("qwen3_5", "qwen3_5"), ("lfm2", "lfm2"), ("bamba", "bamba"), ("jamba", "jamba"),
]  # fmt: skip


@cache
def plain(architecture: str, runner: str = "auto") -> list[RequestOutput]:
    """Plain decoding, one at a time."""
    return LLM(target(architecture, torch.float32), max_num_seqs=1, runner=runner).generate(PROMPTS, PARAMS)


def speculative(architecture: str, draft: str, shape: str, **options: Any) -> LLM:
    model = draft_model(noisy(draft, dtype=torch.float32), quantization="none", **SHAPES[shape])
    return LLM(target(architecture, torch.float32), max_num_seqs=3, drafter=model, trust_drafter=True, **options)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("architecture", "draft"), PAIRS)
def test_text_is_plain_decodings(architecture: str, draft: str, shape: str) -> None:
    """Greedy and sampled requests in one batch, more of them than slots."""
    outputs = speculative(architecture, draft, shape).generate(PROMPTS, PARAMS)
    assert_same_text(outputs, plain(architecture), [shape] * len(PROMPTS), tolerance=1e-4)
    assert all(each.metrics.draft_errors == 0 for each in outputs)
    assert sum(each.metrics.num_drafted for each in outputs) > 40
    if architecture == draft:
        assert tokens_a_pass(outputs) > 1.25  # 1.42 and more are measured


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("draft", ["qwen3_5", "lfm2"])
def test_whole_drafts_write_plain_decodings_text(draft: str, shape: str) -> None:
    """Requests with a temperature alone: one native call drafts a tree; completions of a prompt share its states."""
    params = [SamplingParams(temperature=at % 2 * 0.8, seed=at, max_tokens=24, n=1 + at // 3) for at in range(4)]
    reference = LLM(target(draft, torch.float32), max_num_seqs=1).generate(PROMPTS, params)
    made, are_whole = speculative(draft, draft, shape), list[bool]()

    def drafted(*arguments: Any, **options: Any) -> bool:
        are_whole.append(draft_trees(*arguments, **options))
        return are_whole[-1]

    with mock.patch("foretoken.drafters.levels.draft_trees", drafted):
        outputs = made.generate(PROMPTS, params)
    assert_same_text(outputs, reference, [shape] * len(PROMPTS), tolerance=1e-4)
    assert all(are_whole)
    assert len(are_whole) > 10
    assert all(each.metrics.draft_errors == 0 for each in outputs)
    assert tokens_a_pass(outputs) > 1.25


def tokens_a_pass(outputs: list[RequestOutput]) -> float:
    metrics = [each.metrics for each in outputs]
    return sum(each.num_emitted - each.num_prefill_emitted for each in metrics) / sum(each.steps for each in metrics)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("architecture", "runner"),
    [
        pytest.param(each, runner, marks=pytest.mark.slow if runner == "lean-stock" else ())
        for each in ("qwen3_5", "lfm2", "bamba")
        for runner in ("lean-native", "lean-stock")
    ],
)
def test_tokens_a_pass_are_those_of_the_generic_runner(architecture: str, runner: str, shape: str) -> None:
    found = [speculative(architecture, architecture, shape, runner=each) for each in ("generic", runner)]
    generic, lean = (llm.generate(PROMPTS, PARAMS) for llm in found)
    assert_same_text(lean, generic, [shape] * len(PROMPTS), tolerance=1e-4)
    assert tokens_a_pass(lean) == tokens_a_pass(generic)


@pytest.mark.parametrize("architecture", ["qwen3_5", "lfm2"])
def test_draft_models_of_a_directory(architecture: str) -> None:
    """As people configure them: in int8 on the native kernels, depth and tree chosen by the engine."""
    config = {"method": "draft_model", "model": noisy_directory(architecture, torch.float32)}
    llm = LLM(target(architecture, torch.float32), max_num_seqs=2, speculative_config=config)
    outputs = llm.generate(PROMPTS, PARAMS)
    assert_same_text(outputs, plain(architecture), ["own"] * len(PROMPTS), tolerance=1e-4)


def test_sampled_texts_without_seeds_are_drafted() -> None:
    """Drafts of requests without a seed are drawn from the draft model's distribution."""
    params = SamplingParams(temperature=0.8, max_tokens=24)
    outputs = speculative("qwen3_5", "qwen3_5", "widths").generate(PROMPTS, params)
    assert all(each.metrics.draft_errors == 0 for each in outputs)
    assert tokens_a_pass(outputs) > 1.2


def test_states_of_a_draft_model_are_as_many_as_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three a slot: before the last token, which is fed again, the committed one, and that of the pass."""
    alive, most = set[int](), 0
    made, counted = StateBlock.__init__, list[int]()

    def watched(self: StateBlock, *arguments: Any, has_states: bool) -> None:
        made(self, *arguments, has_states=has_states)
        if has_states:
            nonlocal most
            alive.add(id(self))
            weakref.finalize(self, alive.discard, id(self))
            most = max(most, len(alive))

    def told(mixers: Any, num_blocks: int, num_nodes: int) -> int:
        counted.append(num_blocks)
        return 0

    llm = speculative("llama", "qwen3_5", "chain", enable_prefix_caching=False)  # no snapshots beside them
    monkeypatch.setattr(StateBlock, "__init__", watched)
    llm.generate(PROMPTS, PARAMS)
    monkeypatch.setattr("foretoken.runner.decoders.native_state_bytes", told)
    speculative("llama", "qwen3_5", "chain")
    assert (most > 2 * 3, counted) == (True, [3 * 3])
