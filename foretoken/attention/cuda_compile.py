"""Compiles CUDA C++ at run time with NVRTC, and loads and launches it; needs no toolkit and no build step.

NVRTC, a library that comes with torch's CUDA packages, makes the machine code; the driver runs it on torch's stream.
What the kernels compute is not known here.
"""

from __future__ import annotations

import ctypes
import re
import sys
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_void_p
from ctypes.util import find_library
from functools import cache
from pathlib import Path

import torch

from foretoken.core.errors import ConfigError

_SHARED_MEMORY_OPT_IN = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_ORDINARY_SHARED_BYTES = 48 * 1024  # what a kernel gets without asking


def compile_source(source: str, *, arch: str = "sm_90") -> bytes:
    """Compiles CUDA C++ that includes no header.

    Args:
        source: The text of one translation unit.
        arch: The architecture to make machine code for.

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
    """The NVRTC among the installed Python packages: of the CUDA release that torch was built for, else the newest.

    Returns:
        The path of the library, or None; one of the system is not looked for here.
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
    """Machine code loaded on one device.

    Loading and launching wait for nothing; launches go to the stream that they name.

    Attributes:
        max_shared_bytes: Shared memory that a block can have.
    """

    def __init__(self, image: bytes, *, device: int, driver: ctypes.CDLL | None = None) -> None:
        """Loads the code into the device's primary context, the one torch works in.

        Args:
            image: A cubin, from `compile_source` for this device's architecture.
            device: Index of the device, as torch counts.
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
            arguments: The struct; copied before this returns. Memory that it points to must live until the stream
                gets there, which torch's allocator grants to tensors used on one stream.
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
        """A kernel by its name; looked up once."""
        if name not in self._functions:
            function = c_void_p()
            self._call("cuModuleGetFunction", ctypes.byref(function), self._module, c_char_p(name.encode()))
            self._functions[name] = function
        return self._functions[name]

    def _call(self, name: str, *arguments: object) -> None:
        """Calls the driver, and raises when it reports an error."""
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
    """NVRTC, from the installed packages or the system.

    Raises:
        ConfigError: When there is none.
    """
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
    """Major and minor release."""
    major, minor = c_int(), c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _program_bytes(nvrtc: ctypes.CDLL, program: c_void_p, what: str) -> bytes:
    """What a program holds by a pair of functions nvrtcGet<what>Size and nvrtcGet<what>."""
    size = c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    status = getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    _check(nvrtc, status)
    return buffer.raw


def _check(nvrtc: ctypes.CDLL, status: int) -> None:
    """Raises `ConfigError` when NVRTC reports an error that is not of the source."""
    if status:
        reason = nvrtc.nvrtcGetErrorString(status).decode()
        raise ConfigError(f"NVRTC failed: {reason} ({status}). Expected it to compile CUDA kernels. Reinstall it.")


@cache
def _system_driver() -> ctypes.CDLL:
    """The CUDA driver of this machine.

    Raises:
        ConfigError: When there is none.
    """
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as err:
        raise ConfigError(
            f"the CUDA driver cannot be loaded: {err}. Expected libcuda.so.1, which NVIDIA's driver installs. Run on a "
            "machine with an NVIDIA GPU, or leave attention to the stock kernels."
        ) from err
