"""A tiny model saved to a directory, and ways to damage it."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from foretoken.core.errors import ForetokenError, ModelError
from foretoken.models.loading import load_model

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def saved(directory: Path, architecture: str = "llama", **changes: Any) -> Path:
    """Saves a tiny model in Hugging Face layout."""
    tiny_model(architecture, **changes).save_pretrained(directory)
    return directory


def edit_config(directory: Path, *, without: Iterable[str] = (), **fields: Any) -> None:
    """Changes fields of config.json."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in without}))


def edit_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Changes the tensors of the weights file."""
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, directory / WEIGHTS, {"format": "pt"})


def split_weights(directory: Path) -> dict[str, str]:
    """Splits the weights file into `SHARDS` with an index; gives its weight map."""
    tensors = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    names = sorted(tensors)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    for shard, half in zip(SHARDS, halves, strict=True):
        save_file({name: tensors[name] for name in half}, directory / shard, {"format": "pt"})
    weight_map = {name: shard for shard, half in zip(SHARDS, halves, strict=True) for name in half}
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: Any) -> None:
    """Writes the index of a split model."""
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def message_of(call: Callable[[], Any]) -> str:
    """The message of the error, in one line; anything but a `ModelError` fails the test."""
    with pytest.raises(ModelError) as caught:
        call()
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def refusal(directory: Path | str) -> str:
    """The message of the error of a model that does not load."""
    return message_of(lambda: load_model(str(directory)))


NONSENSE: dict[str, Any] = {
    "null": None,
    "negative": -1,
    "zero": 0,
    "large": 10**6,
    "huge": 10**12,
    "text": "x",
    "list": [1, "a"],
    "bool": True,
    "not a number": float("nan"),
    "infinite": float("inf"),
    "fraction": 2.5,
    "object": {"a": 1},
}
MISSING = "missing"
_ELSEWHERE = ("architectures", "transformers_version", "model_type", "summary_")  # read by nobody, or tested alone


def damages(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Every field of a configuration with every way to damage it, `MISSING` or a key of `NONSENSE`."""
    for field in sorted(key for key in config if not key.startswith(_ELSEWHERE)):
        for kind in (MISSING, *NONSENSE):
            yield field, kind


def damage(directory: Path, field: str, kind: str) -> None:
    """Damages one field of config.json."""
    edit_config(directory, **({} if kind == MISSING else {field: NONSENSE[kind]}), without=[field] * (kind == MISSING))


def outcome(directory: Path, serve: Callable[[Path], Any]) -> str | None:
    """Serves a damaged model: None when it works, else the message.

    Anything but a `ForetokenError` of one line fails the test.

    Args:
        directory: Of the model.
        serve: What is to work, or to refuse.
    """
    try:
        serve(directory)
    except ForetokenError as err:
        message = str(err)
        assert message, "a refusal says something"
        assert "\n" not in message, message
        return message
    return None
