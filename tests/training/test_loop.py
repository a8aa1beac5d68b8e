"""The training loop: micro-batches, steps that are not finite, parts that learn nothing; the rate of every step."""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import training_runs
from torch import Tensor

from foretoken.core.errors import ConfigError, ModelError
from foretoken.heads.base import build_head
from foretoken.models.parts import target_parts
from foretoken.training import trainer as trainer_module
from foretoken.training.data.packed import PackedTokens
from foretoken.training.run_state import saved_states
from foretoken.training.trainer import HeadTrainer, Schedule


@pytest.mark.parametrize("method", training_runs.SIZES)
@pytest.mark.parametrize("size", [1, 3])
def test_micro_batches_change_nothing(tmp_path: Path, method: str, size: int) -> None:
    sizes = {"dropout": 0.0} if method == "hydra" else {}
    whole = training_runs.trained(tmp_path / "whole", method, sizes=sizes)
    parted = training_runs.trained(tmp_path / "parted", method, sizes=sizes, micro_batch_size=size)
    # AdamW divides by a gradient's size: rounding of tiny gradients grows, within a small part of the rate of 1e-2.
    training_runs.same_weights(parted.weights, whole.weights, atol=2e-4)
    losses = [[line["loss"] for line in training_runs.metrics(tmp_path / name)] for name in ("whole", "parted")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize("method", training_runs.SIZES)
def test_learns(tmp_path: Path, method: str) -> None:
    """On one text over and over, every head's loss goes down; the target itself is untouched."""
    before = {key: value.clone() for key, value in training_runs.target().module.state_dict().items()}
    text = training_runs.batches(64, is_partial=False)
    training_runs.trained(tmp_path, method, text=text, schedule={"num_steps": 30}, sizes={"num_heads": 2})
    lines = training_runs.metrics(tmp_path)
    for index in range(2):
        assert lines[-1]["head_losses"][index] < 0.95 * lines[0]["head_losses"][index]
    training_runs.same_weights(training_runs.target().module.state_dict(), before)


def trainer(bad: set[int], num_steps: int = 20) -> HeadTrainer:
    """A Hydra head, and features that are NaN at some steps (counted from 0)."""
    settings = training_runs.settings(Path("unused"), "hydra", schedule={"num_steps": num_steps})
    parts = target_parts(training_runs.target())
    torch.manual_seed(0)
    head = build_head(settings.head)
    head.initialize(parts)

    def features(step: int, tokens: Tensor) -> Tensor:
        result = training_runs.no_grad_features(tokens)
        return result * math.nan if step in bad else result

    return HeadTrainer(head, parts, settings.objective, settings.train, training_runs.batches(), features)


def everything(of: HeadTrainer) -> dict[str, Tensor]:
    """Weights and the optimiser's moments."""
    moments = of._optimizer.state_dict()["state"]
    return {key: value.clone() for key, value in of.head.state_dict().items()} | {
        f"{index}.{key}": torch.as_tensor(value).clone()
        for index, state in moments.items()
        for key, value in state.items()
    }


def test_a_bad_step_is_left_out_and_counted() -> None:
    run = trainer({3, 5})
    for report in run.steps():
        is_bad = report.step - 1 in (3, 5)
        assert math.isfinite(report.loss) == (not is_bad)
        now = everything(run)
        if is_bad:
            training_runs.same_weights(now, before)  # noqa: F821 - the step before set it
        before = now
    assert run.progress.skipped == 2
    assert run.progress.step == 20
    assert all(value.isfinite().all() for value in before.values())


@pytest.mark.parametrize("bad", [{2, 3, 4, 5}, {0, 1, 2, 3, 5, 6, 7, 8}])
def test_four_in_a_row_are_no_end(bad: set[int]) -> None:
    run = trainer(bad)
    assert len(list(run.steps())) == 20
    assert run.progress.skipped == len(bad)


def test_five_in_a_row_end_the_run(tmp_path: Path) -> None:
    run = trainer({7, 8, 9, 10, 11, 12})
    reports = run.steps()
    for _ in range(7):
        next(reports)
    run.save(tmp_path)
    before, (checkpoint,) = everything(run), saved_states(tmp_path)
    files = {path: path.read_bytes() for path in checkpoint.iterdir()}
    with pytest.raises(ModelError, match=r"the loss is nan for 5 steps in a row, up to step 12\. Expected"):
        list(reports)
    training_runs.same_weights(everything(run), before)
    assert {path: path.read_bytes() for path in saved_states(tmp_path)[-1].iterdir()} == files


def test_batches_without_a_label_change_nothing() -> None:
    """Not even by the momentum of the steps before, and the loss is no NaN."""
    run = trainer(set())
    reports = run.steps()
    for _ in range(3):
        next(reports)
    before = everything(run)
    packed = training_runs.batches()
    assert packed.supervised is not None
    run._batches = PackedTokens(packed.tokens, packed.supervised & False, {})
    report = next(reports)
    assert report.loss == 0.0
    training_runs.same_weights(everything(run), before)


def test_windows_too_short_for_the_last_head(tmp_path: Path) -> None:
    """The last head would learn nothing and say so nowhere."""
    with pytest.raises(ConfigError, match="4 tokens"):
        training_runs.trained(tmp_path, length=4)
    training_runs.trained(tmp_path, length=5)


@pytest.mark.parametrize("method", [*training_runs.SIZES, "falcon"])
def test_bfloat16_is_near_float32(tmp_path: Path, method: str) -> None:
    """The same run in autocast: another rounding, not another loss; weights stay float32."""
    changes: dict[str, Any] = {"sizes": {"num_heads": 2}}
    if method == "falcon":  # without what is drawn
        changes = {"sizes": {"num_steps": 2, "dropout": 0.0}, "weights": {"glancing": 0.0}}
    exact = training_runs.trained(tmp_path / "float32", method, **changes)
    rounded = training_runs.trained(tmp_path / "bfloat16", method, **changes, precision="bfloat16")
    assert {value.dtype for value in rounded.weights.values()} == {torch.float32}
    assert any(not torch.equal(value, exact.weights[key]) for key, value in rounded.weights.items())
    losses = [[line["loss"] for line in training_runs.metrics(tmp_path / name)] for name in ("float32", "bfloat16")]
    assert losses[1] == pytest.approx(losses[0], rel=0.03)  # 8 bits of mantissa through a few layers


@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        ("medusa", {}),
        ("hydra", {}),
        ("mlp_speculator", {}),
        ("eagle", {"num_steps": 2}),
        ("hass", {"num_steps": 2}),
        ("falcon", {}),
        ("spire", {"num_steps": 2, "window": 8}),
        ("spire", {"num_steps": 2, "window": 8, "has_feedback": False}),
        ("mtp", {"num_steps": 2}),
        ("eagle3", {"num_steps": 2, "boundaries": [0, 1, 2]}),
        ("eagle3", {"num_steps": 2, "boundaries": [0, 1, 2], "norm_before_fc": True, "norm_before_residual": True}),
        ("eagle3", {"num_steps": 2, "boundaries": [0, 1, 2], "fc_norms": True, "feeds_normed": True}),
    ],
)
def test_torch_has_nothing_to_warn_of_in_bfloat16(tmp_path: Path, method: str, sizes: dict[str, Any]) -> None:
    """Norms of autocast features with float32 weights were computed by torch's slow path, with a warning."""
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            training_runs.trained(
                tmp_path, method, sizes=sizes, precision="bfloat16", schedule={"num_steps": 1, "warmup_steps": 0}
            )
    finally:
        torch.set_warn_always(False)


