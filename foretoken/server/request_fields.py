"""Reads the fields of OpenAI requests into prompts and `SamplingParams`; logs unknown fields once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from foretoken.core.checks import check_boolean, check_integer, check_sequence, shown
from foretoken.core.errors import FormError, RequestError, listed
from foretoken.core.sampling_params import (
    MOST_TOKENS,
    OTHER_FIELDS,
    OtherField,
    SamplingParams,
    StructuredOutputsParams,
)
from foretoken.server.edge import ApiError
from foretoken.server.tools import ToolUse, functions_of, tool_use

if TYPE_CHECKING:
    from foretoken.server.message_parts import MessageForm

_log = logging.getLogger(__name__)

MOST_CHOICES = 128  # completions of one request, over all its prompts; OpenAI's limit of n
_MOST_LOGPROBS = 20  # OpenAI's limit of top_logprobs
_MOST_ITEMS = {  # choices, checked by RESULTS, "What one client's dearest requests cost"
    "stop": 64, "stop_token_ids": 1024, "logit_bias": 4096, "bad_words": 256, "allowed_token_ids": 262_144,
    "messages": 4096, "tokens": 262_144,
}  # fmt: skip
_OTHERWISE = {"logprobs", "n", "output_kind"}  # fields of `SamplingParams` with another form in HTTP bodies
_SAMPLING = frozenset({field.name for field in fields(SamplingParams)} | OTHER_FIELDS.keys()) - _OTHERWISE
_OF_THE_PROMPT = ("cache_salt", "speculative", "prediction")
_SHARED = frozenset({
    "model", "stream", "stream_options", "n", "logprobs", "response_format", "best_of", "return_token_ids",
    "return_token_origins", "add_special_tokens", "spec_decode_metrics", "store",
    *_OF_THE_PROMPT,
})  # fmt: skip
# Fields that OpenAI's clients send and that cannot change an answer.
_IGNORED = frozenset({
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "priority", "request_id",
    "reasoning_effort", "verbosity", "return_tokens_as_token_ids",
})  # fmt: skip
# Switches of any path. Text, numbers and lists are refused: "false" and 0 would be taken for true or for false.
_BOOLEANS = (
    "stream", "echo", "store", "parallel_tool_calls", "return_token_ids", "return_token_origins",
    "return_tokens_as_token_ids", "add_special_tokens", "add_generation_prompt", "continue_final_message",
)  # fmt: skip
_BOOLEANS_INSIDE = {
    "stream_options": ("include_usage", "continuous_usage_stats", "include_obfuscation"),
    "chat_template_kwargs": ("enable_thinking", "thinking"),
}
# For each unsupported field: the neutral values, besides null, and what to do instead.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "suffix": (("",), "Text is only continued at its end. Leave it out."),
    "functions": (([],), "Pass tools."),
    "function_call": (("none", "auto"), "Pass tools and tool_choice."),
    "modalities": ((["text"],), "Only text is generated. Leave it out."),
    "audio": ((), "Only text is generated. Leave it out."),
    "web_search_options": ((), "Nothing is fetched for a request. Leave it out."),
    "documents": (([],), "Put them into the messages."),
    "chat_template": ((), "The server renders conversations with its own template. Leave it out."),
    "prompt_embeds": ((), "Pass text or token ids as prompt."),
    "echo": ((False,), "Only completions repeat their prompt. Leave it out."),
    "output_kind": ((0,), "Set stream."),
}  # fmt: skip
_CHOICE, _JSON, _REGEX, _GRAMMAR = (
    f"Pass structured_outputs: {example}."
    for example in ('{"choice": ["yes", "no"]}', '{"json": SCHEMA}', '{"regex": "[0-9]+"}', '{"grammar": TEXT}')
)
_ADAPTER, _MAX = "Adapters are merged into the model before it is served. Leave it out.", "Pass max_tokens."
_SAMPLER = "There is no such sampler. Use temperature, top_p, top_k, min_p and penalties."
_THINKING = 'Pass chat_template_kwargs: {"enable_thinking": true or false}, where the template knows it.'
# Fields of other servers (earlier vLLM, llama.cpp, TGI, SGLang, Ollama). Ignoring them would change the text.
_REFUSED |= {
    "guided_choice": (([],), _CHOICE), "choice": (([],), _CHOICE),
    "guided_json": (("", {}), _JSON), "json_schema": (("", {}), _JSON), "json": ((), _JSON),
    "guided_json_object": ((False,), 'Pass response_format: {"type": "json_object"}.'),
    "format": (("",), 'Pass response_format: {"type": "json_object"}, or structured_outputs: {"json": SCHEMA}.'),
    "guided_regex": (("",), _REGEX), "regex": (("",), _REGEX),
    "guided_grammar": (("",), _GRAMMAR), "ebnf": (("",), _GRAMMAR),
    "grammar": (("",), f'{_GRAMMAR[:-1]}, {{"json": SCHEMA}} or {{"regex": TEXT}}.'),
    "guided_whitespace_pattern": (("",), 'Pass structured_outputs: {"json": SCHEMA, "whitespace_pattern": TEXT}.'),
    "guided_decoding_backend": (("auto", "guidance"), "llguidance follows every form of output. Leave it out."),
    "structural_tag": (("",), f"{_JSON[:-1]}, or another form."),
    "max_new_tokens": ((), _MAX), "n_predict": ((-1,), _MAX), "num_predict": ((-1,), _MAX),
    "min_new_tokens": ((0,), "Pass min_tokens."),
    "stop_sequences": (([],), "Pass stop."),
    "stop_regex": (("", []), "Pass stop, with the texts themselves."),
    "no_stop_trim": ((False,), "Pass include_stop_str_in_output."),
    "sampling_seed": ((), "Pass seed."), "random_seed": ((), "Pass seed."),
    "do_sample": ((True,), "Pass temperature: 0 for greedy decoding."),
    "num_beams": ((1,), "There is no beam search. Leave it out."),
    "repeat_penalty": ((1,), "Pass repetition_penalty."),
    "truncate": ((), "Shorten the prompt."),
    "custom_logit_processor": ((), "Use logit_bias, bad_words, allowed_token_ids and penalties."),
    "samplers": (([],), _SAMPLER), "watermark": ((False,), _SAMPLER),
    **dict.fromkeys(("typical_p", "tfs", "tfs_z", "guidance_scale"), ((1,), _SAMPLER)),
    **dict.fromkeys((
        "top_a", "top_n_sigma", "mirostat", "mirostat_mode", "dynatemp_range", "xtc_probability", "dry_multiplier",
        "smoothing_factor", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "penalty_alpha",
    ), ((0, -1), _SAMPLER)),
    **dict.fromkeys(("lora", "lora_path", "lora_name", "lora_request", "adapter_id"), (([], {}, ""), _ADAPTER)),
    "vllm_xargs": (({},), "No plug-in reads them. Leave it out."),
    "options": (({},), "Pass its entries as fields of the request."),
    "system": (("",), "Send a message whose role is system."),
    "enable_thinking": ((), _THINKING), "thinking": ((), _THINKING),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRequest:
    """The checked fields of a request; the engine checks the rest.

    Attributes:
        has_max_tokens: Whether the request gives the number of tokens; the context must then have room for all of them.
        is_chat: Whether the answer is a message.
        has_usage: Whether the stream ends with a chunk of token counts.
        has_running_usage: Whether every chunk of the stream has token counts.
        num_top_logprobs: The number of alternatives for each token; None for no log-probabilities.
        is_echoed: Whether completions begin with the prompt.
        is_prompt_alone: Whether the answer is the echoed prompt alone; the single generated token is left out.
        has_prompt_logprobs: Whether each completion has log-probabilities of the prompt.
        has_token_ids: Whether token ids are sent with the text.
        has_origins: Whether chunks of a stream say which text was drafted.
        has_draft_metrics: Whether the answer has draft metrics.
        message_form: How to read the text of a message; None if all of the text is content.
        form_name: The field that asks for a form of output.
        forced_tools: The tools of a request whose answer is forced to call them; their schemas are the form.
        left_out: The types of tools that were left out.
        may_be_learned: Whether `foretoken serve --distill-to` may collect the text: not with `store` false, nor with a
            cache salt, whose text must not change the drafts of other clients.
    """

    prompts: list[Any]
    params: SamplingParams
    has_max_tokens: bool = False
    is_chat: bool
    is_streamed: bool = False
    has_usage: bool = False
    has_running_usage: bool = False
    num_top_logprobs: int | None = None
    is_echoed: bool = False
    is_prompt_alone: bool = False
    has_prompt_logprobs: bool = False
    has_token_ids: bool = False
    has_origins: bool = False
    has_draft_metrics: bool = False
    message_form: MessageForm | None = None
    form_name: str = "structured_outputs"
    forced_tools: ToolUse | None = None
    left_out: Sequence[str] = ()
    may_be_learned: bool = True

    @property
    def warning(self) -> dict[str, str]:
        """What the answer's metadata say about tools that were left out."""
        told = f"tools that this server does not run were left out: {listed(set(self.left_out))}"
        return {"warning": told} if self.left_out else {}

    def form_error(self, error: FormError) -> ApiError:
        """Returns the answer for a form that cannot be followed, in the names of the request's fields."""
        if self.forced_tools is not None:
            return self.forced_tools.form_error(error)
        if self.form_name == "structured_outputs":
            return ApiError(str(error))
        message = error.about(f"the schema of {self.form_name}", error.path, error.advice)
        return ApiError(message, param=self.form_name.partition(".")[0])


