"""Calls in threads, for what would hold up other requests' parts on the event loop."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

is_large: ContextVar[bool] = ContextVar("is_large", default=False)
"""Whether the current task serves a request with a large body."""
# Large requests have threads and processors of their own, so that other requests never wait for them.
_large = ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2), thread_name_prefix="foretoken-large")


async def in_thread(call: Callable[_Given, _Result], *given: _Given.args, **options: _Given.kwargs) -> _Result:
    """Runs a call in a thread and returns its result; with `is_large` in one of few threads. See `in_pool`."""
    return await in_pool(_large if is_large.get() else None, partial(call, *given, **options))


async def in_pool(pool: Executor | None, call: Callable[[], _Result]) -> _Result:
    """What a call returns in one of a pool's threads.

    Args:
        pool: None for the event loop's own.
        call: Sees the context variables of the caller.

    Raises:
        RuntimeError: Where it raises `StopIteration`, with which no future ever ends: who waits would wait for ever.
    """
    return await asyncio.get_running_loop().run_in_executor(pool, copy_context().run, _ended, call)


def _ended(call: Callable[[], _Result]) -> _Result:
    """See `in_pool`."""
    try:
        return call()
    except StopIteration as err:
        raise RuntimeError("StopIteration out of a call in a thread") from err
