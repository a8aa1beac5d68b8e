"""What passes cost: the curve, the tree it suggests, and measuring it once a machine."""

import gc
import itertools
import json
import os
import stat
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder import fused_linear
from foretoken.decoder.base import PassOutput
from foretoken.files import user_cache
from foretoken.models.loading import wrap_model
from foretoken.runner import costs, decoders
from foretoken.runner.costs import WIDTHS, CostCurve, PassCosts, contradicts, measure_costs, pass_costs
from foretoken.runner.runner import Runner


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


class Machine:
    """A clock, and passes with known seconds: the first of each width is cold, and some are interrupted."""

    def __init__(self, seconds: Callable[[int], float], *, cold: float = 0.0, interrupted: int = 5) -> None:
        self.now, self.passes, self._seconds, self._cold = 0.0, list[int](), seconds, cold
        self._interrupted = interrupted

    def run(self, width: int) -> None:
        self.now += self._seconds(width) * (1.0 if (len(self.passes) + 1) % self._interrupted else 3.0)
        self.now += self._cold * (width not in self.passes)
        self.passes.append(width)


def measured_on(machine: Machine, monkeypatch: pytest.MonkeyPatch, **options: Any) -> CostCurve:
    monkeypatch.setattr(costs.time, "perf_counter", lambda: machine.now)
    return CostCurve.measure(machine.run, WIDTHS, **options)


@pytest.mark.parametrize("limit_s", [costs.LIMIT_S, 0.0, 1e9])
def test_a_cold_first_round_does_not_survive(limit_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of 60 ms and more, as of a model of 1.5 billion weights, whose first pass of a width takes 300 ms more."""
    machine = Machine(lambda width: 0.06 + 0.01 * width, cold=0.3)
    curve = measured_on(machine, monkeypatch, limit_s=limit_s)
    assert all(seconds == pytest.approx(0.06 + 0.01 * width) for width, seconds in curve.points)
    assert [curve(width) for width in range(1, 129)] == pytest.approx([0.06 + 0.01 * w for w in range(1, 129)])


def test_few_widths_are_timed_well_where_time_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda width: 0.06 + 0.01 * width)
    curve = measured_on(machine, monkeypatch)
    assert [width for width, _ in curve.points] == [1, 2, 4, 8, 16], "the others lie between, or beyond"
    assert all(machine.passes.count(width) >= 3 for width, _ in curve.points)
    assert machine.now < costs.LIMIT_S + (1 + 1 + 3) * 0.22, "the last width is finished"
    machine = Machine(lambda width: 0.06 + 0.01 * width)
    measured_on(machine, monkeypatch, limit_s=1e9)
    assert set(machine.passes) == set(WIDTHS)
    machine = Machine(lambda width: 0.06 + 0.01 * width)
    assert len(measured_on(machine, monkeypatch, limit_s=0.0).points) == 2, "one point would say nothing of others"


def test_long_passes_are_not_repeated_before_they_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda width: 0.01 if width < 8 else 1.5 * width, interrupted=99)
    curve = measured_on(machine, monkeypatch, longest_s=5.0, limit_s=20.0, repeats=1)
    assert [width for width, _ in curve.points] == [1, 2, 3, 4, 5, 6, 8], "wider ones take longer still"
    assert machine.passes.count(8) == 1
    assert curve(8) == pytest.approx(12.0)


def test_a_disturbance_of_one_width_does_not_make_a_wider_pass_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda width: 0.001 if width != 6 else 0.004)
    curve = measured_on(machine, monkeypatch)
    values = [curve(width) for width in range(1, 200)]
    assert values == sorted(values)


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
    measure_costs(wrap_model(tiny_model("llama"), name="tiny"), "lean-native", limit_s=60.0)
    timed = {
        (work.num_sequences, work.num_tokens, work.has_all_logits, work.is_causal, work.prefix_lens[0])
        for work in passes
    }
    trees = {(1, width, True, width == 1, 48) for width in WIDTHS}
    assert timed == {*trees, (4, 4, True, True, 48), (1, 1, False, True, 0), (1, 32, False, True, 0)}
    widest = max(passes, key=lambda work: work.num_tokens)
    assert len(set(widest.tokens.tolist())) > 60, "other tokens are other experts"


def test_passes_without_logits_are_waited_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator returns from a pass before it has computed anything."""
    events: list[str] = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket is torch.ops.aten._local_scalar_dense:
                events.append("read")
            return func(*args, **(kwargs or {}))

    class Watched:
        name, is_exact = "lean-stock", True

        def __init__(self, *arguments: Any) -> None:
            self._decoder = make(*arguments)

        def run(self, work: Pass) -> PassOutput:
            output = self._decoder.run(work)
            events.append("no logits" if output.logits is None else "logits")
            return output

    make = decoders.DECODERS["lean-stock"]
    monkeypatch.setitem(decoders.DECODERS, "lean-stock", Watched)
    with Reads():
        measure_costs(wrap_model(tiny_model("llama"), name="tiny"), "lean-stock", limit_s=0.0)
    after = {event: following for event, following in itertools.pairwise(events) if event != "read"}
    assert after == {"logits": "read", "no logits": "read"}
    assert events[-1] == "read"


TOLD = CostCurve((1, 8, 64), (0.06, 0.1, 0.5))


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ({1: 0.06, 8: 0.1}, False),
        ({1: 0.18, 8: 0.3}, False),  # a machine that is three times as slow now
        ({1: 0.06, 8: 0.14}, False),
        ({1: 0.06, 8: 0.18}, True),
        ({1: 0.06, 8: 0.05}, True),  # as if the stored pass was a cold one
        ({1: 0.06}, False),
    ],
)
def test_passes_contradict_the_shape_of_a_curve_alone(seen: dict[int, float], expected: bool) -> None:
    def passes(seconds: float) -> list[float]:
        return [seconds, 9 * seconds, seconds, 20 * seconds, seconds]  # two were interrupted

    assert contradicts({width: passes(seconds) for width, seconds in seen.items()}, TOLD) is expected
    assert not contradicts({width: passes(seconds)[:4] for width, seconds in seen.items()}, TOLD), "too few"
    fast = CostCurve((1, 8, 64), (6e-5, 1e-4, 5e-4))
    assert not contradicts({width: passes(seconds) for width, seconds in seen.items()}, fast), "the host counts there"


