"""What passes cost: the curve, the tree it suggests, and measuring it once a machine."""

from __future__ import annotations

import itertools
import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model

import foretoken.runner.costs as costs_module
from foretoken.core import user_cache
from foretoken.hf.loading import wrap_model
from foretoken.runner.costs import WIDTHS, CostCurve, pass_costs


def test_curve_interpolates_and_goes_on_along_its_last_slope() -> None:
    curve = CostCurve((1, 3, 5), (1.0, 2.0, 6.0))
    assert [curve(width) for width in (1, 2, 3, 4, 5, 7)] == pytest.approx([1.0, 1.5, 2.0, 4.0, 6.0, 10.0])
    assert CostCurve((1,), (2.0,))(50) == 2.0


@given(points=st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=8))
def test_curve_never_falls(points: list[float]) -> None:
    """A wider pass that was measured faster is noise."""
    curve = CostCurve(range(1, 2 * len(points), 2), points)
    values = [curve(width) for width in range(1, 3 * len(points) + 2)]
    assert all(later >= earlier * (1 - 1e-12) for earlier, later in itertools.pairwise(values))
    assert values[0] == points[0]


def test_curve_follows_the_passes_that_are_made() -> None:
    curve = CostCurve((1, 4, 8), (1.0, 2.0, 3.0))
    for _ in range(100):
        curve.learn(4, 2.5)
        curve.learn(5, 900.0)  # a width that was not measured teaches nothing
    assert [curve(width) for width in (1, 4, 8)] == pytest.approx([1.0, 2.5, 3.0], abs=1e-3)


