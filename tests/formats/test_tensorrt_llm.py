"""Heads in TensorRT-LLM's layout, split over ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_heads
import torch
from safetensors.torch import load_file, save_file
from test_hydra import BASE
from tiny_eagles import layer
from tiny_heads import (
    E,
    V,
    assert_one_error_names,
    assert_same,
    linear,
    medusa,
    random_head,
    round_trip,
    shapes_of,
    target_info,
    write_files,
)

from foretoken.core.errors import ConfigError, ModelError
from foretoken.formats.checkpoint import TargetInfo
from foretoken.formats.registry import read_head, write_head
from foretoken.heads.decoder_layer import LayerConfig
from foretoken.heads.hydra import HydraConfig

PREFIX = LayerConfig(num_attention_heads=8, num_key_value_heads=4, head_dim=2, intermediate_size=12, rms_norm_eps=1e-5)
MEDUSA_NAMES = {
    **linear("medusa_heads.0.medusa_layers.0.linear", E, E),
    "medusa_heads.0.lm_head.weight": (V, E),
    **linear("medusa_heads.1.medusa_layers.0.linear", E, E),
    "medusa_heads.1.lm_head.weight": (V, E),
}
HYDRA_NAMES = {
    **layer("prefix_embedding_layer.layer", E),
    "prefix_embedding_layer.layer.input_layernorm.weight": (E,),
    "prefix_embedding_layer.norm.weight": (E,),
    **linear("hydra_heads.0.hydra_mlp.linear", E, 2 * E),
    **linear("hydra_heads.0.hydra_mlp.res_connection", E, 2 * E),
    **linear("hydra_heads.0.hydra_mlps.0.linear", E, E),
    **linear("hydra_heads.0.hydra_mlps.1.linear", E, E),
    **linear("hydra_heads.0.hydra_lm_head", V, E),
}
TARGET = {"transformer.vocab_embedding.weight": (V, E), "lm_head.weight": (V, E)}
MEDUSA_CONFIG = {
    "architecture": "MedusaForCausalLM",
    "dtype": "float32",
    "logits_dtype": "float32",
    "hidden_size": E,
    "vocab_size": V,
    "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
    "max_draft_len": 63,
    "num_medusa_heads": 2,
    "num_medusa_layers": 1,
}
HYDRA_CONFIG = {
    **{key: value for key, value in MEDUSA_CONFIG.items() if "medusa" not in key},
    "architecture": "HydraForCausalLM",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "norm_epsilon": 1e-5,
    "num_hydra_heads": 1,
    "num_hydra_layers": 3,
}


def hydra(**changes: Any) -> HydraConfig:
    return tiny_heads.hydra(**{"num_heads": 3, "num_layers": 4, "prefix": PREFIX, **changes})


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_round_trip(tmp_path: Path, tp_size: int, dtype: torch.dtype) -> None:
    """13 tokens do not divide by 2 or 4; prefixes with fewer key heads than heads."""
    configs = (
        medusa(num_layers=0),
        medusa(num_layers=3),
        medusa(num_layers=3, tied_blocks=True, has_bias=False),
        hydra(),
        hydra(tied_blocks=True),
        hydra(num_layers=1, prefix=None),
    )
    for index, config in enumerate(configs):
        head = random_head(config, dtype=dtype)
        assert_same(head, round_trip("tensorrt_llm", head, tmp_path / str(index), tp_size=tp_size))


def test_medusa_names(tmp_path: Path) -> None:
    tensors = write_files(tmp_path / "head", MEDUSA_NAMES | TARGET, MEDUSA_CONFIG, file="rank0.safetensors")
    name, head = read_head(tmp_path / "head")
    assert (name, head.config) == ("tensorrt_llm", medusa())
    assert torch.equal(head.weights["lm_head"][1], tensors["medusa_heads.1.lm_head.weight"])
    write_head("tensorrt_llm", head, tmp_path / "again")
    assert shapes_of(tmp_path / "again" / "rank0.safetensors") == MEDUSA_NAMES
    stored = json.loads((tmp_path / "again" / "config.json").read_text())
    assert MEDUSA_CONFIG.items() <= stored.items()


def test_hydra_names(tmp_path: Path) -> None:
    tensors = write_files(tmp_path / "head", HYDRA_NAMES | TARGET, HYDRA_CONFIG, file="rank0.safetensors")
    name, head = read_head(tmp_path / "head")
    prefix = LayerConfig(
        num_attention_heads=4, num_key_value_heads=2, head_dim=2, intermediate_size=6, rms_norm_eps=1e-5
    )
    assert (name, head.config) == ("tensorrt_llm", hydra(num_heads=1, num_layers=3, prefix=prefix))
    assert torch.equal(head.weights["weight"][0, 1], tensors["hydra_heads.0.hydra_mlps.1.linear.weight"])
    write_head("tensorrt_llm", head, tmp_path / "again", target=TargetInfo(config=BASE))
    assert shapes_of(tmp_path / "again" / "rank0.safetensors") == HYDRA_NAMES
    stored = json.loads((tmp_path / "again" / "config.json").read_text())
    assert HYDRA_CONFIG.items() <= stored.items()


@pytest.mark.parametrize(("kind", "is_known"), [("linear", True), ("llama3", False)])
def test_rotations_of_the_prefix_layer(tmp_path: Path, kind: str, is_known: bool) -> None:
    """The configuration gives the target's; our own says what the head was trained with."""
    stored = HYDRA_CONFIG | {"rotary_scaling": {"type": kind, "factor": 4.0}}
    write_files(tmp_path / "head", HYDRA_NAMES, stored, file="rank0.safetensors")
    if is_known:
        found = read_head(tmp_path / "head")[1].config.prefix
        assert found.rope_scaling == {"rope_type": "linear", "factor": 4.0}
    else:
        with pytest.raises(ModelError, match="does not say how its prefix layer rotates"):
            read_head(tmp_path / "head")
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    head = random_head(hydra(prefix=PREFIX.model_copy(update={"rope_scaling": scaling})))
    assert_same(head, round_trip("tensorrt_llm", head, tmp_path / "ours", tp_size=2))


