"""Forms that take long to compile, and a gate that holds compiling up for as long as a test likes."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from foretoken.grammars.compiling import Form, GrammarChecks

MOST_S = 60  # of waiting, before a test fails

# Nearly as large as a schema may be.
_NAMES = [f"p{index}" for index in range(1_450)]
LARGE = {
    "json": {
        "type": "object",
        "properties": {name: {"type": "string"} for name in _NAMES},
        "required": _NAMES,
        "additionalProperties": False,
    }
}
# Within every limit of sizes, and compiled in minutes.
HOSTILE = {
    "json": {"type": "object", "patternProperties": {f"^a{i}.*b{i}$": {"type": "string"} for i in range(500)}}
}  # fmt: skip
# Converted to Lark in minutes, by one regular expression of Python's.
BLANK = {"grammar": "\n" * 65_536}


class Gate:
    """Compiles as ever, and then waits.

    Attributes:
        has_begun: Set when the first form is compiled.
        may_end: Compiling ends when it is set.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        original = GrammarChecks.grammar

        def held_up(checks: GrammarChecks, form: Form) -> str:
            self.has_begun.set()
            grammar = original(checks, form)
            assert self.may_end.wait(MOST_S), "others were not served meanwhile"
            return grammar

        monkeypatch.setattr(GrammarChecks, "grammar", held_up)

    def wait(self) -> None:
        """Returns once a form is compiled."""
        assert self.has_begun.wait(MOST_S)


def structured(form: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Fields of a request for a form."""
    return {"structured_outputs": form, "max_tokens": 8, "temperature": 0.0, **more}
