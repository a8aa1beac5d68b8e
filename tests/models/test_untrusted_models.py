"""A model directory from a stranger: nothing in it is run, fetched, or read from elsewhere, or read for ever.

Where a test of endless files fails it waits for ever, or until memory is full.
"""

import json
import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.tiny_llms import tokenizer
from model_files import SHARDS, WEIGHTS, edit_config, refusal, split_weights, write_index
from safetensors.torch import load_file
from tiny_models import tiny_model

from foretoken import LLM
from foretoken.core.errors import ForetokenError, ModelError
from foretoken.models.describe import describe_directory
from foretoken.models.loading import load_model, load_tokenizer


@pytest.mark.parametrize("absolute", [False, True])
def test_shards_outside_the_directory_are_not_read(directory: Path, absolute: bool) -> None:
    weight_map = split_weights(directory)
    outside = directory.parent / "outside.safetensors"
    (directory / SHARDS[1]).rename(outside)
    path = str(outside) if absolute else "../outside.safetensors"
    write_index(directory, {name: path if shard == SHARDS[1] else shard for name, shard in weight_map.items()})
    assert f"names files outside its directory: {path}. Expected plain file names." in refusal(directory)


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


CONFIGS = ["config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"]
TOKENIZERS = [
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.txt", "additional_chat_templates/tool.jinja",
]  # fmt: skip


def bind(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


def enlarge(path: Path) -> None:
    with path.open("ab") as file:
        file.truncate(1 << 33)  # takes no room on the disk


ENDLESS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pipe": (os.mkfifo, "a pipe"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a device"),
    "terminal": (lambda path: path.symlink_to("/dev/tty"), "a device"),
    "directory": (Path.mkdir, "a directory"),
    "socket": (bind, "a socket"),
}


def replace(directory: Path, name: str, make: Callable[[Path], Any]) -> None:
    tokenizer().save_pretrained(directory)
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    make(path)


@pytest.mark.parametrize("name", [*CONFIGS, *TOKENIZERS])
@pytest.mark.parametrize("kind", ENDLESS)
def test_what_is_no_file(kind: str, name: str, directory: Path) -> None:
    make, what = ENDLESS[kind]
    replace(directory, name, make)
    calls: list[Callable[[], Any]] = [lambda: load_model(directory), lambda: describe_directory(directory)]
    if name in TOKENIZERS:
        calls += [lambda: load_tokenizer(str(directory)), lambda: LLM(tiny_model("llama"), tokenizer=directory)]
    for call in calls:
        with pytest.raises(ForetokenError, match=f"{Path(name).name}' is {what}. Expected a regular file"):
            call()


@pytest.mark.parametrize("name", [*(n for n in CONFIGS if n != "model.safetensors"), *TOKENIZERS])
def test_files_of_gigabytes(name: str, directory: Path) -> None:
    replace(directory, name, enlarge)
    with pytest.raises(ModelError, match=rf"{Path(name).name}' has 8589934592 bytes\. Expected at most"):
        load_model(directory)
    with pytest.raises(ModelError, match=r"bytes\. Expected at most"):
        load_tokenizer(str(directory))


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "tokenizer.json"])
def test_a_tokenizer_is_a_directory(path: str, tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"is no directory\. Expected one with tokenizer files"):
        LLM(tiny_model("llama"), tokenizer=tmp_path / path)


def test_a_link_to_a_file_is_one(directory: Path) -> None:
    """As in the hub's cache."""
    links = directory.parent / "links"
    links.mkdir()
    for path in directory.iterdir():
        (links / path.name).symlink_to(path)
    assert load_model(links).num_layers == 3
