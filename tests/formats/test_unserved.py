"""Heads that nothing here drafts with are called by their name; those of EAGLE are none of them any more."""

import json
from pathlib import Path

import pytest
from cli.command_line import run
from safetensors.torch import save_file
from tiny_eagles import EAGLE, IS_DRAFTED, LLAMA, OFFSETS, VD, eagle3_shapes
from tiny_heads import write_files
from tiny_models import tiny_model

from foretoken.core.errors import ForetokenError, ModelError
from foretoken.formats.files import open_files
from foretoken.formats.registry import format_of, holds_head, read_head, unserved_head

NESTED = {"draft_vocab_size": VD, "transformer_layer_config": LLAMA}
LAYOUTS = {
    "EAGLE-1": (EAGLE, LLAMA, "eagle"),
    "EAGLE-1 of old vLLM": (EAGLE, {"model_type": "eagle", "model": LLAMA, "eagle_fc_bias": True}, "eagle"),
    "EAGLE-3": (eagle3_shapes(), LLAMA | {"draft_vocab_size": VD}, "eagle3"),
    "SpecForge": (eagle3_shapes(), LLAMA | {"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
    "with a prefix": ({f"model.{key}": shape for key, shape in eagle3_shapes().items()}, LLAMA, "eagle3"),
    "layers.0 without a word in the config": (eagle3_shapes("layers.0"), LLAMA, "eagle3"),
    "speculators": (eagle3_shapes("layers.0"), {"speculators_model_type": "eagle3", **NESTED}, "speculators"),
    "speculators, historic": (
        {key.replace("fc.", "fusion_fc.").replace("layers.0", "transformer"): shape for key, shape in EAGLE.items()},
        {"speculators_model_type": "eagle", **NESTED},
        "speculators",
    ),
}


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_told_by_tensors_and_configuration(tmp_path: Path, name: str, file: str) -> None:
    shapes, config, format_name = LAYOUTS[name]
    write_files(tmp_path, shapes, config, file=file)
    files = open_files(tmp_path)
    assert holds_head(tmp_path)
    found = format_of(files)
    assert found is not None
    assert (found.name, unserved_head(files)) == (format_name, None)


@pytest.mark.parametrize(
    ("kind", "called"),
    [
        ("dflash", "a DFlash head (format speculators, draft vocabulary 5 of 13)"),
        ("peagle", "a P-EAGLE head (format speculators, draft vocabulary 5 of 13)"),
        ("xpress", "a 'xpress' head (format speculators, draft vocabulary 5 of 13)"),
    ],
)
def test_commands_call_others_by_name(tmp_path: Path, kind: str, called: str) -> None:
    write_files(tmp_path / "head", eagle3_shapes("layers.0"), {"speculators_model_type": kind, **NESTED})
    assert holds_head(tmp_path / "head")
    with pytest.raises(ModelError) as error:
        read_head(tmp_path / "head")
    assert str(error.value).startswith(
        f"'{tmp_path / 'head'}' holds {called}: foretoken does not serve it yet. Expected"
    )
    for arguments in (["inspect", str(tmp_path / "head")], ["convert", str(tmp_path / "head"), str(tmp_path / "out")]):
        result = run(*arguments)
        assert (result.returncode, result.stdout) == (2, "")
        assert f"holds {called}: foretoken does not serve it yet." in result.stderr
        assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen2"])
def test_targets_are_none_of_them(tmp_path: Path, architecture: str) -> None:
    tiny_model(architecture).save_pretrained(tmp_path)
    assert unserved_head(open_files(tmp_path)) is None
    assert not holds_head(tmp_path)


CONFIG_KEYS = (
    "architectures", "eagle_config", "draft_vocab_size", "target_hidden_size", "hidden_size", "vocab_size",
    "model_type", "transformer_layer_config", "model", "eagle_aux_hidden_state_layer_ids", "speculators_model_type",
    "num_attention_heads", "rope_parameters", "layer_types", "speculators_config",
)  # fmt: skip


@pytest.mark.parametrize("kind", [None, "eagle3", "eagle", "dflash"])
@pytest.mark.parametrize("key", CONFIG_KEYS)
def test_nonsense_in_a_config_is_no_other_error(tmp_path: Path, key: str, kind: str | None) -> None:
    """Whatever a file of the family says, reading gives a head or one of our errors."""
    name = "midlayer" if kind is None else "layers.0"
    config = LLAMA | {"eagle_aux_hidden_state_layer_ids": [2, 6, 9], "transformer_layer_config": LLAMA}
    config |= {} if kind is None else {"speculators_model_type": kind, "norm_before_residual": False}
    tensors = write_files(tmp_path, eagle3_shapes(name), config)
    save_file(tensors | {"d2t": OFFSETS, "t2d": IS_DRAFTED}, tmp_path / "model.safetensors")
    for value in (None, "x", "", -1, 0, 1.5, True, [], [[1]], {}, {"a": []}):
        (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
        assert holds_head(tmp_path)
        try:
            read_head(tmp_path)
        except ForetokenError as error:
            assert "\n" not in str(error)  # noqa: PT017 - most of them are refused, and some are not
