"""Reads prompts in all their forms, conversations included, and turns them into checked token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import islice
from numbers import Integral
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import torch
from torch import Tensor

from foretoken.core.checks import check_boolean, check_integer, check_text, checked_token_ids, shown
from foretoken.core.errors import ConfigError, ForetokenError, RequestError, foreign_errors_as, one_line
from foretoken.core.sampling_params import OtherField, check_other_keywords
from foretoken.files.processes import ForkLock, HelperProcess, TooSlow
from foretoken.models import chat_templates

if TYPE_CHECKING:
    from foretoken.runner.runner import Runner
    from foretoken.text.codec import Codec


def check_vocabulary(tokenizer: Any) -> None:
    """Raises `ConfigError` unless `get_vocab` of a tokenizer, if it exists, returns tokens with their ids."""
    if not hasattr(tokenizer, "get_vocab"):
        return
    subject, expected = "get_vocab of the tokenizer", "Expected a mapping of tokens to ids."
    with foreign_errors_as(
        ConfigError, lambda err: f"{subject} fails: {type(err).__name__}: {one_line(err)}. {expected}"
    ):
        values = list(tokenizer.get_vocab().values())
    foreign = [value for value in values if not isinstance(value, Integral) or isinstance(value, bool)]
    if foreign:
        raise ConfigError(f"a value in {subject} is {shown(foreign[0])}. {expected}")


def ids_without_token(tokenizer: Any, target: Runner) -> Tensor | None:
    """Returns (U,) int64 ids on the target's device that the tokenizer lacks; None without such ids.

    Many models pad their vocabulary to a round number of rows. A tokenizer that is None or has no `get_vocab` has every
    id. The target's end-of-sequence ids always exist.
    """
    if not hasattr(tokenizer, "get_vocab"):
        return None
    is_unknown = torch.ones(target.vocab_size, dtype=torch.bool)
    known = [token for token in tokenizer.get_vocab().values() if 0 <= token < target.vocab_size]
    is_unknown[[*known, *target.model.eos_ids]] = False
    unknown = is_unknown.nonzero()[:, 0]
    return unknown.to(target.device) if len(unknown) else None


Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt` or `prompt_token_ids`, and perhaps some of `prediction`, `cache_salt` and
`speculative`."""


class _Options(TypedDict, total=False):
    """Further keys of a prompt; see `LLM.generate`."""

    prediction: str | Sequence[int]
    cache_salt: str
    speculative: Mapping[str, Any]


class TextPrompt(_Options):
    """A prompt as text."""

    prompt: str


