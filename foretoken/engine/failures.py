"""Contains failures: an error in one sequence's part of an iteration ends that sequence alone."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from foretoken.core.backend import has_cuda_runtime
from foretoken.core.errors import described

if TYPE_CHECKING:
    from collections.abc import Callable

    from foretoken.engine.sequence import Sequence

T = TypeVar("T")
_log = logging.getLogger(__name__)


def contained(sequence: Sequence, work: Callable[..., T], *arguments: Any) -> T | None:
    """Calls `work(sequence, *arguments)` and returns its result; an error ends that sequence alone and returns None."""
    try:
        return work(sequence, *arguments)
    except Exception as err:  # noqa: BLE001 - one request's failure, whatever it is, must not end the others
        fail(sequence, err)
        return None


def fail(sequence: Sequence, error: Exception) -> None:
    """Ends a sequence with an error, and logs it."""
    sequence.fail(f"decoding failed: {described(error)}.")
    _log.warning("request %s failed and was ended; others go on: %s", sequence.request_id, sequence.error)
    _log.debug("where request %s failed", sequence.request_id, exc_info=error)


_MOST_FAILURES = 3
_WATCHED_SECONDS = 60.0
_OFF_SECONDS = 60.0
_CPU_ALLOCATOR = "DefaultCPUAllocator"  # torch raises a RuntimeError with this name


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error is a failed allocation, on the host or on the device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)


class MemoryPressure:
    """Counts passes that ran out of memory. After three within a minute, drafting is off for a minute.

    Attributes:
        num_failures: Passes that ran out of memory so far.
    """

    def __init__(self, device: torch.device, *, now: Callable[[], float] = time.monotonic) -> None:
        """Starts without failures; `device` is the target's, `now` a monotonic clock in seconds."""
        self.num_failures = 0
        self._device, self._now = device, now
        self._recent: deque[float] = deque(maxlen=_MOST_FAILURES)
        self._off_until = float("-inf")

    @property
    def allows_drafts(self) -> bool:
        """Whether drafting is on."""
        return self._now() >= self._off_until

    def note_failure(self) -> None:
        """Counts a failed pass. Call it when nothing refers to the tensors of the pass any more."""
        self.num_failures += 1
        if has_cuda_runtime(self._device):
            torch.cuda.empty_cache()
        now = self._now()
        self._recent.append(now)
        if len(self._recent) == _MOST_FAILURES and now - self._recent[0] <= _WATCHED_SECONDS:
            self._off_until = now + _OFF_SECONDS
            self._recent.clear()
            _log.warning(
                "memory did not hold %d passes within %.0f seconds: nothing is drafted for %.0f seconds. Lower "
                "max_num_seqs, max_model_len or the nodes of a tree.", _MOST_FAILURES, _WATCHED_SECONDS, _OFF_SECONDS,
            )  # fmt: skip
