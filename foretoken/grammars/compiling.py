"""Compiles the output form of a request to the grammar state that its sequences start from."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from foretoken.core.checks import shown
from foretoken.core.errors import FormError, RequestError, foreign_errors_as, one_line
from foretoken.files.processes import ForkLock, HelperProcess, TooSlow
from foretoken.grammars import checking_process
from foretoken.sampling.node_scores import Ends, GrammarState

if TYPE_CHECKING:
    from foretoken.core.sampling_params import SamplingParams, StructuredOutputsParams

_LONGEST_S = 5.0  # to compile one grammar; a choice: a JSON schema takes milliseconds, a hostile one minutes


class Form(NamedTuple):
    """The output form of a request.

    Attributes:
        kind: "json", "regex", "choice" or "grammar", as llguidance names them.
        text: The schema, expression, list of choices as JSON, or grammar.
        options: Of a schema, as JSON.
        before: What may come before the form, as the beginning of a rule in Lark's syntax.
    """

    kind: str
    text: str
    options: str = "{}"
    before: str = ""


class GrammarChecks:
    """Compiles grammars in another process. For one thread at a time; `process`: the other process."""

    def __init__(self, setup: Callable[[], Mapping[str, Any]]) -> None:
        """Starts nothing yet.

        `setup` returns the input of the process: `tokenizer`, as JSON of tokenizers, `vocab_size`, `eos_ids` and
        `limits`, of llguidance's `LLParserLimits`.
        """
        advice = "Leave structured_outputs out"
        self.process = HelperProcess(checking_process.__file__, "compiles grammars", advice, setup)

    def grammar(self, form: Form) -> str:
        """Returns a form in llguidance's own syntax, after it was compiled once; raises as `HelperProcess.ask` does."""
        asked = json.dumps({**form._asdict(), "options": json.loads(form.options)})
        return str(self.process.ask(asked, _LONGEST_S)["grammar"])


class ByteCache:
    """Values by key, least recently used values dropped first; `num_bytes` of all together. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        """Makes an empty cache of at most `most_bytes`; a larger value is not kept."""
        self.num_bytes = 0
        self._most_bytes = most_bytes
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()  # values, and their bytes
        self._lock = ForkLock()

    def get(self, key: Hashable) -> Any:
        """Returns the value of a key, or None, and marks it as used."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: Hashable, value: Any, num_bytes: int) -> None:
        """Stores a value, and drops the least recently used values beyond the limit."""
        with self._lock:
            self.num_bytes -= self._entries.pop(key, (None, 0))[1]
            if num_bytes > self._most_bytes:
                return
            self._entries[key] = value, num_bytes
            self.num_bytes += num_bytes
            while self.num_bytes > self._most_bytes:
                self.num_bytes -= self._entries.popitem(last=False)[1][1]


# A compiled grammar takes up to 300 bytes per character (measured), and a few hundred kilobytes at least.
_BYTES_KEPT, _BYTES_A_CHARACTER, _BYTES_A_GRAMMAR = 512 * 2**20, 300, 2 * 2**20
# Limits of llguidance's lexers: a mask takes milliseconds to a few seconds. Compiling has no limit of its own.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "max_lexer_states": 50_000, "max_items_in_row": 16_384,
}  # fmt: skip


