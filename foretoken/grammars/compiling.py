"""Compiles the output form of a request to the grammar state that its sequences start from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections import OrderedDict
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from foretoken.core.checks import shown
from foretoken.core.errors import ForetokenError, RequestError, foreign_errors_as, one_line, undone_on_error
from foretoken.files.processes import ForkLock
from foretoken.grammars import checking_process
from foretoken.sampling.grammar import Ends, GrammarState

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from foretoken.core.sampling_params import SamplingParams
    from foretoken.core.structured_outputs import StructuredOutputsParams

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


class TooSlow(Exception):
    """Raised when a grammar takes too long to compile; the text is the limit."""


class GrammarChecks:
    """A process that compiles grammars: started for the first grammar, restarted after it ended. For one thread."""

    def __init__(self, setup: Callable[[], Mapping[str, Any]]) -> None:
        """Starts nothing yet.

        `setup` returns the input of the process: `tokenizer`, as JSON of tokenizers, `vocab_size`, `eos_ids` and
        `limits`, of llguidance's `LLParserLimits`.
        """
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None
        self._owner = os.getpid()

    def grammar(self, form: Form) -> str:
        """Returns a form in llguidance's own syntax, after it was compiled once.

        Raises `ValueError` for a form that does not compile, `TooSlow` if compiling takes too long, and
        `ForetokenError` if the process cannot be started.
        """
        process = self._running()
        asked = {**form._asdict(), "options": json.loads(form.options), "longest_s": _LONGEST_S}
        with undone_on_error(self._end):  # after an interrupt its answer would be taken for that of the next grammar
            answer = _exchange(process, asked)
        if not answer:
            status = process.wait()
            self._end()
            if status == checking_process.TOOK_TOO_LONG:
                raise TooSlow(f"{_LONGEST_S:g} s")
            raise ValueError(f"the compiler crashes, exit status {status}")
        told = json.loads(answer)
        if "error" in told:
            raise ValueError(told["error"])
        return str(told["grammar"])

    def _running(self) -> subprocess.Popen[bytes]:
        """Returns the process; a forked child gets a process of its own."""
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        self._end()
        setup = self._setup()
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", checking_process.__file__],  # -P: not in the folder of its file
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process
            )
        except OSError as err:
            raise ForetokenError(
                f"the process that compiles grammars cannot be started: {one_line(err)}. Expected {sys.executable} to "
                "run. Leave structured_outputs out, or let this process start others."
            ) from err
        self._process, self._owner = process, os.getpid()
        self._end = weakref.finalize(self, _ended, process, self._owner)
        if _exchange(process, setup) != checking_process.READY:
            self._end()
            raise ForetokenError(
                f"the process that compiles grammars ended with exit status {process.returncode} before the first. "
                "Expected llguidance to load there. Leave structured_outputs out, or run in foretoken's "
                "repository: pip install --force-reinstall '.[serve]'."
            )
        return process


def _exchange(process: subprocess.Popen[bytes], line: Mapping[str, Any]) -> bytes:
    assert process.stdin is not None, "it has pipes"
    assert process.stdout is not None, "it has pipes"
    try:
        process.stdin.write(json.dumps(line).encode() + b"\n")
        process.stdin.flush()
    except OSError:
        return b""
    return process.stdout.readline()


def _ended(process: subprocess.Popen[bytes], owner: int) -> None:
    """Ends the process, unless it belongs to the process that this one was forked from."""
    if owner == os.getpid():
        process.kill()
        process.communicate()


T = TypeVar("T")


class _Entry(NamedTuple, Generic[T]):
    value: T
    num_bytes: int


class ByteCache(Generic[T]):
    """Values by key, least recently used values dropped first; `num_bytes` of all together. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        """Makes an empty cache of at most `most_bytes`; a larger value is not kept."""
        self.num_bytes = 0
        self._most_bytes = most_bytes
        self._entries: OrderedDict[Hashable, _Entry[T]] = OrderedDict()
        self._lock = ForkLock()

    def get(self, key: Hashable) -> T | None:
        """Returns the value of a key, or None, and marks it as used."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key].value

    def put(self, key: Hashable, value: T, num_bytes: int) -> None:
        """Stores a value, and drops the least recently used values beyond the limit."""
        with self._lock:
            if key in self._entries:
                self.num_bytes -= self._entries.pop(key).num_bytes
            if num_bytes > self._most_bytes:
                return
            self._entries[key] = _Entry(value, num_bytes)
            self.num_bytes += num_bytes
            while self.num_bytes > self._most_bytes:
                self.num_bytes -= self._entries.popitem(last=False)[1].num_bytes


# A compiled grammar takes up to 300 bytes per character (measured), and a few hundred kilobytes at least.
_BYTES_KEPT, _BYTES_A_CHARACTER, _BYTES_A_GRAMMAR = 512 * 2**20, 300, 2 * 2**20
# Limits of llguidance's lexers: a mask takes milliseconds to a few seconds. Compiling has no limit of its own.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 50_000,
    "max_items_in_row": 16_384,
}


class Grammars:
    """Compiles grammars for one target and tokenizer. Thread-safe; llguidance is loaded for the first grammar.

    Another process compiles each grammar first, within a time limit. Compiling it here then takes as long, without the
    interpreter's lock.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        own = getattr(tokenizer, "eos_token_id", None)
        self._eos_ids = list(eos_ids) or ([] if own is None else [int(own)])
        self._matchers = ByteCache[Any](_BYTES_KEPT)
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
            raise RequestError(
                f"{kind} of structured_outputs cannot be followed: {reason}. Expected a form that text of this model's "
                "tokens can have."
            )
        return state

    def _thoughts(self, begin: str, end: str) -> str:
        tokens = getattr(self._tokenizer, "added_tokens_decoder", {})
        special = {str(token): id_ for id_, token in tokens.items() if token.special}
        first, last = (f"<[{special[tag]}]>" if tag in special else json.dumps(tag) for tag in (begin, end))
        # No text holds a special token; any other tag ends the shortest text that it can end.
        thoughts = f"TEXT {last}\nTEXT: /(?s:.*)/" if end in special else f"text\ntext[suffix={last}]: /(?s:.*)/"
        start = f"({first} thoughts SPACE)?" if begin else "thoughts SPACE"
        return f"start: {start} @form\nthoughts: {thoughts}\nSPACE: /[ \\n]{{0,4}}/\n"

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
                raise RequestError(
                    f"{kind} of structured_outputs takes more than {err} to compile. Expected less. Make it smaller or "
                    "simpler."
                ) from err
            except ValueError as err:
                raise _refused(kind, str(err)) from err
            limits = self._library.LLParserLimits(**_LIMITS, verbose_errors=False)
            matcher = self._library.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
            if matcher.is_error():
                raise _refused(kind, matcher.get_error())
            self._matchers.put(form, matcher, _BYTES_A_GRAMMAR + _BYTES_A_CHARACTER * len(grammar))
        return matcher

    def _setup(self) -> dict[str, Any]:
        tokenizer = copy(self._tokenizer.backend_tokenizer)  # as `from_tokenizer` does
        tokenizer.no_padding()
        tokenizer.no_truncation()
        size = max(self._vocab_size, len(self._tokenizer))
        return {"tokenizer": tokenizer.to_str(), "vocab_size": size, "eos_ids": self._eos_ids, "limits": _LIMITS}

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

        size = max(self._vocab_size, len(self._tokenizer))
        with foreign_errors_as(
            RequestError,
            lambda err: (
                f"structured_outputs cannot read the tokenizer: {one_line(err)}. Expected a fast tokenizer of "
                "transformers."
            ),
        ):
            return from_tokenizer(self._tokenizer, n_vocab=size, eos_token=self._eos_ids)


def _form(asked: StructuredOutputsParams, kind: str) -> Form:
    if kind not in ("json", "json_object"):
        return Form(kind, json.dumps(list(asked.choice or ())) if kind == "choice" else getattr(asked, kind))
    options: dict[str, Any] = {"whitespace_flexible": not asked.disable_any_whitespace}
    if asked.whitespace_pattern is not None:
        options["whitespace_pattern"] = asked.whitespace_pattern
    return Form("json", asked.schema, json.dumps(options))


def _refused(kind: str, reason: str) -> RequestError:
    return RequestError(
        f"{kind} of structured_outputs does not compile: {one_line(ValueError(reason))}. Expected a JSON schema, "
        "regular expression or grammar within what llguidance supports."
    )
