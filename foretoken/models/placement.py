"""Dtypes and devices by name, and contiguous memory for the weights of each block."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from foretoken.core.checks import shown
from foretoken.core.errors import ModelError, nearest_name_hint, one_line
from foretoken.decoder.memory import in_own_memory, plain_tensors

if TYPE_CHECKING:
    from torch import Tensor, nn

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

_LONGEST_REASON = 100  # characters


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    """Returns the dtype to load in; float32 on CPU by default, which is exact and no slower for small models."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if dtype not in DTYPES:
        raise ModelError(f"dtype {shown(dtype)} does not exist. {nearest_name_hint(shown(dtype), [*DTYPES, 'auto'])}")
    return DTYPES[dtype]


def resolve_device(device: str) -> torch.device:
    """Returns the device to load on, with "auto" an accelerator if any; raises `ModelError` if it is unusable."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device == "auto":
        return accelerator or torch.device("cpu")
    try:
        found = torch.device(device)
        torch.empty(1, dtype=torch.float32, device=found).tolist()
    except (RuntimeError, AssertionError, ImportError) as err:
        advice = _usable_devices(accelerator)
        raise ModelError(f"device {shown(device)} cannot be used: {_what_lacks(device, err)}. {advice}") from err
    return found


def _what_lacks(device: str, err: Exception) -> str:
    device_type = device.partition(":")[0]
    if device_type == "meta":
        return "it holds shapes and no numbers"
    if device_type == "cuda" and not torch.cuda.is_available():
        if torch.version.cuda is None and torch.version.hip is None:
            return f"this torch ({torch.__version__}) was built without CUDA"
        return "torch finds no NVIDIA GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES"
    said = one_line(err).rstrip("!")
    # For an unknown or missing device torch lists all types or backends, which helps nobody.
    return said if len(said) < _LONGEST_REASON else "this torch cannot compute on it"


def _usable_devices(accelerator: torch.device | None) -> str:
    if accelerator is not None:
        return f"Expected 'auto', 'cpu' or '{accelerator.type}', also with an index of a device that is there."
    return (
        "Expected 'auto' or 'cpu': torch finds no accelerator here. Where there is one, install its driver and the "
        "build of torch for it that https://pytorch.org/get-started/locally shows."
    )


_BLOCK = re.compile(r"(.*?\.\d+)\.")  # the part of a weight's name up to its block's number
_ALIGNMENT = 64  # bytes


def gather_weights(module: nn.Module) -> None:
    """Moves the weights of each block into one allocation, block after block, in place.

    Weights on other devices and subclasses of tensors, as in quantised layers, stay where they are.
    """
    plain = set(map(id, plain_tensors(module)))
    blocks: dict[tuple[str, torch.dtype], list[Tensor]] = defaultdict(list)
    for name, parameter in module.named_parameters():
        if id(parameter) in plain and parameter.is_cpu:
            match = _BLOCK.match(name)
            blocks["" if match is None else match[1], parameter.dtype].append(parameter)
    for weights in blocks.values():
        _gather(weights)
    for buffer in module.buffers():
        buffer.data = in_own_memory(buffer.data)


def _gather(weights: list[Tensor]) -> None:
    """Moves weights of one dtype into one allocation."""
    step = _ALIGNMENT // weights[0].itemsize
    starts = [0]
    for weight in weights:
        starts.append(starts[-1] + -(-weight.numel() // step) * step)
    memory = torch.empty(starts[-1], dtype=weights[0].dtype, device="cpu")
    for weight, start in zip(weights, starts, strict=False):
        place = memory[start : start + weight.numel()].view(weight.shape)
        place.copy_(weight.data)
        weight.data = place
