"""The GPU suite: a rehearsal of it all, processes that break down, known figures.

Slow because the rehearsal runs every section in processes of its own, kernels in the interpreter.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu_suite import lossless, twin
from benchmarks.gpu_suite.__main__ import chosen_sections, limits, main
from benchmarks.gpu_suite.goals import Ceilings, is_proven, proofs, speeds
from benchmarks.gpu_suite.processes import SectionRun
from benchmarks.gpu_suite.report import as_markdown
from benchmarks.gpu_suite.scripted import prompt_ids, scripted, successor_model, text_after, toy
from benchmarks.gpu_suite.step import PATTERNS, covered
from benchmarks.gpu_suite.work import SECTIONS, Deadline, Section, Work
from foretoken import LLM, SamplingParams
from foretoken.bench.compare import Measurement
from foretoken.bench.verify import Comparison
from foretoken.bench.workload import Workload
from foretoken.entrypoints.config import Setup

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def test_rehearsal(tmp_path: Path) -> None:
    """Everything runs at toy sizes, is proven, and says on every line that it is no result."""
    pytest.importorskip("triton")
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu_suite",
        "--out",
        str(tmp_path / "gpu"),
        "--rehearse",
        "--seed",
        "3",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert record["rehearsal"]
    assert list(record["sections"]) == [section.name for section in SECTIONS]
    for name, section in record["sections"].items():
        assert section["rehearsal"], name
        assert section["errors"] == [], name
        assert section["status"] == "complete", name
        assert all(row["rehearsal"] for rows in section["tables"].values() for row in rows), name
    tables = {key: rows for section in record["sections"].values() for key, rows in section["tables"].items()}
    assert {kernel for row in tables["attention"] for kernel in row["kernels"]} == {
        "mask-free", "sdpa", "sdpa-packed",
    }  # fmt: skip
    assert all("median" in cell for row in tables["attention"] for cell in row["kernels"].values())
    assert {row["pattern"] for row in tables["efficiency"]} == {"plain", *PATTERNS}
    assert all(row["bugs"] == 0 for row in tables["setups"])
    assert [(row["setup"], row["temperature"]) for row in tables["methods"]] == [
        (method, temperature) for temperature in (0.0, 0.8)
        for method in (
            "plain", "ngram", "draft_model", "eagle3", "eagle", "hass", "falcon", "hydra", "mlp_speculator", "medusa",
        )
    ]  # fmt: skip
    # What is drafted depends on times, and so do widths of passes on a decoder that is not exact.
    assert all(row["identical"] + row["near_ties"] == row["prompts"] == 1 for row in tables["methods"])
    report = (tmp_path / "gpu.md").read_text()
    headings = [line for line in report.splitlines() if line.startswith("#")]
    assert all("rehearsal" in line.lower() for line in headings)
    assert len(headings) == 13, "title, goals, ten tables and what each section did"


def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["--out", str(tmp_path / "gpu")]) == 2
    assert "no GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_drafter_that_stops_the_engine_stops_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its neighbours are checked without it."""
    rows: list[tuple[str, Any]] = []

    def verify(model: Any, tokenizer: Any, setups: Any, workload: Any, *, batch_sizes: Any) -> list[list[Comparison]]:
        if any(setup.name == "bad" for setup in setups):
            raise RuntimeError("tensors on two devices\nand more")
        return [
            [Comparison(
                setup=setup.name, runner="lean", runner_choice="lean is used: it was asked for",
                temperature=temperature, batch_size=batch_sizes[0], prompt=0, num_tokens=6, mean_acceptance_length=1.0,
                divergence=None, gap=None, verdict="identical",
            )]
            for setup in setups for temperature in workload.temperatures
        ]  # fmt: skip

    monkeypatch.setattr(lossless, "verify_setups", verify)
    work = Work(device=CPU, is_rehearsal=True, seed=1, emit=lambda table, row: rows.append((table, row)))
    model = SimpleNamespace(dtype=torch.float32)
    lossless._check(work, model, None, [Setup("good", {}), Setup("bad", {}), Setup("better", {})], 2, 6)
    assert [row["setup"] for table, row in rows if table == "setups"] == ["good"] * 2 + ["better"] * 2
    assert [row for table, row in rows if table == "broken"] == [
        {"setup": "bad", "batch": 2, "failure": "RuntimeError: tensors on two devices"}
    ]


