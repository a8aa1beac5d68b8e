"""While a form is compiled, the server serves all others."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from held_calls import HeldCalls
from server.live_server import LiveServer
from slow_grammars import HOSTILE, LARGE, structured

from foretoken.grammars import compiling

SMALL = {"json": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}}
ASK = {"prompt": "class Queue:\n    def push(self, item):\n", "max_tokens": 48, "temperature": 0.0}
COMPILING = 12  # requests at once, more than a thread pool of the event loop's has threads on a small machine


@pytest.mark.parametrize("form", [SMALL, pytest.param(LARGE, marks=pytest.mark.slow)], ids=["small", "large"])
def test_streams_and_other_requests_go_on_while_a_form_compiles(
    form: dict[str, Any], speculative: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldCalls(monkeypatch, compiling.GrammarChecks, "grammar")
    ask = {"prompt": ASK["prompt"], **structured(form)}
    with ThreadPoolExecutor(COMPILING) as pool:
        body = {**ASK, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{speculative.url}/v1/completions", json=body, timeout=60) as stream:
            lines = (line for line in stream.iter_lines() if line)
            next(lines)
            pending = [pool.submit(speculative.post, "/v1/completions", ask) for _ in range(COMPILING)]
            with held:
                assert list(lines)[-1] == "data: [DONE]"
                assert speculative.get("/health").status_code == 200
                assert speculative.get("/metrics").status_code == 200
                assert speculative.post("/v1/completions", ASK).status_code == 200
                assert not any(each.done() for each in pending)
        answers = [each.result() for each in pending]
    assert {answer.status_code for answer in answers} == {200}, answers[0].text
    assert answers[0].json()["choices"][0]["text"].lstrip().startswith("{")


def test_a_form_that_takes_too_long_is_answered_400(speculative: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_LONGEST_S", 0.25)
    answer = speculative.post("/v1/completions", {**ASK, "structured_outputs": HOSTILE})
    assert answer.status_code == 400
    assert "takes more than 0.25 s to compile" in answer.json()["error"]["message"]
    monkeypatch.undo()
    form = {"json": {"enum": ["after"]}}
    answer = speculative.post("/v1/completions", {**ASK, "structured_outputs": form})
    assert json.loads(answer.json()["choices"][0]["text"]) == "after"


@pytest.mark.slow
@pytest.mark.parametrize(
    "form",
    [
        {"choice": [f"choice number {number}" for number in range(2000)]},
        {"json": {"type": "object", "properties": {f"property_{i}": {"type": "string"} for i in range(1500)}}},
    ],
    ids=["choice", "json"],
)
def test_the_widest_forms_that_are_taken_can_be_followed(form: dict[str, Any], speculative: LiveServer) -> None:
    """They have more ways to go on than llguidance follows by itself."""
    body = {"prompt": "def main():", "max_tokens": 24, "temperature": 0.8, "seed": 1, "structured_outputs": form}
    answer = speculative.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("is_streamed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_form_that_grows_too_large_while_it_is_followed_is_answered_400(
    speculative: LiveServer, is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compiles; thousands of properties that may each come next are more than llguidance follows."""
    monkeypatch.setitem(compiling._LIMITS, "max_items_in_row", 1000)
    properties = {f"name_{is_streamed}_{i}": {"type": "integer"} for i in range(900)}
    form = {"json": {"type": "object", "properties": properties, "additionalProperties": False}}
    answer = speculative.post("/v1/completions", {**ASK, "structured_outputs": form, "stream": is_streamed})
    if is_streamed:
        assert '"code":"grammar_too_large"' in answer.text.replace(" ", "")
    else:
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "grammar_too_large"
    assert speculative.post("/v1/completions", ASK).status_code == 200
