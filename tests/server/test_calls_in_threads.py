"""Calls in threads end, whatever they raise."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import pytest

from foretoken.server.live_request import in_pool, in_thread

LONGEST_S = 30
NAME = ContextVar("NAME", default="none")


def test_values_context_and_errors_come_through() -> None:
    async def asked() -> list[object]:
        NAME.set("one")
        return [await in_thread(divmod, 7, 2), await in_thread(sorted, [1, 2], reverse=True), await in_thread(NAME.get)]

    assert asyncio.run(asked()) == [(3, 1), [2, 1], "one"]
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_thread(divmod, 1, 0))


@pytest.mark.parametrize("has_pool", [False, True])
def test_a_stop_of_an_iterator_ends_the_wait(has_pool: bool) -> None:
    async def asked() -> None:
        with ThreadPoolExecutor(1) as own:
            await asyncio.wait_for(in_pool(own if has_pool else None, lambda: next(iter(()))), LONGEST_S)

    with pytest.raises(RuntimeError, match="StopIteration out of a call in a thread"):
        asyncio.run(asked())
