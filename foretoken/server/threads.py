"""Runs long calls, such as rendering conversations, in threads, so that they do not block the event loop."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from foretoken.server.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Executor

    from foretoken.entrypoints.llm import LLM

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

is_large: ContextVar[bool] = ContextVar("is_large", default=False)
"""Whether the current task serves a request with a large body."""
# Large requests have their own threads and processors, so that other requests never wait for them.
_large = ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2), thread_name_prefix="foretoken-large")


async def in_thread(call: Callable[_Given, _Result], *given: _Given.args, **options: _Given.kwargs) -> _Result:
    """Runs a call in a thread and returns its result; large requests share few threads. See `in_pool`."""
    return await in_pool(_large if is_large.get() else None, partial(call, *given, **options))


async def in_pool(pool: Executor | None, call: Callable[[], _Result]) -> _Result:
    """Runs a call in one of a pool's threads and returns its result.

    Args:
        pool: None for the event loop's own pool.
        call: Sees the context variables of the caller.

    Raises:
        RuntimeError: When the call raises `StopIteration`, with which a future would never end.
    """
    return await asyncio.get_running_loop().run_in_executor(pool, copy_context().run, _ended, call)


def _ended(call: Callable[[], _Result]) -> _Result:
    try:
        return call()
    except StopIteration as err:
        raise RuntimeError("StopIteration out of a call in a thread") from err


def has_template(llm: LLM, template: str | None) -> bool:
    """Decides whether conversations can be rendered; template: a server's own, or None."""
    return bool(template or getattr(llm.tokenizer, "chat_template", None))


async def rendered(
    llm: LLM, messages: Any, form: Mapping[str, Any], template: str | None, advice: str
) -> dict[str, Any]:
    """Renders a conversation and returns the prompt.

    Args:
        llm: The model, with its tokenizer.
        messages: The messages; see `chat_form`.
        form: Keyword arguments of `LLM.chat_prompts`; see `chat_form`.
        template: The chat template in Jinja; None for the tokenizer's own.
        advice: Ends the error about a missing template.

    Raises:
        ApiError: When there is no template.
        RequestError: See `LLM.chat_prompts`.
    """
    if llm.tokenizer is not None and not has_template(llm, template):
        raise ApiError(f"The model has no chat template. {advice}", param="messages")
    (prompt,) = await in_thread(llm.chat_prompts, messages, chat_template=template, **form)
    return prompt
