"""A model directory from a stranger: nothing in it is run, fetched, or read from elsewhere."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_files import SHARDS, WEIGHTS, edit_config, refusal, saved, split_weights, write_index
from safetensors.torch import load_file

from foretoken import LLM
from foretoken.core.errors import ModelError
from foretoken.models.loading import load_model, load_tokenizer


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return saved(tmp_path / "tiny")


@pytest.mark.parametrize("absolute", [False, True])
def test_shards_outside_the_directory_are_not_read(directory: Path, absolute: bool) -> None:
    weight_map = split_weights(directory)
    outside = directory.parent / "outside.safetensors"
    (directory / SHARDS[1]).rename(outside)
    place = str(outside) if absolute else "../outside.safetensors"
    write_index(directory, {name: place if shard == SHARDS[1] else shard for name, shard in weight_map.items()})
    assert f"names files outside its directory: {place}. Expected plain file names." in refusal(directory)


class Payload:
    """A pickle of this leaves a file behind where it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Path]]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_pickle_is_refused_and_not_run(directory: Path, name: str) -> None:
    marker = directory.parent / "marker"
    (directory / WEIGHTS).unlink()
    (directory / name).write_bytes(pickle.dumps(Payload(marker)))
    message = refusal(directory)
    assert f"'{directory}' holds only pickle weights ({name}), which can run code" in message
    assert "Expected safetensors." in message
    assert not marker.exists()
    pickle.loads((directory / name).read_bytes())
    assert marker.exists()  # the trap was live


def test_pickle_beside_other_safetensors_is_not_loaded(directory: Path) -> None:
    """A stray safetensors file must not open the way to a pickle that transformers would take for the weights."""
    torch.save(load_file(directory / WEIGHTS), directory / "pytorch_model.bin")
    (directory / WEIGHTS).rename(directory / "adapter.safetensors")
    assert "no file named model.safetensors" in refusal(directory)


@pytest.mark.parametrize("model_type", ["llama", "custom"])
def test_code_in_a_model_is_never_run(directory: Path, model_type: str) -> None:
    marker = directory.parent / "marker"
    (directory / "custom.py").write_text(f"from pathlib import Path\nPath({str(marker)!r}).touch()\n")
    names = {"AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.Model", "AutoTokenizer": "custom.Tokens"}
    edit_config(directory, model_type=model_type, auto_map=names, trust_remote_code=True)
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["custom.Tokens", None]}, "trust_remote_code": True})
    )
    if model_type == "llama":
        load_model(str(directory))  # known to transformers, which has its own code for it
    else:
        assert "needs code that comes with the model, which is never run, also with trust_remote_code=True" in refusal(
            directory
        )
        with pytest.raises(ModelError, match=r"the configuration of .* Load the model with transformers, and pass it"):
            LLM(str(directory), trust_remote_code=True)
    with pytest.raises(ModelError, match=r"the tokenizer of '.*' needs code that comes with the model"):
        load_tokenizer(str(directory))
    assert not marker.exists()


def test_attention_named_in_a_config_is_not_fetched(directory: Path) -> None:
    """A configuration that asks for a kernel from the hub gets the plug-in like every other."""
    edit_config(directory, _attn_implementation="kernels-community/attention", attn_implementation="flash_attention_2")
    assert load_model(str(directory)).config._attn_implementation == "foretoken_tree"
