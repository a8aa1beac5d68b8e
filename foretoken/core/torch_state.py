"""torch's state outside of tensors, kept apart: the caller's from the engine, and foreign code's from both.

Some of it belongs to the thread (autocast, inference mode, gradients, default device and other function modes), some to
the process (default dtype, deterministic algorithms, matmul precision, threads). torch's random generators are left
alone: nothing here draws from them, and a drafter may.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import overrides

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CPU = torch.device("cpu")
_AUTOCAST_DEVICES = ("cpu", "cuda")


@contextmanager
def own_torch_state() -> Iterator[None]:
    """Without the caller's autocast, inference mode and default device, whichever of them is on.

    An iteration serves the requests of all threads in the thread of one of them. Under its autocast their logits would
    round differently, on its default device their tensors would lie elsewhere, and what is kept from one iteration to
    the next would be inference tensors, which nothing may write to outside inference mode.
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
    """Puts torch back to what it was: what foreign code switches on inside and leaves on ends with the block."""
    before = [read() for read, _ in _SETTINGS]
    modes, default = _function_modes()
    try:
        # Leaving this guard restores inference mode and gradients, whatever was entered inside and not left.
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
    """Function modes of torch from the outermost in, the default device among them, and what set that device."""
    return overrides._get_current_function_mode_stack(), getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def _set_function_modes(modes: list[Any], default: Any) -> None:
    """Puts back what `_function_modes` gave.

    `torch.set_default_device` would not do: it refuses to work inside `with torch.device(...)`, having taken half of
    the modes off by then.
    """
    while overrides._get_current_function_mode_stack():
        overrides._pop_mode()
    for mode in modes:
        overrides._push_mode(mode)
    torch._GLOBAL_DEVICE_CONTEXT.device_context = default


def _autocast() -> tuple[Any, ...]:
    """Whether autocast is on and to which dtype, by device, whether it caches weights, and how often it was entered."""
    by_device = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST_DEVICES]
    return (*by_device, torch.is_autocast_cache_enabled(), _autocast_nesting())


def _autocast_nesting() -> int:
    """How many autocast blocks are open; the weights that autocast keeps are given up when the last one is left."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _set_autocast(state: tuple[Any, ...]) -> None:
    """Puts back what `_autocast` gave."""
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
    """Whether deterministic algorithms are asked for, and whether their lack is a warning only."""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _matmul_precision() -> str | None:
    """How float32 products are computed; None where it cannot be told, being set for single backends."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch's way to say so
        return None


def _set_matmul_precision(precision: str | None) -> None:
    """Puts back what `_matmul_precision` gave, for all backends."""
    if precision is not None:
        torch.set_float32_matmul_precision(precision)


# How each is read and written back.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (_autocast, _set_autocast),
    (torch.get_default_dtype, torch.set_default_dtype),
    (_deterministic, lambda state: torch.use_deterministic_algorithms(state[0], warn_only=state[1])),
    (_matmul_precision, _set_matmul_precision),
    (torch.get_num_threads, torch.set_num_threads),
)
