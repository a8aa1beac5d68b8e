"""GGUF files of mixtures of experts: weights, logits, text and refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from models.gguf_files import tiny_file, write
from models.gguf_files import written as written_file
from models.test_gguf import refusal, same_logits
from tiny_models import tiny_model

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ModelError
from foretoken.decoder.quantized_modules import QuantizedExperts
from foretoken.models.loading import load_model
from foretoken.models.smaller import unpacked_model
from foretoken.models.stored.building import build
from foretoken.models.stored.gguf import open_gguf

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
WIDE = SMALL | {"hidden_size": 256, "intermediate_size": 256}  # blocks of 256 weights
ARCHITECTURES = ("qwen3_moe", "mixtral")


def typed(expert: Type, other: Type | None = None) -> Callable[[str], Type]:
    """Types of the matrices of experts and of others; the router stays as it is."""
    return lambda key: Type.F32 if "mlp.gate." in key else expert if "experts" in key else other or expert


def mixed(key: str) -> Type:
    """As Q4_K_M: some of the matrices have more bits."""
    return typed(Type.Q6_K if "down_proj" in key or "v_proj" in key else Type.Q4_K)(key)


Q4_0, CODES = typed(Type.Q4_0), typed(Type.MXFP4, Type.IQ4_XS)


def written(
    path: Path, architecture: str = "qwen3_moe", sizes: dict[str, int] = SMALL, values: Any = None, **options: Any
) -> Any:
    """Writes a file; gives the model that it stands for."""
    changes: dict[str, Any] = sizes
    counts = {"expert_count": 4, "expert_used_count": 2}
    if architecture == "qwen3_moe":
        inner = sizes["intermediate_size"]
        changes = sizes | {"head_dim": 64, "moe_intermediate_size": inner, "norm_topk_prob": True}
        counts["expert_feed_forward_length"] = inner
    options = {"matrices": Q4_0, "values": counts | (values or {})} | options
    return written_file(path, tiny_model(architecture, **changes), **options)


@pytest.mark.parametrize("types", [Q4_0, mixed, CODES, lambda _: Type.BF16], ids=["Q4_0", "Q4_K_M", "codes", "BF16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_models_are_those_of_their_weights(path: Path, architecture: str, types: Any) -> None:
    model = written(path, architecture, WIDE, matrices=types)
    config = open_gguf(path).config
    assert config.model_type == architecture
    assert config.num_experts_per_tok == 2
    same_logits(path, model)
    module: Any = build(open_gguf(path), str(path), torch.float32)[0]
    assert isinstance(module.model.layers[1].mlp.experts, QuantizedExperts) == (types in (Q4_0, mixed, CODES))


def test_text_with_drafts_is_text_without(path: Path) -> None:
    written(path)
    model = load_model(path, dtype="bfloat16")
    prompts, params = [[5, 6, 7, 8, 5, 6], [9, 9, 4]], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    texts = []
    for config in (None, {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}):
        llm = LLM(model, speculative_config=config, max_num_seqs=2, runner="lean-native")
        texts.append([each.outputs[0].token_ids for each in llm.generate(prompts, params)])
    assert texts[0] == texts[1]


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
def test_tensors_that_do_not_fit(path: Path, options: dict[str, Any], message: str) -> None:
    written(path, **options)
    assert message in refusal(path)


@pytest.mark.parametrize(
    ("part", "type_", "message"),
    [("up_proj", Type.Q8_0, "are not stored alike"), ("down_proj", Type.F32, "all in int")],
)
def test_experts_in_several_formats(path: Path, part: str, type_: Type, message: str) -> None:
    """Gate, up and down must be in integers, and of one kind where they are one matrix."""
    written(path, matrices=lambda key: type_ if part in key else Q4_0(key))
    with pytest.raises(ModelError, match=message):
        build(open_gguf(path), str(path), torch.float32)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_used_count", 5, "takes 5 of 4 experts"),
        ("expert_count", 1 << 31, "Expected a whole number from 1 to 268435456"),
        ("expert_count", 8, "instead of"),
        ("expert_count", 0, "has no experts"),
        ("expert_shared_count", 1, "has qwen3moe.expert_shared_count, which may change the model"),
    ],
)
def test_settings_that_are_refused(path: Path, key: str, value: int, message: str) -> None:
    written(path, values={key: value})
    assert message in refusal(path)


def test_experts_of_other_architectures(path: Path) -> None:
    model = tiny_model("qwen2", **SMALL)
    write(path, model, matrices=Type.Q4_0, values={"expert_count": 4})
    assert "is a mixture of experts. Expected a dense model." in refusal(path)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "llama"])
def test_integers_are_unpacked_for_training(path: Path, architecture: str) -> None:
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
    unpacked.module.save_pretrained(path.parent / "saved")
    assert load_model(path.parent / "saved").quantization is None
