"""Medusa heads as vLLM reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_heads import (
    E,
    V,
    assert_one_error_names,
    assert_same,
    assert_same_logits,
    numbers,
    random_head,
    round_trip,
    shapes_of,
    target_info,
    target_weights,
    write_files,
)

from foretoken.core.errors import ConfigError, ModelError
from foretoken.formats.registry import read_head, write_head
from foretoken.heads.medusa import MedusaConfig

BLOCKS = {
    "blocks.0.layers.0.weight": (E, E),
    "blocks.1.layers.0.weight": (E, E),
}
BIASES = {
    "blocks.0.layers.0.bias": (E,),
    "blocks.1.layers.0.bias": (E,),
}
LM_HEADS = {
    "lm_heads.0.weight": (V, E),
    "lm_heads.1.weight": (V, E),
}
CONFIG = {
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "hidden_size": E,
    "vocab_size": V,
    "num_heads": 2,
    "num_hidden_layers": 1,
    "max_paths": 64,
    "topk": 10,
    "truncated_vocab_size": None,
}


def medusa(**changes: object) -> MedusaConfig:
    return MedusaConfig(**{"hidden_size": E, "vocab_size": V, "num_heads": 2, "own_lm_head": True, **changes})


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("num_layers", "tied"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("drafted", [None, 5])
def test_round_trip(tmp_path: Path, num_layers: int, tied: bool, has_bias: bool, drafted: int | None) -> None:
    config = medusa(num_layers=num_layers, tied_blocks=tied, has_bias=has_bias, draft_vocab_size=drafted)
    head = random_head(config)
    assert_same(head, round_trip("vllm_medusa", head, tmp_path))
    stored = json.loads((tmp_path / "one" / "config.json").read_text())
    assert (stored["medusa_fc_bias"], stored["truncated_vocab_size"]) == (has_bias, drafted)


def test_round_trip_without_blocks(tmp_path: Path) -> None:
    head = random_head(medusa(num_layers=0))
    assert_same(head, round_trip("vllm_medusa", head, tmp_path))


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("has_bias", [True, False])
def test_names(tmp_path: Path, prefix: str, has_bias: bool) -> None:
    shapes = BLOCKS | (BIASES if has_bias else {}) | LM_HEADS
    named = {prefix + key: shape for key, shape in shapes.items()}
    tensors = write_files(tmp_path / "head", named, CONFIG | {"medusa_fc_bias": has_bias})
    name, head = read_head(tmp_path / "head")
    assert (name, head.config) == ("vllm_medusa", medusa(has_bias=has_bias))
    assert torch.equal(head.weights["weight"][1, 0], tensors[prefix + "blocks.1.layers.0.weight"])
    assert torch.equal(head.weights["lm_head"][1], tensors[prefix + "lm_heads.1.weight"])
    write_head("vllm_medusa", head, tmp_path / "again")
    assert shapes_of(tmp_path / "again" / "model.safetensors") == shapes
    stored = json.loads((tmp_path / "again" / "config.json").read_text())
    expected = {**CONFIG, "medusa_fc_bias": has_bias, "original_lm_head": False, "torch_dtype": "float32"}
    assert {key: stored[key] for key in expected} == expected


def test_biases_that_vllm_would_drop_are_read_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_files(tmp_path, BLOCKS | BIASES | LM_HEADS, CONFIG | {"num_heads": 5})
    assert read_head(tmp_path)[1].config == medusa()
    assert "has biases, which vLLM drops" in caplog.text
    assert "num_heads 5, the tensors say 2" in caplog.text


def test_biases_that_the_config_promises_must_be_there(tmp_path: Path) -> None:
    write_files(tmp_path, BLOCKS | LM_HEADS, CONFIG | {"medusa_fc_bias": True})
    with pytest.raises(ModelError, match=r"missing: blocks.0.layers.0.bias, blocks.1.layers.0.bias"):
        read_head(tmp_path)


@pytest.mark.parametrize("key", ["lm_head.weight", "lm_heads.0.weight"])
def test_shared_lm_head(tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture) -> None:
    """The target's is shared; another one becomes each head's own; an unknown one is taken for the target's."""
    tensors = write_files(tmp_path, BLOCKS | {key: (V, E)}, CONFIG | {"original_lm_head": True})
    shared = medusa(own_lm_head=False, has_bias=False)
    assert read_head(tmp_path)[1].config == shared
    assert "taken to be the target's" in caplog.text
    other = read_head(tmp_path, weights=target_weights)[1]
    assert other.config == medusa(has_bias=False)
    assert all(torch.equal(part, tensors[key]) for part in other.weights["lm_head"])
    head = random_head(shared)
    assert_same(head, round_trip("vllm_medusa", head, tmp_path / "out", target=target_info()))
    assert shapes_of(tmp_path / "out" / "one" / "model.safetensors") == BLOCKS | {"lm_head.weight": (V, E)}
    with pytest.raises(ConfigError, match="share the target's LM head"):
        write_head("vllm_medusa", head, tmp_path / "no")


def test_lm_heads_over_the_whole_vocabulary_are_cut_by_the_map(tmp_path: Path) -> None:
    kept = torch.tensor([4, 12, 0])
    tensors = write_files(tmp_path, BLOCKS | LM_HEADS, CONFIG | {"truncated_vocab_size": 3})
    from safetensors.torch import save_file

    save_file(tensors | {"token_map": kept.int()}, tmp_path / "model.safetensors")
    head = read_head(tmp_path)[1]
    assert head.config == medusa(has_bias=False, draft_vocab_size=3)
    assert torch.equal(head.weights["token_map"], kept)
    assert torch.equal(head.weights["lm_head"][1], tensors["lm_heads.1.weight"][kept])
    for bad in ([4, 4, 0], [4, V, 0], [-1, 2, 3]):
        save_file(tensors | {"token_map": torch.tensor(bad)}, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=r"token_map of .* is no map. Expected different tokens in 0\.\.12"):
            read_head(tmp_path)
    save_file(
        tensors | {"lm_heads.0.weight": numbers(5, E), "lm_heads.1.weight": numbers(5, E), "token_map": kept},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(ModelError, match=r"have 5 rows. Expected 3, as its token_map, or 13"):
        read_head(tmp_path)


def test_one_error_names_everything(tmp_path: Path) -> None:
    shapes = BLOCKS | LM_HEADS | {"blocks.0.layers.0.scale": (1,), "lm_heads.1.weight": (V, E + 1)}
    del shapes["blocks.1.layers.0.weight"]
    write_files(tmp_path, shapes, CONFIG)
    assert_one_error_names(
        tmp_path,
        "missing: blocks.1.layers.0.weight;",
        "unexpected: blocks.0.layers.0.scale;",
        "lm_heads.1.weight [13, 9]",
    )


def test_scaled_logits_are_refused(tmp_path: Path) -> None:
    write_files(tmp_path, BLOCKS | LM_HEADS, CONFIG | {"logit_scale": 0.5})
    with pytest.raises(ModelError, match=r"scales its logits by 0.5"):
        read_head(tmp_path)


def test_published_names_become_vllm_names(tmp_path: Path) -> None:
    head = random_head(medusa(num_layers=2, tied_blocks=True))
    write_head("medusa", head, tmp_path / "medusa")
    write_head("vllm_medusa", read_head(tmp_path / "medusa")[1], tmp_path / "vllm")
    assert_same_logits(head, read_head(tmp_path / "vllm")[1])
