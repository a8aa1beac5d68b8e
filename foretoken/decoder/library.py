"""The native kernels and their threads. A wheel has them compiled; elsewhere they are compiled once for each machine.

FORETOKEN_SANITIZE=1 compiles them with GCC's address and undefined behaviour sanitizers; see `make sanitize`.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from foretoken.core.backend import limit_kernel_threads
from foretoken.core.errors import ConfigError, undone_on_error
from foretoken.decoder.base import UnsuitableError
from foretoken.files.user_cache import open_cache, read_kept, say_nothing_is_kept, write_kept

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_KERNELS = Path(__file__).with_name("kernels")
_DRAFTS = Path(__file__).parents[1] / "drafters" / "native" / "kernels"  # `drafts.cpp` includes all sources
_COMPILERS = ("c++", "g++", "clang++")
# -O3 takes three times as long and its passes are no faster (benchmarks/RESULTS.md, "Compiling the kernels").
_FLAGS = (*(_KERNELS / "flags.txt").read_text().split(), "-shared")
_WIDE = "-mprefer-vector-width=512"  # x86: compilers avoid the widest registers otherwise
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # Linux on x86-64: the call, the request, the registers
_SANITIZE = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
_SYMBOLS = (
    "foretoken_decode", "foretoken_linear", "foretoken_workspace_bytes",
    "foretoken_draft", "foretoken_draft_bytes", "foretoken_head_draft",
    "foretoken_head_draft_bytes", "foretoken_autoregressive_draft", "foretoken_autoregressive_draft_bytes",
    "foretoken_gather", "foretoken_store_blocks", "foretoken_dequantize",
)  # fmt: skip
_TIMEOUT_S = 300  # a choice: a compiler that hangs must not stop the load; another decoder serves then
_SAYS_SO_S = 10  # interval of the messages that the compiler is still running; a choice
_MOST_BYTES = 1 << 26  # largest library that is kept; a choice, far above the size of the kernels
_log = logging.getLogger(__name__)


class _Processor(NamedTuple):
    """A line of `processors.txt`; "native" where none fits."""

    name: str
    flags: tuple[str, ...]


@cache
def native_library() -> ctypes.CDLL:
    """Returns the compiled kernels: those of the wheel; without them the first call on a machine compiles.

    Compiling takes up to half a minute. Without a writable cache the library is compiled into a private temporary
    directory, which is deleted after loading. Raises `UnsuitableError` if there is no compiler, or it fails.
    """
    processors = _fitting_processors()
    installed = None if _sanitizers() else _installed_library(processors)
    if installed is not None:
        return installed
    compiler = _compiler()
    for processor in processors[:-1]:
        try:
            return _compiled_library(compiler, processor)
        except UnknownProcessorError as err:
            _log.info("%s Compiling for an older processor.", err)
    return _compiled_library(compiler, processors[-1])


def _installed_library(processors: Sequence[_Processor]) -> ctypes.CDLL | None:
    for processor in processors:
        path = _KERNELS / f"decoder-{processor.name}.so"
        if path.exists():
            try:
                return _load_library(path)
            except UnsuitableError as err:
                _log.warning("the installed kernels '%s' are compiled anew: %s", path.name, err)
    return None


class UnknownProcessorError(UnsuitableError):
    """The compiler is older than the processor that it shall compile for."""


def _compiled_library(compiler: tuple[str, ...], processor: _Processor) -> ctypes.CDLL:
    directory, name = open_cache(), f"decoder-{_fingerprint(compiler, processor)}.so"
    kept = None if directory is None else _kept_library(directory / name)
    if kept is not None:
        return kept
    try:
        _log.info("compiling the CPU kernels, once on this machine: takes up to half a minute of a processor")
        with _workplace(directory) as work:
            made = Path(work) / name
            _compile(compiler, processor, made)
            library = _load_library(made)
            if directory is not None and made.parent.parent == directory:
                _keep_library(made, directory / name)
            return library
    except (OSError, subprocess.TimeoutExpired) as err:
        raise UnsuitableError(f"its kernels cannot be compiled: {err}.") from err


@cache
def library_or_none() -> ctypes.CDLL | None:
    """Returns `native_library`, or None if there is none: torch then does the work."""
    try:
        return native_library()
    except UnsuitableError:
        return None


def kernels_version() -> str:
    """Returns a digest of the kernels' source."""
    files = sorted(file for folder in (_KERNELS, _DRAFTS) for file in (*folder.glob("*.cpp"), *folder.glob("*.h")))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _compiler() -> tuple[str, ...]:
    named = os.environ.get("CXX", "").strip()
    try:
        words = [named] if shutil.which(named) else shlex.split(named)
    except ValueError as err:
        raise UnsuitableError(f"CXX is '{named}': {err}. Set it to a C++ compiler.") from err
    if not words:
        words = list(filter(None, map(shutil.which, _COMPILERS)))[:1]
    if not words:
        raise UnsuitableError("there is no C++ compiler for its kernels. Install one, such as g++.")
    return tuple(words)


def _fingerprint(compiler: Sequence[str], processor: _Processor) -> str:
    """Returns a digest of all that may change the binary: source, flags, compiler and the processor's instructions."""
    parts = [kernels_version(), *_flags(processor), *compiler, platform.machine(), *sorted(_instructions())]
    return hashlib.sha256("\n".join(parts).encode(errors="surrogateescape")).hexdigest()[:16]


def _flags(processor: _Processor) -> tuple[str, ...]:
    wide = (_WIDE,) if _is_x86() else ()
    return (*_FLAGS, *wide, *processor.flags, *_sanitizers())


