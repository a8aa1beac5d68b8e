"""Tree attention by a plain CUDA C++ kernel (tree_attention.cu), which checks the Triton kernels.

One block per node, head and sequence re-reads the keys. This is slow by design; no runner calls it.

Letters: B sequences, T nodes, H query heads, Hk KV heads, Dk and Dv widths of keys and values.
"""

from __future__ import annotations

import ctypes
import re
import sys
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_void_p
from ctypes.util import find_library
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from foretoken.core.backend import has_cuda_runtime
from foretoken.core.checks import require
from foretoken.core.errors import ConfigError

_SHARED_MEMORY_OPT_IN = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_ORDINARY_SHARED_BYTES = 48 * 1024  # a kernel gets these without asking


def compile_source(source: str, *, arch: str = "sm_90") -> bytes:
    """Compiles CUDA C++ that includes no header.

    Returns:
        A cubin, for `KernelModule`.

    Raises:
        ConfigError: When NVRTC is not installed, or rejects the source or the architecture; with the compiler's log.
    """
    nvrtc = _nvrtc()
    program = c_void_p()
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"foretoken.cu", 0, None, None)
    _check(nvrtc, status)
    try:
        options = (c_char_p * 2)(f"--gpu-architecture={arch}".encode(), b"--std=c++17")
        status = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status:
            log = _program_bytes(nvrtc, program, "ProgramLog").rstrip(b"\0\n").decode(errors="replace")
            reason = nvrtc.nvrtcGetErrorString(status).decode()
            raise ConfigError(
                f"a CUDA kernel does not compile for '{arch}': {reason}. Expected an architecture that this NVRTC "
                f"{'.'.join(map(str, _nvrtc_version(nvrtc)))} knows; a newer GPU needs a newer one. Its log:\n{log}"
            )
        return _program_bytes(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def find_nvrtc() -> Path | None:
    """Returns the path of NVRTC among the installed Python packages, or None.

    Prefers the CUDA release that torch was built for, then the newest. Does not search the system's libraries.
    """
    found = {}
    for folder in map(Path, sys.path):
        for pattern in ("nvidia/*/lib/libnvrtc.so.*", "nvidia/*/lib/x86_64/libnvrtc.so.*", "torch/lib/libnvrtc*.so.*"):
            for path in folder.glob(pattern):
                release = re.fullmatch(r"libnvrtc(?:-\w+)?\.so\.([\d.]+)", path.name)
                if release:
                    found[path] = tuple(int(part) for part in release[1].split("."))
    wanted = int((torch.version.cuda or "0").split(".")[0])
    return max(found, key=lambda path: (found[path][0] == wanted, found[path]), default=None)


class KernelModule:
    """Machine code loaded on one device. Neither loading nor launching waits for the device.

    Attributes:
        max_shared_bytes: Shared memory that a block can have.
    """

    def __init__(self, image: bytes, *, device: int, driver: ctypes.CDLL | None = None) -> None:
        """Loads the code into the device's primary context, which torch uses.

        Args:
            image: A cubin, from `compile_source` for this device's architecture.
            device: Index of the device in torch.
            driver: The CUDA driver; None for the system's.

        Raises:
            ConfigError: When there is no driver, or it refuses the code.
        """
        self._driver = _system_driver() if driver is None else driver
        self._functions: dict[str, c_void_p] = {}
        self._call("cuInit", c_uint(0))
        handle, shared_bytes = c_int(), c_int()
        self._context, self._module = c_void_p(), c_void_p()
        self._call("cuDeviceGet", ctypes.byref(handle), c_int(device))
        self._call("cuDeviceGetAttribute", ctypes.byref(shared_bytes), c_int(_SHARED_MEMORY_OPT_IN), handle)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle)
        self.max_shared_bytes: int = shared_bytes.value
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            self._call("cuModuleLoadData", ctypes.byref(self._module), c_char_p(image))
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(c_void_p()))

    def launch(
        self,
        name: str,
        arguments: ctypes.Structure,
        *,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        stream: int,
    ) -> None:
        """Queues a kernel that takes one struct by value.

        Args:
            name: Of an `extern "C"` kernel.
            arguments: The struct; copied before this returns. Memory that it points to must live until the kernel has
                run. Torch's allocator ensures this for tensors used on one stream.
            grid: Blocks along x, y and z.
            threads: Threads of a block, along x.
            shared_bytes: Dynamic shared memory of a block, at most `max_shared_bytes`.
            stream: The stream's handle, `torch.cuda.current_stream().cuda_stream`.

        Raises:
            ConfigError: When the driver refuses.
        """
        # Torch makes the primary context current only on threads that have worked with the GPU.
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            function = self._function(name)
            if shared_bytes > _ORDINARY_SHARED_BYTES:
                self._call("cuFuncSetAttribute", function, c_int(_DYNAMIC_SHARED_SIZE), c_int(shared_bytes))
            parameters = (c_void_p * 1)(ctypes.addressof(arguments))
            dimensions = [c_uint(size) for size in (*grid, threads, 1, 1, shared_bytes)]
            self._call("cuLaunchKernel", function, *dimensions, c_void_p(stream), parameters, c_void_p())
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(c_void_p()))

    def _function(self, name: str) -> c_void_p:
        if name not in self._functions:
            function = c_void_p()
            self._call("cuModuleGetFunction", ctypes.byref(function), self._module, c_char_p(name.encode()))
            self._functions[name] = function
        return self._functions[name]

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status:
            text = c_char_p()
            self._driver.cuGetErrorString(c_int(status), ctypes.byref(text))
            reason = (text.value or b"unknown error").decode()
            raise ConfigError(
                f"the CUDA driver refused {name}: {reason} ({status}). Expected it to run code compiled for this GPU. "
                "Update the driver, or install the NVRTC of the CUDA release that torch was built for."
            )


