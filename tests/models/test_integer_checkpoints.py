"""Checkpoints of compressed-tensors, GPTQ and AWQ: their weights, logits and text, and files that cannot be read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.command_line import run
from models.integer_checkpoints import Scheme, settings_of, small_config, words, write
from models.model_files import edit_config, edit_weights
from pairwise import slow_products
from safetensors.torch import save_file

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ModelError
from foretoken.decoder.quantized_modules import QuantizedExperts, QuantizedLinear
from foretoken.models.loading import load_model

CT = "compressed-tensors"
SCHEMES = {
    "W4A16, groups": Scheme(CT),
    "W4A16, groups with zero points": Scheme(CT, group=32, zeros=True),
    "W4A16, groups, bfloat16 scales, in the order of activations": Scheme(
        CT, act_order=True, settings={"bfloat16_scales": True}
    ),
    "W4A16, rows": Scheme(CT, group=0),
    "W8A16, groups": Scheme(CT, bits=8),
    "W8A16, rows": Scheme(CT, bits=8, group=0),
    "W8A8": Scheme(CT, bits=8, group=0, settings={"format": "int-quantized", "inputs": True}),
    "W4A8": Scheme(CT, settings={"inputs": True}),
    "GPTQ": Scheme("gptq"),
    "GPTQ, zero points, desc_act": Scheme("gptq", zeros=True, act_order=True),
    "GPTQ, 8 bits, rows": Scheme("gptq", bits=8, group=0, zeros=True),
    "AWQ": Scheme("awq", zeros=True),
}  # fmt: skip
TOKENS = [5, 17, 3, 88, 42, 9, 61, 30, 2, 77]


def refuses(directory: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load_model(directory, dtype="float32")
    assert "\n" not in str(caught.value)
    assert str(caught.value).encode(), "valid text"


def linears(module: Any) -> dict[str, QuantizedLinear]:
    return {name: part for name, part in module.named_modules() if isinstance(part, QuantizedLinear)}


@pytest.mark.parametrize(
    ("kind", "name"), slow_products(["llama", "qwen2"], list(SCHEMES), each=1)  # without and with biases
)  # fmt: skip
def test_weights_and_logits_are_those_of_the_format(name: str, kind: str, tmp_path: Path) -> None:
    expected = write(tmp_path, small_config(kind), SCHEMES[name])
    model = load_model(tmp_path, dtype="float32")
    found = linears(model.module)
    assert len(found) == 14
    for linear, part in found.items():
        wanted = expected.get_submodule(linear)
        assert (part.weight - wanted.weight).abs().max() <= 1e-6 * wanted.weight.abs().max()
    with torch.no_grad():
        logits = expected(torch.tensor([TOKENS])).logits[0, -1]
    for runner in ("lean-native", "generic"):
        bound = 5e-3 if SCHEMES[name].settings.get("inputs") else 1e-5  # an input may be rounded the other way
        llm = LLM(load_model(tmp_path, dtype="float32"), max_num_seqs=2, runner=runner)
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
        listed = llm.generate([TOKENS], params)[0].outputs[0].logprobs[0]
        right = logits.log_softmax(-1)
        assert max(abs(each.logprob - right[token]) for token, each in listed.items()) <= bound * logits.abs().max()


def settings_file(directory: Path, file: str, settings: dict[str, Any]) -> None:
    """Moves the settings out of config.json into a file of their own."""
    edit_config(directory, without=["quantization_config"])
    (directory / file).write_text(json.dumps(settings))


AUTO_GPTQ = {"bits": 4, "group_size": 32, "desc_act": True, "sym": False, "model_name_or_path": None}
AUTO_AWQ = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
OWN_FILES = [
    ("GPTQ, zero points, desc_act", "quantize_config.json", AUTO_GPTQ),
    ("GPTQ", "quantize_config.json", settings_of(SCHEMES["GPTQ"])),
    ("AWQ", "quant_config.json", AUTO_AWQ),
    ("AWQ", "quantize_config.json", settings_of(SCHEMES["AWQ"])),
]


@pytest.mark.parametrize(("name", "file", "settings"), OWN_FILES)
def test_settings_in_a_file_of_their_own(name: str, file: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """As AutoGPTQ and AutoAWQ write them."""
    expected = write(tmp_path, small_config(), SCHEMES[name])
    settings_file(tmp_path, file, settings)
    with torch.no_grad():
        right = expected(torch.tensor([TOKENS])).logits[0, -1].log_softmax(-1)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    listed = LLM(str(tmp_path), dtype="float32", max_num_seqs=1).generate([TOKENS], params)[0].outputs[0].logprobs[0]
    assert max(abs(each.logprob - right[token]) for token, each in listed.items()) <= 1e-5 * right.abs().max()
    facts = json.loads(run("inspect", str(tmp_path), "--json").stdout)
    assert facts["quantization"] == f"{name[:4].rstrip(',')}, 4 bits"


def test_a_damaged_or_left_over_settings_file(tmp_path: Path) -> None:
    module = write(tmp_path, small_config(), SCHEMES["AWQ"])
    settings_file(tmp_path, "quant_config.json", AUTO_AWQ | {"w_bit": 3})
    refuses(tmp_path, "is a checkpoint of AWQ with 3 bits")
    (tmp_path / "quant_config.json").write_text("{")
    refuses(tmp_path, r"quant_config.json is not valid JSON")
    module.save_pretrained(tmp_path)  # weights that are not rounded
    assert load_model(tmp_path, dtype="float32").quantization is None


@pytest.mark.parametrize("name", SCHEMES)
def test_speculative_text_is_plain_text(name: str, tmp_path: Path) -> None:
    write(tmp_path, small_config(), SCHEMES[name])
    model = load_model(tmp_path, dtype="bfloat16")
    prompts = [[t + i for t in TOKENS[: 4 + i]] for i in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    texts = []
    for config in (None, {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}):
        llm = LLM(model, speculative_config=config, max_num_seqs=2)
        texts.append([each.outputs[0].token_ids for each in llm.generate(prompts, params)])
    assert texts[0] == texts[1]


EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 72, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize(
    ("kind", "name"),
    slow_products(list(EXPERTS), [name for name, scheme in SCHEMES.items() if not scheme.act_order], each=1),
)
def test_experts_are_those_of_the_format(name: str, kind: str, tmp_path: Path) -> None:
    expected: Any = write(tmp_path, small_config(kind, **EXPERTS[kind]), SCHEMES[name])
    model: Any = load_model(tmp_path, dtype="float32")
    for ours, theirs in zip(model.backbone.layers, expected.model.layers, strict=True):
        assert isinstance(ours.mlp.experts, QuantizedExperts)
        assert torch.equal(ours.mlp.gate.weight, theirs.mlp.gate.weight)
        found, wanted = ours.mlp.experts.down.dequantized(), theirs.mlp.experts.down_proj.flatten(0, 1)
        assert (found - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    with torch.no_grad():
        logits = expected(torch.tensor([TOKENS])).logits[0, -1]
    for runner in () if SCHEMES[name].settings.get("inputs") else ("lean-native", "generic"):
        llm = LLM(load_model(tmp_path, dtype="float32"), max_num_seqs=2, runner=runner)
        listed = llm.generate([TOKENS], SamplingParams(temperature=0.0, max_tokens=1, logprobs=20))[0]
        right = logits.log_softmax(-1)
        found = listed.outputs[0].logprobs[0]
        assert max(abs(each.logprob - right[token]) for token, each in found.items()) <= 1e-5 * logits.abs().max()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight_scale"),
            "missing: model.layers.1.mlp.experts.3.up_proj.weight",
        ),
        (lambda t: [t.pop(key) for key in list(t) if ".0.mlp.experts.2." in key], "missing: .*experts.2.down_proj"),
        (lambda t: t.update({"model.layers.0.mlp.experts.4.up_proj.weight_scale": torch.ones(1)}), "more than that"),
        (lambda t: t.pop("model.layers.0.mlp.gate.weight"), "missing: model.layers.0.mlp.gate.weight"),
        (lambda t: t.update({"model.layers.0.mlp.experts.0.up_proj.weight_shape": torch.tensor([96, 72])}), "Expected"),
    ],
)
def test_experts_that_do_not_fit_are_named(change: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path, small_config("qwen3_moe", **EXPERTS["qwen3_moe"]), SCHEMES["W4A16, groups"])
    edit_weights(tmp_path, change)
    refuses(tmp_path, message)


def test_more_experts_than_tensors_are_refused_at_once(tmp_path: Path) -> None:
    write(tmp_path, small_config("qwen3_moe", **EXPERTS["qwen3_moe"]), SCHEMES["W4A16, groups"])
    edit_config(tmp_path, num_experts=1 << 30, num_local_experts=1 << 30)
    refuses(tmp_path, "experts")


def test_experts_with_an_order_of_their_own_are_refused(tmp_path: Path) -> None:
    write(tmp_path, small_config("qwen3_moe", **EXPERTS["qwen3_moe"]), SCHEMES["GPTQ"])
    name = "model.layers.0.mlp.experts.2.down_proj.g_idx"
    edit_weights(tmp_path, lambda tensors: tensors.update({name: tensors[name].flip(0)}))
    refuses(tmp_path, r"experts in model.layers.0.mlp.experts of .* are not stored alike")


def test_layers_of_another_order_run_on_the_generic_runner(tmp_path: Path) -> None:
    """Query and key sort their inputs in different ways, which the kernels refuse."""
    expected = write(tmp_path, small_config(), SCHEMES["GPTQ, zero points, desc_act"])
    name = "model.layers.0.self_attn.k_proj"
    edit_weights(tmp_path, lambda tensors: tensors.update({f"{name}.g_idx": tensors[f"{name}.g_idx"].flip(0)}))
    model = load_model(tmp_path, dtype="float32")
    assert not torch.equal(linears(model.module)[name].weight, expected.get_submodule(name).weight)
    assert LLM(model, max_num_seqs=2).target.name == "generic"


def changed(directory: Path, name: str, **changes: Any) -> None:
    write(directory, small_config(), SCHEMES[name])
    settings = settings_of(SCHEMES[name])
    for path, value in changes.items():
        owner = settings
        *owners, last = path.split("__")
        for each in owners:
            owner = owner[each]
        owner[last] = value
    edit_config(directory, quantization_config=settings)


GROUP = "config_groups__group_0__"
SETTINGS = [
    ("W4A16, groups", {"format": "nvfp4-pack-quantized"}, "numbers of the format 'nvfp4-pack-quantized'"),
    ("W4A16, groups", {f"{GROUP}weights__type": "float"}, "weights of 4 bits of the type 'float'"),
    ("W4A16, groups", {f"{GROUP}weights__num_bits": 2}, "weights of 2 bits"),
    ("W4A16, groups", {f"{GROUP}weights__num_bits": "many"}, r"config_groups\.group_0\.weights\.num_bits"),
    ("W4A16, groups", {f"{GROUP}weights__strategy": "block"}, "strategy"),
    ("W8A8", {f"{GROUP}input_activations__dynamic": False}, "static inputs of 8 bits"),
    ("W4A16, groups", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    ("W4A16, groups", {"transform_config": {"config_groups": {}}}, "transform_config"),
    ("W4A16, groups", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
    ("W4A16, groups", {"config_groups": {}}, "config_groups"),
    ("W4A16, groups", {f"{GROUP}targets": ["re:(["]}, r"has the pattern '\(\[', which is wrong"),
    ("W4A16, groups", {f"{GROUP}targets": ["Conv1d"]}, "no group of quantization_config says how"),
    ("GPTQ", {"group_size": 1 << 64}, "group_size"),
    ("AWQ", {"group_size": 1 << 64}, "group_size"),
    ("W4A16, groups", {f"{GROUP}weights__group_size": 1 << 64}, "group_size"),
    ("AWQ", {"quant_method": ["awq"]}, "quantized by the method"),
    ("W4A16, groups", {f"{GROUP}weights__group_size": 48}, "groups of 48 weights. Expected a power of 2"),
    ("W4A16, groups", {f"{GROUP}weights__group_size": 64}, r"scales or zero points \[\d+, \d\] for a matrix"),
    ("W4A16, groups with zero points", {f"{GROUP}weights__symmetric": True}, "has zero points other than 0, but"),
    ("W4A16, groups", {"format": "a\nb"}, r"numbers of the format 'a\\nb'"),
    ("W4A16, groups", {f"{GROUP}weights__type": "\ud800"}, r"weights of 4 bits of the type '\\ud800'"),
    ("GPTQ", {"checkpoint_format": "\ud800"}, r"numbers of the format '\\ud800'"),
    ("AWQ", {"version": "a\nb"}, r"version 'a\\nb'"),
    ("GPTQ", {"bits": 3}, "GPTQ with numbers of 3 bits"),
    ("GPTQ", {"bits": 8}, "holds .* words of torch.int32. Expected"),
    ("GPTQ", {"checkpoint_format": "marlin"}, "numbers of the format 'marlin'"),
    ("GPTQ", {"dynamic": {"+:.*down.*": {"bits": 8}}}, "other numbers in some layers"),
    ("GPTQ", {"group_size": 64}, "scales or zero points|g_idx of"),
    ("AWQ", {"version": "gemv"}, "AWQ with 4 bits, version 'gemv'"),
    ("AWQ", {"quant_method": "gptq"}, "holds .* words|holds .* Expected"),
    ("AWQ", {"quant_method": "compressed-tensors"}, "format"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "message"), SETTINGS)
def test_settings_that_cannot_be_read_are_named(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    changed(tmp_path, name, **changes)
    refuses(tmp_path, message)


PART = "model.layers.1.mlp.up_proj."
SORTED = "W4A16, groups, bfloat16 scales, in the order of activations"


DAMAGES = [
    ("W4A16, groups", "weight_packed", lambda _: None, "neither weight_packed nor a weight of int8"),
    ("W4A16, groups", "weight_shape", lambda _: None, "no weight_shape of two numbers"),
    ("W4A16, groups", "weight_shape", lambda _: torch.tensor([160, 9 << 40]), "weight_packed holds"),
    ("W4A16, groups", "weight_shape", lambda _: torch.tensor([-160, 96]), "weight_packed holds"),
    ("W4A16, groups", "weight_packed", lambda each: each[:7], "weight_packed holds"),
    ("W4A16, groups", "weight_packed", lambda each: each.float(), "weight_packed holds .* of torch.float32"),
    ("W4A16, groups", "weight_scale", lambda each: each * torch.nan, "scales that are NaN or infinite"),
    ("W4A16, groups", "weight_scale", lambda each: each[:, :1], "scales or zero points"),
    ("W4A16, groups with zero points", "weight_zero_point", lambda each: each[:1], "weight_zero_point holds"),
    ("W8A8", "weight", lambda each: each.float(), "neither weight_packed nor a weight of int8"),
    ("W8A8", "weight", lambda each: each[:7], "scales or zero points|is .* Expected"),
    ("GPTQ", "qzeros", lambda _: None, "lacks model.layers.1.mlp.up_proj.qzeros"),
    ("GPTQ", "qweight", lambda each: each.flatten(), r"has words \[\d+\] torch.int32"),
    ("GPTQ", "scales", lambda each: each[0], r"has scales \[160\]. Expected two dimensions"),
    ("AWQ", "scales", lambda each: each[0, 0], r"has scales \[\]. Expected two dimensions"),
    ("AWQ", "scales", lambda each: torch.full(each.shape, 3e38), "scales that are NaN or infinite"),
    ("W4A16, groups", "weight_shape", lambda _: torch.tensor([torch.nan, 96.0]), "no weight_shape of two numbers"),
    ("W4A16, groups with zero points", "weight_zero_point", lambda _: None, "no zero points of integers"),
    ("W4A16, groups with zero points", "weight_zero_point", lambda each: each.float(), "no zero points of integers"),
    ("GPTQ, zero points, desc_act", "g_idx", lambda each: each * 0, "does not name 32 inputs for each group"),
    ("GPTQ, zero points, desc_act", "g_idx", lambda each: each[:5], "does not name 32 inputs for each group"),
    ("AWQ", "qweight", lambda each: each[:, :3], "holds .* words"),
    ("AWQ", "scales", lambda each: each.int(), r"has scales of torch\.int32\. Expected floating-point numbers"),
    ("W8A8", "weight_scale", lambda each: each.bool(), r"has scales of torch\.bool\. Expected floating-point numbers"),
    ("GPTQ, zero points, desc_act", "g_idx", lambda _: None, r"lacks model\.layers\.1\.mlp\.up_proj\.g_idx"),
    (SORTED, "weight_g_idx", lambda _: None, "lacks weight_g_idx"),
    (SORTED, "weight_g_idx", lambda each: torch.where(each == 1, -1, each), "does not name 32 inputs for each group"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "part", "change", "message"), DAMAGES)
def test_damaged_tensors_are_named(name: str, part: str, change: Any, message: str, tmp_path: Path) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        made = change(tensors.pop(PART + part))
        tensors |= {} if made is None else {PART + part: made}

    write(tmp_path, small_config(), SCHEMES[name])
    edit_weights(tmp_path, damage)
    refuses(tmp_path, message)


@pytest.mark.parametrize("key", [f"{PART}input_scale", f"{PART}bias", "model.layers.0.mlp.act_fn.scales"])
def test_tensors_that_would_change_the_model_are_refused_unless_they_are_zero(key: str, tmp_path: Path) -> None:
    write(tmp_path, small_config(), SCHEMES["W8A8"])
    edit_weights(tmp_path, lambda tensors: tensors.update({key: torch.zeros(160)}))
    load_model(tmp_path, dtype="float32")
    edit_weights(tmp_path, lambda tensors: tensors.update({key: torch.ones(160)}))
    refuses(tmp_path, f"{key} of .* would change the model")


def test_an_lm_head_in_integers_is_not_tied(tmp_path: Path) -> None:
    expected: Any = write(tmp_path, small_config(tie_word_embeddings=True), SCHEMES["W8A16, rows"])
    weight = expected.lm_head.weight.detach()
    scale = weight.abs().amax(1, keepdim=True) / 127
    packed = words((weight / scale).round().int() + 128, 8)
    head = {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    edit_weights(tmp_path, lambda tensors: tensors.update({f"lm_head.{part}": each for part, each in head.items()}))
    module: Any = load_model(tmp_path, dtype="float32").module
    assert (module.lm_head.weight - weight).abs().max() <= 0.51 * scale.max()
    assert torch.equal(module.get_input_embeddings().weight, expected.get_input_embeddings().weight)


def test_weights_that_do_not_fit_are_named_before_memory_is_taken(tmp_path: Path) -> None:
    write(tmp_path, small_config(), SCHEMES["AWQ"])
    edit_config(tmp_path, vocab_size=1 << 28)
    refuses(tmp_path, r"wrong shape: .*embed_tokens.weight \[96, 96\] instead of \[268435456, 96\]")


def test_files_that_the_index_does_not_name_are_not_read(tmp_path: Path) -> None:
    write(tmp_path, small_config(), SCHEMES["GPTQ"])
    save_file({f"{PART}scales": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    load_model(tmp_path, dtype="float32")
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    refuses(tmp_path, r"in two files, consolidated\.safetensors and other\.safetensors")


def test_layers_that_the_architecture_has_not_are_refused(tmp_path: Path) -> None:
    write(tmp_path, small_config(), SCHEMES["GPTQ"])
    edit_weights(tmp_path, lambda tensors: tensors.update({
        key.replace("up_proj", "out_proj"): each.clone() for key, each in tensors.items() if PART in key
    }))  # fmt: skip
    refuses(tmp_path, r"mlp\.out_proj is in integers, but the architecture has no plain linear layer")


def test_a_checkpoint_without_such_layers(tmp_path: Path) -> None:
    write(tmp_path, small_config(), SCHEMES["GPTQ"])
    edit_config(tmp_path, quantization_config=settings_of(SCHEMES["W8A8"]))
    refuses(tmp_path, r"no tensor is called '\*\.weight_scale'")


@pytest.mark.parametrize(("name", "words"), [("AWQ", "qweight"), ("W4A16, groups", "weight_packed")])
def test_integers_without_settings_are_named(name: str, words: str, tmp_path: Path) -> None:
    write(tmp_path, small_config(), SCHEMES[name])
    edit_config(tmp_path, without=["quantization_config"])
    refuses(tmp_path, rf"\.{words} of .* holds weights in integers, but config\.json has no quant")


def test_training_and_rounding_such_a_model_are_refused(tmp_path: Path) -> None:
    write(tmp_path, small_config(), SCHEMES["AWQ"])
    with pytest.raises(ModelError, match="is in memory as AWQ, 4 bits"):
        LLM(str(tmp_path), quantization="int4")
