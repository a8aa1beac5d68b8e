"""A program that compiles grammars one after the other, for `grammars.checks`; the engine does not import it.

Each grammar is a line of JSON in and a line out. The program ends itself when a grammar takes too long. A thread could
not end another thread: llguidance cannot be interrupted, and its conversion of grammars to Lark holds the interpreter's
lock. The program imports nothing of this package, which would take longer than most grammars.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from typing import Any

READY = b"ready\n"
TOOK_TOO_LONG = 1  # exit status


def serve() -> None:
    """Answers grammars until the input ends; the first line has the tokenizer and the limits."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    setup = json.loads(sys.stdin.buffer.readline())
    tokenizer = LLTokenizer(setup["tokenizer"], n_vocab=setup["vocab_size"], eos_token=setup["eos_ids"])
    limits = LLParserLimits(**setup["limits"], verbose_errors=False)
    _write_line(READY)
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        faulthandler.dump_traceback_later(asked["longest_s"], exit=True)  # by a thread that needs no lock
        try:
            grammar = _converted(asked["kind"], asked["text"], asked["options"], asked["before"])
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
            answer = {"error": matcher.get_error()} if matcher.is_error() else {"grammar": grammar}
        except BaseException as err:  # noqa: BLE001 - among them the panics of Rust
            answer = {"error": str(err)}
        faulthandler.cancel_dump_traceback_later()
        _write_line(json.dumps(answer).encode() + b"\n")


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


def _write_line(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve()
