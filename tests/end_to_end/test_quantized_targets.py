"""Targets in 4 and 8 bits: their text is the same with and without drafts, and that of the weights they stand for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.same_text import assert_same_text
from end_to_end.tiny_heads import head
from end_to_end.tiny_llms import config, draft_model, drafters, fixed, noisy, tokenizer
from tiny_models import tiny_model

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ConfigError, ModelError
from foretoken.decoder.quantized import Quantization, QuantizedLinear, quantized
from foretoken.decoder.quantized_embedding import QuantizedEmbedding
from foretoken.formats.checkpoint import TargetFingerprint
from foretoken.models.loading import load_model, wrap_model
from foretoken.models.parts import target_parts
from foretoken.models.quantization.rounding import quantize_model

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
    **{
        name: head(name, num_speculative_tokens=3)
        for name in ("eagle3", "falcon", "hydra", "medusa", "mlp_speculator", "spire")
    },
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


@pytest.mark.parametrize("quantization", ["int4", "int8", "w4a8", "w8a8"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_text_is_plain_decodings(name: str, quantization: str) -> None:
    plain = texts(quantization, {}, max_num_seqs=1)
    known = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in plain]
    got = texts(quantization, DRAFTERS[name](known), max_num_seqs=3)
    assert_same_text(got, plain, [name] * len(PROMPTS))
    assert all(output.metrics.draft_errors == 0 for output in got)


@pytest.mark.parametrize("quantization", ["int4", "int8"])
@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma2", "qwen3"])
def test_rounded_targets_are_the_models_of_their_weights(architecture: str, quantization: Quantization) -> None:
    """In float32, where inputs are rounded to 24 bits."""
    module = tiny_model(architecture, dtype=torch.float32)
    dense = copy.deepcopy(module)
    for part in dense.modules():
        if type(part) is torch.nn.Linear:  # unties an LM head
            part.weight = torch.nn.Parameter(quantized(part.weight, quantization, dtype=torch.float32).dequantized())
        elif isinstance(part, torch.nn.Embedding):
            part.weight = torch.nn.Parameter(quantized(part.weight, "int8", dtype=torch.float32).dequantized())
    found = texts(quantization, {}, module=module)
    expected = LLM(dense, tokenizer=tokenizer(), runner="lean-native").generate(PROMPTS, PARAMS)
    assert_same_text(found, expected, [architecture] * len(PROMPTS), tolerance=1e-4)


def test_the_transformers_model_multiplies_by_the_same_weights() -> None:
    module = tiny_model("llama", dtype=torch.float32)
    native, generic = (texts("int8", {}, module=module, runner=runner) for runner in ("lean-native", "generic"))
    assert_same_text(generic, native, ["generic"] * len(PROMPTS), tolerance=1e-4)
    with pytest.raises(ModelError, match="only native kernels on CPUs run weights in 8 bits"):
        texts("int8", {}, module=module, runner="lean-stock")


def test_experts_stay_and_the_rest_is_rounded() -> None:
    module = tiny_model("qwen3_moe", dtype=BF16)
    made: Any = quantize_model(wrap_model(module, name="tiny"), "int4")
    theirs: Any = module
    assert isinstance(made.backbone.layers[0].self_attn.q_proj, QuantizedLinear)
    for ours, original in zip(made.backbone.layers, theirs.model.layers, strict=True):
        assert torch.equal(ours.mlp.experts.gate_up_proj, original.mlp.experts.gate_up_proj)
    assert_same_text(
        texts("int4", config("ngram", num_speculative_tokens=3)([]), module=module), texts("int4", {}, module=module),
        ["experts"] * len(PROMPTS),
    )  # fmt: skip


ROUNDED = (QuantizedLinear, QuantizedEmbedding)


def reachable_bytes(module: torch.nn.Module) -> int:
    """Bytes of all memory that parameters and buffers keep; of shared pages their own part."""
    rounded = {id(each) for part in module.modules() if isinstance(part, ROUNDED) for each in part.matrix.tensors()}
    tensors = [*module.parameters(), *module.buffers()]
    own = [each.untyped_storage() for each in tensors if id(each) not in rounded]
    shared = [each for each in tensors if id(each) in rounded]
    return sum({each.data_ptr(): each.nbytes() for each in own}.values()) + sum(each.nbytes for each in shared)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_originals_are_freed_and_drafters_know_the_target(architecture: str, tmp_path: Path) -> None:
    module = tiny_model(architecture, dtype=BF16, tie_word_embeddings=False)
    module.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="bfloat16")
    dense = (torch.nn.Linear, torch.nn.Embedding)
    linear = sum(part.weight.nbytes for part in loaded.module.modules() if type(part) in dense)
    before, fingerprint = reachable_bytes(loaded.module), TargetFingerprint.of(loaded)
    rounded = quantize_model(loaded, "int4")
    kept = sum(part.matrix.nbytes for part in rounded.module.modules() if isinstance(part, ROUNDED))
    assert 0 < kept < linear
    assert reachable_bytes(rounded.module) <= before - linear + kept + 4096, "but for alignment"
    assert TargetFingerprint.of(rounded) == fingerprint, "its drafters are those of the original"


def test_a_callers_models_stay() -> None:
    module = tiny_model("llama", dtype=BF16)
    before = {name: each.clone() for name, each in module.state_dict().items()}
    texts("int4", {}, module=module)
    assert all(torch.equal(each, before[name]) for name, each in module.state_dict().items())
    loaded = wrap_model(module, name="tiny")
    plain = LLM(loaded, tokenizer=tokenizer(), runner="lean-native").generate(PROMPTS, PARAMS)
    for quantization in ("int4", "int8"):
        assert_same_text(
            texts(quantization, {}, module=loaded), texts(quantization, {}, module=module), ["loaded"] * len(PROMPTS)
        )
    again = LLM(loaded, tokenizer=tokenizer(), runner="lean-native").generate(PROMPTS, PARAMS)
    assert_same_text(again, plain, ["again"] * len(PROMPTS))


def test_writes_to_a_callers_weights_end_it() -> None:
    module = copy.deepcopy(tiny_model("llama", dtype=BF16))
    engine = LLM(module, tokenizer=tokenizer(), quantization="int8", runner="lean-native")
    engine.generate(PROMPTS[:1], PARAMS[:1])
    with torch.no_grad():
        module.model.norm.weight.mul_(2)
    (output,) = engine.generate(PROMPTS[:1], PARAMS[:1])
    assert "weights of 'LlamaForCausalLM' were written, whose matrices were rounded" in str(output.outputs[0].error)


def test_refusals() -> None:
    module = tiny_model("llama", dtype=BF16)
    with pytest.raises(ConfigError, match=r"quantization is 'int3'. Expected int4 or int8 or w4a8 or w8a8, or None"):
        texts("int3", {}, module=module)
    with pytest.raises(ModelError, match=r"in torch.float64 on 'cpu'. Only CPUs have kernels for it"):
        LLM(tiny_model("llama", dtype=torch.float64), quantization="int8")
    loaded = quantize_model(wrap_model(tiny_model("llama", dtype=BF16), name="tiny"), "int8")
    with pytest.raises(ModelError, match="quantization 'int4' was asked for, but 'tiny' is in memory as int8"):
        LLM(loaded, quantization="int4")
    with pytest.raises(ModelError, match="keeps its weight in 8 bits, which cannot be saved"):
        loaded.module.state_dict()
    with pytest.raises(ModelError, match="'tiny' was rounded to int8, and training and copies need its weights"):
        target_parts(loaded, dtype=torch.float32)
    with pytest.raises(ConfigError, match="quantization 'int8' cannot be had: 'tiny' was rounded to int8 before"):
        LLM(loaded, speculative_config={"method": "sparse_kv", "kv_budget": 12, "quantization": "int8"})
    broken = copy.deepcopy(module)
    broken.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(ModelError, match=r"'model.layers.1.mlp.up_proj' of .* cannot be rounded: a weight .* NaN"):
        LLM(broken, quantization="int4")
    hooked = copy.deepcopy(module)
    hooked.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(ModelError, match=r"was asked for '.*', but .* hook"):
        LLM(hooked, quantization="int4")
    with pytest.raises(ModelError, match=r"is a Conv1D, not a plain linear layer. Expected"):
        LLM(tiny_model("gpt2", dtype=BF16), quantization="int4")