def measurement(setup: str, temperature: float, **more: Any) -> Measurement:
    return Measurement(setup, temperature, "lean", "lean is used: it was asked for", **more)


class Engines:
    """Stands in for `SetupEngines`: every batch takes a second of a clock of its own."""

    def __init__(self, clock: list[float], setups: Sequence[Setup], num_prompts: int) -> None:
        self._clock = clock
        self.names = ["plain", *(setup.name for setup in setups)]
        self.workload = Workload(prompts=["1 2"] * num_prompts)

    def empty(self, name: str, temperature: float) -> Measurement:
        return measurement(name, temperature)

    def warm_up(self, temperature: float) -> None:
        self._clock[0] += 5.0

    def measure(self, name: str, temperature: float, batch: Sequence[int]) -> Measurement:
        self._clock[0] += 1.0
        return measurement(name, temperature, seconds=[1.0], tokens=[6], texts=[[1, 2, 3]])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


# The warm-up takes 7 s, then each temperature 5 s and 2 s a prompt.
@pytest.mark.parametrize(("seconds", "prompts"), [(100.0, [6, 6]), (24.0, [2, 2]), (1.0, [1, 1])])
def test_the_cost_twin_stops_between_prompts(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, seconds: float, prompts: list[int]
) -> None:
    """Both temperatures get some; what is left out is said."""
    rows: list[tuple[str, Any]] = []
    work = Work(
        device=CPU, is_rehearsal=True, seed=1, deadline=Deadline(seconds),
        emit=lambda table, row: rows.append((table, row)),
    )  # fmt: skip
    setups = [Setup("good", {})]
    monkeypatch.setattr(twin, "SetupEngines", lambda *_, **__: Engines(clock, setups, 6))
    model: Any = SimpleNamespace(dtype=torch.float32)
    workload = Workload(prompts=["1 2"] * 6, temperatures=(0.0, 0.8))
    twin.measure(work, model, lambda text: {"input_ids": [1, 2]}, setups, workload, "lean")
    found = [(row["setup"], row["prompts"], row["identical"]) for table, row in rows if table == "methods"]
    assert found == [(name, count, count) for count in prompts for name in ("plain", "good")]
    assert [(row["what"], row["why"]) for table, row in rows if table == "left_out"] == [
        (f"T={temperature:g}: {6 - count} of 6 prompts", "time")
        for temperature, count in zip((0.0, 0.8), prompts, strict=True) if count < 6
    ]  # fmt: skip


