"""The number of KV rows that fit into memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from foretoken.core.backend import has_cuda_runtime, runs_cpu_kernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.decoder.slot_cache import LayerShape

_SHARE = 0.5  # of the free memory after the weights are loaded


def affordable_rows(
    shapes: Sequence[LayerShape], *, dtype: torch.dtype, device: torch.device, memory_bytes: int | None = None
) -> int:
    """Returns the number of cache rows of all slots that fit into `memory_bytes`; None for half of the free memory."""
    row_bytes = sum(s.num_heads * (s.key_width + s.value_width) for s in shapes) * dtype.itemsize
    return (share_of_free(device) if memory_bytes is None else memory_bytes) // row_bytes


def share_of_free(device: torch.device, most: float = 1.0) -> int:
    """Returns the default bound on the bytes of KV rows; most: the largest share of the free memory."""
    return int(_free_bytes(device) * min(_SHARE, most))


def _free_bytes(device: torch.device) -> int:
    if has_cuda_runtime(device):
        return torch.cuda.mem_get_info(device)[0]
    if runs_cpu_kernels(device) and hasattr(os, "sysconf"):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 1 << 62  # unknown: the allocator fails if there is less
