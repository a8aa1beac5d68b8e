"""Capabilities of a device: free reads by the host, CPU kernels, the CUDA runtime, CUDA graphs, Triton kernels.

No other module compares torch's names of device types, so a new accelerator needs changes here alone.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def reads_are_free(device: torch.device) -> bool:
    """Whether the host reads tensors of the device without synchronisation or copy."""
    return device.type == "cpu"


def runs_cpu_kernels(device: torch.device) -> bool:
    """Whether NumPy, oneDNN and our CPU kernels work on tensors of the device in place."""
    return device.type == "cpu"


def has_cuda_runtime(device: torch.device) -> bool:
    """Whether `torch.cuda` serves the device, on NVIDIA GPUs and under ROCm: streams, events, memory counters."""
    return device.type == "cuda"


def has_cuda_graphs(device: torch.device) -> bool:
    """Whether passes can be captured as CUDA graphs on the device."""
    return has_cuda_runtime(device)


def has_triton_kernels(device: torch.device) -> bool:
    """Whether our Triton kernels run on the device."""
    return has_cuda_runtime(device) and has_triton()


@cache
def has_triton() -> bool:
    """Whether triton is installed."""
    return find_spec("triton") is not None


def integers_on(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Returns integers of the host as an int64 tensor on a device; nested lists give more dimensions.

    Does not wait for a GPU: the copy is made from pinned memory.
    """
    return _on(torch.from_numpy(np.array(values, dtype=np.int64)), device)  # takes half the time of `torch.tensor`


def floats_on(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Returns numbers of the host as a float32 tensor on a device, like `integers_on`."""
    return _on(torch.from_numpy(np.array(values, dtype=np.float32)), device)


def _on(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    if reads_are_free(device):
        return host
    return host.pin_memory().to(device, non_blocking=True) if has_cuda_runtime(device) else host.to(device)
