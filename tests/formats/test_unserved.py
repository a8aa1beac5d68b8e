"""Heads that nothing here drafts with are called by their name, in every layout; names of keys written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cli.command_line import run
from safetensors.torch import save_file
from tiny_heads import E, V, write_files
from tiny_models import tiny_model

from foretoken.core.errors import ModelError
from foretoken.formats.files import open_files
from foretoken.formats.registry import holds_head, read_head
from foretoken.formats.unserved import unserved_head

VD = 5
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": E, "vocab_size": V}
LAYER = {
    "self_attn.q_proj.weight": (E, E),
    "self_attn.o_proj.weight": (E, E),
    "mlp.down_proj.weight": (E, E),
    "post_attention_layernorm.weight": (E,),
}
EAGLE1 = {"embed_tokens.weight": (V, E), "fc.weight": (E, 2 * E)} | {f"layers.0.{k}": s for k, s in LAYER.items()}
EAGLE3 = {
    "fc.weight": (E, 3 * E),
    "norm.weight": (E,),
    "lm_head.weight": (VD, E),
    "d2t": (VD,),
    "t2d": (V,),
    "midlayer.hidden_norm.weight": (E,),
} | {f"midlayer.{key}": shape for key, shape in LAYER.items()}
SPECULATORS = {key.replace("midlayer.", "layers.0."): shape for key, shape in EAGLE3.items()}
NESTED = {"transformer_layer_config": {"model_type": "llama", "hidden_size": E, "vocab_size": V}}
OLD = {"fusion_fc.weight": (E, 2 * E)} | {f"transformer.{key}": shape for key, shape in LAYER.items()}

LAYOUTS: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, Any], str]] = {
    "EAGLE-1": (EAGLE1, LLAMA, "an EAGLE-1 or -2 head (draft vocabulary 13)"),
    "EAGLE-1 with a bias": (EAGLE1 | {"fc.bias": (E,)}, LLAMA, "an EAGLE-1 or -2 head (draft vocabulary 13)"),
    "EAGLE-1 of old vLLM": (
        EAGLE1 | {"lm_head.weight": (V, E)},
        {"model_type": "eagle", "model": LLAMA, "eagle_fc_bias": True},
        "an EAGLE-1 or -2 head (draft vocabulary 13)",
    ),
    "EAGLE-3": (
        EAGLE3,
        LLAMA | {"draft_vocab_size": VD},
        "an EAGLE-3 head (3 taps, their layers not stated, draft vocabulary 5 of 13)",
    ),
    "EAGLE-3 over the whole vocabulary": (
        {key: shape for key, shape in EAGLE3.items() if key not in ("d2t", "t2d")} | {"lm_head.weight": (V, E)},
        LLAMA,
        "an EAGLE-3 head (3 taps, their layers not stated, draft vocabulary 13)",
    ),
    "EAGLE-3 of another width": (
        EAGLE3 | {"fc.weight": (E, 3 * 4)},
        LLAMA | {"draft_vocab_size": VD, "target_hidden_size": 4},
        "an EAGLE-3 head (3 taps, their layers not stated, draft vocabulary 5 of 13)",
    ),
    "SpecForge": (
        EAGLE3,
        LLAMA
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": VD,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 28], "use_aux_hidden_state": True},
        },
        "an EAGLE-3 head (of SpecForge, taps 1, 17, 28, draft vocabulary 5 of 13)",
    ),
    "with a prefix": (
        {f"model.{key}": shape for key, shape in EAGLE3.items()},
        LLAMA | {"draft_vocab_size": VD},
        "an EAGLE-3 head (3 taps, their layers not stated, draft vocabulary 5 of 13)",
    ),
    "layers.0 without a word in the config": (
        SPECULATORS,
        LLAMA,
        "an EAGLE-3 head (3 taps, their layers not stated, draft vocabulary 5 of 13)",
    ),
    "speculators": (
        SPECULATORS,
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": VD,
            "eagle_aux_hidden_state_layer_ids": [2, 18, 29],
            **NESTED,
        },
        "an EAGLE-3 head (format speculators, taps 2, 18, 29, draft vocabulary 5 of 13)",
    ),
    "speculators, historic": (
        OLD,
        {"speculators_model_type": "eagle", **NESTED},
        "an EAGLE-1 or -2 head (format speculators, draft vocabulary 13)",
    ),
    "speculators, of another kind": (
        SPECULATORS,
        {"speculators_model_type": "dflash", "draft_vocab_size": VD, **NESTED},
        "a DFlash head (format speculators, draft vocabulary 5 of 13)",
    ),
    "speculators, of a kind to come": (
        SPECULATORS,
        {"speculators_model_type": "xpress", **NESTED},
        "a 'xpress' head (format speculators, draft vocabulary 5 of 13)",
    ),
}


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(tmp_path: Path, name: str, file: str) -> None:
    shapes, config, called = LAYOUTS[name]
    tensors = write_files(tmp_path, shapes, config, file=file)
    if "t2d" in tensors and file.endswith(".safetensors"):  # as stored: a mask and offsets
        save_file(tensors | {"t2d": tensors["t2d"] > 0, "d2t": torch.arange(VD)}, tmp_path / file)
    assert holds_head(tmp_path)
    with pytest.raises(ModelError) as error:
        read_head(tmp_path)
    assert str(error.value).startswith(
        f"'{tmp_path}' holds {called}: foretoken does not serve it yet. Expected one of "
    )


def test_commands_call_them_by_name(tmp_path: Path) -> None:
    shapes, config, called = LAYOUTS["SpecForge"]
    write_files(tmp_path / "head", shapes, config)
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
)  # fmt: skip


@pytest.mark.parametrize("key", CONFIG_KEYS)
def test_nonsense_in_a_config_is_no_other_error(tmp_path: Path, key: str) -> None:
    for index, value in enumerate((None, "x", "", -1, 0, 1.5, True, [], [[1]], {}, {"a": []})):
        write_files(tmp_path / str(index), EAGLE3, LLAMA | {key: value})
        with pytest.raises(ModelError, match="foretoken does not serve it yet"):
            read_head(tmp_path / str(index))