def test_weights_that_are_not_finite_replace_no_checkpoint(tmp_path: Path) -> None:
    run = trainer(set())
    reports = run.steps()
    next(reports)
    run.save(tmp_path)
    next(reports)
    with torch.no_grad():
        next(run.head.parameters())[0, 0] = math.inf
    with pytest.raises(ModelError, match="weights are not finite after step 2"):
        run.save(tmp_path)
    assert [path.name for path in saved_states(tmp_path)] == ["checkpoint-00000001"]


def test_a_run_that_learned_nothing_is_no_success(tmp_path: Path) -> None:
    """Fewer steps than it takes to give up, and none of them counted: the head would be the one it began from."""
    with pytest.raises(ModelError, match="no step changed anything"):
        list(trainer(set(range(20)), num_steps=3).steps())
    silent = training_runs.batches()
    assert silent.supervised is not None
    with pytest.raises(ModelError, match="no batch had a label"):
        training_runs.trained(tmp_path, text=PackedTokens(silent.tokens, silent.supervised & False, {}))


def test_warmup_rises_in_equal_steps_to_the_peak() -> None:
    schedule = Schedule(peak=2.0, num_steps=100, warmup_steps=4)
    assert [schedule.rate(step) for step in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_cosine_from_the_peak_to_the_floor() -> None:
    schedule = Schedule(peak=2.0, num_steps=15, warmup_steps=4, floor=0.1)
    assert schedule.rate(4) == 2.0
    assert schedule.rate(9) == pytest.approx(2.0 * (0.1 + 0.9 / 2))  # halfway between steps 4 and 14
    assert schedule.rate(14) == pytest.approx(0.2)
    rates = [schedule.rate(step) for step in range(4, 15)]
    assert rates == sorted(rates, reverse=True)
    steps = [rates[0] - rates[1], rates[4] - rates[5]]
    assert steps[0] == pytest.approx(0.9 * (1 - math.cos(math.pi / 10)))
    assert steps[0] < steps[1]  # a cosine leaves its ends slowly, a line does not


@pytest.mark.parametrize("num_steps", [1, 2, 5])
@pytest.mark.parametrize("warmup", [0, 1, 5, 9])
def test_never_zero(num_steps: int, warmup: int) -> None:
    schedule = Schedule(peak=1e-3, num_steps=num_steps, warmup_steps=warmup, floor=0.05)
    for step in range(num_steps + 3):
        assert 0 < schedule.rate(step) <= 1e-3


def test_a_floor_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="floor"):
        Schedule(floor=0.0)


