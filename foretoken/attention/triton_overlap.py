"""Overlap of consecutive Triton kernels by programmatic dependent launch, on GPUs of compute capability 9 and newer.

A kernel that is launched with `launch_options` starts while the kernel before it still runs. Each of its programs calls
`start_next`, so that the next kernel may start too, and then `wait_for_previous`. Before the wait a program reads only
weights, and what was written before the first overlapped kernel of the pass: tables, and keys and values of earlier
passes. It writes nothing. As every kernel waits, the end of one implies the end of all kernels before it.
"""
# The kernels are in Triton's language: its values have no Python types.

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from foretoken.core.backend import has_cuda_runtime


@lru_cache
def overlaps(device: torch.device) -> bool:
    """Decides whether kernels overlap on a device."""
    return has_cuda_runtime(device) and torch.cuda.get_device_capability(device)[0] >= 9


def launch_options(device: torch.device) -> dict[str, Any]:
    """Returns the options for the launch of a kernel with the constant `OVERLAPS`."""
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps(device) else {"OVERLAPS": False}


@triton.jit
def start_next():
    """Lets the next kernel start once all programs of this kernel have called `start_next`, or have ended."""
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous():
    """Waits until the kernel before has ended and its results are visible."""
    tl.extra.cuda.gdc_wait()


@triton.jit
def fetch_lines(places):
    """Fetches the 128 bytes around each place into L2, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [places.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
