"""`inspect --verify` of targets: whole files have no findings, and each kind of damage has its sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from foretoken.core.errors import ModelError
from foretoken.models.weight_files import weight_findings

Weights = dict[str, torch.Tensor]
GATE = "model.layers.1.mlp.gate_proj.weight"


def written(directory: Path, architecture: str = "llama") -> Path:
    """A tiny model's files."""
    tiny_model(architecture).save_pretrained(directory)
    return directory


def changed(directory: Path, change: Callable[[Weights], object]) -> Path:
    """The same files with other tensors."""
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2", "gemma2"])
def test_whole_files_have_no_findings(architecture: str, tmp_path: Path) -> None:
    assert weight_findings(written(tmp_path, architecture)) == ([], [])


def test_names_without_the_architectures_prefix_are_known(tmp_path: Path) -> None:
    """As GPT-2's own files have them."""

    def shorten(weights: Weights) -> None:
        for key in list(weights):
            weights[key.removeprefix("transformer.")] = weights.pop(key)

    assert weight_findings(changed(written(tmp_path, "gpt2"), shorten)) == ([], [])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda w: w.pop(GATE), f"{GATE} is missing, of shape ["),
        (lambda w: w.update({GATE: w[GATE][:, 1:].clone()}), f"{GATE} has shape ["),
        (lambda w: w[GATE][0, :3].fill_(float("nan")), f"{GATE} holds 3 numbers that are not finite"),
        (lambda w: w[GATE][0, :1].fill_(float("-inf")), f"{GATE} holds 1 numbers that are not finite"),
        (lambda w: w.update({GATE: w[GATE].to(torch.int8)}), f"{GATE} of "),
        (
            lambda w: [w.pop(key) for key in list(w) if ".layers.2." in key],
            "num_hidden_layers is 3, but the files have 2",
        ),
        (lambda w: w.update({GATE.replace("1", "7"): w[GATE].clone()}), "a layer model.layers.7"),
    ],
)
def test_damage_is_named(change: Callable[[Weights], object], sentence: str, tmp_path: Path) -> None:
    (found,) = weight_findings(changed(written(tmp_path), change)).findings
    assert sentence in found


def test_what_is_not_used_is_a_warning(tmp_path: Path) -> None:
    found = weight_findings(changed(written(tmp_path), lambda w: w.update({"extra.weight": torch.ones(2)})))
    assert found == ([], ["extra.weight is not used"])


@pytest.mark.parametrize("architecture", ["mixtral", "gpt_neox"])
def test_weights_under_other_names_are_refused(architecture: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="under other names than its architecture's"):
        weight_findings(written(tmp_path, architecture))


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    config = json.loads((written(tmp_path / "quantized") / "config.json").read_text())
    text = json.dumps({**config, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    (tmp_path / "quantized" / "config.json").write_text(text)
    with pytest.raises(ModelError, match="are quantized"):
        weight_findings(tmp_path / "quantized")
