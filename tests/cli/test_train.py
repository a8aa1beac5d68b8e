"""`foretoken.train`: the same run as the command's, and a result that holds the curves of the run and draws them."""

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import report_of
from heads.test_mtp import reference, save
from test_train_refusals import packed, saved_model, tokenizer

import foretoken
from foretoken.cli.train import train as command
from foretoken.core.errors import ConfigError
from foretoken.formats.registry import read_head
from foretoken.training.run import Interrupted

QUICK: dict[str, Any] = {
    "steps": 6, "batch_size": 2, "length": 16, "lr": 0.02, "warmup_steps": 1, "eval_every": 2,
    "sizes": {"num_heads": 2}, "objective": {"ce_weight": 0.5}, "prompts": "heldout", "num_prompts": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shared")
    saved_model(directory / "target")
    packed(directory / "data" / "train")
    packed(directory / "data" / "held_out", 200)
    return directory


def trained(shared: Path, out: Path, **changes: Any) -> foretoken.TrainingResult:
    return foretoken.train("medusa", str(shared / "target"), data=shared / "data", out=out, **{**QUICK, **changes})


@pytest.fixture(scope="module")
def result(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> foretoken.TrainingResult:
    return trained(shared, tmp_path_factory.mktemp("result") / "head")


def logged(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_command_has_the_same_options_with_the_same_defaults() -> None:
    """The command hands its options on by name."""
    options = inspect.signature(command).parameters
    arguments = inspect.signature(foretoken.train).parameters
    assert set(arguments) - set(options) == {"on_step", "on_held_out", "command"}
    assert set(options) - set(arguments) == {"threads", "as_json"}
    shared_names = set(options) & set(arguments)
    assert {name: options[name].default for name in shared_names} == {
        name: arguments[name].default for name in shared_names
    }


def test_the_command_trains_the_same_head(shared: Path, tmp_path: Path, result: foretoken.TrainingResult) -> None:
    facts = report_of(
        "train", "medusa", str(shared / "target"), "--data", str(shared / "data"), "--out", str(tmp_path / "head"),
        "--steps", "6", "--batch-size", "2", "--length", "16", "--lr", "0.02", "--warmup-steps", "1", "--eval-every",
        "2", "--set", "num_heads=2", "--objective", "ce_weight=0.5", "--num-prompts", "0",
    )  # fmt: skip
    weights, ours = (read_head(place)[1].weights for place in (tmp_path / "head", result.directory))
    assert weights.keys() == ours.keys()
    assert all(torch.equal(weights[key], ours[key]) for key in ours)
    for key, value in result.facts.items():
        assert facts[key] == value or key in ("seconds", "directory"), key
    assert "$ foretoken train medusa" in (tmp_path / "head" / "README.md").read_text()


def test_the_result_holds_the_curves_of_the_run(result: foretoken.TrainingResult) -> None:
    lines = logged(result.run_dir)
    assert result.losses == [line["loss"] for line in lines]
    assert list(result.acceptance) == list(result.tau) == [2, 4, 6]
    for step, by_depth in result.acceptance.items():
        assert by_depth == lines[step - 1]["held_out_acceptance"]
        assert len(by_depth) == 2
        assert result.tau[step] == pytest.approx(1 + by_depth[0] + by_depth[1])
    assert result.facts["steps"] == 6
    assert result.target.name == read_head(result.directory)[1].target.name  # type: ignore[union-attr]


def test_the_card_shows_the_call(result: foretoken.TrainingResult) -> None:
    card = (result.directory / "README.md").read_text()
    call = next(line for line in card.splitlines() if line.startswith(">>> "))
    assert call.startswith(">>> foretoken.train(method='medusa', model='/")
    assert f"out='{result.directory}'" in call
    assert "lr=0.02" in call
    assert "seed" not in call  # a default


def test_a_stopped_run_goes_on_and_has_all_losses(
    shared: Path, tmp_path: Path, result: foretoken.TrainingResult
) -> None:
    def stop(report: Any) -> None:
        if report.step == 3:
            raise Interrupted(15, tmp_path)

    with pytest.raises(Interrupted):
        trained(shared, tmp_path / "head", save_every_s=0.0, on_step=stop)
    assert not (tmp_path / "head").exists()
    steps: list[int] = []
    again = trained(shared, tmp_path / "head", on_step=lambda report: steps.append(report.step))
    assert steps[0] > 1
    assert again.losses == result.losses
    assert again.acceptance == result.acceptance


def test_the_picture_shows_losses_and_acceptance(result: foretoken.TrainingResult, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = result.plot(tmp_path / "curves.svg")
    loss, acceptance = figure.axes
    assert list(loss.lines[0].get_ydata()) == result.losses
    assert len(acceptance.lines) == 2
    for depth, line in enumerate(acceptance.lines):
        assert list(line.get_xdata()) == [2, 4, 6]
        assert list(line.get_ydata()) == [100 * rates[depth] for rates in result.acceptance.values()]
    first = (tmp_path / "curves.svg").read_bytes()
    result.plot(tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").read_bytes() == first  # no date, no random ids


def test_a_run_without_evaluations_is_drawn_too(shared: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = trained(shared, tmp_path / "head", eval_every=0, steps=2)
    assert result.acceptance == result.tau == {}
    loss, acceptance = result.plot().axes
    assert len(loss.lines) == 1
    assert not acceptance.lines


def test_without_matplotlib_it_is_a_sentence(result: foretoken.TrainingResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"need the package 'matplotlib'.*pip install '\.\[report\]'"):
        result.plot()


def test_the_target_learns_along(shared: Path, tmp_path: Path) -> None:
    """The head belongs to the new target, which is on disk; the old one refuses it."""
    joint = {"joint": {"backbone": "full"}, "target_out": tmp_path / "target", "eval_every": 0}
    result = trained(shared, tmp_path / "head", **joint)
    assert result.target.name == str(tmp_path / "target")
    assert len(result.losses) == 6
    drafter = {"method": "medusa", "model": str(result.directory), "num_speculative_tokens": 2}
    params = foretoken.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    texts = [
        foretoken.LLM(str(tmp_path / "target"), speculative_config=config).generate("w5 w6", params)[0].outputs[0]
        for config in (None, drafter)
    ]
    assert texts[0].token_ids == texts[1].token_ids
    with pytest.raises(foretoken.ForetokenError, match="was trained for"):
        foretoken.LLM(str(shared / "target"), speculative_config=drafter)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"eval_every": -1}, r"--eval-every is -1\. Expected"),
        ({"num_prompts": -1}, r"--num-prompts is -1\. Expected"),
        ({"steps": 0}, r"'schedule\.num_steps' of training is 0"),
        ({"sizes": {"num_hads": 2}}, r"no key 'num_hads'.*Did you mean 'num_heads'"),
        ({"joint": {"backbone": "lora"}, "eval_every": 0}, r"--joint and --target-out go together"),
    ],
)
def test_what_does_not_fit_is_one_sentence(shared: Path, tmp_path: Path, changes: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        trained(shared, tmp_path / "head", **changes)
    assert not list(tmp_path.iterdir())


def test_a_head_that_exists_is_kept(shared: Path, result: foretoken.TrainingResult) -> None:
    before = (result.directory / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="exists already"):
        trained(shared, result.directory)
    assert (result.directory / "model.safetensors").read_bytes() == before


def test_mtp_heads_begin_from_those_in_the_targets_files(tmp_path: Path) -> None:
    """Unless sizes are named: then from new weights."""
    target = save(tmp_path / "target", reference())
    tokenizer().save_pretrained(target)
    found, own = {}, read_head(target)[1].weights
    data = packed(tmp_path / "data")
    for name, sizes in (("own", {}), ("new", {"num_steps": 3})):
        options = {**QUICK, "steps": 1, "lr": 1e-4, "objective": {}, "eval_every": 0, "sizes": sizes}
        foretoken.train("mtp", str(target), data=data, out=tmp_path / name, **options)
        found[name] = read_head(tmp_path / name)[1].weights
    assert found["own"].keys() == own.keys()
    moved = [float((each - own[key]).abs().max()) for key, each in found["own"].items()]
    assert min(moved) > 0
    assert max(moved) < 1e-3
    width = own["fc.weight"].shape[0]
    torch.testing.assert_close(found["new"]["fc.weight"][:, width:], torch.eye(width), rtol=0, atol=1e-3)
