"""What a device offers, a clock for its work, and torch's global state, kept apart from the caller's."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import overrides

from foretoken.core.errors import ConfigError
from foretoken.core.records import StageSeconds


def reads_are_free(device: torch.device) -> bool:
    """Whether the host reads tensors of the device without synchronisation or copy."""
    return device.type == "cpu"


def runs_cpu_kernels(device: torch.device) -> bool:
    """Whether NumPy, oneDNN and our CPU kernels work on tensors of the device in place."""
    return device.type == "cpu"


def has_cuda_runtime(device: torch.device) -> bool:
    """Whether `torch.cuda` serves the device, on NVIDIA GPUs and under ROCm: streams, events, graphs, counters."""
    return device.type == "cuda"


def has_triton_kernels(device: torch.device) -> bool:
    """Whether our Triton kernels run on the device."""
    return has_cuda_runtime(device) and has_triton()


@cache
def has_triton() -> bool:
    """Whether triton is installed."""
    return find_spec("triton") is not None


def integers_on(values: Sequence[Any] | np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """Returns nested lists of integers as an int64 tensor on a device; does not wait for a GPU."""
    host = torch.from_numpy(np.array(values, dtype=np.int64))  # takes half the time of `torch.tensor`
    return host if device.type == "cpu" else _copied(host, device)


def floats_on(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Returns numbers of the host as a float32 tensor on a device, like `integers_on`."""
    host = torch.from_numpy(np.array(values, dtype=np.float32))
    return host if device.type == "cpu" else _copied(host, device)


_LARGEST_STAGED = 1 << 16  # bytes; CUDA's driver copies as many out of pageable memory before the call returns


def _copied(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    if has_cuda_runtime(device) and host.nbytes > _LARGEST_STAGED:
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


_CPU_ALLOCATOR = "DefaultCPUAllocator"  # torch raises a RuntimeError with this name


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error is a failed allocation, on the host or on the device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)


_CPU = torch.device("cpu")
_AUTOCAST_DEVICES = ("cpu", "cuda")


@contextmanager
def own_torch_state() -> Iterator[None]:
    """Switches off the caller's autocast, inference mode and default device.

    An iteration serves the requests of all threads in one thread. The autocast of that thread would change the rounding
    of their logits, its default device would move their tensors, and its inference mode would make tensors that later
    iterations cannot write to.
    """
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(mode=False))
            stack.enter_context(torch.no_grad())
        for kind in _AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if _function_modes() != ([], None) and torch.get_default_device() != _CPU:
            stack.enter_context(_CPU)
        yield


@contextmanager
def restored_torch_state() -> Iterator[None]:
    """Restores torch's state at the end of the block, whatever foreign code switched on inside."""
    before = [read() for read, _ in _SETTINGS]
    modes, default = _function_modes()
    try:
        # This guard restores inference mode and gradients at its end.
        with torch.inference_mode(mode=torch.is_inference_mode_enabled()):
            torch.set_grad_enabled(before[0])
            yield
    finally:
        if _function_modes() != (modes, default):
            _set_function_modes(modes, default)
        for (read, write), value in zip(_SETTINGS, before, strict=True):
            if read() != value:
                write(value)


def _function_modes() -> tuple[list[Any], Any]:
    return overrides._get_current_function_mode_stack(), getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def _set_function_modes(modes: list[Any], default: Any) -> None:
    """Restores modes; `torch.set_default_device` fails inside `with torch.device(...)`, and removes half of them."""
    while overrides._get_current_function_mode_stack():
        overrides._pop_mode()
    for mode in modes:
        overrides._push_mode(mode)
    torch._GLOBAL_DEVICE_CONTEXT.device_context = default


def _autocast() -> tuple[Any, ...]:
    by_device = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST_DEVICES]
    return (*by_device, torch.is_autocast_cache_enabled(), _autocast_nesting())


