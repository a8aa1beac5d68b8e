"""Tiny random heads, files made by hand, and what it means that two heads are the same."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.core.errors import ModelError
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint, TargetInfo, TargetWeights
from foretoken.formats.conversion import head_shapes
from foretoken.formats.registry import read_head, write_head
from foretoken.heads.base import HeadConfig
from foretoken.heads.hydra import HydraConfig
from foretoken.heads.medusa import MedusaConfig
from foretoken.models.parts import TargetParts

E, V = 8, 13
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def medusa(**changes: Any) -> MedusaConfig:
    return MedusaConfig(**{"hidden_size": E, "vocab_size": V, "num_heads": 2, "own_lm_head": True, **changes})


def hydra(**changes: Any) -> HydraConfig:
    sizes = {"hidden_size": E, "vocab_size": V, "num_heads": 2, "num_layers": 2, "own_lm_head": True}
    return HydraConfig(**{**sizes, **changes})


def linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a linear layer with a bias."""
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers; no two tensors of a test share a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_head(config: HeadConfig, *, dtype: torch.dtype = torch.float32, **more: Any) -> HeadCheckpoint:
    """A head with random weights in every place."""
    weights = {
        name: numbers(*shape, seed=100 + i, dtype=dtype) for i, (name, shape) in enumerate(head_shapes(config).items())
    }
    if "token_map" in weights:
        size = weights["token_map"].numel()
        weights["token_map"] = torch.randperm(config.vocab_size, generator=torch.Generator().manual_seed(5))[:size]
    target = TargetFingerprint(
        name="some/target", architecture="LlamaForCausalLM", hidden_size=E, vocab_size=V, num_layers=2, weights="abc"
    )
    return HeadCheckpoint(config=config, weights=weights, **{"target": target, **more})


def target_weights(dtype: torch.dtype = torch.float32, **more: Any) -> TargetWeights:
    """The target's tensors that heads may share."""
    return TargetWeights(
        lm_head=numbers(V, E, seed=1, dtype=dtype), embedding=numbers(V, E, seed=2, dtype=dtype), **more
    )


def target_info(**more: Any) -> TargetInfo:
    """A target at hand."""
    return TargetInfo(load=lambda: target_weights(**more))


def logits(checkpoint: HeadCheckpoint) -> list[Tensor]:
    """What the head says after a random text, in float64."""
    target = target_weights(torch.float64)
    parts = TargetParts(
        embed=lambda tokens: torch.nn.functional.embedding(tokens, target.embedding),
        lm_head=lambda features: features @ target.lm_head.T,
        lm_head_weight=target.lm_head,
    )
    head = checkpoint.module(dtype=torch.float64)
    tokens = torch.randint(V, (2, 9), generator=torch.Generator().manual_seed(3))
    features = numbers(2, 9, len(head.config.taps) * E, seed=4).double()
    hidden = head.teacher_forced(features, tokens, parts)
    return [head.logits(index, each, parts) for index, each in enumerate(hidden)]


def assert_same(one: HeadCheckpoint, other: HeadCheckpoint) -> None:
    """Same configuration, same bits, same target, same logits."""
    assert other.config == one.config
    assert other.weights.keys() == one.weights.keys()
    for key, tensor in one.weights.items():
        assert other.weights[key].dtype == tensor.dtype, key
        assert torch.equal(other.weights[key], tensor), key
    assert other.target == one.target
    assert all(torch.equal(a, b) for a, b in zip(logits(one), logits(other), strict=True))


def assert_same_logits(one: HeadCheckpoint, other: HeadCheckpoint) -> None:
    assert all(torch.equal(a, b) for a, b in zip(logits(one), logits(other), strict=True))


def round_trip(name: str, checkpoint: HeadCheckpoint, directory: Path, **options: Any) -> HeadCheckpoint:
    """Written, read, written again, read again: both readings are the same."""
    around = options.get("target") or TargetInfo()
    write_head(name, checkpoint, directory / "one", **options)
    found, first = read_head(directory / "one", base_config=around.config, weights=around.load)
    assert found == name
    write_head(name, first, directory / "two", **options)
    assert_same(first, read_head(directory / "two", base_config=around.config, weights=around.load)[1])
    return first


def write_files(
    directory: Path, shapes: Mapping[str, Sequence[int]], config: Any = None, *, file: str = "model.safetensors"
) -> dict[str, Tensor]:
    """A checkpoint made by hand, random numbers under the given names."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {key: numbers(*shape, seed=i) for i, (key, shape) in enumerate(shapes.items())}
    if file.endswith(".safetensors"):
        save_file(tensors, directory / file)
    else:
        torch.save(tensors, directory / file)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return tensors


def assert_one_error_names(directory: Path, *parts: str, **options: Any) -> None:
    """Reading is refused, and the error says everything that is wrong."""
    with pytest.raises(ModelError) as caught:
        read_head(directory, **options)
    for part in parts:
        assert part in str(caught.value)


def shapes_of(path: Path) -> dict[str, tuple[int, ...]]:
    """What a file holds, read without our code."""
    tensors = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    return {key: tuple(tensor.shape) for key, tensor in tensors.items()}
