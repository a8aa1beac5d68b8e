"""Sampling parameters of a request and the required form of its text: checked values with vLLM's field names."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import wraps
from numbers import Real
from types import MappingProxyType
from typing import Any, NamedTuple, Self, TypeVar

from foretoken.core.checks import (
    as_python,
    check_boolean,
    check_integer,
    check_number,
    check_sequence,
    check_text,
    check_token_ids,
    shown,
)
from foretoken.core.errors import RequestError, nearest_name_hint, one_line

_LONGEST_GRAMMAR = 65_536  # characters of a schema, a grammar, or all choices together
_LONGEST_REGEX = 2_048
_LONGEST_TAG = 64
_MOST_CHOICES = 2_000  # also values of one "enum"
_DEEPEST_SCHEMA = 32  # containers within each other
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form of the whole output: exactly one of the first five fields is given.

    Attributes:
        json: A JSON schema, as a mapping or as text.
        regex: A regular expression, in the syntax of Rust's `regex`.
        choice: Texts; the output is one of them.
        grammar: A context-free grammar, in Lark's syntax or llama.cpp's GBNF.
        json_object: Whether the output is any JSON object.
        disable_any_whitespace: For `json` and `json_object`: no white space outside strings.
        whitespace_pattern: For `json` and `json_object`: a regular expression of the white space between tokens.
        reasoning: The opening and closing tag of thoughts, which may precede the structured output. With an empty
            opening tag the text always begins with thoughts, as after a prompt that opens them. None for no thoughts.

    Raises:
        RequestError: When a value has another type, is too large or nested too deeply. Compile errors come later, when
            the request is read.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    reasoning: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.json_object is not None:
            check_boolean("json_object", self.json_object)
        check_boolean("disable_any_whitespace", self.disable_any_whitespace)
        given = self._given()
        if len(given) != 1:
            found = " and ".join(given) or "none of its fields"
            raise RequestError(f"structured_outputs has {found}. Expected exactly one of {', '.join(_KINDS)}.")
        for name, longest in (
            ("regex", _LONGEST_REGEX), ("grammar", _LONGEST_GRAMMAR), ("whitespace_pattern", _LONGEST_REGEX),
        ):  # fmt: skip
            if getattr(self, name) is not None:
                _check_size(name, getattr(self, name), longest)
        if self.choice is not None:
            self._check_choice(self.choice)
        if self.json is not None:
            _check_schema(self.schema)
        if self.reasoning is not None:
            check_sequence("reasoning", self.reasoning, "two texts")
            if len(self.reasoning) != 2 or not self.reasoning[1]:
                raise RequestError(f"reasoning is {shown(self.reasoning)}. Expected two texts, the second not empty.")
            for text in self.reasoning:
                check_text("a text of reasoning", text)
                if len(text) > _LONGEST_TAG:
                    raise RequestError(
                        f"reasoning has a text of {len(text)} characters. Expected at most {_LONGEST_TAG}."
                    )

    @classmethod
    def read(cls, value: Any) -> Self:
        """Returns the parameters, which may be given as a mapping; raises `RequestError` for anything else."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise RequestError(f"structured_outputs is {shown(value)}. Expected StructuredOutputsParams or a mapping.")
        known = [field.name for field in fields(cls)]
        for name in value:
            if name not in known:
                raise RequestError(
                    f"structured_outputs has no field {shown(name)}. {nearest_name_hint(str(name), known)}"
                )
        return cls(**{name: item for name, item in value.items() if item is not None})

    @property
    def kind(self) -> str:
        """The name of the given field among the first five; an empty schema counts as given."""
        (kind,) = self._given()
        return kind

    def _given(self) -> list[str]:
        return [name for name in _KINDS if getattr(self, name) not in (None, False)]

    @property
    def schema(self) -> str:
        """The JSON schema as text; raises `RequestError` if the schema cannot be written as JSON."""
        if self.json_object:
            return '{"type": "object"}'
        if isinstance(self.json, str):
            return self.json
        if not isinstance(self.json, Mapping):
            raise RequestError(f"json is {shown(self.json)}. Expected a JSON schema, as a mapping or as text.")
        try:
            return json.dumps(self.json, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as err:
            raise RequestError(f"json cannot be written as JSON: {one_line(err)}. Expected a JSON schema.") from err

    @staticmethod
    def _check_choice(choice: Any) -> None:
        check_sequence("choice", choice, "a list of texts")
        if not 0 < len(choice) <= _MOST_CHOICES:
            raise RequestError(f"choice has {len(choice)} texts. Expected 1 to {_MOST_CHOICES}.")
        for text in choice:
            check_text("a text of choice", text)
        if not all(choice) or sum(map(len, choice)) > _LONGEST_GRAMMAR:
            raise RequestError(
                f"choice holds an empty text, or more than {_LONGEST_GRAMMAR} characters. Expected shorter texts."
            )


def _check_size(name: str, text: Any, longest: int) -> None:
    check_text(name, text)
    if not 0 < len(text) <= longest:
        raise RequestError(f"{name} has {len(text)} characters. Expected 1 to {longest}.")


def _check_schema(text: str) -> None:
    _check_size("json", text, _LONGEST_GRAMMAR)
    try:
        level: list[Any] = [json.loads(text)]
    except (ValueError, RecursionError) as err:
        raise RequestError(f"json is no JSON: {one_line(err)}. Expected a JSON schema.") from err
    if not isinstance(level[0], dict):
        raise RequestError(f"json is {shown(level[0])}. Expected a JSON schema: an object.")
    for _ in range(_DEEPEST_SCHEMA):
        level = [item for each in level for item in (each.values() if isinstance(each, dict) else each)]
        level = [item for item in level if isinstance(item, dict | list)]
        for item in level:
            if isinstance(item, list) and len(item) > _MOST_CHOICES:
                raise RequestError(f"json holds a list of {len(item)} values. Expected at most {_MOST_CHOICES}.")
    if level:
        raise RequestError(
            f"json nests more than {_DEEPEST_SCHEMA} objects and lists in each other. Expected at most that. Name "
            'inner schemas in "$defs".'
        )


class OtherField(NamedTuple):
    """A field that only vLLM has; None and `neutral` values have no effect, others get the advice `instead`."""

    neutral: tuple[Any, ...]
    instead: str

    def check(self, name: str, value: Any) -> None:
        """Raises `RequestError` for a value that is not neutral; the message has the advice."""
        is_neutral = any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.neutral)
        if value is not None and not is_neutral:
            raise RequestError(f"{name} = {shown(value)} is not supported. {self.instead}")


