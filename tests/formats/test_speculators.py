"""EAGLE heads as vllm-project/speculators has them; files from outside are written by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_eagles import EAGLE, LAYER, LLAMA, TARGET, TOKENS, VD, eagle, eagle3, eagle3_shapes, restate, write_eagle3
from tiny_heads import (
    E,
    V,
    assert_same,
    assert_same_logits,
    random_head,
    round_trip,
    target_info,
    target_weights,
    write_files,
)
from tiny_models import tiny_model

from foretoken.core.errors import ConfigError, ModelError
from foretoken.formats.checkpoint import TargetInfo, TargetWeights
from foretoken.formats.conversion import SPECULATORS
from foretoken.formats.registry import head_readers, read_head, write_head
from foretoken.models.loading import wrap_model

CONFIG = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.3.0",
    "draft_vocab_size": VD,
    "norm_before_residual": True,
    "target_hidden_size": None,
    "eagle_aux_hidden_state_layer_ids": [2, 6, 9],
    "transformer_layer_config": LLAMA | {"head_dim": 4, "attention_bias": False, "mlp_bias": False},
    "speculators_config": {
        "algorithm": "eagle3",
        "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        ],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": "meta-llama/some-8b", "architectures": ["LlamaForCausalLM"]},
    },
}
SHAPES = eagle3_shapes("layers.0") | {"embed_tokens.weight": (V, E)}
READ = eagle3(norm_before_residual=True, own_embedding=True, num_steps=3)
CONFIGS = {
    "plain": eagle3(),
    "norm_before_residual": eagle3(norm_before_residual=True, own_embedding=True),
    "norm_before_fc": eagle3(norm_before_fc=True, num_steps=2),
    "fc_norm, norm_output": eagle3(fc_norms=True, feeds_normed=True),
    "whole vocabulary": eagle3(draft_vocab_size=None),
    "embeddings and the last block": eagle3(boundaries=(0, 5, 7, 12)),
    "narrower": eagle3(draft_hidden_size=6, own_embedding=True, layer=LAYER.model_copy(update={"head_dim": 2})),
    "biased": eagle3(layer=LAYER.model_copy(update={"attention_bias": True, "rope_theta": 5e5})),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(tmp_path: Path, name: str) -> None:
    head = random_head(CONFIGS[name], dtype=torch.bfloat16)
    assert_same(head, round_trip("speculators", head, tmp_path))


def test_published_names(tmp_path: Path) -> None:
    tensors = write_eagle3(tmp_path / "head", SHAPES, CONFIG)
    name, head = read_head(tmp_path / "head")
    assert (name, head.config) == ("speculators", READ)
    assert head.weights["token_map"].tolist() == TOKENS
    assert torch.equal(head.weights["state_norm"], tensors["layers.0.hidden_norm.weight"])
    assert torch.equal(head.weights["embedding"], tensors["embed_tokens.weight"])
    assert head.target is not None
    assert head.target.name == "meta-llama/some-8b"
    write_head("speculators", head, tmp_path / "again", target=TargetInfo(config=TARGET))
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[key], tensors[key]) for key in tensors)
    stored = json.loads((tmp_path / "again" / "config.json").read_text())
    block = stored.pop("transformer_layer_config")
    block_key, version = "transformer_layer_config", "speculators_version"
    assert {key: CONFIG[key] for key in CONFIG if key not in (block_key, version)}.items() <= stored.items()
    wanted = CONFIG["transformer_layer_config"] | {"max_position_embeddings": 64, "torch_dtype": "float32"}
    assert {key: wanted[key] for key in wanted if key not in ("architectures", "pad_token_id")}.items() <= block.items()


def test_conversion_from_and_to_the_authors_layout(tmp_path: Path) -> None:
    """Their converter renames the block and nothing else: so do ours, both ways."""
    config = CONFIG | {"norm_before_residual": False}
    tensors = write_eagle3(tmp_path / "head", SHAPES, config)
    head = read_head(tmp_path / "head")[1]
    write_head("eagle3", head, tmp_path / "official", as_safetensors=True)
    official = load_file(tmp_path / "official" / "model.safetensors")
    assert official.keys() == {key.replace("layers.0.", "midlayer.") for key in tensors}
    back = read_head(tmp_path / "official")[1]
    assert back.config == head.config
    assert_same_logits(head, back)
    write_head("native", back, tmp_path / "native")
    write_head("speculators", read_head(tmp_path / "native")[1], tmp_path / "again")
    assert_same(head, read_head(tmp_path / "again")[1])


def test_layer_ids_are_boundaries(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_eagle3(tmp_path, SHAPES, CONFIG)
    assert read_head(tmp_path)[1].config.boundaries == (2, 6, 9)
    assert not caplog.text
    restate(tmp_path, eagle_aux_hidden_state_layer_ids=[1, 46, 90])
    assert read_head(tmp_path)[1].config.boundaries == (1, 46, 90)
    assert "taps [1, 46, 90] are taken as boundaries, and files of SpecForge name the layer before" in caplog.text
    assert "[2, 47, 91]" in caplog.text
    with pytest.raises(ModelError, match=r"boundaries \[1, 46, 90\] of its target. Expected them in 0..12"):
        read_head(tmp_path, base_config=TARGET)
    restate(tmp_path, eagle_aux_hidden_state_layer_ids=None)
    with pytest.raises(ModelError, match="Pass --target DIR"):
        read_head(tmp_path)
    assert read_head(tmp_path, base_config=TARGET)[1].config.boundaries == (2, 6, 9)


def test_a_missing_norm_before_residual_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_eagle3(tmp_path, SHAPES, CONFIG)
    restate(tmp_path, norm_before_residual=None)
    assert not read_head(tmp_path)[1].config.norm_before_residual
    assert "taken to be false, as speculators does; vLLM takes it to be true" in caplog.text


@pytest.mark.parametrize(
    ("tensors", "config", "change"),
    [
        ({"input_norm.weight": (3 * E,)}, {"norm_before_fc": True}, {"norm_before_fc": True}),
        (
            {f"fc_norm.{index}.weight": (E,) for index in range(3)},
            {"fc_norm": True, "norm_output": True},
            {"fc_norms": True, "feeds_normed": True},
        ),
        ({}, {"norm_output": True}, {"feeds_normed": True}),
    ],
)
def test_options(tmp_path: Path, tensors: dict[str, Any], config: dict[str, Any], change: dict[str, Any]) -> None:
    write_eagle3(tmp_path, SHAPES | tensors, CONFIG | config)
    assert read_head(tmp_path)[1].config == READ.model_copy(update=change)


def test_a_bias_covers_the_output_there(tmp_path: Path) -> None:
    """A Llama's `attention_bias` is one for all four matrices; heads here have none behind attention, so it is zero."""
    layer = LAYER.model_copy(update={"attention_bias": True})
    write_head("speculators", random_head(eagle3(layer=layer)), tmp_path)
    tensors, key = load_file(tmp_path / "model.safetensors"), "layers.0.self_attn.o_proj.bias"
    assert torch.equal(tensors[key], torch.zeros(E))
    assert json.loads((tmp_path / "config.json").read_text())["transformer_layer_config"]["attention_bias"] is True
    assert read_head(tmp_path)[1].config.layer == layer
    save_file(tensors | {key: torch.ones(E)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"o_proj.bias of .* is not zero"):
        read_head(tmp_path)


@pytest.mark.parametrize(
    ("block", "message"),
    [(None, "transformer_layer_config of .* is None"), (LLAMA | {"layer_types": ["sliding_attention"]}, "window")],
)
def test_blocks_that_are_no_llamas_are_refused(tmp_path: Path, block: Any, message: str) -> None:
    write_eagle3(tmp_path, SHAPES, CONFIG | {"transformer_layer_config": block})
    with pytest.raises(ModelError, match=message):
        read_head(tmp_path)


FORMER = {
    key.replace("fc.", "fusion_fc.").replace("layers.0", "transformer"): shape
    for key, shape in EAGLE.items()
    if key != "embed_tokens.weight"
}


@pytest.mark.parametrize("has_bias", [True, False])
def test_former_heads_of_eagle_1(tmp_path: Path, has_bias: bool) -> None:
    shapes = {key: shape for key, shape in FORMER.items() if has_bias or not key.endswith("bias")}
    config = CONFIG | {"speculators_model_type": "eagle", "layernorms": False, "fusion_bias": has_bias}
    tensors = write_files(tmp_path / "head", shapes, config)
    name, head = read_head(tmp_path / "head")
    assert (name, head.config) == ("speculators", eagle(has_bias=has_bias, num_steps=3))
    assert torch.equal(head.weights["layer.q_proj.weight"], tensors["transformer.self_attn.q_proj.weight"])
    write_head("eagle", head, tmp_path / "official")
    assert_same(head, read_head(tmp_path / "official")[1])
    with pytest.raises(ConfigError, match=r"cannot hold a head of method 'eagle'. Expected eagle3"):
        write_head("speculators", head, tmp_path / "no")


def test_former_heads_with_norms_are_refused(tmp_path: Path) -> None:
    norms = ("embedding_layernorm", "transformer.input_layernorm", "pre_lm_head_layernorm")
    config = CONFIG | {"speculators_model_type": "eagle", "layernorms": True}
    write_files(tmp_path, FORMER | {f"{norm}.weight": (E,) for norm in norms}, config)
    with pytest.raises(ModelError, match="is a variant of EAGLE with norms of its own"):
        read_head(tmp_path)


def test_the_target_is_named(tmp_path: Path) -> None:
    head = random_head(eagle3(), target=None)
    with pytest.raises(ConfigError, match=r"names the target .*, and this one names none. Pass --target"):
        write_head("speculators", head, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_shared_embedding_is_written_and_stays_shared(tmp_path: Path) -> None:
    """Speculators and vLLM find it in the file, as in their own; whoever reads it here shares the target's."""
    head = random_head(eagle3(), dtype=torch.bfloat16)
    write_head("speculators", head, tmp_path / "head", target=target_info())
    written = load_file(tmp_path / "head" / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(written, target_weights().embedding.bfloat16())
    for weights in (None, target_weights):
        assert_same(head, read_head(tmp_path / "head", weights=weights)[1])
    other = TargetWeights(lm_head=written, embedding=torch.zeros(V, E))
    assert read_head(tmp_path / "head", weights=lambda: other)[1].config.own_embedding
    scaled = replace(target_weights(), is_embedding_plain=False)
    assert read_head(tmp_path / "head", weights=lambda: scaled)[1].config.own_embedding
    with pytest.raises(ConfigError, match="shares the target's embeddings, which are scaled"):
        write_head("speculators", head, tmp_path / "no", target=target_info(is_embedding_plain=False))


@pytest.mark.parametrize(("architecture", "is_plain"), [("llama", True), ("gemma3", False)])
def test_scaled_embeddings_are_noticed(architecture: str, is_plain: bool) -> None:
    weights = TargetWeights.of_model(wrap_model(tiny_model(architecture), name=architecture))
    assert weights.is_embedding_plain == is_plain


def test_who_reads_it() -> None:
    def said(name: str, target: TargetInfo | None = None) -> dict[str, bool]:
        readers = head_readers("speculators", random_head(CONFIGS[name]), target=target)
        return {reader.program: reader.reads for reader in readers}

    assert said("plain") == {"foretoken": True, SPECULATORS: False, "vLLM": True}  # it would embed at random
    assert said("plain", target_info()) == {"foretoken": True, SPECULATORS: True, "vLLM": True}
    assert said("norm_before_residual")[SPECULATORS]
    assert not said("narrower")[SPECULATORS]
    assert not said("embeddings and the last block")["vLLM"]
