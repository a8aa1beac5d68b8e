"""GGUF files of mixtures of experts: weights, logits, text and refusals."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from models.gguf_files import tiny_file, write
from models.test_gguf import add_value, refusal, same_logits
from tiny_models import tiny_model

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ModelError
from foretoken.decoder.quantized_experts import QuantizedExperts
from foretoken.models.loading import load_model
from foretoken.models.smaller import unpacked_model
from foretoken.models.stored.building import build
from foretoken.models.stored.gguf import open_gguf

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
WIDE = SMALL | {"hidden_size": 256, "intermediate_size": 256}  # blocks of 256 weights
COUNTS = {GGUFWriter.add_expert_count: 4, GGUFWriter.add_expert_used_count: 2}
NAMES = {"qwen3_moe": "qwen3moe", "mixtral": "llama"}


def mixed(key: str) -> Type:
    """As Q4_K_M: some of the matrices have more bits."""
    return Type.F32 if "mlp.gate." in key else Type.Q6_K if "down_proj" in key or "v_proj" in key else Type.Q4_K


def rounded(key: str) -> Type:
    return Type.F32 if "mlp.gate." in key else Type.Q4_0


def in_codes(key: str) -> Type:
    return Type.F32 if "mlp.gate." in key else Type.MXFP4 if "experts" in key else Type.IQ4_XS


def changes(architecture: str, sizes: dict[str, int]) -> dict[str, Any]:
    if architecture == "mixtral":
        return sizes
    return sizes | {"head_dim": 64, "moe_intermediate_size": sizes["intermediate_size"], "norm_topk_prob": True}


def written(path: Path, architecture: str = "qwen3_moe", sizes: dict[str, int] = SMALL, **options: Any) -> Any:
    """Writes a file; gives the model that it stands for."""
    model = tiny_model(architecture, **changes(architecture, sizes))
    values = [lambda writer, add=add, count=count: add(writer, count) for add, count in COUNTS.items()]
    if architecture == "qwen3_moe":
        values.append(lambda writer: writer.add_expert_feed_forward_length(sizes["intermediate_size"]))
    options = {"matrices": rounded, "architecture": NAMES[architecture], "values": values} | options
    model.load_state_dict(write(path, model, **options))
    return model


@pytest.mark.parametrize(
    "types", [rounded, mixed, in_codes, lambda _: Type.BF16], ids=["Q4_0", "Q4_K_M", "codes", "BF16"]
)
@pytest.mark.parametrize("architecture", NAMES)
def test_models_are_those_of_their_weights(tmp_path: Path, architecture: str, types: Any) -> None:
    path = tmp_path / "model.gguf"
    model = written(path, architecture, WIDE, matrices=types)
    config = open_gguf(path).config
    assert config.model_type == architecture
    assert config.num_experts_per_tok == 2
    same_logits(path, model, 1e-5)
    module: Any = build(open_gguf(path), str(path), torch.float32)[0]
    assert isinstance(module.model.layers[1].mlp.experts, QuantizedExperts) == (types in (rounded, mixed, in_codes))


def test_text_with_drafts_is_text_without(tmp_path: Path) -> None:
    written(tmp_path / "model.gguf")
    model = load_model(tmp_path / "model.gguf", dtype="bfloat16")
    prompts, params = [[5, 6, 7, 8, 5, 6], [9, 9, 4]], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    texts = []
    for config in (None, {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}):
        llm = LLM(model, speculative_config=config, max_num_seqs=2, runner="lean-native")
        texts.append([each.outputs[0].token_ids for each in llm.generate(prompts, params)])
    assert texts[0] == texts[1]


def different(key: str) -> Type:
    """Gate and up differ, so that they are no matrix of one kind."""
    return Type.F32 if "mlp.gate." in key else Type.Q8_0 if "up_proj" in key else Type.Q4_0


def some(key: str) -> Type:
    return Type.F32 if "mlp.gate." in key or "down_proj" in key else Type.Q4_0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"leave_out": ["blk.1.ffn_up_exps.weight"]}, "model.layers.1.mlp.experts.up_proj.weight is missing"),
        ({"leave_out": ["blk.0.ffn_gate_inp.weight"]}, "model.layers.0.mlp.gate.weight is missing"),
        (
            {"tensors": {"blk.0.ffn_gate_shexp.weight": torch.zeros(4, 4).numpy()}},
            "tensors that its architecture lacks",
        ),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    written(tmp_path / "model.gguf", **options)
    assert message in refusal(tmp_path / "model.gguf")


@pytest.mark.parametrize(("types", "message"), [(different, "are not stored alike"), (some, "all in integers")])
def test_experts_in_several_formats(tmp_path: Path, types: Any, message: str) -> None:
    path = tmp_path / "model.gguf"
    written(path, matrices=types)
    with pytest.raises(ModelError, match=message):
        build(open_gguf(path), str(path), torch.float32)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("qwen3moe.expert_used_count", 5, "takes 5 of 4 experts"),
        ("qwen3moe.expert_count", 1 << 31, "Expected a positive whole number"),
        ("qwen3moe.expert_count", 8, "instead of"),
        ("qwen3moe.expert_count", 0, "has no experts"),
        ("qwen3moe.expert_shared_count", 1, "has qwen3moe.expert_shared_count, which may change the model"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, key: str, value: int, message: str) -> None:
    path = tmp_path / "model.gguf"
    model = tiny_model("qwen3_moe", **changes("qwen3_moe", SMALL))
    found = {"qwen3moe.expert_count": 4, "qwen3moe.expert_used_count": 2, "qwen3moe.expert_feed_forward_length": 96}
    write(path, model, matrices=rounded, architecture="qwen3moe",
          values=[partial(add_value, each, number) for each, number in (found | {key: value}).items()])  # fmt: skip
    assert message in refusal(path)


def test_experts_of_other_architectures(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, tiny_model("qwen2", **SMALL), matrices=Type.Q4_0, architecture="qwen2",
          values=[partial(add_value, "qwen2.expert_count", 4)])  # fmt: skip
    assert "is a mixture of experts. Expected a dense model." in refusal(path)


@pytest.mark.parametrize("architecture", [*NAMES, "llama"])
def test_integers_are_unpacked_for_training(tmp_path: Path, architecture: str) -> None:
    path = tmp_path / "model.gguf"
    if architecture == "llama":
        tiny_file(path)
    else:
        written(path, architecture, WIDE, matrices=mixed)
    stored, tokens = load_model(path, dtype="float32"), torch.arange(1, 25).view(2, 12)
    unpacked = unpacked_model(stored)
    assert (unpacked.quantization, unpacked.name, unpacked.eos_ids) == (None, str(path), stored.eos_ids)
    assert unpacked_model(unpacked) is unpacked
    head: Any = unpacked.module.get_output_embeddings()
    assert (head.weight is unpacked.module.get_input_embeddings().weight) == (architecture == "llama")  # type: ignore[operator]
    modules: Any = (unpacked.module, stored.module)
    for module in modules:
        module.set_attn_implementation("eager")
    with torch.no_grad():
        found, expected = (module(tokens).logits for module in modules)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    unpacked.module.save_pretrained(tmp_path / "saved")
    assert load_model(tmp_path / "saved").quantization is None