class Grammars:
    """Compiles grammars for one target and tokenizer. Thread-safe; llguidance is loaded for the first grammar.

    Another process compiles each grammar first, within a time limit. Compiling it here then takes as long, without the
    interpreter's lock.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        own = getattr(tokenizer, "eos_token_id", None)
        self._eos_ids = list(eos_ids) or ([] if own is None else [int(own)])
        self._matchers = ByteCache(_BYTES_KEPT)
        self._checks, self._checking = GrammarChecks(self._setup), ForkLock()

    def state_of(self, params: SamplingParams) -> GrammarState | None:
        """Returns the state before the first output token; None for requests without a form.

        Raises `RequestError` when the form does not compile, matches nothing, or is not supported here.
        """
        asked = params.structured_outputs
        if asked is None:
            return None
        kind = asked.kind
        form = _form(asked, kind)._replace(before="" if asked.reasoning is None else self._thoughts(*asked.reasoning))
        matcher = self._matcher(form, kind)
        unwanted = [end for end in self._eos_ids if params.ignore_eos and end not in params.stop_token_ids]
        state = GrammarState(matcher.deep_copy(), vocab_size=self._vocab_size, ends=Ends(self._eos_ids, unwanted))
        if state.error is not None or state.is_over:
            reason = "it matches the empty text alone" if state.is_over else one_line(ValueError(state.error))
            advice = "Expected a form that text of this model's tokens can have."
            raise FormError(kind, f"cannot be followed: {reason}", advice)
        return state

    def _thoughts(self, begin: str, end: str) -> str:
        """Returns what may precede a form. A tag is spelled out, or a token of its own, which matches no text."""
        known = {str(token): id_ for id_, token in getattr(self._tokenizer, "added_tokens_decoder", {}).items()}
        first = f"(<[{known[begin]}]> | {json.dumps(begin)})" if begin in known else json.dumps(begin)
        tag = re.escape(end).replace("/", r"\/")
        token = f"INNER <[{known[end]}]> | " if end in known else ""
        inner = f"INNER: /(?s:.*)/ & ~/(?s:.*){tag}(?s:.*)/\n" if token else ""
        start = f"({first} thoughts SPACE)?" if begin else "thoughts SPACE"
        spelled = f"text[suffix={json.dumps(end)}]: /(?s:.*)/\n{inner}"
        return f"start: {start} @form\nthoughts: {token}text\n{spelled}SPACE: /[ \\n]{{0,4}}/\n"

    def _matcher(self, form: Form, kind: str) -> Any:
        """Returns a matcher at the beginning of a form; callers must not advance it. One thread at a time compiles."""
        if (known := self._matchers.get(form)) is not None:
            return known
        vocabulary = self._vocabulary
        with self._checking:
            if (known := self._matchers.get(form)) is not None:  # another thread was faster
                return known
            try:
                grammar = self._checks.grammar(form)
            except TooSlow as err:
                fault = f"takes more than {err} to compile"
                raise FormError(kind, fault, "Expected less. Make it smaller or simpler.") from err
            except ValueError as err:
                raise _refused(kind, str(err), form) from err
            limits = self._library.LLParserLimits(**_LIMITS, verbose_errors=False)
            matcher = self._library.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
            if matcher.is_error():
                raise _refused(kind, matcher.get_error(), form)
            self._matchers.put(form, matcher, _BYTES_A_GRAMMAR + _BYTES_A_CHARACTER * len(grammar))
        return matcher

    def _setup(self) -> dict[str, Any]:
        tokenizer = copy(self._tokenizer.backend_tokenizer)  # as `from_tokenizer` does
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return {
            "tokenizer": tokenizer.to_str(), "vocab_size": self._num_ids, "eos_ids": self._eos_ids, "limits": _LIMITS,
        }  # fmt: skip

    @property
    def _num_ids(self) -> int:
        return max(self._vocab_size, len(self._tokenizer))

    @cached_property
    def _library(self) -> Any:
        try:
            import llguidance
        except ImportError as err:
            raise RequestError(
                "structured_outputs needs the package llguidance, which is not installed. Run in foretoken's "
                "repository: pip install '.[serve]'."
            ) from err
        return llguidance

    @cached_property
    def _vocabulary(self) -> Any:
        if not hasattr(self._tokenizer, "backend_tokenizer"):
            raise RequestError(
                f"structured_outputs needs to know the text of every token, and the tokenizer is "
                f"{shown(self._tokenizer)}. Expected a fast tokenizer of transformers."
            )
        if not self._eos_ids:
            raise RequestError(
                "structured_outputs needs a token that ends a text, and neither the model nor its tokenizer has one. "
                "Set eos_token_id in the model's generation config."
            )
        from llguidance.hf import from_tokenizer

        with foreign_errors_as(
            RequestError,
            lambda err: (
                f"structured_outputs cannot read the tokenizer: {one_line(err)}. Expected a fast tokenizer of "
                "transformers."
            ),
        ):
            return from_tokenizer(self._tokenizer, n_vocab=self._num_ids, eos_token=self._eos_ids)


def _form(asked: StructuredOutputsParams, kind: str) -> Form:
    if kind not in ("json", "json_object"):
        return Form(kind, json.dumps(list(asked.choice or ())) if kind == "choice" else getattr(asked, kind))
    options: dict[str, Any] = {"whitespace_flexible": not asked.disable_any_whitespace}
    if asked.whitespace_pattern is not None:
        options["whitespace_pattern"] = asked.whitespace_pattern
    return Form("json", _without_unknown_formats(asked.schema), json.dumps(options))


def _refused(kind: str, reason: str, form: Form) -> FormError:
    place = _refused_place(json.loads(form.text), reason) if form.kind == "json" else ()
    return FormError(
        kind,
        f"does not compile: {one_line(ValueError(reason))}",
        "Expected a JSON schema, regular expression or grammar within what llguidance supports.",
        place,
    )


# Keywords whose value is a schema, a list of schemas, or schemas by name. The value of any other keyword is data.
_ONE = frozenset({
    "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
})  # fmt: skip
_LIST = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
# Of llguidance 1.9; a tuple, since any value may be compared with it.
_KNOWN_FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")


def _subschemas(schema: Any, *place: str) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Yields every schema inside a schema with its path in it, the schema itself first.

    `const`, `enum`, `default` and other data are not searched. `place` is the beginning of each path.
    """
    if not isinstance(schema, Mapping):
        return
    yield place, schema
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            for name, each in value.items():
                yield from _subschemas(each, *place, key, str(name))
        elif key in _LIST and isinstance(value, list):
            for at, each in enumerate(value):
                yield from _subschemas(each, *place, key, str(at))
        elif key in _ONE:
            yield from _subschemas(value, *place, key)


def _without_unknown_formats(text: str) -> str:
    """Returns a schema without `format` keywords that llguidance would refuse; `format` is an annotation."""
    schema = json.loads(text)
    for _, each in _subschemas(schema):
        if isinstance(each, dict) and each.get("format", "date") not in _KNOWN_FORMATS:
            del each["format"]
    return json.dumps(schema)


def _refused_place(schema: Any, reason: str) -> tuple[str, ...]:
    """Returns the place of the keyword that a message of llguidance speaks of; () if no keyword fits the message."""
    for place, each in _subschemas(schema):
        for key, value in each.items():
            texts = value if key == "patternProperties" else [value] if key in _QUOTED else []
            if f'"{key}"' in reason or (
                isinstance(texts, list | Mapping) and any(_is_in(text, reason) for text in texts)
            ):
                return (*place, key)
    return ()


_QUOTED = ("$ref", "$schema", "pattern", "type")  # keywords whose value messages quote


def _is_in(text: Any, reason: str) -> bool:
    marked = f"{reason}\n"
    return isinstance(text, str) and any(
        f"{before}{text.lstrip('#')}{after}" in marked for before, after in (("'", "'"), (": ", "\n"), ("\n    ", "\n"))
    )
