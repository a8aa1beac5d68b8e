"""What passes cost: the curve, the tree it suggests, and measuring it once a machine."""

from __future__ import annotations

import gc
import itertools
import json
import os
import stat
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model

from foretoken.core.passes import Pass
from foretoken.decoder import torch_blocks
from foretoken.decoder.base import PassOutput
from foretoken.files import user_cache
from foretoken.models.loading import wrap_model
from foretoken.runner import costs, decoders
from foretoken.runner.costs import WIDTHS, CostCurve, PassCosts, measure_costs, pass_costs

NARROW = tuple(width for width in WIDTHS if width <= 12)


def test_curve_interpolates_and_goes_on_along_its_last_slope() -> None:
    curve = CostCurve((1, 3, 5), (1.0, 2.0, 6.0))
    assert [curve(width) for width in (1, 2, 3, 4, 5, 7)] == pytest.approx([1.0, 1.5, 2.0, 4.0, 6.0, 10.0])
    assert CostCurve((1,), (2.0,))(50) == 2.0


@given(points=st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=8))
def test_curve_never_falls(points: list[float]) -> None:
    """A wider pass that was measured faster says that the narrower one was disturbed."""
    curve = CostCurve(range(1, 2 * len(points), 2), points)
    values = [curve(width) for width in range(1, 3 * len(points) + 2)]
    assert all(later >= earlier * (1 - 1e-12) for earlier, later in itertools.pairwise(values))
    assert values[0] == min(points)
    assert curve(2 * len(points) - 1) == points[-1]


def test_one_disturbed_width_leaves_the_others_as_measured() -> None:
    curve = CostCurve((1, 4, 8, 16), (1.0, 9.0, 3.0, 4.0))
    assert [curve(width) for width in (1, 4, 8, 16)] == [1.0, 3.0, 3.0, 4.0]


def test_measuring_takes_the_fastest_pass_and_stops_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, passes = [0.0], []

    def run(width: int) -> None:
        passes.append(width)
        clock[0] += width * 0.01 * (3.0 if len(passes) % 5 == 0 else 1.0)  # now and then something else runs

    monkeypatch.setattr(costs.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(costs, "_BURST_S", 0.0)
    curve = CostCurve.measure(run, NARROW, repeats=4, limit_s=1e9)
    assert [curve(width) for width in (1, 6, 12, 24)] == pytest.approx([0.01, 0.06, 0.12, 0.24])
    assert set(passes) == set(NARROW)
    passes.clear()
    slow = CostCurve.measure(run, NARROW, limit_s=0.0, repeats=3)
    assert len(passes) == 9 + 3 * 2, "one warm-up of every width, then the two narrowest alone"
    assert slow(2) > slow(1)


def test_a_width_that_was_timed_once_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of a large model take long: what is beyond the first widths is measured, not continued from them."""
    clock, passes = [0.0], []

    def run(width: int) -> None:
        passes.append(width)
        clock[0] += 1.0 if width < 8 else 10.0

    monkeypatch.setattr(costs.time, "perf_counter", lambda: clock[0])
    curve = CostCurve.measure(run, NARROW, limit_s=2.0)
    assert [width for width, _ in curve.points] == list(NARROW)
    assert [curve(width) for width in (1, 2, 6, 8, 12)] == pytest.approx([1.0, 1.0, 1.0, 10.0, 10.0])
    passes.clear()
    short = CostCurve.measure(run, NARROW, limit_s=2.0, longest_s=5.0)
    assert [width for width, _ in short.points] == [1, 2, 3, 4, 5, 6, 8], "wider ones take longer still"
    assert max(passes) == 8


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Runners that were measured, by name; measuring is made instant."""
    names: list[str] = []

    def instantly(model: Any, decoder: str) -> PassCosts:
        names.append(f"{decoder} {model.dtype} {torch.get_num_threads()}")
        curve = CostCurve((1, 2), (0.5, 0.75))
        return PassCosts(curve, CostCurve((1, 4), (0.5, 1.0)), CostCurve((1, 32), (0.25, 8.0)))

    monkeypatch.setattr(costs, "measure_costs", instantly)
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(user_cache, "_said", [])
    return names


def test_a_machine_is_measured_once(measured: list[str], tmp_path: Path) -> None:
    model = wrap_model(tiny_model("llama"), name="tiny")
    known = [pass_costs(model, "generic") for _ in range(3)]
    assert len(measured) == 1
    for found in known:
        assert [curve.points for curve in found] == [
            [(1, 0.5), (2, 0.75)], [(1, 0.5), (4, 1.0)], [(1, 0.25), (32, 8.0)],
        ]  # fmt: skip
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
    """An entry of the file; changes: its date, or what is in its curve of trees."""
    date = {"measured": changes.pop("measured", time.time())}
    curve = {"widths": [1, 4], "seconds": [0.1, 0.2]}
    return {**date, "tree": {"widths": [1, 2, 4], "seconds": [0.1, 0.2, 0.3], **changes}, "step": curve,
            "prompt": {**curve, "widths": [1, 32]}}  # fmt: skip


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in entry().items() if name not in names}


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
        assert pass_costs(model, "generic").tree.points == [(1, 0.5), (2, 0.75)]
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
        assert pass_costs(model, "generic").tree.points == [(1, 0.5), (2, 0.75)]
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
    "no curve of trees": without("tree"),
    "no curve of steps": without("step"),
    "no curve of prompts": without("prompt"),
    "a prompt of an unknown width": {**entry(), "prompt": {"widths": [1, 33], "seconds": [0.1, 0.2]}},
    "one step alone": {**entry(), "step": {"widths": [4], "seconds": [0.1]}},
    "what was kept before there were three": {"measured": time.time(), "widths": [1, 2], "seconds": [0.1, 0.2]},
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
        assert pass_costs(model, "generic").tree.points == [(1, 0.5), (2, 0.75)]
    assert len(measured) == 2
    kept = json.loads((tmp_path / "cache" / "foretoken-costs.json").read_text())
    assert set(kept["curves"]) >= {"another"}, "what is likely stays"


