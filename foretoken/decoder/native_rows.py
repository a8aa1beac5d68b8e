"""Copies of listed KV rows, by native kernels on CPUs that have a compiler."""

from __future__ import annotations

from ctypes import c_int64
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from foretoken.core.backend import runs_cpu_kernels
from foretoken.core.checks import require
from foretoken.decoder.library import kernel_threads, library_or_none

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def gather_rows(sources: Sequence[Tensor], lists: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Copies listed rows, in order, to the first rows of each output, in place.

    Raises `ValueError` or `IndexError` for rows past the end, and for outputs with fewer rows than listed.

    Args:
        sources: P tensors (Hk, capacity, D) with rows side by side; each has its own D.
        lists: P tensors (Hk, n) int64, the rows of each head, below the capacity.
        outs: P tensors (Hk, n or more, D), with rows side by side.
    """
    count, room = lists[0].shape[1], min(out.shape[1] for out in outs)
    require(count <= room, f"{count} rows are listed, and an output has {room}")
    library = library_or_none() if runs_cpu_kernels(sources[0].device) else None
    if library is None:
        for source, rows, out in zip(sources, lists, outs, strict=True):
            for head, each in enumerate(rows):
                torch.index_select(source[head], 0, each, out=out[head, :count])
        return
    lists = [rows if rows.stride(1) == 1 else rows.contiguous() for rows in lists]
    from_, to, listed = (np.concatenate([_addresses(part) for part in parts]) for parts in (sources, outs, lists))
    row_bytes = np.concatenate([np.full(len(part), part.shape[2] * part.itemsize) for part in sources])
    addresses = [part.ctypes.data for part in (from_, to, listed, row_bytes)]
    sizes = (len(from_), count, min(part.shape[1] for part in sources))
    status = library.foretoken_gather(*map(c_int64, (*addresses, *sizes, kernel_threads())))
    require(status == 0, f"listed rows are refused: status {status}. Expected rows of 0..{sizes[2] - 1}")


def _addresses(part: Tensor) -> Any:
    """Returns the address of each head, (Hk,) int64."""
    return part.data_ptr() + np.arange(len(part)) * (part.stride(0) * part.itemsize)
