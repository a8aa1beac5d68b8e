"""A model directory that does not load: one error type, one sentence with what is wrong, where, and what to do."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_files import INDEX, SHARDS, WEIGHTS, edit_config, edit_weights, refusal, saved, split_weights, write_index

from foretoken.models.config import check_model_files

NORM, GATE, UP = "model.norm.weight", "model.layers.1.mlp.gate_proj.weight", "model.layers.2.mlp.up_proj.weight"


def test_missing_directory_names_the_nearest(directory: Path) -> None:
    saved(directory.parent / "other")
    (directory.parent / "tinx").mkdir()  # holds no model: never suggested
    message = refusal(directory.parent / "tinny")
    assert message.startswith(f"there is no model '{directory.parent / 'tinny'}'. Expected a directory with")
    assert f"Did you mean '{directory}'? Known: {directory.parent / 'other'}, {directory}." in message


def test_missing_directory_far_from_every_name(directory: Path) -> None:
    message = refusal(directory.parent / "zzzzzzzz")
    assert "Did you mean" not in message  # the directories' common path makes no two names alike
    assert f"Known: {directory}." in message


@pytest.mark.parametrize("name", ["/no/such/place", "./model", "../model", "~/model", "a/b/c", "", "models//x y"])
def test_missing_directory_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "Expected a" in refusal(name)


def test_a_file_is_no_directory(directory: Path) -> None:
    assert "there is no model" in refusal(directory / WEIGHTS)


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-0.5B", "a_b/c-d.e"])
def test_hub_ids_are_left_to_the_hub(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_model_files(name)


def test_names_beside_local_models_are_local(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory.parent)
    assert "Did you mean 'tiny'?" in refusal("tinyy")
    monkeypatch.chdir(directory.parent.parent)
    parent = directory.parent.name
    assert f"Did you mean '{parent}/tiny'?" in refusal(f"{parent}/tinyy")


def test_no_config(directory: Path) -> None:
    (directory / "config.json").unlink()
    assert refusal(directory) == f"'{directory}' has no config.json. Expected a model directory in Hugging Face layout."


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"{nope", "is not valid JSON"),
        (b"", "is not valid JSON"),
        (b"\xff\xfe{}", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'["llama"]', "holds a JSON list. Expected an object."),
    ],
    ids=["broken", "empty", "not text", "too deep", "a list"],
)
def test_config_that_cannot_be_parsed(directory: Path, content: bytes, part: str) -> None:
    (directory / "config.json").write_bytes(content)
    message = refusal(directory)
    assert message.startswith(str(directory / "config.json"))
    assert part in message


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"model_type": "llamma"}, "model type `llamma` but Transformers does not recognize this architecture"),
        ({"model_type": "vit"}, "for this kind of AutoModel: AutoModelForCausalLM"),
        ({"hidden_size": "wide"}, "'hidden_size' expected int, got str"),
        ({"num_attention_heads": 0}, "cannot be read"),
        ({"num_attention_heads": 5}, "not a multiple of the number of attention heads"),
        ({"hidden_act": "swishy"}, "it names 'swishy', which is not known"),
        ({"dtype": "float33"}, "float33"),
        ({"layer_types": ["nope"] * 3}, "'nope'"),
        ({"layer_types": ["chunked_attention"] * 3}, "has layers of kind chunked_attention"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            "with a library that is missing",
        ),
        ({"vocab_size": 10**6}, "lm_head.weight [67, 32] instead of [1000000, 32]"),
        ({"vocab_size": 10**12}, "vocab_size in the configuration of"),
        ({"vocab_size": -1}, "is -1. Expected a whole number from 1 to"),
        ({"hidden_size": 0}, "hidden_size in the configuration of"),
        ({"max_position_embeddings": 0}, "is 0. Expected a whole number from 1 to"),
        ({"max_position_embeddings": -5}, "is -5. Expected a whole number from 1 to"),
        ({"intermediate_size": 10**6}, "mlp.down_proj.weight [32, 48] instead of [32, 1000000]"),
        ({"num_hidden_layers": 4}, "num_hidden_layers is 4, but the files have 3 layers; missing: model.layers.3"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, but the files have 3 layers"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, but the files have a layer model.layers.2"),
        ({"quantization_config": {"quant_method": "magic"}}, "quantized by the method 'magic'"),
        ({"quantization_config": {"bits": 4}}, "quantized by the method None"),
        ({"quantization_config": {"quant_method": "foretoken"}}, "quantized by the method 'foretoken'"),
        ({"quantization_config": [4]}, "is [4]. Expected an object, or none"),
    ],
    ids=str,
)
def test_config_that_makes_no_sense(directory: Path, fields: dict[str, Any], part: str) -> None:
    edit_config(directory, **fields)
    message = refusal(directory)
    assert str(directory) in message
    assert part in message


def test_config_without_a_model_type(directory: Path) -> None:
    edit_config(directory, without=["model_type"])
    assert "Should have a `model_type` key" in refusal(directory)


def test_no_weights(directory: Path) -> None:
    (directory / WEIGHTS).unlink()
    assert refusal(directory) == f"'{directory}' holds no weights. Expected *.safetensors beside config.json."


def cut(size: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:size]


@pytest.mark.parametrize(
    "damage",
    [cut(0), cut(1), cut(7), cut(200), cut(5000), cut(-1), lambda _: b"\x00garbage" * 100, lambda content: content * 2],
    ids=["empty", "one byte", "no header", "half a header", "no end", "last byte gone", "garbage", "twice"],
)
def test_damaged_weights(directory: Path, damage: Callable[[bytes], bytes]) -> None:
    path = directory / WEIGHTS
    path.write_bytes(damage(path.read_bytes()))
    message = refusal(directory)
    assert message.startswith(f"{path} is damaged: ")
    assert message.endswith("Copy or download it again.")


def test_weights_under_another_name(directory: Path) -> None:
    (directory / WEIGHTS).rename(directory / "weights.safetensors")
    assert "no file named model.safetensors" in refusal(directory)


def test_every_missing_and_misshaped_weight_is_named_at_once(directory: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[NORM]
        tensors[GATE] = tensors[GATE][:5]
        tensors[UP] = tensors[UP][:, :3]

    edit_weights(directory, change)
    message = refusal(directory)
    assert f"missing: {NORM}; wrong shape: {GATE} [5, 32] instead of [48, 32], {UP} [48, 3] instead of" in message
    assert message.endswith("Copy or download the model again.")


def test_many_missing_and_misshaped_weights_are_few_words(tmp_path: Path) -> None:
    directory = saved(tmp_path / "deep", num_hidden_layers=40)
    edit_weights(directory, lambda tensors: tensors.update({key: tensor[:1] for key, tensor in tensors.items()}))
    edit_weights(directory, lambda tensors: [tensors.pop(key) for key in [*tensors][::3]] and None)
    message = refusal(directory)
    assert message.count("instead of") > 1
    assert re.search(
        r"missing: lm_head.weight, model.* and \d\d\d more; wrong shape: model.* and \d\d\d more\. ", message
    )
    assert len(message) - len(str(directory)) < 700


def test_missing_weights_alone(directory: Path) -> None:
    edit_weights(directory, lambda tensors: [tensors.pop(key) for key in (UP, NORM)] and None)
    assert f"do not fit its config.json: missing: {UP}, {NORM}." in refusal(directory)


def test_misshaped_weight_beside_a_tied_head(tmp_path: Path) -> None:
    directory = saved(tmp_path / "tied", "llama_tied")
    edit_weights(directory, lambda tensors: tensors.update({GATE: tensors[GATE][:5]}))
    assert f"config.json: wrong shape: {GATE} [5, 32] instead of [48, 32]." in refusal(directory)


def test_missing_shard(directory: Path) -> None:
    split_weights(directory)
    (directory / SHARDS[1]).unlink()
    assert f"'{directory}' lacks weight files that its index names: {SHARDS[1]}." in refusal(directory)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": ["a"]}'])
def test_damaged_index(directory: Path, content: str) -> None:
    split_weights(directory)
    (directory / INDEX).write_text(content)
    assert refusal(directory).startswith(str(directory / INDEX))


def test_index_that_names_no_file(directory: Path) -> None:
    split_weights(directory)
    write_index(directory, {NORM: 3})
    assert "lacks weight files that its index names: 3." in refusal(directory)