class TokensPrompt(_Options):
    """A prompt as token ids, optionally with its text."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]


_MEDIA_KEYS = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "media_io_kwargs", "prompt_embeds")
_KNOWN_KEYS = {"prompt", "prompt_token_ids", "prediction", "cache_salt", "speculative", *_MEDIA_KEYS}
_KEYS_SHOWN = 4  # of a refused prompt in a message; a choice
_LONGEST_SALT = 1024  # characters; a choice: salts are keys of tables


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPrompt:
    """A checked prompt; `text` is None for a prompt of token ids, which are at least one.

    Attributes:
        prediction: Token ids that the output probably repeats in part; None for none.
        cache_salt: See `foretoken.drafters.base.DraftRequest`.
        max_nodes: Most nodes of a tree, root included, so 1 for no drafts; None for no limit.
    """

    text: str | None
    token_ids: list[int]
    prediction: list[int] | None
    cache_salt: str | None
    max_nodes: int | None = None


def split_prompts(prompts: Any) -> list[Any]:
    """Returns a list of prompts, not checked yet, from one or several prompts.

    The argument is one prompt, or a list, tuple, array or tensor of prompts, or the output of a tokenizer (`input_ids`,
    with `attention_mask` for padded rows). Raises `RequestError` for anything else.
    """
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        return _encoded(prompts)
    prompts = _plain(prompts)
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not _is_list(prompts):
        raise RequestError(f"the prompts are {type(prompts).__name__}. Expected text, token ids or a list of these.")
    return [prompts] if len(prompts) and isinstance(prompts[0], Integral) else list(prompts)


class PromptReader:
    """Reads prompts with a target's tokenizer."""

    def __init__(self, codec: Codec | None, vocab_size: int, context_len: int) -> None:
        self._codec, self._vocab_size, self._context_len = codec, vocab_size, context_len

    def read_prompt(self, prompt: Any) -> ReadPrompt:
        """Returns a prompt as token ids, with its other keys.

        Raises `RequestError` when a part has an unknown form, is empty or too long, is text without a tokenizer, or
        holds ids that do not exist.
        """
        more = prompt if isinstance(prompt, Mapping) else {"prompt": prompt}
        given = _value(prompt) if isinstance(prompt, Mapping) else prompt
        ids = self._token_ids(given, "the prompt", "a prompt is {}. Expected text, a list of token ids or a mapping.")
        text, prediction, salt = (more.get(name) for name in ("prompt", "prediction", "cache_salt"))
        return ReadPrompt(
            text=text if isinstance(text, str) else None,
            token_ids=ids,
            prediction=None if prediction is None else self._prediction(prediction),
            cache_salt=None if salt is None else _salt(salt),
            max_nodes=_max_nodes(more.get("speculative")),
        )

    def _prediction(self, given: Any) -> list[int]:
        ids = self._token_ids(given, "the prediction", "the prediction is {}. Expected text or a list of token ids.")
        if len(ids) > self._context_len:
            raise RequestError(
                f"the prediction has {len(ids)} tokens. Expected at most {self._context_len}, the context length. "
                "Shorten it."
            )
        return ids

    def _token_ids(self, given: Any, where: str, other: str) -> list[int]:
        given = _plain(given)
        if isinstance(given, str):
            ids: Sequence[Any] = self._encode(given, where)
        elif _is_list(given):
            ids = given
        else:
            raise RequestError(other.format(type(given).__name__))
        if not len(ids):
            advice = "" if where == "the prompt" else " Leave it out."
            raise RequestError(f"{where} is empty. Expected at least one token.{advice}")
        return checked_token_ids(ids, self._vocab_size, where)

    def _encode(self, text: str, where: str) -> list[int]:
        if self._codec is None:
            raise RequestError(f"{where} is text but the model has no tokenizer. Pass token ids.")
        check_text(where, text)
        if where == "the prompt":
            self._codec.check_length(text, where, self._context_len - 1, "one less than the context length")
            return self._codec.encode(text, where)
        self._codec.check_length(text, where, self._context_len, "the context length")
        return self._codec.encode(text, where, add_special_tokens=False)


def _salt(given: Any) -> str:
    check_text("cache_salt", given)
    if not 0 < len(given) <= _LONGEST_SALT:
        raise RequestError(f"cache_salt has {len(given)} characters. Expected 1 to {_LONGEST_SALT}, or None.")
    return str(given)


def _max_nodes(speculative: Any) -> int | None:
    if speculative is None:
        return None
    if not isinstance(speculative, Mapping) or speculative.keys() - {"enabled", "max_nodes"}:
        raise RequestError(
            f"speculative is {shown(speculative)}. Expected a mapping with 'enabled', True or False, or 'max_nodes', "
            "most nodes of a tree, or both."
        )
    enabled, most = speculative.get("enabled"), speculative.get("max_nodes")
    if enabled is not None:
        check_boolean("speculative['enabled']", enabled)
    if most is not None:
        check_integer("speculative['max_nodes']", most, 1)
    return 1 if enabled is not None and not enabled else None if most is None else int(most)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _value(prompt: Mapping[str, Any]) -> Any:
    for key in _MEDIA_KEYS:
        if prompt.get(key):
            raise RequestError(f"the prompt has {key}, which is not supported. Expected text or token ids alone.")
    ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
    if prompt.keys() - _KNOWN_KEYS or (ids is None and text is None):
        raise RequestError(
            f"the prompt has the keys {_names(prompt)}. Expected 'prompt' or 'prompt_token_ids', and perhaps "
            "'prediction', 'cache_salt' and 'speculative'."
        )
    return text if ids is None else ids


def _names(prompt: Mapping[str, Any]) -> str:
    names = [shown(key) for key in islice(prompt, _KEYS_SHOWN + 1)]
    return f"[{', '.join(names if len(names) <= _KEYS_SHOWN else [*names[:-1], '…'])}]"


