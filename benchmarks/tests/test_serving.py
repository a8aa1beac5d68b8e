"""Reports of servers under load, and a soak that notices what is wrong."""

import asyncio
from typing import Any

import pytest
from server.live_server import live_server

from benchmarks.serving.report import markdown
from benchmarks.soak import Soak, faults, requests
from foretoken import LLM

pytestmark = pytest.mark.slow

PROMPTS = ["def main():\n", "class Queue:\n    def push", "import os\n", "for line in", "return {"]


def run(server: str, clients: int | None, turn: int, speed: float, texts: list[str]) -> dict[str, Any]:
    """A run of two requests."""
    return {
        "server": server, "clients": clients, "round": turn, "request_rate": 3.0, "output_throughput": speed,
        "generated_texts": texts, "completed": 1, "rejected": 1, "failed": 1, "num_prompts": 2,
        **{f"{figure}_{name}_ms": 1.0 for figure in ("median", "p99") for name in ("ttft", "itl")},
    }  # fmt: skip


def test_ratios_are_of_the_same_load_and_round() -> None:
    runs = [
        run("plain", 1, 0, 10.0, ["a", "b"]), run("ngram", 1, 0, 20.0, ["a", "c"]),
        run("ngram", 1, 1, 90.0, ["a", "b"]), run("plain", 1, 1, 30.0, ["a", "b"]),
        run("plain", None, 0, 8.0, ["a", ""]), run("ngram", None, 0, 4.0, ["a", "b"]),
    ]  # fmt: skip
    settings = {
        "dtype": "float32", "threads": 1, "max_num_seqs": 4, "max_tokens": 8, "temperature": 0.0, "rounds": 2,
    }  # fmt: skip
    machine = {"cpu": "any", "cores": 2, "instruction_sets": ["avx2"]}
    page = markdown(
        {"runs": runs, "settings": settings, "machine": machine, "model": {"of": "m"}, "date": "", "commit": ""}
    )
    rows = {tuple(cells[:2]): cells[2:] for line in page.splitlines() if len(cells := line.split(" | ")) == 13}
    assert rows["| `ngram`", "1 clients"][1] == "2.50"
    assert rows["| `ngram`", "1 clients"][-1] == "3 of 4 |"
    assert rows["| `ngram`", "open, 3.00 requests/s"][1] == "0.50"
    assert rows["| `ngram`", "open, 3.00 requests/s"][-4:] == ["1 of 2", "1", "0", "1 of 1 |"]


@pytest.mark.parametrize("is_right", [True, False])
def test_a_soak_notices_another_text(is_right: bool) -> None:
    bodies = requests(PROMPTS)
    with live_server(LLM("models/tinycode", max_num_seqs=2), names=["tinycode"]) as server:
        answers = [server.post("/v1/completions", body).json()["choices"] for body in bodies]
        expected = [[choice["text"] + ("" if is_right else "?") for choice in choices] for choices in answers]
        soak = Soak(server.url, bodies, expected)
        asyncio.run(soak.run(2, 3.0, lambda counts: None))
        server.wait_until_idle()
    assert soak.counts["whole"] + soak.counts["streamed"] > 0
    assert soak.counts["failed"] == 0
    assert (soak.counts["different"] == 0) == is_right


def test_what_is_wrong_is_said() -> None:
    fine = {"counts": {"whole": 9}, "running": 0, "waiting": 0, "mib_at_the_end": 104.0, "mib_after_a_quarter": 100.0}
    assert faults(fine) == []
    wrong = {"counts": {"failed": 1}, "first_difference": "gone", "running": 1, "mib_at_the_end": 106.0}
    assert faults({**fine, **wrong}) == [
        "requests failed or had another text, the first: gone", "requests were left running or waiting", "memory grew",
    ]  # fmt: skip
