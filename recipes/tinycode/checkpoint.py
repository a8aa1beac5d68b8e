"""Atomic, resumable checkpoints of a training run (read back with `weights_only=True`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, Any]) -> None:
    """Write model, optimiser and progress to `path`; a crash midway leaves the previous file whole."""
    temporary = path.with_suffix(".tmp")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": progress}, temporary)
    temporary.replace(path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Restore model (strictly) and optimiser in place from `path`; return the progress record."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
    return state["progress"]


def load_weights(path: Path, model: nn.Module) -> None:
    """Restore the weights alone (strictly), from a checkpoint or from an exported model's directory."""
    exported = path.is_dir()
    state = load_file(path / "model.safetensors") if exported else torch.load(path, weights_only=True)["model"]
    model.load_state_dict(state)
