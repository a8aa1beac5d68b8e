"""Conversations of requests, rendered to prompts in a thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foretoken.server.errors import ApiError
from foretoken.server.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Mapping

    from foretoken.entrypoints.llm import LLM


def has_template(llm: LLM, template: str | None) -> bool:
    """Whether conversations can be rendered; template: a server's own, or None."""
    return bool(template or getattr(llm.tokenizer, "chat_template", None))


async def rendered(
    llm: LLM, messages: Any, form: Mapping[str, Any], template: str | None, advice: str
) -> dict[str, Any]:
    """The prompt of a conversation.

    Args:
        llm: Renders it.
        messages: As `chat_form` gives them.
        form: Likewise.
        template: In Jinja; None for the tokenizer's own.
        advice: What to do where there is none: who asks cannot pass one.

    Raises:
        ApiError: When there is no template.
        RequestError: What `LLM.chat_prompts` raises.
    """
    if llm.tokenizer is not None and not has_template(llm, template):
        raise ApiError(f"The model has no chat template. {advice}", param="messages")
    (prompt,) = await in_thread(llm.chat_prompts, messages, chat_template=template, **form)
    return prompt
