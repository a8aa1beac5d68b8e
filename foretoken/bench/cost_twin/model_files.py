"""Writes the directory of a padded model: weights file by file, configuration and tokenizer.

The weights may be left out, for a model whose weights are padded in memory.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

from foretoken.bench.cost_twin.model import exactly
from foretoken.files.bounded_reads import read_json_object
from foretoken.formats.checkpoint import TargetFingerprint, lm_head_hash
from foretoken.formats.files import open_files, write_config, write_weights
from foretoken.models.config_checks import TWIN_KEY, TwinRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import torch
    from torch import Tensor

    from foretoken.bench.cost_twin.model import Padding, SmallModel

_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
_WEIGHTS = "model.safetensors"
_SHARD_SIZE = 1 << 30  # numbers in a file
_TEXTS = {".json", ".txt", ".model", ".jinja"}  # tokenizer, generation configuration


def write_model(
    model: SmallModel,
    padding: Padding,
    record: TwinRecord,
    new: Path,
    *,
    num_layers: int,
    dtype: torch.dtype | None,
    on_tensor: Callable[[], None],
) -> None:
    """Writes a padded model, with configuration and tokenizer.

    Args:
        model: The model to pad.
        padding: The padding.
        record: For the configuration.
        new: An empty directory.
        num_layers: Layers of the padded model, at least the model's.
        dtype: Dtype of its weights; None keeps theirs.
        on_tensor: Called after each tensor.

    Raises:
        ConfigError: When the dtype cannot hold the model's numbers.
        OSError: When a file cannot be written.
    """
    origins = model.origins(num_layers)
    shards = _shards(model, origins, padding.factor)
    files: dict[str, str] = {}
    for number, keys in enumerate(shards, start=1):
        name = _WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        for key in keys:
            tensors[key] = _padded(model, key, origins[key], padding, dtype).cpu()
            files[key] = name
            on_tensor()
        write_weights(new / name, tensors)
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": files}
        (new / f"{_WEIGHTS}.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    write_all_but_weights(model, padding, record, new, num_layers=num_layers, dtype=dtype)


def write_all_but_weights(
    model: SmallModel,
    padding: Padding,
    record: TwinRecord,
    new: Path,
    *,
    num_layers: int,
    dtype: torch.dtype | None,
) -> None:
    """Writes a padded model's configuration and the small model's other files; see `write_model`."""
    for path in sorted(model.path.iterdir()):
        if path.suffix in _TEXTS and path.name != "config.json" and not path.name.endswith(".index.json"):
            shutil.copyfile(path, new / path.name)
    write_config(new, _config(model, padding.factor, record, num_layers=num_layers, dtype=dtype))


def padded_tensors(
    model: SmallModel, padding: Padding, *, num_layers: int, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor of a padded model with its name, on the device of `padding`; arguments as in `write_model`.

    Raises:
        ConfigError: When the dtype cannot hold the model's numbers.
    """
    for key, origin in model.origins(num_layers).items():
        yield key, _padded(model, key, origin, padding, dtype)


def fingerprint(path: Path, name: str) -> TargetFingerprint:
    """Returns the fingerprint of a written padded model; name: the target's name in heads."""
    config, weights = read_json_object(path / "config.json"), open_files(path).weights
    key = next(key for key in ("lm_head.weight", "model.embed_tokens.weight") if key in weights.shapes)
    lm_head = weights.fetch([key])[key]
    return TargetFingerprint(
        name=name,
        architecture=(config.get("architectures") or [None])[0],
        hidden_size=lm_head.shape[1],
        vocab_size=lm_head.shape[0],
        num_layers=config["num_hidden_layers"],
        weights=lm_head_hash(lm_head),
    )


def _shards(model: SmallModel, origins: Mapping[str, str], factor: int) -> list[list[str]]:
    """Returns the keys of each file."""
    shards: list[list[str]] = [[]]
    size = 0
    for key, origin in origins.items():
        more = model.grown(origin, factor)
        if size and size + more > _SHARD_SIZE:
            shards.append([])
            size = 0
        shards[-1].append(key)
        size += more
    return shards


def _padded(model: SmallModel, key: str, origin: str, padding: Padding, dtype: torch.dtype | None) -> Tensor:
    rule = model.rule(origin)
    padded = padding(exactly(model.weights.fetch([origin])[origin], dtype, f"'{model.path}'"), rule)
    return padded.zero_() if rule.is_written and key != origin else padded


def _config(
    model: SmallModel, factor: int, record: TwinRecord, *, num_layers: int, dtype: torch.dtype | None
) -> dict[str, Any]:
    old = model.config
    config = dict(old)
    config |= {key: old[key] * factor for key in _SIZES if old.get(key) is not None}
    config |= {
        "head_dim": old.get("head_dim") or model.hidden_size // old["num_attention_heads"],
        "num_hidden_layers": num_layers,
        "rms_norm_eps": old.get("rms_norm_eps", 1e-6) / factor,
        TWIN_KEY: record.model_dump(mode="json"),
    }
    if old.get("layer_types"):
        config["layer_types"] = [*old["layer_types"], *old["layer_types"][-1:] * (num_layers - model.num_layers)]
    if dtype is not None:
        config |= {key: str(dtype).removeprefix("torch.") for key in ("dtype", "torch_dtype") if key in old}
    return config
