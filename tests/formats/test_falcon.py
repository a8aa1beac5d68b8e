"""Falcon heads as published; files from outside are written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_eagles import LAYER, LLAMA, layer
from tiny_heads import (
    E,
    V,
    assert_one_error_names,
    assert_same,
    assert_same_logits,
    random_head,
    round_trip,
    shapes_of,
    target_info,
    write_files,
)

from foretoken.core.errors import ModelError
from foretoken.formats.conversion import FALCON_CODE
from foretoken.formats.registry import head_readers, read_head, write_head
from foretoken.heads.falcon import FalconConfig

FALCON = {
    "embed_tokens.weight": (V, E),
    "lstm.weight_ih_l0": (4 * E, 2 * E),
    "lstm.weight_hh_l0": (4 * E, E),
    "lstm.bias_ih_l0": (4 * E,),
    "lstm.bias_hh_l0": (4 * E,),
    "lstm.weight_ih_l1": (4 * E, E),
    "lstm.weight_hh_l1": (4 * E, E),
    "lstm.bias_ih_l1": (4 * E,),
    "lstm.bias_hh_l1": (4 * E,),
} | layer("layers.0", E)
STATED = {**LLAMA, "k_mask": 2}


def falcon(**sizes: Any) -> FalconConfig:
    """As published, unless said otherwise."""
    values = {"hidden_size": E, "vocab_size": V, "layer": LAYER, "lstm_mode": "per_position", **sizes}
    return FalconConfig(**values)


CONFIGS = {
    "as published": falcon(),
    "no bias": falcon(has_bias=False),
    "recurrent": falcon(lstm_mode="recurrent", num_steps=4, dropout=0.0),
    "three": falcon(block=3, num_steps=9),
    "biased attention": falcon(layer=LAYER.model_copy(update={"attention_bias": True})),
}


@pytest.mark.parametrize("as_safetensors", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(tmp_path: Path, name: str, as_safetensors: bool) -> None:
    head = random_head(CONFIGS[name], dtype=torch.bfloat16)
    assert_same(head, round_trip("falcon", head, tmp_path, as_safetensors=as_safetensors))


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_published_names(tmp_path: Path, prefix: str, has_bias: bool) -> None:
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


def test_one_error_names_all_keys(tmp_path: Path) -> None:
    shapes = {**FALCON, "layers.0.input_layernorm.weight": (E,), "lstm.bias_hh_l1": (E,)}
    del shapes["lstm.weight_hh_l0"]
    write_files(tmp_path, shapes, STATED)
    assert_one_error_names(
        tmp_path, "missing: lstm.weight_hh_l0", "unexpected: layers.0.input_layernorm.weight",
        "wrong shape: lstm.bias_hh_l1 [8] instead of [32]",
    )  # fmt: skip


@pytest.mark.parametrize("value", [None, "2", True, 1, 99])
def test_blocks_that_make_no_sense(tmp_path: Path, value: object) -> None:
    write_files(tmp_path, FALCON, {**STATED, "k_mask": value})
    with pytest.raises(ModelError, match="k_mask" if value in (None, "2") or value is True else "block"):
        read_head(tmp_path)


def test_readers() -> None:
    """The published code runs into an error of its own."""
    readers = head_readers("falcon", random_head(falcon()))
    assert [(reader.program, reader.reads) for reader in readers] == [("foretoken", True), (FALCON_CODE, False)]
