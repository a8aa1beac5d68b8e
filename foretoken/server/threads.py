"""Calls in threads, for what would hold up other requests' parts on the event loop."""

from __future__ import annotations

import asyncio
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


async def in_thread(call: Callable[_Given, _Result], *given: _Given.args, **options: _Given.kwargs) -> _Result:
    """What a call returns in one of the event loop's own threads; raises what it raises, see `in_pool`."""
    return await in_pool(None, partial(call, *given, **options))


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
