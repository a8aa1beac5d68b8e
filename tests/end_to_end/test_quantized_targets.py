"""Targets in 4 and 8 bits: their text is the same with and without drafts, and that of the weights they stand for."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from end_to_end.same_text import assert_same_text
from end_to_end.tiny_heads import head
from end_to_end.tiny_llms import config, draft_model, drafters, fixed, noisy, tokenizer
from tiny_models import tiny_model

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ConfigError, ModelError
from foretoken.decoder.quantized import QuantizedLinear, quantized
from foretoken.formats.checkpoint import TargetFingerprint
from foretoken.models.loading import wrap_model
from foretoken.models.quantize import quantize_model

PROMPTS = [[5, 6, 7, 8, 5, 6], list(range(3, 40)), [9, 9, 4]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, logprobs=2),
    SamplingParams(temperature=0.8, seed=1, max_tokens=24),
    SamplingParams(temperature=0.9, seed=2, max_tokens=24, top_p=0.9),
]
BF16 = torch.bfloat16
DRAFTERS: dict[str, Any] = {
    **{
        name: drafters(dtype=BF16)[name]
        for name in ("ngram tree", "draft tree", "draft dynamic", "early exit", "sparse kv", "recycling", "oracle tree")
    },
    **{name: head(name, num_speculative_tokens=3) for name in ("eagle3", "medusa", "hydra", "mlp_speculator")},
    "draft in int4": fixed(
        drafter=draft_model(noisy(dtype=BF16), quantization="int4", num_speculative_tokens=4), trust_drafter=True
    ),
    "eagle in int4": head("eagle", num_speculative_tokens=3, quantization="int4"),
    "sparse kv adaptive": config("sparse_kv"),
}


def texts(quantization: str, arguments: dict[str, Any], *, module: Any = None, **more: Any) -> list[Any]:
    target = tiny_model("llama", dtype=BF16) if module is None else module
    engine = LLM(
        target, tokenizer=tokenizer(), quantization=quantization, **{"runner": "lean-native"} | more, **arguments
    )
    return engine.generate(PROMPTS, PARAMS)


@pytest.mark.parametrize("quantization", ["int4", "int8"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_text_is_plain_decodings(name: str, quantization: str) -> None:
    plain = texts(quantization, {}, max_num_seqs=1)
    known = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in plain]
    got = texts(quantization, DRAFTERS[name](known), max_num_seqs=3)
    assert_same_text(got, plain, [name] * len(PROMPTS))
    assert all(output.metrics.draft_errors == 0 for output in got)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma2", "qwen3"])
def test_int4_is_the_model_of_its_decoded_weights(architecture: str, dtype: torch.dtype) -> None:
    """To the last bit: groups are decoded before they are multiplied."""
    module = tiny_model(architecture, dtype=dtype)
    dense = copy.deepcopy(module)
    for part in dense.modules():
        if type(part) is torch.nn.Linear:  # unties an LM head
            part.weight = torch.nn.Parameter(quantized(part.weight, "int4", dtype=dtype).decoded())
    found = texts("int4", {}, module=module)
    expected = LLM(dense, tokenizer=tokenizer(), runner="lean-native").generate(PROMPTS, PARAMS)
    assert_same_text(found, expected, [architecture] * len(PROMPTS))


def test_the_transformers_model_multiplies_by_the_same_weights() -> None:
    module = tiny_model("llama", dtype=torch.float32)
    native, generic = (texts("int8", {}, module=module, runner=runner) for runner in ("lean-native", "generic"))
    assert_same_text(generic, native, ["generic"] * len(PROMPTS), tolerance=1e-4)
    with pytest.raises(ModelError, match="only native kernels on CPUs run weights in 8 bits"):
        texts("int8", {}, module=module, runner="lean-stock")


def test_experts_stay_and_the_rest_is_rounded() -> None:
    module = tiny_model("qwen3_moe", dtype=BF16)
    made = quantize_model(wrap_model(module, name="tiny"), "int4")
    assert any(isinstance(part, QuantizedLinear) for part in made.module.modules())
    assert_same_text(
        texts("int4", config("ngram", num_speculative_tokens=3)([]), module=module), texts("int4", {}, module=module),
        ["experts"] * len(PROMPTS),
    )  # fmt: skip


def test_originals_are_freed_and_a_callers_model_stays(tmp_path: Any) -> None:
    module = tiny_model("llama", dtype=BF16)
    before = {name: each.clone() for name, each in module.state_dict().items()}
    texts("int4", {}, module=module)
    assert all(torch.equal(each, before[name]) for name, each in module.state_dict().items())
    module.save_pretrained(tmp_path)
    from foretoken.models.loading import load_model

    loaded = load_model(str(tmp_path), dtype="bfloat16")
    first: Any = loaded.backbone
    memory = weakref.ref(first.layers[0].self_attn.q_proj.weight)
    storage = first.layers[0].self_attn.q_proj.weight.untyped_storage()
    fingerprint = TargetFingerprint.of(loaded)
    rounded = quantize_model(loaded, "int4")
    gc.collect()
    assert memory() is None
    assert first.layers[0].input_layernorm.weight.untyped_storage()._cdata != storage._cdata
    assert TargetFingerprint.of(rounded) == fingerprint, "its drafters are those of the original"


def test_refusals() -> None:
    module = tiny_model("llama", dtype=BF16)
    with pytest.raises(ConfigError, match=r"quantization is 'int3'. Expected int4 or int8, or None"):
        texts("int3", {}, module=module)
    with pytest.raises(ModelError, match=r"in torch.float64 on 'cpu'. Only CPUs have kernels for it"):
        LLM(tiny_model("llama", dtype=torch.float64), quantization="int8")
    loaded = quantize_model(wrap_model(tiny_model("llama", dtype=BF16), name="tiny"), "int8")
    with pytest.raises(ModelError, match="quantization 'int4' was asked for, but 'tiny' is in memory as int8"):
        LLM(loaded, quantization="int4")
    broken = copy.deepcopy(module)
    broken.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(ModelError, match=r"'model.layers.1.mlp.up_proj' of .* cannot be rounded: a weight .* NaN"):
        LLM(broken, quantization="int4")
