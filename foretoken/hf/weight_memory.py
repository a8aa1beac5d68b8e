"""Where the weights of a model on the CPU lie in memory: those of a block side by side, and nothing in a mapped file.

Decoders look before every pass whether memory they read by its address has moved (`decoder.held_memory`), which costs
time for every allocation: one a block here, where a model has one a weight.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from foretoken.decoder.held_memory import in_own_memory, plain_tensors

if TYPE_CHECKING:
    from torch import Tensor, nn

_BLOCK = re.compile(r"(.*?\.\d+)\.")  # the part of a weight's name that names its block
_ALIGNMENT = 64  # bytes


def gather_weights(module: nn.Module) -> None:
    """Moves the weights of each block into one allocation, one block after another, in place.

    What lies on other devices or is no plain tensor, as in quantised layers, stays where it is.
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
    """Moves some weights of one dtype into one allocation."""
    step = _ALIGNMENT // weights[0].itemsize
    starts = [0]
    for weight in weights:
        starts.append(starts[-1] + -(-weight.numel() // step) * step)
    memory = torch.empty(starts[-1], dtype=weights[0].dtype, device="cpu")
    for weight, start in zip(weights, starts, strict=False):
        place = memory[start : start + weight.numel()].view(weight.shape)
        place.copy_(weight.data)
        weight.data = place