class UnknownFields:
    """Logs each unknown field once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def log_names(self, names: Iterable[str]) -> None:
        """Logs each new name, cut to 80 characters; remembers at most 1,000 names."""
        for name in names:
            if len(self._seen) >= 1000:
                return
            if (name := name[:80]) not in self._seen:
                self._seen.add(name)
                _log.warning("requests have the unknown field %s, which is ignored", ascii(name))


def check_booleans(body: Mapping[str, Any]) -> None:
    """Raises `ApiError` if a switch of a body, whatever its path, is neither true, false nor null."""
    for outer, names in {"": _BOOLEANS, **_BOOLEANS_INSIDE}.items():
        given: Any = body.get(outer) if outer else body
        for name in names if isinstance(given, dict) else ():
            checked_boolean(given, name)


def completion_request(body: Mapping[str, Any], unknown: UnknownFields, defaults: Mapping[str, Any]) -> ServedRequest:
    """Reads a body of /v1/completions; `defaults` fill missing fields. Logs unknown fields; raises `ApiError`."""
    given = _known(body, unknown, {"prompt", "echo"})
    is_echoed = given.get("echo", False)
    num_logprobs = checked_integer(given, "logprobs", 0, _MOST_LOGPROBS)
    prompts = [_with_extras(prompt, given) for prompt in _prompts(given.get("prompt"))]
    more = {"is_echoed": is_echoed, "has_prompt_logprobs": "prompt_logprobs" in given}
    if is_echoed:
        if checked_integer(given, "max_tokens", 0, MOST_TOKENS) == 0:
            given["max_tokens"], more["is_prompt_alone"] = 1, True  # the engine generates at least one token
        if num_logprobs is not None:
            given.setdefault("prompt_logprobs", num_logprobs)
    return _request(given, prompts, defaults, is_chat=False, num_top_logprobs=num_logprobs, **more)


def chat_request(
    body: Mapping[str, Any],
    unknown: UnknownFields,
    defaults: Mapping[str, Any],
    prompt: Mapping[str, Any],
    tools: ToolUse | None,
    form: MessageForm | None,
    form_name: str = "response_format",
) -> ServedRequest:
    """Reads a body of /v1/chat/completions like `completion_request`; `prompt` is the rendered conversation.

    `form` says how to read the answer. `form_name` is what the client calls `response_format`.
    """
    given = _known(body, unknown, {"messages", "max_completion_tokens", "top_logprobs", *_TOOLS, *_FORM})
    if form is not None and form.has_special_markers:
        given["skip_special_tokens"] = False  # the parsers need the markers
    is_forced = tools is not None and tools.choice == "required"
    if tools is not None and is_forced:
        if "structured_outputs" in given:
            raise ApiError("structured_outputs and a required tool call exclude each other. Pass one of them.")
        given.pop("response_format", None)  # a forced call has no content
        given["structured_outputs"] = tools.forced_form()
    num_top = checked_integer(given, "top_logprobs", 0, _MOST_LOGPROBS)
    has_logprobs = checked_boolean(given, "logprobs")
    if num_top and not has_logprobs:
        raise ApiError("top_logprobs needs logprobs. Set logprobs to true.", param="top_logprobs")
    limit = given.pop("max_completion_tokens", None)
    given["max_tokens"] = given.get("max_tokens") if limit is None else limit
    return _request(
        given, [_with_extras(prompt, given)], defaults, is_chat=True,
        num_top_logprobs=(num_top or 0) if has_logprobs else None, has_prompt_logprobs="prompt_logprobs" in given,
        message_form=form, form_name=form_name, forced_tools=tools if is_forced else None,
        left_out=() if tools is None else tools.left_out,
    )  # fmt: skip


_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
_FORM = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class Conversation(NamedTuple):
    """The messages of a chat, arguments of `LLM.chat_prompts` that render them, and the request's tools.

    `continued` is the message that the answer continues; None if the answer is a message of its own.
    """

    messages: Any
    form: dict[str, Any]
    tools: ToolUse | None
    continued: Mapping[str, Any] | None


def read_conversation(body: Mapping[str, Any]) -> Conversation:
    """Reads the messages and tools of a body; raises `ApiError` if they are invalid."""
    messages = body.get("messages")
    if messages is None:
        raise ApiError("messages is missing. Expected a list of messages with role and content.", param="messages")
    if not isinstance(messages, list) or not all(isinstance(each, Mapping) for each in messages):
        raise ApiError("messages is not a list of objects. Expected messages with role and content.", param="messages")
    _check_size("messages", messages)
    form = {name: body[name] for name in _FORM if body.get(name) is not None}
    tools, continued = tool_use(body), None
    if tools is not None and tools.choice != "none":
        form["tools"] = functions_of(body["tools"])
    if form.get("continue_final_message") is True:
        form.setdefault("add_generation_prompt", False)
        continued = messages[-1] if messages and messages[-1].get("content") else None
    variables = form.get("chat_template_kwargs", {})
    # Values that templates test. Names of the renderer's own arguments and values to loop over are refused.
    if not isinstance(variables, Mapping) or any(
        name in _RENDERING or not (value is None or isinstance(value, str | bool | int | float))
        for name, value in variables.items()
    ):
        raise ApiError(
            f"chat_template_kwargs is {shown(variables)}. Expected variables of the template with text, numbers or "
            "booleans.",
            param="chat_template_kwargs",
        )
    return Conversation(messages, form, tools, continued)


_RENDERING = frozenset({
    "self", "conversation", "conversations", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "sanitize_control_tokens",
    "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs", "tokenizer", "load_audio_from_video",
})  # fmt: skip


def supported(body: Mapping[str, Any], refused: Mapping[str, tuple[tuple[Any, ...], str]]) -> dict[str, Any]:
    """Returns the fields that are neither null nor in `refused`.

    Raises `ApiError` for values of `refused` fields that are not neutral.
    """
    for name in refused.keys() & body.keys():
        with _named(name):
            OtherField(*refused[name]).check(name, body[name])
    return {name: value for name, value in body.items() if value is not None and name not in refused}


def _known(body: Mapping[str, Any], unknown: UnknownFields, own: set[str]) -> dict[str, Any]:
    given = supported(body, {name: told for name, told in _REFUSED.items() if name not in own})
    known = _SAMPLING | _SHARED | own
    unknown.log_names(given.keys() - known - _IGNORED)
    return {name: value for name, value in given.items() if name in known}


def _request(
    given: Mapping[str, Any], prompts: list[Any], defaults: Mapping[str, Any], *, is_chat: bool, **more: Any
) -> ServedRequest:
    options = given.get("stream_options", {})
    if not isinstance(options, Mapping):
        raise ApiError(f"stream_options is {shown(options)}. Expected an object.", param="stream_options")
    n = 1 if given.get("n") is None else checked_integer(given, "n", 1, MOST_CHOICES)
    assert n is not None, "there is a default"
    if n * len(prompts) > MOST_CHOICES:
        raise ApiError(
            f"{len(prompts)} prompts with n = {n} are too many. Expected at most {MOST_CHOICES} completions."
        )
    if given.get("best_of", n) != n:
        raise ApiError("best_of is not supported. Ask for n completions and choose among them.", param="best_of")
    metrics = given.get("spec_decode_metrics")
    if metrics not in (None, "none", "summary"):
        message = f"spec_decode_metrics is {shown(metrics)}. Expected 'none' or 'summary'."
        raise ApiError(message, param="spec_decode_metrics")
    is_streamed, form = given.get("stream", False), more.get("message_form")
    more["form_name"] = (
        "structured_outputs" if "structured_outputs" in given else more.get("form_name", "response_format")
    )
    params = _params(
        given, defaults, n, more["num_top_logprobs"], max_tokens=None if is_chat else 16,
        thoughts=None if form is None else form.thoughts, form_name=more["form_name"],
    )  # fmt: skip
    return ServedRequest(
        prompts=prompts,
        params=params,
        has_max_tokens=given.get("max_tokens") is not None,
        is_chat=is_chat,
        is_streamed=is_streamed,
        has_usage=is_streamed and options.get("include_usage") is True,
        has_running_usage=is_streamed and options.get("continuous_usage_stats") is True,
        has_token_ids=given.get("return_token_ids", False),
        has_origins=is_streamed and given.get("return_token_origins", False),
        has_draft_metrics=metrics == "summary",
        may_be_learned=given.get("store") is not False and "cache_salt" not in given,
        **more,
    )


def _params(
    given: Mapping[str, Any], defaults: Mapping[str, Any], n: int, num_logprobs: int | None, *,
    max_tokens: int | None, thoughts: tuple[str, str] | None, form_name: str,
) -> SamplingParams:  # fmt: skip
    """Returns the sampling parameters of a request; the engine checks their values.

    The `max_tokens` of `defaults` bounds every request, as in vLLM's server; the argument `max_tokens` fills a missing
    one.
    """
    for name in _MOST_ITEMS:
        _check_size(name, given.get(name))
    values = {name: value for name, value in given.items() if name in _SAMPLING and name != "best_of"}
    values |= {"n": n, "logprobs": num_logprobs, "max_tokens": given.get("max_tokens", max_tokens)}
    if "prompt_logprobs" in given:
        checked_integer(given, "prompt_logprobs", 0, _MOST_LOGPROBS)
    if isinstance(values.get("logit_bias"), Mapping):
        values["logit_bias"] = {_token_id(key): bias for key, bias in values["logit_bias"].items()}
    form = structured_outputs(given.get("response_format"))
    if form is not None:
        if "structured_outputs" in values:
            raise ApiError("response_format and structured_outputs exclude each other. Pass one of them.")
        try:
            values["structured_outputs"] = StructuredOutputsParams.read(form)
        except RequestError as err:
            message = f"the schema of {form_name} cannot be followed: {err}"
            raise ApiError(message, param=form_name.partition(".")[0]) from err
    try:
        if thoughts is not None and "structured_outputs" in values:
            asked = StructuredOutputsParams.read(values["structured_outputs"])
            values["structured_outputs"] = replace(asked, reasoning=thoughts)
        params = SamplingParams(**{**defaults, **values})
        most = defaults.get("max_tokens")
        is_within = most is None or (params.max_tokens is not None and params.max_tokens <= most)
        return params if is_within else replace(params, max_tokens=most)
    except RequestError as err:
        raise ApiError(str(err), param=next((name for name in values if str(err).startswith(name)), None)) from err


def structured_outputs(form: Any, name: str = "response_format") -> dict[str, Any] | None:
    """Returns OpenAI's `response_format` as `structured_outputs`; None for free text. Raises `ApiError` if unknown."""
    kind = form.get("type") if isinstance(form, Mapping) else None
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        schema = form.get("schema")  # llama.cpp's form
        return {"json_object": True} if schema is None else {"json": schema}
    if kind == "json_schema" and isinstance(form.get("json_schema"), Mapping):
        schema = form["json_schema"].get("schema")
        if isinstance(schema, Mapping) and isinstance(form["json_schema"].get("strict"), bool | None):
            return {"json": schema}
    raise ApiError(
        f"{name} is {shown(form)}. Expected a type 'text', 'json_object', or 'json_schema' with a schema and perhaps "
        "strict, true or false. For other forms pass structured_outputs.",
        param=name.partition(".")[0],
    )


