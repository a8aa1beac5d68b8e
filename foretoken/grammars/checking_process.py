"""A program that compiles grammars one after the other, for `grammars.compiling`; the engine does not import it.

llguidance cannot be interrupted, and its conversion of grammars to Lark holds the interpreter's lock. The program
imports little of this package, which would take longer than most grammars.
"""

import json
from collections.abc import Callable
from typing import Any

from foretoken.files.processes import serve


def _compiler(setup: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    tokenizer = LLTokenizer(setup["tokenizer"], n_vocab=setup["vocab_size"], eos_token=setup["eos_ids"])
    limits = LLParserLimits(**setup["limits"], verbose_errors=False)

    def compiled(asked: dict[str, Any]) -> dict[str, Any]:
        grammar = _converted(asked["kind"], asked["text"], asked["options"], asked["before"])
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        return {"error": matcher.get_error()} if matcher.is_error() else {"grammar": grammar}

    return compiled


def _converted(kind: Any, text: str, options: Any, before: str) -> str:
    from llguidance import LLMatcher, grammar_from

    is_schema = kind == "json"
    grammar = str(
        LLMatcher.grammar_from_json_schema(text, overrides=options) if is_schema else grammar_from(kind, text)
    )
    if not before:
        return grammar
    (form,) = json.loads(grammar)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": before}, {**form, "name": "form"}]})


if __name__ == "__main__":
    serve(_compiler)