def _autocast_nesting() -> int:
    """Returns the number of open autocast blocks; autocast drops its cached weights at the end of the last one."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _set_autocast(state: tuple[Any, ...]) -> None:
    *by_device, is_cached, nesting = state
    for kind, (is_enabled, dtype) in zip(_AUTOCAST_DEVICES, by_device, strict=True):
        torch.set_autocast_enabled(kind, is_enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(is_cached)
    while _autocast_nesting() > nesting:
        torch.autocast_decrement_nesting()
    while _autocast_nesting() < nesting:
        torch.autocast_increment_nesting()
    torch.clear_autocast_cache()


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _matmul_precision() -> str | None:
    """Returns the precision of float32 GEMMs; None if single backends have their own."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # raised when backends differ
        return None


def _set_matmul_precision(precision: str | None) -> None:
    if precision is not None:
        torch.set_float32_matmul_precision(precision)


# Each setting with the functions that read and write it.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (_autocast, _set_autocast),
    (torch.get_default_dtype, torch.set_default_dtype),
    (_deterministic, lambda state: torch.use_deterministic_algorithms(state[0], warn_only=state[1])),
    (_matmul_precision, _set_matmul_precision),
    (torch.get_num_threads, torch.set_num_threads),
)


# A choice: more threads than that only wait for each other (NOTES, "Waiting threads").
MAX_THREADS = 4 * (os.cpu_count() or 1)
_kernel_threads = {"most": MAX_THREADS}


def kernel_threads() -> int:
    """Returns the threads of a native kernel: torch's, at most `MAX_THREADS`; 1 where a fork broke OpenMP's."""
    return min(torch.get_num_threads(), _kernel_threads["most"])


def limit_kernel_threads(most: int) -> None:
    """Sets the most threads of native kernels in this process."""
    _kernel_threads["most"] = most


def set_num_threads(count: int) -> None:
    """Sets the number of threads of torch and the kernels; raises `ConfigError` outside 1..`MAX_THREADS`."""
    if not 1 <= count <= MAX_THREADS:
        raise ConfigError(
            f"threads is {count}. Expected 1..{MAX_THREADS} on this machine of {os.cpu_count()} processors. Pass no "
            "more than the cores that are really free."
        )
    torch.set_num_threads(count)


class StageClock:
    """The clock of one iteration, or of proposals in turn; starts at construction."""

    def __init__(self, device: torch.device, *, max_events: int | None = 3) -> None:
        """Starts the first stage; on GPUs only the first `max_events` marks are timed by the device, None for all."""
        self._max_events = max_events if has_cuda_runtime(device) else 0
        # `Event.record` looks the stream up by itself too, at 60 us each time.
        self._stream = torch.cuda.current_stream(device) if self._max_events != 0 else None
        self._marks = [time.perf_counter()]
        self._events: list[torch.cuda.Event] = []
        self._paused_for = 0.0
        if self._max_events != 0:
            self._record_event()

    def mark(self) -> None:
        """Ends a stage; in an iteration: draft, verify, accept (which waits for the device), then commit."""
        self._marks.append(time.perf_counter() - self._paused_for)
        if self._max_events is None or len(self._events) < self._max_events:
            self._record_event()

    def _record_event(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        self._events.append(event)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time of this block, between acceptance and commit, from all stages."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._paused_for += time.perf_counter() - begin

    def laps(self) -> list[float]:
        """Returns the seconds of each stage; on GPUs call it after the host has waited for the last timed stage."""
        if self._events:
            return [before.elapsed_time(after) / 1000 for before, after in pairwise(self._events)]
        return [after - before for before, after in pairwise(self._marks)]

    def seconds(self) -> StageSeconds:
        """Returns the seconds of the four stages of an iteration; their sum is the host's time.

        Uses the host's clock if the host has not waited for the device, as after a pass that chooses no token.
        """
        marks = self._marks
        draft, verify = marks[1] - marks[0], marks[2] - marks[1]
        if self._events and self._events[-1].query():
            draft, verify = self.laps()
        return StageSeconds(
            draft=draft,
            verify=verify,
            accept=max(marks[3] - marks[0] - draft - verify, 0.0),
            commit=marks[4] - marks[3],
        )
