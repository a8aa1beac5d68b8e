"""Turns conversations into prompts: checks them, renders them with the chat template, and encodes the text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from jinja2 import UndefinedError

from foretoken.core.checks import check_boolean, check_text, shown
from foretoken.core.errors import RequestError, foreign_errors_as, one_line
from foretoken.core.sampling_params import OtherField, check_other_keywords

if TYPE_CHECKING:
    from foretoken.text.codec import Codec

Message = Mapping[str, Any]
"""`{"role": ..., "content": ...}`, and other keys that a template reads, such as `tool_calls`."""

CONTENT_FORMAT = OtherField(("auto", "string"), "Templates get the content of messages as text. Leave it out.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """How conversations are rendered.

    Attributes:
        chat_template: A template in Jinja; None for the tokenizer's own.
        add_generation_prompt: Whether the text ends with the beginning of an answer.
        continue_final_message: Whether the text ends inside the last message, so that the model continues it.
        tools: Descriptions of functions, for templates that show them.
        chat_template_kwargs: Further variables of the template.
    """

    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("add_generation_prompt", "continue_final_message"):
            check_boolean(name, getattr(self, name))
        if self.chat_template is not None:
            check_text("chat_template", self.chat_template)
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message exclude each other: one begins an answer, the other "
                "goes on with the last message. Set one of them to False."
            )


def chat_format(given: Mapping[str, Any]) -> ChatFormat:
    """Returns the chat format for keywords of `LLM.chat`; raises `RequestError` for unknown or unsupported ones."""
    names = [each.name for each in fields(ChatFormat)]
    others = {name: value for name, value in given.items() if name not in names}
    CONTENT_FORMAT.check("chat_template_content_format", others.pop("chat_template_content_format", None))
    check_other_keywords("chat", others, names)
    return ChatFormat(**{name: value for name, value in given.items() if name in names and value is not None})


def chat_prompts(
    messages: Any, tokenizer: Any, codec: Codec | None, form: ChatFormat, context_len: int
) -> list[dict[str, Any]]:
    """Returns prompts with text and token ids for one or several conversations.

    Conversations that are longer than `context_len` tokens are refused before they are encoded.

    Raises:
        RequestError: When there is no template, a conversation is invalid, or the template refuses it.
    """
    if codec is None or not callable(getattr(tokenizer, "apply_chat_template", None)):
        raise RequestError("the model has no tokenizer that knows chat templates. Pass one as LLM(tokenizer=...).")
    if form.chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise RequestError(
            "the tokenizer has no chat template: the model was not trained for conversations. Expected a template. "
            "Pass chat_template=TEXT, or use generate."
        )
    return [_prompt(each, tokenizer, codec, form, context_len) for each in _conversations(messages)]


def _prompt(
    conversation: list[dict[str, Any]], tokenizer: Any, codec: Codec, form: ChatFormat, context_len: int
) -> dict[str, Any]:
    with foreign_errors_as(RequestError, lambda err: f"the chat template refuses the conversation: {one_line(err)}."):
        text = _rendered(conversation, tokenizer, form)
    check_text("what the chat template makes", text)
    codec.check_length(text, "the conversation", context_len - 1, "one less than the context length")
    return {"prompt": text, "prompt_token_ids": codec.encode(text, "the conversation", add_special_tokens=False)}


def _rendered(conversation: list[dict[str, Any]], tokenizer: Any, form: ChatFormat) -> Any:
    """Renders a conversation; tries the forms of tool calls until the template accepts one."""
    forms = _CALL_FORMS if any("tool_calls" in message for message in conversation) else _CALL_FORMS[:1]
    for as_text, content in forms:
        messages = [_with_arguments(message, as_text=as_text, content=content) for message in conversation]
        try:
            return tokenizer.apply_chat_template(
                messages, chat_template=form.chat_template, add_generation_prompt=form.add_generation_prompt,
                continue_final_message=form.continue_final_message, tools=form.tools, tokenize=False,
                **form.chat_template_kwargs,
            )  # fmt: skip
        except (TypeError, UndefinedError):
            if (as_text, content) == forms[-1]:
                raise
    raise AssertionError("the last form was rendered, or raised")


# Whether arguments are text, and the value of missing content. Most templates take objects and check for content.
# DeepSeek's joins both with text, Llama 4's iterates over the content. A template raises for forms that it cannot take.
_CALL_FORMS: tuple[tuple[bool, str | None], ...] = ((False, None), (True, None), (False, ""), (True, ""))


def _conversations(messages: Any) -> list[list[dict[str, Any]]]:
    if not _is_list(messages) or not messages:
        raise RequestError(f"messages are {shown(messages)}. Expected a list of messages with a role and content.")
    several = messages if _is_list(messages[0]) else [messages]
    if not all(_is_list(each) and each for each in several):
        raise RequestError("a conversation is empty or no list of messages. Expected a list of messages for each.")
    return [[_message(message) for message in conversation] for conversation in several]


def _message(message: Any) -> dict[str, Any]:
    """Returns a checked message with its content as text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"a message is {shown(message)}. Expected {{'role': 'user', 'content': 'text'}}.")
    made = {name: value for name, value in message.items() if value is not None}
    content, calls = message.get("content"), message.get("tool_calls")
    made["content"] = None if content is None else _text(content)
    if calls:
        _check_calls(calls)
    else:
        made.pop("tool_calls", None)  # some templates treat an empty list as calls
    if "reasoning" in made:  # the name that some clients use
        made.setdefault("reasoning_content", made["reasoning"])
    return made


def _check_calls(calls: Any) -> None:
    functions = [
        call.get("function") if isinstance(call, Mapping) else None for call in (calls if _is_list(calls) else ())
    ]
    if not functions or not all(isinstance(each, Mapping) and isinstance(each.get("name"), str) for each in functions):
        expected = "Expected [{'id': ..., 'type': 'function', 'function': {'name': ..., 'arguments': ...}}]."
        raise RequestError(f"the tool_calls of a message are {shown(calls)}. {expected}")


def _with_arguments(message: dict[str, Any], *, as_text: bool, content: str | None) -> dict[str, Any]:
    """Returns a message with the arguments of its calls as text or as objects; `content` replaces missing content."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _arguments(call["function"].get("arguments"), as_text)}}
        for call in message["tool_calls"]
    ]
    return {**message, "content": content if message["content"] is None else message["content"], "tool_calls": calls}


def _arguments(given: Any, as_text: bool) -> Any:
    """Returns the arguments of a call as text or as an object; other values unchanged."""
    try:
        told = json.loads(given) if isinstance(given, str) else given
        text = given if isinstance(given, str) else json.dumps(given)
    except (ValueError, TypeError, RecursionError):
        return given
    return text if as_text or not isinstance(told, Mapping) else told


def _text(content: Any) -> str:
    """Returns content as text; joins several parts by line breaks, as vLLM does."""
    if isinstance(content, str):
        return content
    parts = content if _is_list(content) else [content]
    for part in parts:
        is_text = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        if not is_text:
            raise RequestError(
                f"the content of a message is {shown(part)}. Expected text, or parts {{'type': 'text', 'text': ...}}: "
                "the models that are served read nothing else."
            )
    return "\n".join(part["text"] for part in parts)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