OTHER_FIELDS: Mapping[str, OtherField] = MappingProxyType({
    "best_of": OtherField((1,), "Ask for n completions and choose among them."),
    "use_beam_search": OtherField((False,), "There is no beam search. Leave it out."),
    "length_penalty": OtherField((1, 1.0), "There is no beam search. Leave it out."),
    "early_stopping": OtherField((False,), "There is no beam search. Leave it out."),
    "logits_processors": OtherField((), "Use logit_bias, bad_words, allowed_token_ids and penalties."),
    "detokenize": OtherField((True,), "Text is decoded when it is read. Leave it out."),
    "spaces_between_special_tokens": OtherField((True, False), "Leave it out."),
    "truncate_prompt_tokens": OtherField((), "Shorten the prompt."),
    "flat_logprobs": OtherField((False,), "logprobs is a list with a mapping for each token. Leave it out."),
    "logprob_token_ids": OtherField((), "logprobs holds the most probable tokens. Leave it out."),
    "prompt_logprob_token_ids": OtherField((), "prompt_logprobs holds the most probable tokens. Leave it out."),
    "prompt_logprob_start": OtherField((0,), "prompt_logprobs begins with the prompt. Leave it out."),
    "stream_interval": OtherField((1,), "A part is handed out after every pass. Leave it out."),
    "output_text_buffer_length": OtherField((0,), "Leave it out."),
    "watermarking": OtherField((False,), "Outputs have no watermark. Leave it out."),
    "guided_decoding": OtherField((), "Pass structured_outputs=StructuredOutputsParams(...)."),
    "routed_experts_prompt_start": OtherField((0,), "Outputs do not hold experts. Leave it out."),
    "trace_decode_token_ids": OtherField((), "Tokens are always chosen by the model. Leave it out."),
    "extra_args": OtherField(({},), "No plug-in reads them. Leave it out."),
    "skip_reading_prefix_cache": OtherField((True, False), "Set enable_prefix_caching of LLM."),
    "skip_clone": OtherField((True, False), "Leave it out."),
    "thinking_token_budget": OtherField((), "Set max_tokens."),
    "repetition_detection": OtherField((), "Use penalties or stop strings."),
})  # fmt: skip

OTHER_KEYWORDS: Mapping[str, OtherField] = MappingProxyType(
    {
        "lora_request": OtherField((), "Merge the adapter into the model first."),
        "priority": OtherField((0,), "Requests are served in the order in which they come. Leave it out."),
        "tokenization_kwargs": OtherField(({},), "Pass token ids."),
        "mm_processor_kwargs": OtherField(({},), "Prompts are text or token ids. Leave it out."),
    }
)


def without_other_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that foretoken has; raises `RequestError` for vLLM's other fields unless neutral."""
    for name, value in values.items():
        other = OTHER_FIELDS.get(name)
        if other is not None:
            other.check(name, value)
    return {name: value for name, value in values.items() if name not in OTHER_FIELDS}


