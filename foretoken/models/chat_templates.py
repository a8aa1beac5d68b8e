"""Renders conversations with chat templates; run as a program, in the process of a `HelperProcess`.

Templates come with models and are programs: they may never end, or fill the memory. The program imports transformers
alone, without torch.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from jinja2 import UndefinedError

from foretoken.files.processes import serve

MOST_BYTES = 512 << 20  # memory of one conversation's text; a choice: 8 MB of messages take a quarter of it
_MOST_CHARACTERS = 32 << 20  # of a text; a choice: longer than any context, and read by the engine's process at once

# Whether arguments are text, and the value of missing content. Most templates take objects and check for content.
# DeepSeek's joins both with text, Llama 4's iterates over the content. A template raises for forms that it cannot take.
_CALL_FORMS: tuple[tuple[bool, str | None], ...] = ((False, None), (True, None), (False, ""), (True, ""))


def rendered(conversation: list[dict[str, Any]], render: Callable[[list[dict[str, Any]]], Any]) -> Any:
    """Returns what `render` makes of a conversation, in the first form of tool calls that it takes."""
    forms = _CALL_FORMS if any("tool_calls" in message for message in conversation) else _CALL_FORMS[:1]
    for as_text, content in forms:
        try:
            return render([_with_arguments(message, as_text=as_text, content=content) for message in conversation])
        except (TypeError, UndefinedError):
            if (as_text, content) == forms[-1]:
                raise
    raise AssertionError("the last form was rendered, or raised")


def _with_arguments(message: dict[str, Any], *, as_text: bool, content: str | None) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _arguments(call["function"].get("arguments"), as_text)}}
        for call in message["tool_calls"]
    ]
    return {**message, "content": content if message["content"] is None else message["content"], "tool_calls": calls}


def _arguments(given: Any, as_text: bool) -> Any:
    try:
        told = json.loads(given) if isinstance(given, str) else given
        text = given if isinstance(given, str) else json.dumps(given)
    except (ValueError, TypeError, RecursionError):
        return given
    return text if as_text or not isinstance(told, Mapping) else told


def schema_of(function: Any) -> dict[str, Any]:
    """Returns the description of a Python function as a tool, made from its docstring and types."""
    from transformers.utils.chat_template_utils import get_json_schema

    made: dict[str, Any] = get_json_schema(function)
    return made


def _renderer(_: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    def answered(asked: dict[str, Any]) -> dict[str, Any]:
        tokenizer: Any = SimpleNamespace(
            get_chat_template=lambda template, _: template, special_tokens_map=asked["special_tokens"]
        )
        apply = PreTrainedTokenizerBase.apply_chat_template
        render = partial(apply, tokenizer, **asked["options"], **asked["variables"])
        text = rendered(asked["conversation"], render)
        if len(text) > _MOST_CHARACTERS:
            return {"error": f"it makes more than {_MOST_CHARACTERS} characters of it"}
        return {"text": text}

    return answered


if __name__ == "__main__":
    serve(_renderer)