@cache
def _nvrtc() -> ctypes.CDLL:
    """Loads NVRTC from the installed packages or the system; raises `ConfigError` if there is none."""
    path = find_nvrtc() or find_library("nvrtc")
    if path is None:
        raise ConfigError(
            "NVRTC, which compiles CUDA kernels, was not found. Expected libnvrtc.so among the installed packages, "
            "where torch with CUDA puts it, or in the system. Run: pip install nvidia-cuda-nvrtc-cu12"
        )
    nvrtc = ctypes.CDLL(str(path))
    nvrtc.nvrtcGetErrorString.restype = c_char_p
    nvrtc.nvrtcCreateProgram.argtypes = [c_void_p, c_char_p, c_char_p, c_int, c_void_p, c_void_p]
    nvrtc.nvrtcCompileProgram.argtypes = [c_void_p, c_int, c_void_p]
    return nvrtc


def _nvrtc_version(nvrtc: ctypes.CDLL) -> tuple[int, int]:
    major, minor = c_int(), c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _program_bytes(nvrtc: ctypes.CDLL, program: c_void_p, what: str) -> bytes:
    """Returns the result of a pair of functions nvrtcGet<what>Size and nvrtcGet<what>."""
    size = c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    status = getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    _check(nvrtc, status)
    return buffer.raw


def _check(nvrtc: ctypes.CDLL, status: int) -> None:
    """Raises `ConfigError` when NVRTC reports an error that the source did not cause."""
    if status:
        reason = nvrtc.nvrtcGetErrorString(status).decode()
        raise ConfigError(f"NVRTC failed: {reason} ({status}). Expected it to compile CUDA kernels. Reinstall it.")


@cache
def _system_driver() -> ctypes.CDLL:
    """Loads the CUDA driver of this machine; raises `ConfigError` if there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as err:
        raise ConfigError(
            f"the CUDA driver cannot be loaded: {err}. Expected libcuda.so.1, which NVIDIA's driver installs. Run on a "
            "machine with an NVIDIA GPU, or leave attention to the stock kernels."
        ) from err


_ENTRIES = {
    torch.float32: "tree_attention_float32",
    torch.float16: "tree_attention_float16",
    torch.bfloat16: "tree_attention_bfloat16",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """The work of one block; shapes differ in results only by rounding.

    Attributes:
        threads: Threads, a power of two.
        chunk: Keys with scores in shared memory at once, at least 1.
    """

    threads: int = 128
    chunk: int = 4096

    def __post_init__(self) -> None:
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


def tree_attention_cuda(
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
    """Computes attention of every node to its sequence's prefix, its ancestors and itself.

    Row r of a slot holds position r for r < prefix; node j's own key is in row prefix + j. The first call on a device
    compiles. Nothing synchronises. Rows that no node sees are not read.

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
        shape: Work of a block; None for the default.
        kernels: The loaded kernels; None to compile them for the query's device.

    Returns:
        (B, T, H, Dv) in the query's dtype; sums are float32.

    Raises:
        ConfigError: When the dtype is not supported, tensors are not on a CUDA device, T exceeds shared memory, or the
            kernel cannot be compiled or loaded.
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
    """Asserts the shapes that keep the kernel inside its tensors, without waiting for the device."""
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
    """Returns the text of the kernel."""
    return Path(__file__).with_name("tree_attention.cu").read_text(encoding="utf-8")


@cache
def _kernels(device: int) -> KernelModule:
    """Compiled once per architecture."""
    major, minor = torch.cuda.get_device_capability(device)
    return KernelModule(_cubin(f"sm_{major}{minor}"), device=device)


@cache
def _cubin(arch: str) -> bytes:
    return compile_source(kernel_source(), arch=arch)
