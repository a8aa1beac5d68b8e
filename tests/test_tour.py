"""The tour of docs/: the notebook runs; page, notebook and script show the same code, with the output of that code.

Slow because the tour verifies texts, trains a head and starts a server.
"""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / ".ci"))
import make_tour  # noqa: E402 - a script, no package

PAGE = make_tour.PAGE.read_text(encoding="utf-8")
CELLS = json.loads(make_tour.NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODES = [cell["source"] for cell in CELLS if cell["cell_type"] == "code"]
SHOWN = ["".join(output.get("text", "") for output in cell["outputs"]) for cell in CELLS if cell["cell_type"] == "code"]
EXACT = 4  # cells whose output is the same on every machine: imports, load, draft, tree


def test_page_and_notebook_show_the_code_of_the_script() -> None:
    codes = make_tour.cells()
    outputs = [text for code, text in zip(CODES, SHOWN, strict=True) if code != "result"]
    assert make_tour.page(PAGE, codes, outputs) == PAGE, "docs/tour.md is stale. Run `python .ci/make_tour.py`."
    assert make_tour.NOTEBOOK.read_text(encoding="utf-8") == make_tour.notebook(PAGE), (
        "docs/tour.ipynb is stale. Run `python .ci/make_tour.py --prose`."
    )


def test_steps_are_short() -> None:
    for code in make_tour.cells()[1:]:
        for function in re.split(r"\n\n\n", code)[:-1]:
            assert len(function.splitlines()) <= 17, function


def masked(text: str) -> list[str]:
    """Lines without their figures, which machines and numbers of steps change; lines that differ in these are one."""
    lines = [re.sub(r"[\d.]+", "N", " ".join(line.split())) for line in text.splitlines()]
    return [line for index, line in enumerate(lines) if index == 0 or line != lines[index - 1]]


def test_the_first_cells_print_what_the_notebook_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "docs")
    outputs, _ = make_tour.run(CODES[:EXACT], {})
    assert outputs == SHOWN[:EXACT]
    assert "same text: True" in outputs[2]


@pytest.mark.slow
def test_the_other_cells_print_what_the_notebook_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the notebook's own directory, with less training; the head learns all the same, its curves are drawn."""
    for extra in ("matplotlib", "fastapi", "uvicorn", "prometheus_client"):
        pytest.importorskip(extra)
    monkeypatch.chdir(ROOT / "docs")
    outputs, namespace = make_tour.run(CODES, {"TRAINING_STEPS": 20})
    for output, shown in zip(outputs[EXACT:], SHOWN[EXACT:], strict=True):
        assert masked(output) == masked(shown)
    assert "False" not in "".join(outputs)
    result = namespace["result"]
    first, last = result.tau.values()
    assert last > first > 1
    assert result._repr_svg_() == result.directory.with_name("tour.svg").read_text()
    tau = re.search(r"tau (\d+\.\d+) in", outputs[-1])
    assert tau is not None
    assert float(tau[1]) > 1
