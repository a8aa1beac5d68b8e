"""Facts about a directory without loading its weights, and `inspect --verify`, which reads all of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from model_files import WEIGHTS, damage, damages, edit_config, edit_weights, saved, split_weights
from safetensors.torch import save_file
from tiny_models import ARCHITECTURES, CONTEXT_LEN, VOCAB_SIZE, tiny_model

from foretoken.core.errors import ModelError
from foretoken.models.config import SIZES
from foretoken.models.describe import describe_directory, describe_plain
from foretoken.models.weight_files import weight_findings


def test_facts(directory: Path) -> None:
    facts = describe_directory(directory)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["weight_bytes"] == (directory / WEIGHTS).stat().st_size
    assert facts | {"weight_bytes": 0} == {
        "directory": str(directory),
        "architecture": "LlamaForCausalLM",
        "layers": 3,
        "hidden_size": 32,
        "vocabulary": VOCAB_SIZE,
        "context": CONTEXT_LEN,
        "parameters": sum(parameter.numel() for parameter in tiny_model("llama").parameters()),
        "weight_dtypes": ["F32"],
        "weight_bytes": 0,
        "has_tokenizer": False,
        "can_be_target": "yes, if it loads and the self-test agrees",
    }


DESCRIBED = {"llama", "llama_tied", "mistral", "qwen2", "qwen3"}  # their files say all there is to tell


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_told_without_transformers_is_the_same(architecture: str, tmp_path: Path) -> None:
    tiny_model(architecture).save_pretrained(tmp_path / "tiny")
    plain = describe_plain(tmp_path / "tiny")
    assert (plain is not None) == (architecture in DESCRIBED)
    assert plain in (None, describe_directory(tmp_path / "tiny"))


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ["chunked_attention"] * 3},
        {"auto_map": {"AutoConfig": "code.Config"}},
        {"architectures": ["LlamaModel"]},
        {"model_type": ["llama"]},
        {"vocab_size": "many"},
        {"is_encoder_decoder": True},
    ],
    ids=str,
)
def test_what_is_unusual_is_left_to_transformers(change: dict[str, Any], directory: Path) -> None:
    edit_config(directory, **change)
    assert describe_plain(directory) is None


def test_a_head_with_the_configuration_of_a_model_is_none(directory: Path) -> None:
    """Draft heads are published under the configuration of one block of their target."""
    save_file({"fc.weight": torch.zeros(2, 4)}, directory / WEIGHTS)
    assert describe_plain(directory) is None


def test_shards_and_other_dtypes_add_up(tmp_path: Path) -> None:
    directory = tmp_path / "tiny"
    tiny_model("gpt2", dtype=torch.bfloat16).save_pretrained(directory)
    whole = describe_directory(directory)
    split_weights(directory)
    split = describe_directory(directory)
    assert whole["weight_dtypes"] == ["BF16"]
    assert (split["parameters"], split["weight_dtypes"]) == (whole["parameters"], whole["weight_dtypes"])
    assert (split["layers"], split["context"]) == (3, CONTEXT_LEN)


def test_a_model_that_cannot_be_a_target_is_described_all_the_same(directory: Path) -> None:
    edit_config(directory, layer_types=["chunked_attention"] * 3)
    assert describe_directory(directory)["can_be_target"].startswith("no: '")


@pytest.mark.parametrize(
    "config",
    [
        hf.T5Config(vocab_size=67, d_model=32, num_layers=2, num_heads=4, d_ff=48),
        hf.MiniMaxConfig(
            vocab_size=67,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            layer_types=["linear_attention"] * 2,
        ),
        hf.ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
        hf.CLIPConfig(),
    ],
    ids=lambda config: config.model_type,
)
def test_configurations_of_other_kinds_of_models(config: hf.PreTrainedConfig, directory: Path) -> None:
    config.save_pretrained(directory)
    assert describe_directory(directory)["can_be_target"].startswith("no: ")


@pytest.mark.parametrize("damage", ["config.json", WEIGHTS])
def test_damage_is_a_model_error(damage: str, directory: Path) -> None:
    (directory / damage).write_bytes(b"\x00")
    with pytest.raises(ModelError, match=damage):
        describe_directory(directory)


def test_a_directory_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="there is no model"):
        describe_directory(tmp_path / "none")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="there is no model"):
        describe_directory(Path("gpt2"))  # a hub id elsewhere; here only directories count


def test_damaged_configurations_are_not_told_without_transformers(directory: Path) -> None:
    """Where the quick way answers at all, it gives what the other one gives: no "yes" for sizes that are refused."""
    sound = json.loads((directory / "config.json").read_text())
    for field, kind in damages(sound):
        if field not in (*SIZES, "architectures", "layer_types", "model_type", "rope_parameters"):
            continue  # of other fields transformers alone knows the types; the model then does not load
        damage(directory, field, kind)
        plain = describe_plain(directory)
        if plain is not None:
            assert plain == describe_directory(directory), (field, kind)
        (directory / "config.json").write_text(json.dumps(sound))


Weights = dict[str, torch.Tensor]
GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2", "gemma2"])
def test_whole_files_have_no_findings(architecture: str, tmp_path: Path) -> None:
    assert weight_findings(saved(tmp_path, architecture)) == ([], [])


def test_names_without_the_architectures_prefix_are_known(tmp_path: Path) -> None:
    """As GPT-2's own files have them."""

    def shorten(weights: Weights) -> None:
        for key in list(weights):
            weights[key.removeprefix("transformer.")] = weights.pop(key)

    edit_weights(saved(tmp_path, "gpt2"), shorten)
    assert weight_findings(tmp_path) == ([], [])


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
def test_damage_is_named(change: Callable[[Weights], None], sentence: str, directory: Path) -> None:
    edit_weights(directory, change)
    (found,) = weight_findings(directory).findings
    assert sentence in found


def test_what_is_not_used_is_a_warning(directory: Path) -> None:
    edit_weights(directory, lambda w: w.update({"extra.weight": torch.ones(2)}))
    assert weight_findings(directory) == ([], ["extra.weight is not used"])


@pytest.mark.parametrize("architecture", ["mixtral", "gpt_neox"])
def test_weights_under_other_names_are_refused(architecture: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="under other names than its architecture's"):
        weight_findings(saved(tmp_path, architecture))


def test_quantized_weights_are_refused(directory: Path) -> None:
    edit_config(directory, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ModelError, match="are quantized"):
        weight_findings(directory)