def _encoded(encoding: Mapping[str, Any]) -> list[list[Any]]:
    rows, mask = (_plain(encoding.get(name)) for name in ("input_ids", "attention_mask"))
    if not _is_list(rows):
        raise RequestError(f"input_ids are {shown(rows)}. Expected token ids or rows of them.")
    if len(rows) == 0 or not _is_list(rows[0]):
        rows, mask = [rows], None if mask is None else [mask]
    if mask is None:
        return [list(row) for row in rows]
    if not _is_list(mask) or list(map(_length, mask)) != list(map(_length, rows)):
        raise RequestError("attention_mask has another shape than input_ids. Expected one number for each token.")
    return [
        [token for token, is_real in zip(row, real, strict=True) if is_real]
        for row, real in zip(rows, mask, strict=True)
    ]


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _length(row: Any) -> int:
    return len(row) if _is_list(row) else -1


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

    Conversations that are longer than `context_len` tokens are refused before they are encoded. Raises `RequestError`
    when there is no template, a conversation is invalid, or the template refuses it.
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
    with foreign_errors_as(
        RequestError,
        lambda err: f"the chat template refuses the conversation: {one_line(err)}.",
        passing=(ForetokenError,),
    ):
        text = _rendered(conversation, tokenizer, codec, form)
    check_text("what the chat template makes", text)
    codec.check_length(text, "the conversation", context_len - 1, "one less than the context length")
    return {"prompt": text, "prompt_token_ids": codec.encode(text, "the conversation", add_special_tokens=False)}


def _rendered(conversation: list[dict[str, Any]], tokenizer: Any, codec: Codec, form: ChatFormat) -> Any:
    """Returns the text of a conversation: by another process, unless the tokenizer has code of its own for it."""
    options: dict[str, Any] = {
        "add_generation_prompt": form.add_generation_prompt, "continue_final_message": form.continue_final_message,
        "tools": form.tools, "tokenize": False,
    }  # fmt: skip
    if getattr(tokenizer.apply_chat_template, "__module__", None) != "transformers.tokenization_utils_base":
        options["chat_template"] = form.chat_template
        with codec.lock:
            render = partial(tokenizer.apply_chat_template, **options, **form.chat_template_kwargs)
            return chat_templates.rendered(conversation, render)
    options["chat_template"] = tokenizer.get_chat_template(form.chat_template, form.tools)
    asked = {
        "conversation": conversation, "options": options, "variables": form.chat_template_kwargs,
        "special_tokens": tokenizer.special_tokens_map,
    }  # fmt: skip
    question = json.dumps(asked, ensure_ascii=False, default=_as_json)
    process, lock = _TEMPLATES[len(question) > _LONG_QUESTION]
    try:
        with lock:
            return process.ask(question, _LONGEST_S)["text"]
    except TooSlow as err:
        raise RequestError(
            f"the chat template takes more than {err} for the conversation. Expected milliseconds. Shorten the "
            "conversation, or pass another template."
        ) from err


_LONGEST_S = 5.0  # to render one conversation; a choice: conversations take milliseconds, those of 8 MB half a second
_LONG_QUESTION = 1 << 17  # characters, with tools and template; a choice: shorter ones never wait for longer ones


def _renderer() -> tuple[HelperProcess, ForkLock]:
    advice = "Render conversations elsewhere, and pass their text to generate"
    setup = {"most_bytes": chat_templates.MOST_BYTES}
    return HelperProcess(chat_templates.__file__, "renders conversations", advice, lambda: setup), ForkLock()


_TEMPLATES = _renderer(), _renderer()  # for short and for long conversations; of all models


def _as_json(value: Any) -> Any:
    """Returns a part of a conversation as JSON has it."""
    if isinstance(value, Mapping):
        return dict(value)
    if callable(value):
        return chat_templates.schema_of(value)
    raise TypeError(f"it holds a value {shown(value)}, not text, a number, a list or a mapping")


def _conversations(messages: Any) -> list[list[dict[str, Any]]]:
    if not _is_list(messages) or not messages:
        raise RequestError(f"messages are {shown(messages)}. Expected a list of messages with a role and content.")
    several = messages if _is_list(messages[0]) else [messages]
    if not all(_is_list(each) and each for each in several):
        raise RequestError("a conversation is empty or no list of messages. Expected a list of messages for each.")
    return [[_message(message) for message in conversation] for conversation in several]


def _message(message: Any) -> dict[str, Any]:
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
    listed = calls if _is_list(calls) else ()
    functions = [call.get("function") if isinstance(call, Mapping) else None for call in listed]
    if not functions or not all(isinstance(each, Mapping) and isinstance(each.get("name"), str) for each in functions):
        expected = "Expected [{'id': ..., 'type': 'function', 'function': {'name': ..., 'arguments': ...}}]."
        raise RequestError(f"the tool_calls of a message are {shown(calls)}. {expected}")


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if _is_list(content) else [content]
    for part in parts:
        if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise RequestError(
                f"the content of a message is {shown(part)}. Expected text, or parts {{'type': 'text', 'text': ...}}: "
                "foretoken serves text-only models."
            )
    return "\n".join(part["text"] for part in parts)
