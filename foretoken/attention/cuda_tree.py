"""Tree attention by a plain CUDA C++ kernel (tree_attention.cu), against which the Triton kernels are checked.

One block per node, head and sequence re-reads the keys, so this is slow by design and no runner calls it.

Letters: B sequences, T nodes, H query heads, Hk KV heads, Dk and Dv widths of keys and values.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from foretoken.attention.cuda_compile import KernelModule, compile_source
from foretoken.core.backend import has_cuda_runtime
from foretoken.core.checks import require
from foretoken.core.errors import ConfigError

_ENTRIES = {
    torch.float32: "tree_attention_float32",
    torch.float16: "tree_attention_float16",
    torch.bfloat16: "tree_attention_bfloat16",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """How the work of a block is laid out; results differ only by rounding.

    Attributes:
        threads: Threads, a power of two.
        chunk: Keys whose scores lie in shared memory at once, at least 1.
    """

    threads: int = 128
    chunk: int = 4096

    def __post_init__(self) -> None:
        """Checks what the kernel relies on."""
        require(self.threads.bit_count() == 1, "sums over a block halve it")
        require(self.chunk >= 1, "no progress without a key")


class TreeAttentionArguments(ctypes.Structure):
    """`struct TreeAttention` of the kernel, field by field."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "output")),
        *((name, ctypes.c_void_p) for name in ("slots", "prefix", "positions", "parents", "sinks")),
        *((name, ctypes.c_longlong * 3) for name in ("query_strides", "key_strides", "value_strides")),
        *((name, ctypes.c_int) for name in ("kv_heads", "key_width", "value_width", "window", "chunk")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


def tree_attention_cuda(  # noqa: PLR0913 - the tables by name, as the kernel reads them
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    prefix: Tensor,
    positions: Tensor,
    parents: Tensor | None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    shape: BlockShape | None = None,
    kernels: KernelModule | None = None,
) -> Tensor:
    """Attention of every node to its sequence's prefix, its ancestors and itself.

    Row r of a slot holds position r for r < prefix; node j's own key lies in row prefix + j. The first call on a device
    compiles. Nothing synchronises, and rows that no node sees are not read.

    Args:
        query: (B, H, T, Dk) float32, float16 or bfloat16.
        keys: (slots, Hk, capacity, Dk) in the query's dtype, rows of this pass already written; H a multiple of Hk.
        values: (slots, Hk, capacity, Dv) in the query's dtype.
        slots: (B,) int32, cache slots.
        prefix: (B,) int32, prefix lengths.
        positions: (B, T) int32, of the nodes.
        parents: (B, T) int32, less than the node's own index, -1 at the root and at padding nodes, which see the prefix
            and themselves; None for causal tokens: t sees scratch rows 0 … t.
        scale: Factor of the dot products.
        window: Only keys less than this many positions back, or None.
        softcap: c in c tanh(score / c), or None.
        sinks: (H,) logits that take part in the softmax and have no value, or None.
        shape: How a block works; None for the usual way.
        kernels: The loaded kernels; None to compile them for the query's device.

    Returns:
        (B, T, H, Dv) in the query's dtype; everything is summed in float32.

    Raises:
        ConfigError: When the dtype is not among the kernels', tensors are not on a CUDA device, T is beyond what shared
            memory holds, or the kernel cannot be compiled or loaded.
    """
    shape = shape or BlockShape()
    tables = {"slots": slots, "prefix": prefix, "positions": positions, "parents": parents}
    if query.dtype not in _ENTRIES:
        known = ", ".join(map(str, _ENTRIES))
        raise ConfigError(f"the CUDA attention kernel was given {query.dtype}. Expected one of {known}.")
    if kernels is None and not has_cuda_runtime(query.device):
        raise ConfigError(f"the CUDA attention kernel was given tensors on '{query.device}'. Expected a CUDA device.")
    _check_shapes(query, keys, values, tables, sinks)
    require(window is None or window >= 1, "a node sees itself")

    # Bound to names, so that copies live until the launch.
    query, keys, values = (
        tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, keys, values)
    )
    tables = {name: None if table is None else table.contiguous() for name, table in tables.items()}
    sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
    batch, heads, nodes, key_width = query.shape
    _, kv_heads, capacity, value_width = values.shape
    output = query.new_empty(batch, nodes, heads, value_width)
    if output.numel() == 0:
        return output
    kernels = _kernels(query.device.index) if kernels is None else kernels
    chunk = min(shape.chunk, capacity)
    # Floats and ints of a block: query, mixture, partial sums, weights; length of the path, path.
    shared_bytes = 4 * (key_width + value_width + shape.threads + chunk + 1 + nodes)
    if shared_bytes > kernels.max_shared_bytes:
        raise ConfigError(
            f"the CUDA attention kernel needs {shared_bytes} bytes of shared memory for {nodes} nodes. Expected at "
            f"most {kernels.max_shared_bytes}, what a block has. Pass fewer nodes, or a smaller chunk than {chunk}."
        )
    arguments = TreeAttentionArguments(
        query=query.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        output=output.data_ptr(),
        **{name: None if table is None else table.data_ptr() for name, table in tables.items()},
        sinks=None if sinks is None else sinks.data_ptr(),
        query_strides=query.stride()[:3],
        key_strides=keys.stride()[:3],
        value_strides=values.stride()[:3],
        kv_heads=kv_heads,
        key_width=key_width,
        value_width=value_width,
        window=window or 0,
        chunk=chunk,
        scale=scale,
        softcap=softcap or 0.0,
    )
    kernels.launch(
        _ENTRIES[query.dtype],
        arguments,
        grid=(nodes, heads, batch),
        threads=shape.threads,
        shared_bytes=shared_bytes,
        stream=torch.cuda.current_stream(query.device).cuda_stream if has_cuda_runtime(query.device) else 0,
    )
    return output


def _check_shapes(
    query: Tensor, keys: Tensor, values: Tensor, tables: dict[str, Tensor | None], sinks: Tensor | None
) -> None:
    """Asserts what keeps the kernel inside its tensors, as far as the host can tell without waiting for the device."""
    batch, heads, nodes, key_width = query.shape
    slots, kv_heads, capacity, _ = values.shape
    table_shapes = {"slots": (batch,), "prefix": (batch,), "positions": (batch, nodes), "parents": (batch, nodes)}
    require(keys.dtype == values.dtype == query.dtype, "query, keys and values share a dtype")
    require(keys.shape == (slots, kv_heads, capacity, key_width), "keys fit neither query nor values")
    require(heads % kv_heads == 0, "query heads are a multiple of KV heads")
    for name, table in tables.items():
        if table is not None:
            require(table.dtype == torch.int32, f"{name} is {table.dtype}, not int32")
            require(table.shape == table_shapes[name], f"{name} is {tuple(table.shape)}, not {table_shapes[name]}")
    require(sinks is None or sinks.shape == (heads,), "one sink per query head")
    used = [query, keys, values, *tables.values(), sinks]
    require(
        {tensor.device for tensor in used if tensor is not None} == {query.device}, "tensors are on several devices"
    )


def kernel_source() -> str:
    """The text of the kernel."""
    return Path(__file__).with_name("tree_attention.cu").read_text(encoding="utf-8")


@cache
def _kernels(device: int) -> KernelModule:
    """The kernels on a device; compiled once per architecture."""
    major, minor = torch.cuda.get_device_capability(device)
    return KernelModule(_cubin(f"sm_{major}{minor}"), device=device)


@cache
def _cubin(arch: str) -> bytes:
    """Machine code for an architecture."""
    return compile_source(kernel_source(), arch=arch)