@pytest.mark.parametrize("is_wrong", [True, False])
def test_contradicted_costs_are_measured_again(
    is_wrong: bool, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real passes of a runner, on a clock that says what each took."""
    model, clock = wrap_model(tiny_model("llama"), name="tiny"), [0.0]
    pass_costs(model, "lean-native")  # stores 0.5 s for one token, 0.75 for two, 1.0 for three
    runner = Runner(model, num_slots=1, max_nodes=8, runner="lean-native")
    run = runner.decoder.run

    def timed(work: Pass) -> PassOutput:
        clock[0] += 0.5 + 0.25 * (work.num_tokens - 1) * (-0.8 if is_wrong else 1)
        return run(work)

    monkeypatch.setattr(runner.decoder, "run", timed)
    monkeypatch.setattr("foretoken.runner.runner.time.perf_counter", lambda: clock[0])
    runner.prefill(0, [5, 6, 7, 8], 0)
    for width in [1, 3] * 5:
        runner.verify([0], [4], TokenTree.from_rows([TreeRow([9] * width, range(-1, width - 1))]))
    assert measured == ["lean-native torch.float32 " + measured[0].split()[-1]]
    pass_costs(model, "lean-native")
    assert len(measured) == (2 if is_wrong else 1)


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
        assert not any(fused_linear._fused.get(module) for module in model.module.modules())
    finally:
        gc.enable()
