"""From what a request asks of its output's form to the grammar state that its sequences begin with."""

from __future__ import annotations

import json
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from foretoken.core.checks import shown
from foretoken.core.errors import RequestError, one_line
from foretoken.sampling.grammar import Ends, GrammarState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.core.sampling_params import SamplingParams
    from foretoken.core.structured_outputs import StructuredOutputsParams

_GRAMMARS_KEPT = 32  # compiled ones
# Limits of llguidance's: compiling takes fractions of a second, a mask milliseconds, a grammar tens of megabytes.
_LIMITS = {"initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "max_lexer_states": 50_000}


class Grammars:
    """Compiles grammars for one target and tokenizer; llguidance is loaded when the first is asked for."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """Nothing is compiled.

        Args:
            tokenizer: The target's, or None.
            vocab_size: V of the target.
            eos_ids: Its end-of-sequence ids.
        """
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        own = getattr(tokenizer, "eos_token_id", None)
        self._eos_ids = list(eos_ids) or ([] if own is None else [int(own)])
        self._matcher = lru_cache(maxsize=_GRAMMARS_KEPT)(self._compiled)

    def state_of(self, params: SamplingParams) -> GrammarState | None:
        """The state before anything is written; None for requests that ask for no form.

        Raises:
            RequestError: When the form does not compile, matches nothing, or cannot be served here.
        """
        asked = params.structured_outputs
        if asked is None:
            return None
        kind = next(name for name in ("json", "regex", "choice", "grammar", "json_object") if getattr(asked, name))
        grammar = self._grammar(asked, kind)
        matcher = self._matcher(grammar)
        if matcher.is_error():
            raise _refused(kind, matcher.get_error())
        unwanted = [end for end in self._eos_ids if params.ignore_eos and end not in params.stop_token_ids]
        state = GrammarState(matcher.deep_copy(), vocab_size=self._vocab_size, ends=Ends(self._eos_ids, unwanted))
        if state.error is not None or state.is_over:
            reason = "it matches the empty text alone" if state.is_over else one_line(ValueError(state.error))
            raise RequestError(
                f"{kind} of structured_outputs cannot be followed: {reason}. Expected a form that text of this model's "
                "tokens can have."
            )
        return state

    def _grammar(self, asked: StructuredOutputsParams, kind: str) -> str:
        """What is asked for in llguidance's own form."""
        library = self._library
        try:
            if kind in ("json", "json_object"):
                options = {"whitespace_flexible": not asked.disable_any_whitespace}
                if asked.whitespace_pattern is not None:
                    options["whitespace_pattern"] = asked.whitespace_pattern  # type: ignore[assignment]  # of any type
                return str(library.LLMatcher.grammar_from_json_schema(asked.schema, overrides=options))
            if kind == "choice":
                return str(library.grammar_from("choice", json.dumps(list(asked.choice or ()))))
            return str(library.grammar_from(kind, getattr(asked, kind)))
        except ValueError as err:
            raise _refused(kind, str(err)) from err

    def _compiled(self, grammar: str) -> Any:
        """A matcher at the beginning of a grammar, in its error state where that does not compile."""
        library = self._library
        limits = library.LLParserLimits(**_LIMITS, verbose_errors=False)
        return library.LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)

    @cached_property
    def _library(self) -> Any:
        """The package.

        Raises:
            RequestError: When it is not installed.
        """
        try:
            import llguidance
        except ImportError as err:
            raise RequestError(
                "structured_outputs needs the package llguidance, which is not installed. Install foretoken[serve]."
            ) from err
        return llguidance

    @cached_property
    def _vocabulary(self) -> Any:
        """The tokens' bytes.

        Raises:
            RequestError: When the tokenizer does not tell them, or no token ends a text.
        """
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
        try:
            return from_tokenizer(self._tokenizer, n_vocab=size, eos_token=self._eos_ids)
        except Exception as err:  # a tokenizer of any make
            raise RequestError(
                f"structured_outputs cannot read the tokenizer: {one_line(err)}. Expected a fast tokenizer of "
                "transformers."
            ) from err


def _refused(kind: str, reason: str) -> RequestError:
    """The error for a form that does not compile."""
    return RequestError(
        f"{kind} of structured_outputs does not compile: {one_line(ValueError(reason))}. Expected a JSON schema, "
        "regular expression or grammar within what llguidance supports."
    )
