"""Model directories with things in the place of files that would keep a library reading: refused before it begins.

Where one of these tests fails it waits for ever, or until memory is full.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from end_to_end.tiny_llms import tokenizer
from model_files import saved
from tiny_models import tiny_model

from foretoken import LLM
from foretoken.core.errors import ForetokenError, ModelError
from foretoken.models.describe import describe_directory
from foretoken.models.loading import load_model, load_tokenizer

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


def directory_with(path: Path, name: str, make: Callable[[Path], Any]) -> Path:
    directory = saved(path / "tiny")
    tokenizer().save_pretrained(directory)
    place = directory / name
    place.parent.mkdir(exist_ok=True)
    place.unlink(missing_ok=True)
    make(place)
    return directory


@pytest.mark.parametrize("name", [*CONFIGS, *TOKENIZERS])
@pytest.mark.parametrize("kind", ENDLESS)
def test_what_is_no_file(kind: str, name: str, tmp_path: Path) -> None:
    make, what = ENDLESS[kind]
    directory = directory_with(tmp_path, name, make)
    calls: list[Callable[[], Any]] = [lambda: load_model(directory), lambda: describe_directory(directory)]
    if name in TOKENIZERS:
        calls += [lambda: load_tokenizer(str(directory)), lambda: LLM(tiny_model("llama"), tokenizer=directory)]
    for call in calls:
        with pytest.raises(ForetokenError, match=f"{Path(name).name}' is {what}. Expected a regular file"):
            call()


@pytest.mark.parametrize("name", [*(n for n in CONFIGS if n != "model.safetensors"), *TOKENIZERS])
def test_files_of_gigabytes(name: str, tmp_path: Path) -> None:
    directory = directory_with(tmp_path, name, lambda path: None)
    enlarge(directory / name)
    with pytest.raises(ModelError, match=rf"{Path(name).name}' has 8589934592 bytes\. Expected at most"):
        load_model(directory)
    with pytest.raises(ModelError, match=r"bytes\. Expected at most"):
        load_tokenizer(str(directory))


@pytest.mark.parametrize("size", [0, 1, 100, 5000])
def test_weights_that_were_cut_before_loading(size: int, tmp_path: Path) -> None:
    directory = saved(tmp_path / "tiny")
    os.truncate(directory / "model.safetensors", size)
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged: .* Copy or download it again\."):
        load_model(directory)


@pytest.mark.parametrize("place", ["/dev/zero", "/dev/null", "tokenizer.json"])
def test_a_tokenizer_is_a_directory(place: str, tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"is no directory\. Expected one with tokenizer files"):
        LLM(tiny_model("llama"), tokenizer=tmp_path / place)


def test_a_link_to_a_file_is_one(tmp_path: Path) -> None:
    """As in the hub's cache."""
    directory, links = saved(tmp_path / "tiny"), tmp_path / "links"
    links.mkdir()
    for path in directory.iterdir():
        (links / path.name).symlink_to(path)
    assert load_model(links).num_layers == 3