MODULES = {
    "works": "def run(work):\n    print('chatter')\n    work.emit('rows', {'seed': work.seed, 'shard': work.shard})",
    "raises": "def run(work):\n    work.emit('rows', {'n': 1})\n    raise ValueError('a bad day')",
    "dies": "import os, sys\ndef run(work):\n    print('last words', file=sys.stderr, flush=True)\n    os._exit(9)",
    "hangs": "import time\ndef run(work):\n    work.emit('rows', {'n': 1})\n    time.sleep(100)",
}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in MODULES.items():
        (tmp_path / f"section_that_{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_sections_that_break_down(modules: Path) -> None:
    """What they had found is kept, and why they broke down is said; the next one runs."""
    runs = {
        name: SectionRun(Section(name, f"section_that_{name}", 1.0), is_rehearsal=True, seed=7, logs=modules)
        for name in MODULES
    }
    seen: list[int] = []
    try:
        records = {
            name: run.finish(
                1.0 if name == "hangs" else 60.0, lambda found: seen.append(len(found["tables"])), grace_s=0.5
            )
            for name, run in reversed(runs.items())
        }  # fmt: skip
    finally:
        for run in runs.values():
            run.close()
    assert {name: record["status"] for name, record in records.items()} == {
        "hangs": "failed", "dies": "failed", "raises": "failed", "works": "complete",
    }  # fmt: skip
    assert records["works"]["tables"]["rows"] == [{"seed": 7, "shard": 0, "rehearsal": True}]
    assert records["raises"]["tables"]["rows"] == [{"n": 1, "rehearsal": True}]
    assert records["raises"]["errors"][0]["lines"][-1] == "ValueError: a bad day"
    assert records["dies"]["errors"][0]["lines"][-2:] == ["last words", "ended with status 9"]
    assert "killed" in records["hangs"]["errors"][0]["lines"][-1]
    assert max(seen) == 1, "the record can be written while a section is at work"


def test_time_is_shared_by_what_is_left() -> None:
    sections = chosen_sections(None)
    whole = sum(section.seconds for section in sections)
    assert limits(sections, whole, is_rehearsal=False) == sections[0].seconds
    assert limits(sections, whole + 10, is_rehearsal=False) > sections[0].seconds
    assert limits(sections, whole / 2, is_rehearsal=False) == pytest.approx(sections[0].seconds / 2)
    assert limits(sections[-1:], 200.0, is_rehearsal=False) == pytest.approx(200.0), "the last one gets all"
    assert whole < 515


def test_sections_are_chosen_with_what_they_need() -> None:
    assert [section.name for section in chosen_sections("step,lossless")] == ["ceilings", "step", "lossless"]
    with pytest.raises(ValueError, match="lossles"):
        chosen_sections("lossles")


def test_union_of_intervals() -> None:
    assert covered([(0, 2), (1, 3), (1, 2), (5, 6)]) == 4


@pytest.mark.parametrize("pattern", PATTERNS)
def test_scripts_are_kept_to_the_letter(pattern: str) -> None:
    """The model writes the successors, and accepts of every draft what the script says."""
    right = PATTERNS[pattern].right
    model = successor_model(toy(128), dtype=torch.float32, device=CPU, seed=1)
    accepted: list[int] = []
    engine = LLM(
        model, drafter=scripted(PATTERNS[pattern].shape, right), max_num_seqs=1, max_model_len=100,
        runner="lean-stock", on_step=lambda record: accepted.append(record.sequences[0].num_accepted),
    )  # fmt: skip
    prompt = list(prompt_ids(9, 512))
    for has_prefix in (False, True):
        accepted.clear()
        output = engine.generate(prompt, SamplingParams(temperature=0.0, max_tokens=60))[0]
        assert output.outputs[0].token_ids == text_after(prompt[-1], 60, 512)
        if not has_prefix:
            assert accepted.pop(0) == 0, "prefill gives the first token"
        wanted = [right[number % len(right)] for number in range(len(accepted))]
        assert accepted[:-2] == wanted[:-2], "the last drafts may be cut by the length of the text"


def record(**sections: Any) -> dict[str, Any]:
    """A record with the given tables by section."""
    return {
        "rehearsal": False, "commit": "abc", "seed": 1, "begun": "now", "seconds": 1.0, "command": "it",
        "device": {"name": "Some GPU"},
        "sections": {
            name: {"status": "complete", "errors": [], "limit_s": 1.0, "seconds": 1.0, "tables": tables}
            for name, tables in sections.items()
        },
    }  # fmt: skip


def times(median: float) -> dict[str, Any]:
    return {"median": median, "min": median, "max": median, "rounds": 5, "is_replayed": True}


def attention_row(prefix: int, nodes: int, us: float, sdpa_us: float) -> dict[str, Any]:
    return {
        "batch": 1, "prefix": prefix, "nodes": nodes, "heads": [32, 8, 128], "dtype": "bfloat16",
        "kv_bytes": 4096 * (prefix + nodes), "flop": 16384 * nodes * (prefix + nodes),
        "kernels": {
            "mask-free": times(us), "sdpa": times(sdpa_us), "sdpa-packed": {"left_out": "out of memory"},
        },
    }  # fmt: skip


def pass_row(width: int, ms: float) -> dict[str, Any]:
    both = {"waited": times(ms * 1e3), "queued": times(ms * 1e3)}
    return {"context": 2048, "width": width, "runner": "recorded", "launch_us": 1.0, **both}


def measured() -> dict[str, Any]:
    """Figures whose ratios are known: copy and read 4000 GB/s, product 800 TFLOP/s, 14 GB of weights."""
    ceilings = [
        {"what": "copy", "gb_per_s": 4000.0, "bytes": 2**33, **times(2000.0)},
        {"what": "read, sum", "gb_per_s": 3900.0, "bytes": 2**32, **times(1000.0)},
        {"what": "read, max", "gb_per_s": 4000.0, "bytes": 2**32, **times(1000.0)},
        {"what": "matmul", "tflop_per_s": 800.0, "size": 8192, "dtype": "bfloat16", **times(1400.0)},
    ]
    model = {
        "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "intermediate": 14336, "vocabulary": 128256,
        "dtype": "bfloat16", "weight_bytes": 14 * 10**9, "kv_bytes_a_token": 0,
    }  # fmt: skip
    return record(
        ceilings={"ceilings": ceilings},
        attention={
            "attention": [
                attention_row(32768, 8, 4096 * 32776 / 4000e3 / 0.7, 1000.0),  # 70 % of copying
                attention_row(2048, 64, 30.0, 50.0),  # 1.67 times SDPA
                attention_row(512, 64, 30.0, 30.0),  # too short a context to count
            ]
        },
        step={"model": [model], "passes": [pass_row(1, 4.0), pass_row(64, 4.2), pass_row(16, 4.4)]},
    )


def test_goals_of_known_figures() -> None:
    found = {(goal.what, goal.wanted): goal for goal in speeds(measured())}
    assert Ceilings.of(measured()) == Ceilings(4000.0, 4000.0, 800.0)
    over_sdpa = found["attention, mask-free over the faster form of SDPA, L >= 2048", ">= 2"]
    assert over_sdpa.verdict == "MISSED"
    assert over_sdpa.measured.startswith("1 of 2 cases; 1.67 to ")
    bandwidth = found["attention, K+V bytes over copy bandwidth, N <= 32, B L >= 16384", ">= 0.6"]
    assert (bandwidth.verdict, bandwidth.measured) == ("met", "1 of 1 cases; 0.70 to 0.70, median 0.70")
    roofline = found["plain pass, share of the read roofline, L = 2048", ">= 0.85"]
    assert (roofline.measured, roofline.verdict) == ("0.875", "met")
    assert found["pass of 64 over a plain one, L = 2048", "<= 1.1"].verdict == "met"
    assert found["pass of 16 over a plain one, L = 2048", "<= 1.05"].verdict == "MISSED"


def twin_row(setup: str, *, speed_up: float = 1.0, tau: float = 1.0, bugs: int = 0) -> dict[str, Any]:
    return {
        "setup": setup, "temperature": 0.8, "runner": "recorded", "tokens_per_s": 200.0 * speed_up,
        "speed_up": speed_up, "speed_up_min": speed_up - 0.1, "speed_up_max": speed_up + 0.1,
        "mean_acceptance_length": tau, "efficiency": speed_up / tau, "verify_ms": 4.5, "draft_ms": 0.25,
        "host_ms": 0.35, "declined": 0.125, "prompts": 6, "tokens": 576, "max_tokens": 96, "identical": 5 - bugs,
        "near_ties": 1, "bugs": bugs, "differences": [],
    }  # fmt: skip


def on_twin(*rows: dict[str, Any]) -> dict[str, Any]:
    model = {
        "twin": "cost twin 32 x 4096 of tinycode", "layers": 32, "hidden": 4096, "heads": 128, "kv_heads": 64,
        "intermediate": 12288, "vocabulary": 6144, "dtype": "bfloat16", "weight_bytes": 12 * 10**9,
        "drafter_file_bytes": 3 * 10**9, "made_in_s": 4.0,
    }  # fmt: skip
    return {"model": [model], "methods": [twin_row("plain"), *rows]}


def test_the_cost_twin_of_known_figures() -> None:
    """The goals that there are for its methods."""
    rows = [twin_row("ngram", speed_up=1.5, tau=2.0), twin_row("medusa", speed_up=0.9, tau=1.5)]
    whole = record(twin=on_twin(*rows), ceilings=measured()["sections"]["ceilings"]["tables"])
    found = {goal.what: goal for goal in speeds(whole)}
    lookup = found["efficiency, prompt lookup on the cost twin, T=0.8, tau 2.00"]
    assert (lookup.wanted, lookup.measured, lookup.verdict) == (">= 0.95", "0.75", "MISSED")
    slowest = found["speed-up of any method on the cost twin, batch 1"]
    assert slowest.measured.startswith("1 of 2 cases; 0.90 to 1.50")
    assert not any("Medusa" in what or "medusa" in what for what in found), "4.3 has no goal for heads of this kind"


def test_nothing_measured_is_nothing_met() -> None:
    assert {goal.verdict for goal in proofs(record())} == {"not measured"}
    assert {goal.verdict for goal in speeds(record())} == {"not measured"}


def test_report_of_known_figures() -> None:
    report = as_markdown(measured())
    assert "rehearsal" not in report.lower()
    assert "| 1 | 2048 | 64 | [32, 8, 128] | bfloat16 | 8650752 | 2214592512 | 30 | 50 | out of memory |" in report
    assert "| 2048 | 16 | recorded | 1 | 4400 | 4400 |" in report


@pytest.mark.parametrize("fault", ["attention", "bug", "broken", "twin bug", "text", "section"])
def test_faults_are_loud(fault: str) -> None:
    row = attention_row(2048, 8, 1.0, 1.0)
    row["kernels"]["sdpa-packed"] = {"failure": "WrongResultError: it differs"} if fault == "attention" else times(1.0)
    whole = record(
        attention={"attention": [row]},
        lossless={
            "setups": [
                {
                    "setup": "ngram", "batch": 3, "temperature": 0.0, "runner": "lean", "dtype": "float32",
                    "prompts": 5, "tokens": 50, "tau": 2.0, "identical": 5, "near_ties": 0, "bugs": int(fault == "bug"),
                    "differences": [],
                }
            ],
            "broken": [{"setup": "it", "batch": 3, "failure": "RuntimeError: no"}] if fault == "broken" else [],
        },
        twin=on_twin(twin_row("ngram", bugs=int(fault == "twin bug"))),
        step={
            "generate": [
                {"who": "transformers", "tokens_per_s": 9.0, "attention": "sdpa", "is_expected_text": fault != "text"}
            ]
        },
    )  # fmt: skip
    assert not any("FAILED" in line for line in as_markdown(record()).splitlines())
    assert is_proven(whole) == (fault == "section")
    if fault == "section":
        whole["sections"]["step"]["errors"] = [{"process": "step-0", "lines": ["RuntimeError: an illegal access"]}]
    assert not is_proven(whole)
    top = as_markdown(whole).split("## Goals")[0]
    assert "**BROKE DOWN: step, step-0**" in top if fault == "section" else "**FAILED" in top
    assert ("stopped the engine: RuntimeError" in top) == (fault == "broken")
