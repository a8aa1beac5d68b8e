"""Compiling the native kernels with the machine's own compiler, once per machine and version of the source."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from foretoken.core.user_cache import cache_directory
from foretoken.target.decoder import UnsuitableError

_SOURCE = Path(__file__).with_name("decoder.cpp")
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp")
_WIDE = "-mprefer-vector-width=512"  # x86: compilers hesitate to use the widest registers
_TIMEOUT_S = 300


@cache
def native_library() -> ctypes.CDLL:
    """The compiled kernels; the first call on a machine compiles for a few seconds.

    Raises:
        UnsuitableError: When there is no compiler, or it fails.
    """
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise UnsuitableError("there is no C++ compiler for its kernels. Install one, such as g++.")
    library = cache_directory() / f"decoder-{_fingerprint(compiler)}.so"
    if not library.is_file():
        _compile(compiler, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as err:
        raise UnsuitableError(f"its kernels cannot be loaded: {err}.") from err


def kernels_version() -> str:
    """Changes with the kernels' source."""
    return hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]


def _fingerprint(compiler: str) -> str:
    """Changes with whatever may change the binary: source, flags, compiler and the processor's instructions."""
    capabilities = sorted(name for name, has in torch.cpu.get_capabilities().items() if has is True)
    parts = [kernels_version(), *_flags(), compiler, platform.machine(), *capabilities]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _flags() -> tuple[str, ...]:
    """The compiler's flags on this machine."""
    return (*_FLAGS, _WIDE) if platform.machine() in ("x86_64", "AMD64") else _FLAGS


def _compile(compiler: str, library: Path) -> None:
    """Writes the library in one move, so that processes may compile at the same time.

    Raises:
        UnsuitableError: When the compiler fails or the directory cannot be written.
    """
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as directory:
            made = Path(directory) / library.name
            command = [compiler, *_flags(), str(_SOURCE), "-o", str(made)]
            result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
            if result.returncode:
                lines = [*result.stderr.splitlines(), "no message"]
                raise UnsuitableError(f"'{compiler}' cannot compile its kernels: {lines[0]}.")
            made.replace(library)
    except (OSError, subprocess.TimeoutExpired) as err:
        raise UnsuitableError(f"its kernels cannot be compiled: {err}.") from err