def _sanitizers() -> tuple[str, ...]:
    sanitize = os.environ.get("FORETOKEN_SANITIZE", "0")
    if sanitize not in ("0", "1"):
        raise ConfigError(f"FORETOKEN_SANITIZE is '{sanitize}'. Expected 0 or 1.")
    return _SANITIZE if sanitize == "1" else ()


def _is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def _instructions() -> set[str]:
    """Returns the instruction sets that this process may use; matrix units need the system's permission."""
    names = {name for name, has in torch.cpu.get_capabilities().items() if has is True}
    return names if _may_use_tiles() else {name for name in names if not name.startswith("amx")}


def _fitting_processors() -> list[_Processor]:
    """Returns what kernels may be compiled for, the best first; "native" alone where no line fits."""
    lines = (_KERNELS / "processors.txt").read_text().splitlines() if _is_x86() else []
    known = [[part.strip() for part in line.split("|")] for line in lines if not line.startswith("#")]
    has = _instructions()
    found = [_Processor(name, tuple(flags.split())) for name, needs, flags in known if has.issuperset(needs.split())]
    return found or [_Processor("native", ("-march=native",))]


@cache
def _may_use_tiles() -> bool:
    """Asks Linux on x86-64 for this process' use of AMX tile registers; forks inherit the permission."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":  # 158 is arch_prctl on x86-64 only
        return False
    system: Any = ctypes.CDLL(None, use_errno=True)
    is_granted: bool = system.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0
    if not is_granted and torch.cpu.get_capabilities().get("amx_tile"):
        reason = os.strerror(ctypes.get_errno())
        _log.info("the system does not let this process use matrix units (%s): vector registers are used", reason)
    return is_granted


def _kept_library(path: Path) -> ctypes.CDLL | None:
    if not os.path.lexists(path):
        return None
    data, digest = read_kept(path, limit=_MOST_BYTES), read_kept(_digest_path(path), limit=64)
    reason = "it is not what was compiled, or others can write to it"
    if data is not None and digest == _digest(data):
        try:
            return _load_library(path)
        except UnsuitableError as err:
            reason = str(err)
    _log.warning("the compiled kernels '%s' are compiled anew: %s", path, reason)
    return None


def _workplace(directory: Path | None) -> tempfile.TemporaryDirectory[str]:
    """Creates a directory that only this user can enter, inside the cache because /tmp may be mounted noexec."""
    if directory is not None:
        try:
            return tempfile.TemporaryDirectory(dir=directory)
        except OSError as err:
            say_nothing_is_kept(str(err))
    return tempfile.TemporaryDirectory(prefix="foretoken-")


def _compile(compiler: Sequence[str], processor: _Processor, library: Path) -> None:
    source = _DRAFTS / "drafts.cpp"
    command = [*compiler, *_flags(processor), f"-I{_KERNELS}", str(source), "-o", str(library)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    with process, undone_on_error(process.kill):
        printed = _printed(process)
    if process.returncode:
        lines = printed.decode(errors="replace").splitlines()
        errors = [line for line in lines if "error:" in line]  # come after lines about included files
        reason = [*errors, *lines, "no message"][0]
        kind = UnknownProcessorError if any(flag in reason for flag in processor.flags) else UnsuitableError
        raise kind(f"'{shlex.join(compiler)}' cannot compile its kernels: {reason}.")
    library.chmod(0o700)


def _printed(process: subprocess.Popen[bytes]) -> bytes:
    for seconds in range(_SAYS_SO_S, _TIMEOUT_S + 1, _SAYS_SO_S):
        try:
            return process.communicate(timeout=_SAYS_SO_S)[1]
        except subprocess.TimeoutExpired:
            _log.info("still compiling the CPU kernels: %d s so far", seconds)
    raise subprocess.TimeoutExpired(process.args, _TIMEOUT_S)


def _load_library(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as err:
        raise UnsuitableError(f"its kernels cannot be loaded: {err}.") from err
    missing = [name for name in _SYMBOLS if not hasattr(library, name)]
    if missing:
        raise UnsuitableError(f"its kernels cannot be loaded: they lack {', '.join(missing)}.")
    for name in _SYMBOLS:
        getattr(library, name).restype = ctypes.c_int64
    return library


def _keep_library(made: Path, path: Path) -> None:
    """Moves a library and its digest into the cache; if processes mix up a pair, the next one compiles again."""
    try:
        digest = _digest(made.read_bytes())
        made.replace(path)
        write_kept(_digest_path(path), digest)
    except OSError as err:
        say_nothing_is_kept(str(err))


def _digest_path(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


_PAUSE_HARD = 2  # omp_pause_hard: ends the threads
_has_ended = {"threads": True}  # whether OpenMP's threads were ended before the last fork


def _pauses() -> Iterator[ctypes._NamedFuncPointer | None]:
    """Returns `omp_pause_resource_all` of torch's OpenMP and of the kernels', usually the same one; None without it."""
    libraries = [ctypes.CDLL(torch._C.__file__)]
    if native_library.cache_info().currsize:
        libraries.append(native_library())
    for library in libraries:
        yield getattr(library, "omp_pause_resource_all", None)


def _before_fork() -> None:
    """Ends the OpenMP threads of the forking thread, which alone lives on in the child."""
    _has_ended["threads"] = all(pause is not None and pause(_PAUSE_HARD) == 0 for pause in _pauses())


def _after_fork_in_child() -> None:
    count = torch.get_num_threads()
    if not _has_ended["threads"] and count > 1:
        count = 1
        limit_kernel_threads(count)
        _log.warning("the OpenMP threads could not be ended before a fork; the child process runs on one thread.")
    # Torch replaces a thread pool that the fork broke at the first call, which must not come from two threads.
    torch.set_num_threads(count)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
