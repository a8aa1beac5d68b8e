"""The table of faults names tests that exist; and those faults that have no other place."""

import ast
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from held_calls import HeldCalls
from served_app import wait_until
from server.live_server import live_server

from foretoken import LLM
from foretoken.server import app

ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^\| (?P<fault>[^|]+) \| [^|]+ \|[^|]*\| (?P<tests>[^|]+) \|$", re.MULTILINE)
_TEST = re.compile(r"`(tests/[a-z_0-9/]+\.py)::(test_\w+)`")
ROWS = [(row["fault"], _TEST.findall(row["tests"])) for row in _ROW.finditer((ROOT / "docs/faults.md").read_text())][1:]
# Of files that others read, and of dates that people do.
_DATES = {"server/answers.py", "files/user_cache.py", "bench/serving.py"}


def test_every_row_is_read() -> None:
    assert len(ROWS) == (ROOT / "docs/faults.md").read_text().count("\n| ") - 1


@pytest.mark.parametrize(("fault", "tests"), ROWS, ids=[fault for fault, _ in ROWS])
def test_every_fault_has_tests_that_exist(fault: str, tests: list[tuple[str, str]]) -> None:
    assert tests, fault
    for path, name in tests:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}, (
            f"{path}::{name}"
        )


def test_no_duration_is_read_off_a_clock_that_may_jump() -> None:
    wall = re.compile(r"\btime\.time\(|\bdatetime\.(now|utcnow)\(")
    package = ROOT / "foretoken"
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if wall.search(path.read_text(encoding="utf-8"))
    }  # fmt: skip
    assert found == _DATES


def test_health_tells_of_an_iteration_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What never returns cannot be ended; whatever watches over the server learns of it."""
    monkeypatch.setattr(app, "_LONGEST_ITERATION_S", 0.2)
    llm = LLM("models/tinycode", max_num_seqs=1)
    with live_server(llm) as server, ThreadPoolExecutor(1) as pool:
        body = {"prompt": "def main(argv):\n    def main(", "max_tokens": 8, "temperature": 0.0}
        want, hanging = server.complete(**body), HeldCalls(monkeypatch, llm.target, "run")
        answer = pool.submit(server.complete, **body)
        with hanging:
            wait_until(lambda: server.get("/health").status_code == 503)
            assert "has not ended for" in server.get("/health/live").json()["error"]["message"]
        assert answer.result() == want
        assert server.get("/health").status_code == 200