def test_measuring_takes_the_fastest_pass_and_stops_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, passes = [0.0], []

    def run(width: int) -> None:
        passes.append(width)
        clock[0] += width * 0.01 * (3.0 if len(passes) % 5 == 0 else 1.0)  # now and then something else runs

    monkeypatch.setattr(costs_module.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(costs_module, "_BURST_S", 0.0)
    curve = CostCurve.measure(run, max_width=12, repeats=4, limit_s=1e9)
    assert [curve(width) for width in (1, 6, 12, 24)] == pytest.approx([0.01, 0.06, 0.12, 0.24])
    assert set(passes) == {1, 2, 3, 4, 5, 6, 8, 10, 12}
    passes.clear()
    slow = CostCurve.measure(run, max_width=12, limit_s=0.0, repeats=3)
    assert len(passes) == 9 + 3 * 2, "one warm-up of every width, then the two narrowest alone"
    assert slow(2) > slow(1)


def test_trees_are_as_wide_as_passes_are_cheap() -> None:
    """Matrix units: free up to 16; a small cache in float32: every token costs; an accelerator: almost nothing does."""
    assert CostCurve((1, 8, 16, 32, 64), (1.0, 1.0, 1.1, 1.5, 2.1)).tree_nodes() == 16
    assert CostCurve((1, 2, 4, 8, 16), (1.0, 2.0, 4.0, 8.0, 16.0)).tree_nodes() == 1
    assert CostCurve((1, 16, 64, 128), (1.0, 1.01, 1.03, 1.05)).tree_nodes() == 128


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Runners that were measured, by name; measuring is made instant."""
    names: list[str] = []

    def instantly(made: Any) -> CostCurve:
        names.append(f"{made.name} {made.model.dtype} {torch.get_num_threads()}")
        return CostCurve((1, 2), (0.5, 0.75))

    monkeypatch.setattr(costs_module, "measure_costs", instantly)
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(user_cache, "_said", [])
    return names


def test_a_machine_is_measured_once(measured: list[str], tmp_path: Path) -> None:
    model = wrap_model(tiny_model("llama"), name="tiny")
    curves = [pass_costs(model, "generic") for _ in range(3)]
    assert len(measured) == 1
    assert {tuple(curve.points) for curve in curves} == {((1, 0.5), (2, 0.75))}
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["foretoken-costs.json"]


def test_what_changes_the_cost_is_measured_anew(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORETOKEN_SANITIZE", raising=False)
    for module in (tiny_model("llama"), tiny_model("llama", dtype=torch.bfloat16), tiny_model("llama", hidden_size=64)):
        for runner in ("generic", "lean-stock"):
            pass_costs(wrap_model(module, name="any"), runner)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        pass_costs(wrap_model(tiny_model("llama"), name="any"), "generic")
    finally:
        torch.set_num_threads(threads)
    assert len(measured) == 7
    pass_costs(wrap_model(tiny_model("llama"), name="another name"), "generic")
    assert len(measured) == 7
    for sanitize, count in (("0", 7), ("1", 8), ("1", 8), ("0", 8)):  # kernels with sanitizers are many times slower
        monkeypatch.setenv("FORETOKEN_SANITIZE", sanitize)
        pass_costs(wrap_model(tiny_model("llama"), name="any"), "generic")
        assert len(measured) == count


def entry(**changes: Any) -> dict[str, Any]:
    return {"measured": time.time(), "widths": [1, 2, 4], "seconds": [0.1, 0.2, 0.3], **changes}


def as_kept(directory: Path, made: Any) -> None:
    """Writes the file as a whole, with an entry in the place of the model's."""
    path = directory / "foretoken-costs.json"
    file = json.loads(path.read_text())
    file["curves"] = {next(iter(file["curves"])): made, "another": entry()}
    path.write_text(json.dumps(file))


# What foretoken's file may hold of its curves after a disk or an editor damaged it.
DAMAGED: dict[str, bytes] = {
    "nothing more": b"",
    "cut off": b'{"a": {"measured": 1',
    "a list": b"[]}",
    "a number": b"1e999}",
    "null": b"null}",
    "not UTF-8": b'{"\xff": 1}}',
    "nested deeply": b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    "nested lists": b"[" * 500_000,
    "a number of too many digits": b'{"a": ' + b"9" * 100_000 + b"}}",
    "too long": b'{"a": "' + b"x" * (1 << 20) + b'"}}',
    "a lone surrogate": b'{"\\ud800": 1}}',
}


@pytest.mark.parametrize("what", [*DAMAGED, "an empty file", "no curves"])
def test_a_damaged_file_is_replaced(what: str, measured: list[str], tmp_path: Path) -> None:
    model = wrap_model(tiny_model("llama"), name="tiny")
    (tmp_path / "cache").mkdir(mode=0o700)
    whole = {"an empty file": b"", "no curves": b'{"foretoken_costs":1}'}
    data = whole.get(what, b'{"foretoken_costs": 1, "curves": ' + DAMAGED.get(what, b""))
    (tmp_path / "cache" / "foretoken-costs.json").write_bytes(data)
    for _ in range(2):
        assert pass_costs(model, "generic").points == [(1, 0.5), (2, 0.75)]
    assert len(measured) == 1


@pytest.mark.parametrize(
    "data", [b"{}", b"[]", b'{"foretoken": 1}', b'{ "foretoken_costs": 1}', b"\x7fELF", b"prices,2026\n", b"\x00" * 99]
)
def test_files_of_others_stay_as_they_are(
    data: bytes, measured: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The directory may be one that holds other things: by any name, and by ours."""
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    (cache / "costs.json").write_bytes(data)
    (cache / "foretoken-costs.json").write_bytes(data)
    model = wrap_model(tiny_model("llama"), name="tiny")
    for _ in range(2):
        assert pass_costs(model, "generic").points == [(1, 0.5), (2, 0.75)]
    assert len(measured) == 2
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == {
        "costs.json": data, "foretoken-costs.json": data
    }  # fmt: skip
    assert "foretoken-costs.json' is not a file that foretoken wrote, and stays as it is. Move it away" in caplog.text
    (cache / "foretoken-costs.json").unlink()
    for _ in range(2):
        pass_costs(model, "generic")
    assert len(measured) == 3


UNLIKELY: dict[str, Any] = {
    "null": None,
    "a list": [[1, 2], [0.5, 0.75]],
    "nothing": {},
    "no points": entry(widths=[], seconds=[]),
    "more widths than seconds": entry(widths=[1, 2, 3, 4]),
    "widths as text": entry(widths="124"),
    "a width as text": entry(widths=[1, 2, "4"]),
    "a width that is no whole number": entry(widths=[1, 2.0, 4]),
    "a truth value": entry(widths=[True, 2, 4]),
    "widths that fall": entry(widths=[4, 2, 1]),
    "a width twice": entry(widths=[1, 1, 2]),
    "widths of nobody": entry(widths=[1, 2, 10**30]),
    "a negative width": entry(widths=[-1, 1, 2]),
    "no single token": entry(widths=[2, 3, 4]),
    "nested widths": entry(widths=[[1], [2], [4]]),
    "no seconds": entry(seconds=None),
    "seconds as text": entry(seconds=["0.1", "0.2", "0.3"]),
    "a mapping": entry(seconds={"0": 1, "1": 2, "2": 3}),
    "zero": entry(seconds=[0, 0.2, 0.3]),
    "negative": entry(seconds=[0.1, -0.2, 0.3]),
    "not a number": entry(seconds=[0.1, float("nan"), 0.3]),
    "infinite": entry(seconds=[0.1, 0.2, float("inf")]),
    "huge": entry(seconds=[0.1, 0.2, 10**400]),
    "instant": entry(seconds=[1e-300, 0.2, 0.3]),
    "wide passes for nothing": entry(seconds=[0.1, 0.2, 0.001]),
    "no date": entry(measured=None),
    "a date to come": entry(measured=time.time() + 1e6),
    "an old date": entry(measured=time.time() - 1e7),
    "no date at all": entry(measured=float("nan")),
}


@pytest.mark.parametrize("what", UNLIKELY)
def test_a_curve_that_cannot_be_true_is_measured_again(what: str, measured: list[str], tmp_path: Path) -> None:
    model = wrap_model(tiny_model("llama"), name="tiny")
    pass_costs(model, "generic")
    as_kept(tmp_path / "cache", UNLIKELY[what])
    for _ in range(2):
        assert pass_costs(model, "generic").points == [(1, 0.5), (2, 0.75)]
    assert len(measured) == 2
    kept = json.loads((tmp_path / "cache" / "foretoken-costs.json").read_text())
    assert set(kept["curves"]) >= {"another"}, "what is likely stays"


def test_a_likely_curve_is_taken(measured: list[str], tmp_path: Path) -> None:
    """The control of the test above."""
    model = wrap_model(tiny_model("llama"), name="tiny")
    pass_costs(model, "generic")
    as_kept(tmp_path / "cache", entry(seconds=[1, 0.2, 0.3]))
    assert pass_costs(model, "generic").points == [(1, 1.0), (2, 0.2), (4, 0.3)]
    assert len(measured) == 1
    assert pass_costs(model, "generic", is_refreshed=True).points == [(1, 0.5), (2, 0.75)]
    assert pass_costs(model, "generic").points == [(1, 0.5), (2, 0.75)]
    assert len(measured) == 2


@pytest.mark.parametrize("what", ["a directory", "a pipe", "a link", "a file others can write"])
def test_something_else_in_its_place(what: str, measured: list[str], tmp_path: Path) -> None:
    """It does not stop a start, is not followed, and is not believed."""
    model = wrap_model(tiny_model("llama"), name="tiny")
    pass_costs(model, "generic")
    path, elsewhere = tmp_path / "cache" / "foretoken-costs.json", tmp_path / "elsewhere"
    path.rename(elsewhere)
    text = elsewhere.read_text()
    match what:
        case "a directory":
            path.mkdir()
        case "a pipe":
            os.mkfifo(path)
        case "a link":
            path.symlink_to(elsewhere)
        case _:
            path.write_text(text)
            path.chmod(0o666)
    kind = path.lstat().st_mode
    pass_costs(model, "generic")
    assert len(measured) == 2
    assert elsewhere.read_text() == text
    pass_costs(model, "generic")
    is_ours = what == "a file others can write"
    assert len(measured) == (2 if is_ours else 3)
    assert path.lstat().st_mode == (stat.S_IFREG | 0o600 if is_ours else kind)


def test_a_cache_that_cannot_be_written_is_done_without(
    measured: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where the directory should be")
    model = wrap_model(tiny_model("llama"), name="tiny")
    for _ in range(2):
        assert pass_costs(model, "generic").points == [(1, 0.5), (2, 0.75)]
    assert len(measured) == 2
    assert caplog.text.count("are not kept for the next process: ") == 1


def test_a_real_measurement_covers_the_widths() -> None:
    made = costs_module.Runner(wrap_model(tiny_model("llama"), name="tiny"), num_slots=1, max_nodes=40)
    points = costs_module.measure_costs(made, limit_s=60.0).points
    assert [width for width, _ in points] == [width for width in WIDTHS if width <= 40]
    assert all(0 < seconds < 1 for _, seconds in points)
