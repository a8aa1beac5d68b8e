"""torch's default dtype is the caller's: tables and tensors of ours have the dtypes that they need."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from end_to_end.tiny_llms import drafters, llm, target
from pairwise import slow_products

from foretoken import LLM, RequestOutput, SamplingParams

PROMPTS = [[5, 6, 5, 6], [7, 8], [9]]
PARAMS = [
    SamplingParams(temperature=0.8, seed=3, max_tokens=16, repetition_penalty=1.1, logit_bias={5: 1.0}, logprobs=2),
    SamplingParams(temperature=0.7, seed=4, max_tokens=16, top_p=0.9, min_p=0.01, min_tokens=3, logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=16, logprobs=1),
]
DRAFTERS = drafters(dtype=torch.float32)
REFERENCES = [[5, 6, 5, 6, 9, 9], [7, 8, 9]]  # heads are trained on them


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """As a script may set it before it does anything else."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def outputs(name: str, runner: str, rule: str | None) -> list[RequestOutput]:
    """Made and called in the default dtype of the moment."""
    arguments: dict[str, Any] = DRAFTERS[name](REFERENCES)
    if rule is not None:
        arguments = {"speculative_config": {**arguments["speculative_config"], "acceptance": rule}}
    engine = llm(arguments, module=target("llama", torch.float32), runner=runner, max_num_seqs=3)
    return engine.generate(PROMPTS, PARAMS)


SETUPS = [
    ("none", "generic", None), ("none", "lean-native", None), ("none", "lean-stock", None),
    ("oracle tree", "generic", "typical"), ("draft tree", "generic", None), ("medusa", "generic", "sequential"),
    ("medusa", "lean-native", None), ("hydra++", "lean-native", "lenient"),
    ("mlp_speculator chain", "generic", "block"),
]  # fmt: skip


@pytest.mark.parametrize(("setup", "dtype"), slow_products(SETUPS, [torch.float64, torch.float16], each=1))
def test_the_default_dtype_changes_nothing(setup: tuple[str, str, str | None], dtype: torch.dtype) -> None:
    """To the last bit of every log-probability, with every kind of rule, and with drafts that are as good."""
    name, runner, rule = setup
    want = outputs(name, runner, rule)
    with default_dtype(dtype):
        got = outputs(name, runner, rule)
    assert [o.outputs[0] for o in got] == [o.outputs[0] for o in want]
    for ours, theirs in zip(got, want, strict=True):
        assert ours.metrics.draft_errors == 0
        assert ours.metrics.num_accepted == theirs.metrics.num_accepted


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_models_of_a_directory(dtype: torch.dtype, tmp_path: Any) -> None:
    target("llama", torch.float32).save_pretrained(tmp_path)
    want = LLM(tmp_path).generate(PROMPTS, PARAMS)
    with default_dtype(dtype):
        engine = LLM(tmp_path)
    assert engine.target.model.dtype is torch.float32
    with default_dtype(dtype):
        got = engine.generate(PROMPTS, PARAMS)
    assert [o.outputs[0] for o in got] == [o.outputs[0] for o in want]
