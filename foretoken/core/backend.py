"""What a device offers: free reads by the host, CPU kernels, the CUDA runtime, CUDA graphs, Triton kernels.

The one place that knows torch's names of device types, so that a new accelerator is answered here.
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
    """Whether the host can look into a tensor without waiting for the device: no synchronisation, no copy."""
    return device.type == "cpu"


def runs_cpu_kernels(device: torch.device) -> bool:
    """Whether numpy, oneDNN and our compiled CPU kernels can work on its tensors in place."""
    return device.type == "cpu"


def has_cuda_runtime(device: torch.device) -> bool:
    """Whether `torch.cuda` serves it, on NVIDIA GPUs and under ROCm: streams, events, memory counters."""
    return device.type == "cuda"


def has_cuda_graphs(device: torch.device) -> bool:
    """Whether passes can be captured as CUDA graphs on it."""
    return has_cuda_runtime(device)


def has_triton_kernels(device: torch.device) -> bool:
    """Whether our Triton kernels run on it."""
    return has_cuda_runtime(device) and has_triton()


@cache
def has_triton() -> bool:
    """Whether triton is installed."""
    return find_spec("triton") is not None


def integers_on(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Integers of the host as an int64 tensor, of as many dimensions as the lists are nested.

    Nothing waits for a GPU: a copy from ordinary memory would, until all that was asked of it before is done.
    """
    return _on(torch.from_numpy(np.array(values, dtype=np.int64)), device)  # in half the time of `torch.tensor`


def floats_on(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Numbers of the host as a float32 tensor, as `integers_on`."""
    return _on(torch.from_numpy(np.array(values, dtype=np.float32)), device)


def _on(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host's, on a device."""
    if reads_are_free(device):
        return host
    return host.pin_memory().to(device, non_blocking=True) if has_cuda_runtime(device) else host.to(device)
