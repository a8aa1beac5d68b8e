"""A few cases of every target in every test run, and proof that the harness sees what it is there to see.

Slow because every target has cases in processes with engines of their own.
"""

import importlib
import os
import time
from typing import Any

import pytest
from limits import limit_memory

from foretoken.core.errors import ConfigError, ForetokenError
from foretoken.runner.runner import Runner
from fuzz.command import described
from fuzz.worker import Case, FindingError, Report, Settings, check_refusal, run_cases


def findings(name: str, numbers: range, settings: Settings) -> list[str]:
    """What some cases of a target found, with the commands that show it again."""
    run = importlib.import_module(f"fuzz.{name}").run
    reports = list(run_cases(run, name, numbers, settings))
    assert len(reports) == len(numbers)
    return [described(report, name, settings) for report in reports if report.finding is not None]


def slow(*values: Any) -> Any:
    """A slice of a target that has another one by default."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "numbers", "settings"),
    [
        ("requests", range(3), Settings(seed=2026)),
        slow("requests", range(3, 7), Settings(seed=2026)),
        slow("requests", range(5), Settings(seed=2027, dtype="float32")),
        slow("requests", range(2), Settings(seed=2028, runner="generic", dtype="float64")),
        ("threads", range(2), Settings(seed=2026)),
        slow("threads", range(2, 4), Settings(seed=2026)),
        ("models", range(16), Settings(seed=2026)),
        ("checkpoints", range(12), Settings(seed=2026)),
        ("caches", range(4), Settings(seed=4)),
        ("bodies", range(1), Settings(seed=2026)),
        slow("bodies", range(1, 4), Settings(seed=2026)),
    ],
    ids=lambda value: value.dtype if isinstance(value, Settings) else str(value),
)
def test_a_slice_of_every_target(name: str, numbers: range, settings: Settings) -> None:
    assert findings(name, numbers, settings) == []


@pytest.mark.parametrize(("name", "numbers"), [("requests", range(8)), slow("threads", range(8))])
def test_wrong_texts_are_found(name: str, numbers: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that forgets to move the KV rows of accepted nodes: its texts are wrong and nothing raises."""
    monkeypatch.setattr(Runner, "commit", lambda *_: None)
    found = findings(name, numbers, Settings(seed=2026))  # not in every case: drafts have to be accepted
    assert found
    assert all("instead of" in finding for finding in found)
    assert all(f"python -m tests.fuzz {name} --seed 2026 --only " in finding for finding in found)
    assert all("--runner lean-native" in finding for finding in found)


def misbehave(case: Case) -> None:
    """What a case may do, by its number."""
    case.note(f"case {case.number}")
    match case.number:
        case 1:
            os.abort()
        case 2:
            time.sleep(60)
        case 3:
            raise ValueError("raw")
        case 4:
            raise FindingError("wrong text")
        case 5:
            os._exit(3)
        case 6:
            with limit_memory(64 << 20):
                bytearray(8 << 30)  # more than a large process may have free in its heap
        case 7:
            case.count("done")


def test_what_goes_wrong_is_found_and_the_rest_goes_on() -> None:
    reports = list(run_cases(misbehave, "misbehaviour", range(8), Settings(limit_s=1.0)))
    assert [report.number for report in reports] == list(range(8))
    assert reports[0] == Report(0, None, "", 1, {})
    assert reports[7].counts == {"done": 1}
    expected = {1: "SIGABRT", 2: "no answer within 1 s", 3: "ValueError: raw", 4: "wrong text", 5: "exit code 3"}
    for number, text in {**expected, 6: "MemoryError"}.items():
        assert text in str(reports[number].finding)
        assert reports[number].doing == f"case {number}"
    for number in (1, 2):
        assert "in misbehave" in str(reports[number].finding), "where it stood"


def test_a_case_is_the_same_alone() -> None:
    def draw(case: Case) -> None:
        raise FindingError(str(case.rng.random()))

    together = [report.finding for report in run_cases(draw, "draw", range(3))]
    assert [next(run_cases(draw, "draw", [number])).finding for number in range(3)] == together
    assert len(set(together)) == 3


@pytest.mark.parametrize("message", ["", "two\nlines", "x" * 1000, "half a character \ud800"])
def test_bad_messages_are_found(message: str) -> None:
    check_refusal(ConfigError("n is 0. Expected at least 1."))
    with pytest.raises(FindingError):
        check_refusal(ForetokenError(message))