def _prompts(prompt: Any) -> list[Any]:
    if prompt is None:
        raise ApiError("prompt is missing. Expected text, token ids, or a list of these.", param="prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise ApiError(f"prompt is {shown(prompt)}. Expected text, token ids, or a list of these.", param="prompt")
    if all(type(item) is int for item in prompt):
        return [prompt]
    if not all(isinstance(item, str | list) for item in prompt):
        raise ApiError("a prompt of the list is neither text nor a list of token ids.", param="prompt")
    return list(prompt)


def _with_extras(prompt: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a prompt as a mapping, with the fields of `_OF_THE_PROMPT`."""
    if not isinstance(prompt, Mapping):
        prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    extras = {name: given[name] for name in _OF_THE_PROMPT if name in given}
    if isinstance(extras.get("prediction"), Mapping):
        extras["prediction"] = _predicted(extras["prediction"])
    return {**prompt, **extras}


def _predicted(prediction: Mapping[str, Any]) -> str:
    content = prediction.get("content")
    if isinstance(content, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content):
        content = "\n".join(part["text"] for part in content)  # as the parts of a message
    if prediction.get("type") != "content" or not isinstance(content, str):
        expected = "Expected {'type': 'content', 'content': text}."
        raise ApiError(f"prediction is {shown(prediction)}. {expected}", param="prediction")
    return content


def _check_size(name: str, value: Any) -> None:
    if isinstance(value, list | dict) and len(value) > _MOST_ITEMS[name]:
        raise ApiError(f"{name} has {len(value)} items. Expected at most {_MOST_ITEMS[name]}.", param=name)


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise ApiError(f"logit_bias has the key {shown(key)}. Expected token ids.", param="logit_bias")
    return int(key)


def token_request(body: Mapping[str, Any]) -> list[int]:
    """Returns the token ids of a body of /detokenize; raises `ApiError` if there are none."""
    with _named("tokens"):
        check_sequence("tokens", body.get("tokens"), "a list of token ids")
    _check_size("tokens", body["tokens"])
    return list(body["tokens"])


def checked_boolean(given: Mapping[str, Any], name: str) -> bool:
    """Returns a switch of the body, False if missing; raises `ApiError` if the value is no boolean."""
    value = given.get(name)
    with _named(name):
        check_boolean(name, False if value is None else value)
    return bool(value)


def checked_integer(given: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    """Returns an integer of the body, None if missing; raises `ApiError` unless the integer is in `low`..`high`."""
    value = given.get(name)
    with _named(name):
        if value is not None:
            check_integer(name, value, low, high)
    return value


@contextmanager
def _named(field: str) -> Iterator[None]:
    try:
        yield
    except RequestError as err:
        raise ApiError(str(err), param=field) from err