def test_the_rates_of_a_run_in_pieces(tmp_path: Path) -> None:
    """What the optimiser steps with, in a run that goes on from a checkpoint: not begun anew, not one step off."""
    schedule = {"peak": 1e-2, "num_steps": 6, "warmup_steps": 2}
    used: list[float] = []
    step = torch.optim.AdamW.step

    def watched(self: torch.optim.AdamW, *args: object) -> None:
        used.extend({group["lr"] for group in self.param_groups})
        step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", watched)
        with pytest.raises(training_runs.StopError):
            training_runs.trained(
                tmp_path / "run", schedule=schedule, save_every_s=-1.0, on_step=training_runs.stop_after(3)
            )
        training_runs.trained(tmp_path / "run", schedule=schedule, save_every_s=-1.0)
    rates = [Schedule(**schedule).rate(step) for step in range(6)]
    # The third step's checkpoint was not written when its report was interrupted: it is done again.
    assert used == [*rates[:3], *rates[2:]]
    assert [line["rate"] for line in training_runs.metrics(tmp_path / "run")] == rates


def test_rates_fall_by_the_clock_where_it_is_ahead() -> None:
    by_steps, by_clock = Schedule(num_steps=101, warmup_steps=0), Schedule(num_steps=101, warmup_steps=0, seconds=8.0)
    assert by_clock.rate(50, 2.0) == by_steps.rate(50)
    assert by_clock.rate(5, 4.0) == pytest.approx(by_steps.rate(50))
    assert by_clock.rate(5, 9.0) == by_steps.rate(100)
    assert by_steps.rate(5, 9.0) == by_steps.rate(5)


@pytest.mark.parametrize("method", ["medusa", "falcon"])
def test_a_run_ends_with_its_seconds(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes two seconds here. The last one begins before the end, and the share of glances falls as well."""
    readings = iter(range(0, 10_000, 2))
    monkeypatch.setattr(trainer_module.time, "perf_counter", lambda: float(next(readings)))
    schedule = {"peak": 1e-2, "num_steps": 500, "warmup_steps": 2, "seconds": 9.0}
    training_runs.trained(tmp_path / "run", method, schedule=schedule)
    lines = training_runs.metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    expected = [Schedule(**schedule).rate(step, 2.0 * step) for step in range(5)]
    assert [line["rate"] for line in lines] == expected
    assert expected[-1] < 0.1 * expected[1]


def test_a_stopped_run_goes_on_with_its_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter(range(0, 10_000, 2))
    monkeypatch.setattr(trainer_module.time, "perf_counter", lambda: float(next(readings)))
    schedule = {"peak": 1e-2, "num_steps": 500, "warmup_steps": 2, "seconds": 9.0}
    stop = training_runs.stop_after(3)
    with pytest.raises(training_runs.StopError):
        training_runs.trained(tmp_path / "run", schedule=schedule, save_every_s=-1.0, on_step=stop)
    stopped = training_runs.trained(tmp_path / "run", schedule=schedule)
    whole = training_runs.trained(tmp_path / "whole", schedule=schedule)
    assert stopped.notes["steps"] == whole.notes["steps"] == 5
    training_runs.same_weights(stopped.weights, whole.weights)