def test_a_likely_curve_is_taken(measured: list[str], tmp_path: Path) -> None:
    """The control of the test above."""
    model = wrap_model(tiny_model("llama"), name="tiny")
    pass_costs(model, "generic")
    as_kept(tmp_path / "cache", entry(seconds=[1, 0.2, 0.3]))
    assert pass_costs(model, "generic").tree.points == [(1, 1.0), (2, 0.2), (4, 0.3)]
    assert len(measured) == 1
    assert pass_costs(model, "generic", is_refreshed=True).tree.points == [(1, 0.5), (2, 0.75)]
    assert pass_costs(model, "generic").tree.points == [(1, 0.5), (2, 0.75)]
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
        assert pass_costs(model, "generic").tree.points == [(1, 0.5), (2, 0.75)]
    assert len(measured) == 2
    assert caplog.text.count("are not kept for the next process: ") == 1


def test_a_real_measurement_covers_the_widths() -> None:
    found = measure_costs(wrap_model(tiny_model("llama"), name="tiny"), "lean-native", limit_s=60.0)
    assert [width for width, _ in found.tree.points] == list(WIDTHS)
    assert [width for width, _ in found.step.points] == [1, 4]
    assert [width for width, _ in found.prompt.points] == [1, 32], "of a context of 96"
    assert all(0 < seconds < 1 for curve in found for _, seconds in curve.points)


@pytest.mark.parametrize("context_len", [4, 7, 20])
def test_short_contexts_are_measured_too(context_len: int) -> None:
    model = wrap_model(tiny_model("llama", max_position_embeddings=context_len), name="tiny")
    found = measure_costs(model, "lean-native", limit_s=0.0)
    assert found.prompt.points[-1][0] <= context_len
    assert found.verification(4, 8) > 0


def test_the_passes_that_are_timed_are_those_that_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees with the logits of every node, one token each of several sequences, and prompts without logits."""
    passes: list[Pass] = []

    class Watched:
        name, is_exact = "lean-native", True

        def __init__(self, *arguments: Any) -> None:
            self._decoder = make(*arguments)

        def run(self, work: Pass) -> PassOutput:
            passes.append(work)
            return self._decoder.run(work)

    make = decoders.DECODERS["lean-native"]
    monkeypatch.setitem(decoders.DECODERS, "lean-native", Watched)
    measure_costs(wrap_model(tiny_model("llama"), name="tiny"), "lean-native", limit_s=0.0)
    proof = 3  # two prompts and a batch of trees
    timed = {
        (work.num_sequences, work.num_tokens, work.has_all_logits, work.is_causal, work.prefix_lens[0])
        for work in passes[proof:]
    }
    trees = {(1, width, True, width == 1, 48) for width in WIDTHS}
    assert timed == {*trees, (4, 4, True, True, 48), (1, 1, False, True, 0), (1, 32, False, True, 0)}
    widest = max(passes, key=lambda work: work.num_tokens)
    assert len(set(widest.tokens.tolist())) > 60, "other tokens are other experts"


def test_what_was_measured_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the decoder, nor its KV rows, nor the weights that it packed; without waiting for the collector."""
    made: list[weakref.ref[Any]] = []
    make = decoders.DECODERS["lean-stock"]

    def watched(*arguments: Any) -> Any:
        decoder = make(*arguments)
        made.extend([weakref.ref(decoder), weakref.ref(arguments[1])])
        return decoder

    monkeypatch.setitem(decoders.DECODERS, "lean-stock", watched)
    model = wrap_model(tiny_model("llama"), name="tiny")
    gc.disable()
    try:
        measure_costs(model, "lean-stock", limit_s=0.0)
        assert [each() for each in made] == [None, None]
        assert not any(torch_blocks._fused.get(module) for module in model.module.modules())
    finally:
        gc.enable()
