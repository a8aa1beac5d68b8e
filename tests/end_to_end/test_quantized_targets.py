"""Targets in 4 and 8 bits: their text is the same with and without drafts, and that of the weights they stand for."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.same_text import assert_same_text
from end_to_end.tiny_heads import head
from end_to_end.tiny_llms import config, draft_model, drafters, fixed, noisy, tokenizer
from pairwise import slow_products
from tiny_models import tiny_model

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ConfigError, ModelError
from foretoken.decoder.quantized import Quantization, quantized
from foretoken.decoder.quantized_modules import QuantizedEmbedding, QuantizedExperts, QuantizedLinear, is_plain_experts
from foretoken.formats.checkpoint import TargetFingerprint
from foretoken.models.loading import load_model, wrap_model
from foretoken.models.making.in_memory import quantize_model
from foretoken.models.parts import target_parts

PROMPTS = [[5, 6, 7, 8, 5, 6], list(range(3, 40)), [9, 9, 4]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, logprobs=2),
    SamplingParams(temperature=0.8, seed=1, max_tokens=24),
    SamplingParams(temperature=0.9, seed=2, max_tokens=24, top_p=0.9),
]
BF16 = torch.bfloat16


@cache
def known_texts(quantization: str | None) -> list[list[int]]:
    """Prompts and what plain decoding writes."""
    return [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in plain_texts(quantization)]


def trained_once(name: str, **options: Any) -> Any:
    """A head for all quantizations, which write nearly the same: trained for what the model writes as it is."""
    return lambda known: head(name, steps=50, num_speculative_tokens=3, **options)(known_texts(None))


DRAFTERS: dict[str, Any] = {
    **{
        name: drafters(dtype=BF16)[name]
        for name in ("ngram tree", "draft tree", "draft dynamic", "early exit", "sparse kv", "recycling", "oracle tree")
    },
    **{name: trained_once(name) for name in ("eagle3", "falcon", "hydra", "medusa", "mlp_speculator", "spire")},
    "draft in int4": fixed(
        drafter=draft_model(noisy(dtype=BF16), quantization="int4", num_speculative_tokens=4), trust_drafter=True
    ),
    "eagle in int4": trained_once("eagle", quantization="int4"),
    "sparse kv adaptive": config("sparse_kv"),
}


def texts(quantization: str | None, arguments: dict[str, Any], *, module: Any = None, **more: Any) -> list[Any]:
    target = tiny_model("llama", dtype=BF16) if module is None else module
    engine = LLM(
        target, tokenizer=tokenizer(), quantization=quantization, **{"runner": "lean-native"} | more, **arguments
    )
    return engine.generate(PROMPTS, PARAMS)


@cache
def plain_texts(quantization: str | None) -> list[Any]:
    """Plain decoding, one at a time."""
    return texts(quantization, {}, max_num_seqs=1)


@pytest.mark.parametrize(
    ("name", "quantization"), slow_products(list(DRAFTERS), ["int4", "int8", "w4a8", "w8a8"], each=1)
)
def test_text_is_plain_decodings(name: str, quantization: str) -> None:
    got = texts(quantization, DRAFTERS[name](known_texts(quantization)), max_num_seqs=3)
    assert_same_text(got, plain_texts(quantization), [name] * len(PROMPTS))
    assert all(output.metrics.draft_errors == 0 for output in got)


def stand_in(weight: torch.Tensor, quantization: Quantization) -> torch.Tensor:
    return quantized(weight, quantization, dtype=torch.float32).dequantized()


@pytest.mark.parametrize(
    ("architecture", "quantization"),
    slow_products(["llama", "phi3", "gemma2", "qwen3", "qwen3_moe", "mixtral"], ["int4", "int8"], each=1),
)
def test_rounded_targets_are_the_models_of_their_weights(architecture: str, quantization: Quantization) -> None:
    """In float32, where inputs are rounded to 24 bits."""
    module = tiny_model(architecture, dtype=torch.float32)
    dense = copy.deepcopy(module)
    for part in dense.modules():
        if type(part) is torch.nn.Linear:  # unties an LM head
            part.weight = torch.nn.Parameter(stand_in(part.weight, quantization))
        elif isinstance(part, torch.nn.Embedding):
            part.weight = torch.nn.Parameter(stand_in(part.weight, "int8"))
        elif is_plain_experts(part):
            experts: Any = part
            gate_up, down = experts.gate_up_proj.data, experts.down_proj.data
            for each in (*gate_up, *down):
                for matrix in each.chunk(2) if each.shape == gate_up.shape[1:] else [each]:
                    matrix.copy_(stand_in(matrix, quantization))
    found = texts(quantization, {}, module=module)
    if hasattr(dense.model.layers[0].mlp, "experts"):  # the module of transformers
        for each in texts(quantization, {}, module=module, runner="generic"), found:
            assert_same_text(each, found, [architecture] * len(PROMPTS), tolerance=1e-4)
    expected = LLM(dense, tokenizer=tokenizer(), runner="lean-native").generate(PROMPTS, PARAMS)
    assert_same_text(found, expected, [architecture] * len(PROMPTS), tolerance=1e-4)


def test_the_transformers_model_multiplies_by_the_same_weights() -> None:
    module = tiny_model("llama", dtype=torch.float32)
    native, generic = (texts("int8", {}, module=module, runner=runner) for runner in ("lean-native", "generic"))
    assert_same_text(generic, native, ["generic"] * len(PROMPTS), tolerance=1e-4)
    with pytest.raises(ModelError, match="only native kernels on CPUs run weights in 8 bits"):
        texts("int8", {}, module=module, runner="lean-stock")


@pytest.mark.parametrize(
    ("architecture", "quantization"), slow_products(["qwen3_moe", "mixtral"], ["int4", "w8a8"], each=1)
)
def test_text_of_experts_is_plain_decodings(architecture: str, quantization: str) -> None:
    module = tiny_model(architecture, dtype=BF16)
    made: Any = quantize_model(wrap_model(module, name="tiny"), quantization)  # type: ignore[arg-type]
    assert all(isinstance(each.mlp.experts, QuantizedExperts) for each in made.backbone.layers)
    plain = texts(quantization, {}, module=module, max_num_seqs=1)
    draft = draft_model(noisy(architecture, dtype=BF16), quantization="int4", num_speculative_tokens=4)
    for arguments in (config("ngram", num_speculative_tokens=3)([]), fixed(drafter=draft, trust_drafter=True)([])):
        got = texts(quantization, arguments, module=module, max_num_seqs=3)
        assert_same_text(got, plain, [architecture] * len(PROMPTS))
        assert all(output.metrics.draft_errors == 0 for output in got)


def test_experts_of_another_layout_are_refused() -> None:
    module = tiny_model("gpt_oss", dtype=torch.float32)
    with pytest.raises(ModelError, match=r"'model.layers.2.mlp.experts' is a GptOssExperts, not a plain linear layer"):
        quantize_model(wrap_model(module, name="tiny"), "int8")


ROUNDED = (QuantizedLinear, QuantizedEmbedding, QuantizedExperts)


def reachable_bytes(module: torch.nn.Module) -> int:
    """Bytes of all memory that parameters and buffers keep; of shared pages their own part."""
    rounded = {
        id(each) for part in module.modules() if isinstance(part, ROUNDED) for each in part.buffers(recurse=False)
    }  # fmt: skip
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
    linear = sum(
        each.nbytes for part in loaded.module.modules() if type(part) in dense or is_plain_experts(part)
        for each in part.parameters()
    )  # fmt: skip
    before, fingerprint = reachable_bytes(loaded.module), TargetFingerprint.of(loaded)
    rounded = quantize_model(loaded, "int4")
    kept = sum(
        each.nbytes for part in rounded.module.modules() if isinstance(part, ROUNDED)
        for each in part.buffers(recurse=False)
    )  # fmt: skip
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
    assert "weights of 'LlamaForCausalLM' were written, whose matrices were quantized" in str(output.outputs[0].error)


def test_refusals() -> None:
    module = tiny_model("llama", dtype=BF16)
    with pytest.raises(
        ConfigError, match=r"quantization is 'int3'. Expected int4 or int8 or w4a8 or w8a8 or a8, or None"
    ):
        texts("int3", {}, module=module)
    with pytest.raises(ModelError, match=r"in torch.float64 on 'cpu'. Only CPUs have kernels for it"):
        LLM(tiny_model("llama", dtype=torch.float64), quantization="int8")
    loaded = quantize_model(wrap_model(tiny_model("llama", dtype=BF16), name="tiny"), "int8")
    with pytest.raises(ModelError, match="quantization 'int4' was asked for, but 'tiny' is in memory as int8"):
        LLM(loaded, quantization="int4")
    with pytest.raises(ModelError, match="keeps its weight in 8 bits, which cannot be saved"):
        loaded.module.state_dict()
    with pytest.raises(ModelError, match="'tiny' was quantized to int8, and training and copies need its weights"):
        target_parts(loaded, dtype=torch.float32)
    with pytest.raises(ConfigError, match="quantization 'int8' cannot be had: 'tiny' was quantized to int8 before"):
        LLM(loaded, speculative_config={"method": "sparse_kv", "kv_budget": 12, "quantization": "int8"})
    broken = copy.deepcopy(module)
    broken.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(ModelError, match=r"'model.layers.1.mlp.up_proj' of .* cannot be quantized: a weight .* NaN"):
        LLM(broken, quantization="int4")
    hooked = copy.deepcopy(module)
    hooked.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(ModelError, match=r"was asked for '.*', but .* hook"):
        LLM(hooked, quantization="int4")
    with pytest.raises(ModelError, match=r"is a Conv1D, not a plain linear layer. Expected"):
        LLM(tiny_model("gpt2", dtype=BF16), quantization="int4")
