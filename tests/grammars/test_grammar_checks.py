"""Forms compile in a process that is ended where they take too long, and hold up nobody meanwhile."""

import asyncio
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from held_calls import HeldCalls
from slow_grammars import BLANK, HOSTILE, LARGE, structured

from foretoken import LLM, AsyncLLM, SamplingParams
from foretoken.core.errors import RequestError
from foretoken.grammars import compiling
from foretoken.grammars.compiling import ByteCache, Form, GrammarChecks

PROMPT = "def area(self):\n    "


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("models/tinycode", max_num_seqs=2, max_model_len=96)


@pytest.fixture
def checks(llm: LLM) -> Iterator[GrammarChecks]:
    checks = GrammarChecks(llm.shared.requests._grammars._setup)
    yield checks
    checks.process.end()


def text_of(llm: LLM, form: dict[str, Any]) -> str:
    (output,) = llm.generate(PROMPT, SamplingParams(**structured(form)))
    return output.outputs[0].text


@pytest.mark.parametrize("schema", [{}, "{}"])
def test_an_empty_schema_is_any_json(llm: LLM, schema: Any) -> None:
    assert text_of(llm, {"json": schema}).lstrip()[:1] in tuple('{["-0123456789tfn')


@pytest.mark.parametrize("form", [HOSTILE, BLANK])
def test_what_takes_too_long_is_refused_and_others_compile_after_it(
    form: dict[str, Any], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "_LONGEST_S", 0.25)
    with pytest.raises(RequestError) as refused:
        text_of(llm, form)
    monkeypatch.undo()
    assert re.fullmatch(
        r"(json|grammar) of structured_outputs takes more than 0.25 s to compile\. Expected less\. "
        r"Make it smaller or simpler\.",
        str(refused.value),
    )
    assert re.fullmatch("x[ab]{3}", text_of(llm, {"regex": "x[ab]{3}"}))


def test_one_process_compiles_all_forms_until_it_is_ended(checks: GrammarChecks) -> None:
    assert checks.grammar(Form("regex", "a+"))
    first = checks.process.pid
    assert first is not None
    with pytest.raises(ValueError, match="unclosed group"):
        checks.grammar(Form("regex", "(a"))
    assert checks.grammar(Form("choice", '["a", "b"]'))
    assert checks.process.pid == first
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)  # until it has ended; its end stays to be found
    assert checks.grammar(Form("regex", "b+"))
    assert checks.process.pid != first


@pytest.mark.slow
def test_a_compiler_that_crashes_is_the_forms_fault(checks: GrammarChecks) -> None:
    """Stands for a stack that overflows in Rust: the process is killed while it compiles."""
    checks.grammar(Form("regex", "a+"))
    assert checks.process.pid is not None
    killing = threading.Timer(1, os.kill, (checks.process.pid, signal.SIGKILL))
    killing.start()
    with pytest.raises(ValueError, match="the process that compiles grammars crashed, exit status -9"):
        checks.grammar(Form("json", json.dumps(HOSTILE["json"])))
    killing.join()


def test_a_forked_child_has_a_process_of_its_own(checks: GrammarChecks) -> None:
    checks.grammar(Form("regex", "a+"))
    process = checks.process.pid
    child = os.fork()
    if not child:
        is_right = bool(checks.grammar(Form("regex", "b+"))) and checks.process.pid != process
        checks.process.end()
        os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert checks.grammar(Form("regex", "c+"))
    assert checks.process.pid == process


def test_a_call_that_compiles_holds_up_no_other(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither other calls of the `LLM`, nor the thread of an `AsyncLLM`."""
    compiling, engine = HeldCalls(monkeypatch, GrammarChecks, "grammar"), AsyncLLM(llm)
    with ThreadPoolExecutor(1) as pool, closing(engine):
        pending = pool.submit(text_of, llm, {"regex": "y[ab]{3}"})
        with compiling:
            (other,) = llm.generate(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True))
            served = asyncio.run(engine.generate(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True)))
            assert not pending.done()
        assert re.fullmatch("y[ab]{3}", pending.result())
    assert [len(output.outputs[0].token_ids) for output in (other, served)] == [4, 4]


def test_compiled_forms_are_kept_up_to_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_BYTES_KEPT", 2 * compiling._BYTES_A_GRAMMAR + 300 * 300)
    compiled, original = list[str](), GrammarChecks.grammar

    def noted(checks: GrammarChecks, form: Form) -> str:
        compiled.append(form.text)
        return original(checks, form)

    monkeypatch.setattr(GrammarChecks, "grammar", noted)
    llm = LLM("models/tinycode", max_num_seqs=2, max_model_len=96)
    for name in "abacab":
        text_of(llm, {"regex": f"{name}[xy]"})
    assert compiled == [f"{name}[xy]" for name in "abcb"], "c took the place of b, which was not used for longest"
    with pytest.raises(RequestError, match="does not compile"):
        text_of(llm, {"regex": "(a"})
    text_of(llm, {"json": LARGE["json"]})
    text_of(llm, {"regex": "b[xy]"})
    assert len(compiled) == 6, "what cannot be kept takes nobody's place"


def test_what_was_not_used_for_longest_goes_first() -> None:
    cache = ByteCache(100)
    for key in "abc":
        cache.put(key, key.upper(), 30)
    assert cache.get("a") == "A"
    cache.put("d", "D", 35)
    assert [cache.get(key) for key in "abcd"] == ["A", None, "C", "D"]
    assert cache.num_bytes == 95
    cache.put("e", "E", 70)
    assert [cache.get(key) for key in "acde"] == [None, None, None, "E"]
    assert cache.num_bytes == 70


def test_a_key_is_counted_once() -> None:
    cache = ByteCache(100)
    for value in range(10):
        cache.put("a", value, 60)
    assert (cache.get("a"), cache.num_bytes) == (9, 60)


def test_what_is_larger_than_the_cache_is_not_kept() -> None:
    cache = ByteCache(100)
    cache.put("a", 1, 60)
    cache.put("b", 2, 101)
    assert (cache.get("a"), cache.get("b"), cache.num_bytes) == (1, None, 60)
    cache.put("a", 3, 101)
    assert (cache.get("a"), cache.num_bytes) == (None, 0), "the former value is not kept either"