def test_split(tmp_path: Path) -> None:
    """Which part of which tensor lies in which rank, biases included."""
    head = random_head(hydra(num_heads=1))
    write_head("tensorrt_llm", head, tmp_path, tp_size=2)
    first, second = (load_file(tmp_path / f"rank{rank}.safetensors") for rank in (0, 1))
    ours = head.weights
    for key, whole, dim in (
        ("hydra_heads.0.hydra_mlp.linear.weight", ours["first.0.linear.weight"], 0),
        ("hydra_heads.0.hydra_mlp.linear.bias", ours["first.0.linear.bias"], 0),
        ("hydra_heads.0.hydra_mlps.2.linear.bias", ours["bias"][0, 2], 0),
        ("prefix_embedding_layer.layer.self_attn.k_proj.weight", ours["prefix.k_proj.weight"], 0),
        ("prefix_embedding_layer.layer.self_attn.o_proj.weight", ours["prefix.o_proj.weight"], 1),
        ("prefix_embedding_layer.layer.mlp.down_proj.weight", ours["prefix.down_proj.weight"], 1),
    ):
        half = whole.shape[dim] // 2
        assert torch.equal(first[key], whole.narrow(dim, 0, half)), key
        assert torch.equal(second[key], whole.narrow(dim, half, half)), key
    for part in (first, second):
        assert torch.equal(part["prefix_embedding_layer.norm.weight"], ours["prefix.norm"])
    padded = torch.cat([first["hydra_heads.0.hydra_lm_head.weight"], second["hydra_heads.0.hydra_lm_head.weight"]])
    assert padded.shape == (14, E)
    assert torch.equal(padded[:13], ours["lm_heads.0.weight"])
    assert not padded[13].any()
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["mapping"] == {"world_size": 2, "tp_size": 2, "pp_size": 1}
    assert config["vocab_size"] == V


def test_missing_rank(tmp_path: Path) -> None:
    write_head("tensorrt_llm", random_head(medusa()), tmp_path, tp_size=4)
    (tmp_path / "rank2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks rank2\.safetensors"):
        read_head(tmp_path)


def test_one_error_names_everything_and_the_rank(tmp_path: Path) -> None:
    write_head("tensorrt_llm", random_head(hydra(num_heads=1)), tmp_path, tp_size=2)
    tensors = load_file(tmp_path / "rank1.safetensors")
    del tensors["prefix_embedding_layer.norm.weight"]
    tensors["hydra_heads.0.extra"] = torch.ones(1)
    tensors["hydra_heads.0.hydra_mlps.2.linear.bias"] = torch.ones(E)  # whole, as the public port leaves it
    save_file(tensors, tmp_path / "rank1.safetensors")
    assert_one_error_names(
        tmp_path,
        "missing: rank1: prefix_embedding_layer.norm.weight;",
        "unexpected: rank1: hydra_heads.0.extra;",
        "rank1: hydra_heads.0.hydra_mlps.2.linear.bias [8] instead of [4]",
    )


def test_norms_must_agree_between_ranks(tmp_path: Path) -> None:
    write_head("tensorrt_llm", random_head(hydra(num_heads=1)), tmp_path, tp_size=2)
    tensors = load_file(tmp_path / "rank1.safetensors")
    tensors["prefix_embedding_layer.norm.weight"] += 1
    save_file(tensors, tmp_path / "rank1.safetensors")
    with pytest.raises(ModelError, match="differs between ranks"):
        read_head(tmp_path)


@pytest.mark.parametrize(
    ("config", "tp_size", "message"),
    [
        (hydra(prefix=PREFIX.model_copy(update={"num_key_value_heads": 2})), 4, "num_key_value_heads, 2"),
        (medusa(), 3, "Expected a divisor of 8"),
    ],
)
def test_sizes_that_cannot_be_split(tmp_path: Path, config: HydraConfig, tp_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write_head("tensorrt_llm", random_head(config), tmp_path / "no", tp_size=tp_size)


def test_dtypes_and_quantization(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"The head has float64. Pass --dtype"):
        write_head("tensorrt_llm", random_head(medusa(), dtype=torch.float64), tmp_path / "no")
    config = MEDUSA_CONFIG | {"quantization": {"quant_algo": "FP8"}}
    write_files(tmp_path, MEDUSA_NAMES, config, file="rank0.safetensors")
    with pytest.raises(ModelError, match="quantized by FP8"):
        read_head(tmp_path)


def test_shared_lm_head_needs_the_target(tmp_path: Path) -> None:
    for config in (medusa(own_lm_head=False), hydra(own_lm_head=False)):
        with pytest.raises(ConfigError, match="share the target's LM head"):
            write_head("tensorrt_llm", random_head(config), tmp_path / "no")
        write_head("tensorrt_llm", random_head(config), tmp_path / config.method, target=target_info(), tp_size=2)
        assert read_head(tmp_path / config.method)[1].config == config.model_copy(update={"own_lm_head": True})


def test_other_formats_know_no_ranks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tp_size is 2. Expected 1"):
        write_head("medusa", random_head(medusa()), tmp_path / "no", tp_size=2)