def check_other_keywords(call: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raises `RequestError` for keywords of a call that vLLM lacks too, and for values that are not neutral."""
    for name, value in given.items():
        if name not in OTHER_KEYWORDS:
            raise RequestError(f"{call} has no argument {shown(name)}. {nearest_name_hint(name, known)}")
        OTHER_KEYWORDS[name].check(name, value)


GREEDY_BELOW = 1e-5  # a temperature under this is greedy decoding
_NO_SEED = -1
_LEAST_REPETITION_PENALTY = 2.0**-20  # just below 1e-6; smaller ones may make float32 logits infinite
MOST_BAD_WORD_TOKENS = 128  # of one word
MOST_BAD_TOKENS = 4096  # of all words of a request
MOST_TOKENS = 2**31 - 1  # of min_tokens and max_tokens
_Class = TypeVar("_Class", bound=type)
_Word = TypeVar("_Word", bound=Sequence[int])


def _takes_any_numbers(cls: _Class) -> _Class:
    """Wraps `__init__`: None (except for `max_tokens`) is the default, foreign numbers become Python's."""
    construct = cls.__init__  # type: ignore[misc]  # `__init__` of this class
    optional = {field.name for field in fields(cls)} - {"max_tokens"}

    @wraps(construct)
    def construct_from_any_numbers(self: Any, **values: Any) -> None:
        values = without_other_fields(values)
        given = {name: as_python(value) for name, value in values.items() if value is not None or name not in optional}
        if type(given.get("seed")) is int and given["seed"] == _NO_SEED:
            del given["seed"]
        if "structured_outputs" in given:
            given["structured_outputs"] = StructuredOutputsParams.read(values["structured_outputs"])
        construct(self, **given)

    cls.__init__ = construct_from_any_numbers  # type: ignore[misc]
    return cls


def bounded_bad_words(words: Iterable[_Word]) -> list[_Word]:
    """Returns forbidden words as token ids; raises `RequestError` at the first word beyond the limits."""
    kept: list[_Word] = []
    total = 0
    for word in words:
        kept.append(word)
        total += len(word)
        if len(word) > MOST_BAD_WORD_TOKENS:
            raise RequestError(
                f"bad_words holds a word of {len(word)} tokens. Expected at most {MOST_BAD_WORD_TOKENS}. Forbid a part "
                "of it."
            )
        if total > MOST_BAD_TOKENS:
            raise RequestError(
                f"bad_words has more than {MOST_BAD_TOKENS} tokens. Expected at most that in all words together. Pass "
                "fewer, or shorter ones."
            )
    return kept


class RequestOutputKind(Enum):
    """The form of the results that `async for` over `AsyncLLM.generate` yields."""

    CUMULATIVE = 0  # all tokens so far
    DELTA = 1  # the tokens since the last result
    FINAL_ONLY = 2  # the whole result, once


@_takes_any_numbers
@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it stops. None leaves a field at its default.

    Fields may be assigned; they are checked when a request is made. A request keeps the values that it was made with.

    Attributes:
        n: Independent completions of the prompt.
        temperature: 0 means greedy decoding.
        top_k: Keep the k most probable tokens; 0 or -1 keeps all.
        top_p: Keep the smallest set of tokens with a probability of at least p.
        min_p: Keep tokens with at least this fraction of the most probable token's probability.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or output; at least
            2**-20, just below 1e-6.
        presence_penalty: Subtracted once from the logit of every token already in the output.
        frequency_penalty: Subtracted once per occurrence in the output.
        logit_bias: Maps a token id to the number, -100..100, that is added to its logit.
        bad_words: Token sequences, or strings, that must not appear; at most 128 tokens each and 4096 together. A
            string is forbidden with and without a space before it.
        allowed_token_ids: The only token ids that may be generated, including those that end the text; None for all.
        min_tokens: End-of-sequence and stop token ids are impossible before this many output tokens.
        max_tokens: Most output tokens; None means up to the context limit.
        stop: Strings that end the text.
        stop_token_ids: Token ids that end the text.
        ignore_eos: Continues after the end-of-sequence token.
        include_stop_str_in_output: Keeps the stop string or stop token in the text.
        seed: Makes sampled text reproducible: the same seed gives the same text for every drafter, tree and batch,
            unless the setup names an acceptance rule other than `auto` and `coupled`. -1 means no seed, as in vLLM.
        logprobs: Return the log-probability of each output token and of this many most probable tokens.
        prompt_logprobs: Return the same for each prompt token but the first.
        skip_special_tokens: Leaves special tokens out of the text.
        structured_outputs: The required form of the text, as `StructuredOutputsParams` or a mapping. End-of-sequence
            tokens are possible where the form is complete, with `ignore_eos` nowhere. If nothing can follow, the text
            ends with "stop", even before `min_tokens`.
        output_kind: Form of the results of `async for` over `AsyncLLM.generate`; None for
            `RequestOutputKind.CUMULATIVE`.
            `LLM.generate` ignores it. `LLM.stream` and `AsyncLLM.submit` accept `DELTA` and None alone.

    Raises:
        RequestError: When a value has another type (booleans are no numbers) or is out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[str | Sequence[int]] = ()
    allowed_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    output_kind: RequestOutputKind | None = None

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, 0.0, 100.0)
        check_number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_number("repetition_penalty", self.repetition_penalty, _LEAST_REPETITION_PENALTY, 100.0)
        check_number("presence_penalty", self.presence_penalty, -100.0, 100.0)
        check_number("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        check_integer("n", self.n, 1, 128)
        check_integer("top_k", self.top_k, -1)
        check_integer("min_tokens", self.min_tokens, 0, MOST_TOKENS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            check_boolean(name, getattr(self, name))
        if self.output_kind is not None and not isinstance(self.output_kind, RequestOutputKind):
            raise RequestError(f"output_kind is {shown(self.output_kind)}. Expected a RequestOutputKind.")
        if self.seed is not None:
            check_integer("seed", self.seed)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 0, 1024)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, MOST_TOKENS)
            if self.min_tokens > self.max_tokens:
                raise RequestError(
                    f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}. Expected at most as many."
                )
        self._check_stops()
        self._check_bias()
        self._check_bad_words()
        self._check_allowed()

    @classmethod
    def from_optional(cls, *, logit_bias: Mapping[Any, float] | None = None, **fields: Any) -> Self:
        """Makes parameters from fields that may be None, such as those of an API request.

        Token ids of `logit_bias` may be text, as in JSON; biases are clipped to -100..100. Raises `RequestError` as the
        class does, and for keys of `logit_bias` that are no integers.
        """
        given: Any = logit_bias
        if isinstance(logit_bias, Mapping):
            given = {_token_id(key): _clipped(bias) for key, bias in logit_bias.items()}
        return cls(logit_bias=given, **fields)

    def clone(self) -> Self:
        """Returns a deep copy, checked like new parameters."""
        return replace(self)

    def _check_stops(self) -> None:
        check_sequence("stop_token_ids", self.stop_token_ids, "a list of token ids")
        check_token_ids("stop_token_ids", self.stop_token_ids)
        if not isinstance(self.stop, str):
            check_sequence("stop", self.stop, "text or a list of texts")
        for text in self.stop_strings:
            check_text("a string of stop", text)
            if not text:
                raise RequestError("stop holds an empty string. Expected non-empty strings. Leave it out.")

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(
                f"logit_bias is {shown(self.logit_bias)}. Expected a mapping from token id to a number, -100..100."
            )
        for token, bias in self.logit_bias.items():
            check_integer("a token id of logit_bias", token, 0)
            check_number(f"logit_bias[{token}]", bias, -100.0, 100.0)

    def _check_bad_words(self) -> None:
        check_sequence("bad_words", self.bad_words, "a list of texts or of lists of token ids")
        for word in self.bad_words:
            if isinstance(word, str):
                check_text("a word of bad_words", word)
            else:
                check_sequence("a word of bad_words", word, "text or a list of token ids")
                check_token_ids("bad_words", word)
            if len(word) == 0:
                raise RequestError("bad_words holds an empty word. Expected at least one token each. Leave it out.")
        bounded_bad_words(word for word in self.bad_words if not isinstance(word, str))

    def _check_allowed(self) -> None:
        if self.allowed_token_ids is None:
            return
        check_sequence("allowed_token_ids", self.allowed_token_ids, "a list of token ids")
        if len(self.allowed_token_ids) == 0:
            raise RequestError("allowed_token_ids is empty. Expected at least one token id. Leave it out to allow all.")
        check_token_ids("allowed_token_ids", self.allowed_token_ids)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        """Whether the temperature means greedy decoding."""
        return self.temperature < GREEDY_BELOW

    @property
    def inverse_temperature(self) -> float:
        """1 / temperature; 0 for greedy decoding, as decoders read it in a `TokenChoice`."""
        return 0.0 if self.is_greedy else 1 / self.temperature

    @property
    def is_plain(self) -> bool:
        """Whether temperature is all that changes the target distribution."""
        return not (
            self.has_penalties or self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.logit_bias
            or self.bad_words or self.min_tokens or self.allowed_token_ids is not None or self.structured_outputs
        )  # fmt: skip

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty reads token counts."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


def _token_id(key: Any) -> Any:
    """Returns a token id given as text; other values as they are, so that the check refuses them."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key


def _clipped(bias: Any) -> Any:
    """Returns a number clipped to -100..100; other values as they are, so that the check refuses them."""
    if not isinstance(bias, Real) or isinstance(bias, bool):
        return bias
    number = float(bias)
    return 100.0 if number > 100 else -100.0 if number < -100 else bias
