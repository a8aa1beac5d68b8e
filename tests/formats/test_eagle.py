"""EAGLE-1, EAGLE-2 and HASS heads as published, and Falcon's; files from outside are written by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_eagles import EAGLE, LAYER, LLAMA, TARGET, eagle, layer, restate
from tiny_heads import (
    LINEAR,
    E,
    V,
    assert_one_error_names,
    assert_same,
    assert_same_logits,
    logits,
    numbers,
    random_head,
    round_trip,
    shapes_of,
    target_info,
    target_weights,
    write_files,
)
from torch.nn.functional import rms_norm, silu

from foretoken.core.errors import ModelError
from foretoken.formats.checkpoint import TargetFingerprint, TargetInfo, TargetWeights
from foretoken.formats.conversion import EAGLE_CODE, FALCON_CODE
from foretoken.formats.registry import head_readers, read_head, write_head
from foretoken.heads.falcon import FalconConfig

CONFIGS = {
    "bias": eagle(),
    "no bias": eagle(has_bias=False, num_steps=3),
    "biased attention": eagle(layer=LAYER.model_copy(update={"attention_bias": True})),
    "base": eagle(layer=LAYER.model_copy(update={"rope_theta": 500000.0})),
    "scaled": eagle(layer=LAYER.model_copy(update={"rope_scaling": LINEAR})),
    "other head size": eagle(layer=LAYER.model_copy(update={"head_dim": 6})),
}
NO_BIAS = {key: shape for key, shape in EAGLE.items() if key != "fc.bias"}


@pytest.mark.parametrize("as_safetensors", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(tmp_path: Path, name: str, as_safetensors: bool) -> None:
    head = random_head(CONFIGS[name], dtype=torch.bfloat16)
    assert_same(head, round_trip("eagle", head, tmp_path, as_safetensors=as_safetensors))


@pytest.mark.parametrize("shapes", [EAGLE, NO_BIAS, {key: EAGLE[key] for key in EAGLE if "embed" not in key}])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_published_names(tmp_path: Path, shapes: dict[str, tuple[int, ...]], prefix: str) -> None:
    named = {prefix + key: shape for key, shape in shapes.items()}
    tensors = write_files(tmp_path / "head", named, LLAMA, file="pytorch_model.bin")
    name, head = read_head(tmp_path / "head")
    assert (name, head.config) == ("eagle", eagle(has_bias="fc.bias" in shapes))
    assert torch.equal(head.weights["layer.gate_proj.weight"], tensors[prefix + "layers.0.mlp.gate_proj.weight"])
    write_head("eagle", head, tmp_path / "again", target=target_info())
    written = shapes | {"embed_tokens.weight": (V, E), "fc.bias": EAGLE["fc.bias"]}
    assert shapes_of(tmp_path / "again" / "pytorch_model.bin") == written
    stored = json.loads((tmp_path / "again" / "config.json").read_text())
    as_published = {key: value for key, value in LLAMA.items() if key not in ("pad_token_id", "torch_dtype")}
    assert as_published.items() <= (stored | {"max_position_embeddings": 2048}).items()


def test_it_computes_what_the_tensors_say(tmp_path: Path) -> None:
    """The first step by hand: embedding first, no norm before attention, none behind the block."""
    tensors = {key: part.double() for key, part in write_files(tmp_path, NO_BIAS, LLAMA).items()}
    head = read_head(tmp_path)[1]
    tokens = torch.randint(V, (2, 9), generator=torch.Generator().manual_seed(3))
    embedded = target_weights(torch.float64).embedding[tokens.roll(-1, dims=1)]
    x = torch.cat([embedded, numbers(2, 9, E, seed=4).double()], dim=-1) @ tensors["fc.weight"].T
    value = x @ tensors["layers.0.self_attn.v_proj.weight"].T
    first = x[:, 0]  # the first position sees itself alone
    first = first + torch.cat([value[:, 0]] * 2, dim=-1) @ tensors["layers.0.self_attn.o_proj.weight"].T
    norm = rms_norm(first, (E,), tensors["layers.0.post_attention_layernorm.weight"], 1e-5)
    gate, up, down = (tensors[f"layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    first = first + (silu(norm @ gate.T) * (norm @ up.T)) @ down.T
    torch.testing.assert_close(logits(head)[0][:, 0], first @ target_weights(torch.float64).lm_head.T)


def test_what_a_configuration_leaves_out(tmp_path: Path) -> None:
    stated = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "rms_norm_eps")}
    write_files(tmp_path, {**EAGLE, **{f"layers.0.self_attn.{part}_proj.weight": (8, E) for part in "kv"}}, stated)
    assert read_head(tmp_path)[1].config.layer == LAYER.model_copy(
        update={"num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
    )
    restate(tmp_path, num_attention_heads=None)
    with pytest.raises(ModelError, match=r"num_attention_heads None. Expected a count"):
        read_head(tmp_path)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("stated", "theta", "scaling"),
    [
        ({"rope_theta": 500000}, 5e5, None),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 1e4, LINEAR),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, "rope_theta": 500000.0},
            5e5,
            {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 2048},
        ),
    ],
)
def test_rotations_in_the_words_of_every_version(
    tmp_path: Path, stated: dict[str, Any], theta: float, scaling: Any
) -> None:
    write_files(tmp_path, EAGLE, LLAMA | stated)
    found = read_head(tmp_path)[1].config.layer
    assert (found.rope_theta, found.rope_scaling) == (theta, scaling)


def test_biased_attention_and_its_own_head_size(tmp_path: Path) -> None:
    shapes = {key: EAGLE[key] for key in ("fc.weight",)} | layer("layers.0", E, bias=True)
    wide = {"layers.0.self_attn.q_proj.weight": (12, E), "layers.0.self_attn.o_proj.weight": (E, 12)}
    wide |= {f"layers.0.self_attn.{part}_proj.weight": (6, E) for part in "kv"}
    wide |= {f"layers.0.self_attn.{part}_proj.bias": (12 if part == "q" else 6,) for part in "qkv"}
    write_files(tmp_path / "biased", shapes, LLAMA | {"qkv_bias": True})
    write_files(tmp_path / "wide", shapes | wide, LLAMA | {"qkv_bias": True, "head_dim": 6})
    write_files(tmp_path / "ignored", shapes, LLAMA | {"qkv_bias": True, "head_dim": 6})  # as the original code does
    for name, size in (("biased", 4), ("wide", 6), ("ignored", 4)):
        config = read_head(tmp_path / name)[1].config
        assert config == eagle(
            has_bias=False, layer=LAYER.model_copy(update={"attention_bias": True, "head_dim": size})
        )


def test_old_files_for_vllm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": LLAMA, "eagle_fc_bias": True}
    tensors = write_files(tmp_path, EAGLE | {"lm_head.weight": (V, E)}, config)
    assert read_head(tmp_path)[1].config == eagle()
    assert "lm_head.weight is taken for the target's" in caplog.text
    caplog.clear()
    same = TargetWeights(lm_head=tensors["lm_head.weight"], embedding=tensors["embed_tokens.weight"])
    assert read_head(tmp_path, weights=lambda: same)[1].config == eagle()
    assert not caplog.text
    with pytest.raises(ModelError, match="has an LM head of its own"):
        read_head(tmp_path, weights=target_weights)
    restate(tmp_path, eagle_fc_bias=False)
    read_head(tmp_path, weights=lambda: same)
    assert "eagle_fc_bias False, the tensors say True" in caplog.text


def test_embedding_is_compared_with_the_targets(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = write_files(tmp_path, EAGLE, LLAMA)
    same = TargetWeights(lm_head=numbers(V, E), embedding=tensors["embed_tokens.weight"])
    read_head(tmp_path, weights=lambda: same)
    assert not caplog.text
    read_head(tmp_path, weights=target_weights)
    assert "embed_tokens.weight is not the target's embedding" in caplog.text


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"embed_layernorm.weight": (E,), "hidden_layernorm.weight": (E,)}, {}, r"norms of its own \(embed_layernorm"),
        ({"lm_head_layernorm.weight": (E,)}, {}, r"norms of its own \(lm_head_layernorm.weight\)"),
        ({}, {"add_para_norm": True}, r"norms of its own \(add_para_norm\)"),
        ({"layers.1.input_layernorm.weight": (E,)}, {"num_hidden_layers": 2}, "has several decoder layers"),
        ({}, {"num_hidden_layers": 2}, "has 2 decoder layers. Expected a head with one"),
        ({}, {"hidden_act": "gelu"}, "hidden_act 'gelu'. Expected silu"),
        ({}, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({}, {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}}, "several values of rope_theta"),
        ({}, {"rope_scaling": "linear"}, "Expected keys and values, or null"),
        ({"layers.0.self_attn.q_norm.weight": (4,)}, {}, r"norms queries and keys \(q_norm, k_norm\)"),
    ],
)
def test_what_is_computed_otherwise_is_refused(
    tmp_path: Path, tensors: dict[str, tuple[int, ...]], config: dict[str, Any], message: str
) -> None:
    write_files(tmp_path, EAGLE | tensors, LLAMA | config)
    with pytest.raises(ModelError, match=message):
        read_head(tmp_path)


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    write_files(tmp_path, EAGLE, LLAMA)
    tensors = load_file(tmp_path / "model.safetensors")
    for key in ("fc.bias", "embed_tokens.weight"):
        save_file(tensors | {key: torch.full_like(tensors[key], float("nan"))}, tmp_path / "model.safetensors")
        assert_one_error_names(tmp_path, f"not finite: {key}")


def test_a_head_for_another_target_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path, EAGLE, LLAMA)
    with pytest.raises(ModelError, match="has hidden_size 8 instead of 16, which is the target's"):
        read_head(tmp_path, target=TargetFingerprint(hidden_size=2 * E, vocab_size=V))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_scaling": LINEAR}, None),
        (
            {"rope_scaling": LINEAR, "rope_theta": 5e5},
            "it scales rotations of base 10000 alone, and this head's is 500000",
        ),
        ({"rope_scaling": {**LINEAR, "factor": 1.0}}, "it stops at a scaling factor of 1.0, which has to be above 1"),
        ({"rope_theta": 5e5, "attention_bias": True}, None),
    ],
)
def test_who_reads_which_rotations(
    tmp_path: Path, changes: dict[str, Any], reason: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """As `benchmarks/interop` found of the original code, which wants two keys, `type` and a float."""
    head = random_head(eagle(layer=LAYER.model_copy(update=changes)))
    found = next(reader for reader in head_readers("eagle", head) if reader.program == EAGLE_CODE)
    assert found.reads == (reason is None)
    assert found.how.startswith(reason or "EaModel.from_pretrained")
    assert round_trip("eagle", head, tmp_path).config == head.config
    stored = json.loads((tmp_path / "one" / "config.json").read_text())
    if "rope_scaling" in changes:
        assert stored["rope_scaling"] == {"type": "linear", "factor": changes["rope_scaling"]["factor"]}
    assert "rope_theta" not in caplog.text, "this code wrote it, and knows what it means"
    del stored["foretoken"]
    (tmp_path / "one" / "config.json").write_text(json.dumps(stored))
    read_head(tmp_path / "one")
    warned = "rope_theta is 500000 here; beside rope_scaling EAGLE's own code takes 10000" in caplog.text
    assert warned == ({"rope_scaling", "rope_theta"} <= changes.keys())


@pytest.mark.parametrize(("name", "reads"), [("bias", True), ("scaled", True), ("other head size", False)])
def test_who_reads_it(name: str, reads: bool) -> None:
    said = {reader.program: reader for reader in head_readers("eagle", random_head(CONFIGS[name]))}
    assert said[EAGLE_CODE].reads == reads
    assert not said["vLLM"].reads  # it has no bias there
    assert not said["SGLang"].reads
    assert said["SGLang"].how.endswith("remove 'bias' from config.json")
    plain = head_readers("eagle", random_head(CONFIGS["no bias"]), target=TargetInfo(config=TARGET))
    assert {reader.program: reader.reads for reader in plain}["vLLM"]
    assert {reader.program: reader.reads for reader in plain}["SGLang"]  # a bias of zeros is written


def test_a_bias_that_is_not_the_zeros_written_is_an_error(tmp_path: Path) -> None:
    write_head("eagle", random_head(CONFIGS["no bias"]), tmp_path)
    tensors = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert not tensors["fc.bias"].any()
    (tmp_path / "pytorch_model.bin").unlink()  # it may be mapped
    torch.save(tensors | {"fc.bias": torch.ones_like(tensors["fc.bias"])}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"unexpected: fc\.bias"):
        read_head(tmp_path)


LSTM = {
    "lstm.weight_ih_l0": (4 * E, 2 * E),
    "lstm.weight_ih_l1": (4 * E, E),
    **{f"lstm.weight_hh_l{index}": (4 * E, E) for index in (0, 1)},
    **{f"lstm.bias_{kind}_l{index}": (4 * E,) for kind in ("ih", "hh") for index in (0, 1)},
}
FALCON = {"embed_tokens.weight": (V, E)} | LSTM | layer("layers.0", E)
STATED = {**LLAMA, "k_mask": 2}


def falcon(**sizes: Any) -> FalconConfig:
    """As published, unless said otherwise."""
    values = {"hidden_size": E, "vocab_size": V, "layer": LAYER, "lstm_mode": "per_position", **sizes}
    return FalconConfig(**values)


FALCONS = {
    "as published": falcon(),
    "no bias": falcon(has_bias=False),
    "recurrent": falcon(lstm_mode="recurrent", num_steps=4, dropout=0.0),
    "three": falcon(block=3, num_steps=9),
    "biased attention": falcon(layer=LAYER.model_copy(update={"attention_bias": True})),
}


@pytest.mark.parametrize("as_safetensors", [True, False])
@pytest.mark.parametrize("name", FALCONS)
def test_round_trip_of_falcon(tmp_path: Path, name: str, as_safetensors: bool) -> None:
    head = random_head(FALCONS[name], dtype=torch.bfloat16)
    assert_same(head, round_trip("falcon", head, tmp_path, as_safetensors=as_safetensors))


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_published_names_of_falcon(tmp_path: Path, prefix: str, has_bias: bool) -> None:
    shapes = {key: shape for key, shape in FALCON.items() if has_bias or "bias" not in key}
    named = {prefix + key: shape for key, shape in shapes.items()}
    tensors = write_files(tmp_path / "head", named, {**STATED, "bias": has_bias}, file="pytorch_model.bin")
    name, head = read_head(tmp_path / "head")
    assert (name, head.config) == ("falcon", falcon(has_bias=has_bias))
    assert torch.equal(head.weights["lstm.weights.weight_hh_l1"], tensors[prefix + "lstm.weight_hh_l1"])
    assert torch.equal(head.weights["layer.gate_proj.weight"], tensors[prefix + "layers.0.mlp.gate_proj.weight"])
    write_head("falcon", head, tmp_path / "again", target=target_info())
    assert shapes_of(tmp_path / "again" / "pytorch_model.bin") == shapes
    stored = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (stored["k_mask"], stored["bias"], stored["hidden_size"]) == (2, has_bias, E)
    assert_same_logits(head, read_head(tmp_path / "again")[1])


@pytest.mark.parametrize("value", [None, "2", True, 1, 99])
def test_blocks_of_falcon_that_make_no_sense(tmp_path: Path, value: object) -> None:
    write_files(tmp_path, FALCON, {**STATED, "k_mask": value})
    with pytest.raises(ModelError, match="k_mask" if value in (None, "2") or value is True else "block"):
        read_head(tmp_path)


def test_readers_of_falcon() -> None:
    """The published code runs into an error of its own."""
    readers = head_readers("falcon", random_head(falcon()))
    assert [(reader.program, reader.reads) for reader in readers] == [("foretoken", True), (FALCON_CODE, False)]
