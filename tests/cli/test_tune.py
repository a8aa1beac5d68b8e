"""`foretoken tune`: what it prints and writes, on the bundled models, and where the files are taken."""

import json
import shutil
from pathlib import Path

import pytest
from command_line import MODEL, assert_refused, output_of, refused, report_of

from foretoken.drafters.registry import drafter_options
from foretoken.entrypoints.config import parse_setup
from foretoken.training import report
from foretoken.trees.choices import TreeShape, best_nodes

QUICK = ("--num-prompts", "1", "--max-tokens", "12", "--temperature", "0")


def test_the_tree_it_writes_is_taken_by_every_command(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    tune = ("tune", "tree", MODEL, "-s", "hydra", "--out", str(file), *QUICK)
    told = report_of(*tune, "--nodes", "9", "--depth", "3")
    choices = json.loads(file.read_text())
    assert choices == told["tree"]
    selected = best_nodes(told["acceptance"][:3], 64)
    shape = TreeShape.from_choices(choice for choice, value in selected[:8] if value > 0)
    assert TreeShape.parse(choices) == shape
    assert told["tokens_by_nodes"].keys() == {"8", "9", "16", "32", "64"}
    assert told["tokens_by_nodes"]["9"] == pytest.approx(1 + sum(value for _, value in selected[:8]))
    setup = parse_setup(f"hydra:tree=@{file}")
    assert setup.config is not None
    assert drafter_options(setup.config).tree == shape
    assert_refused("exists already. Expected a new file.", *tune)


def test_a_draft_model_has_one_row_for_all_depths() -> None:
    told = output_of("tune", "tree", MODEL, "-s", "draft_model", "--nodes", "6", "--depth", "5", *QUICK)
    assert "acceptance by rank, the same at every depth" in told
    assert 1 <= len(json.loads(told.splitlines()[-1])) <= 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tree",), "-s names 0 drafters. Expected one head or draft model, as -s hydra."),
        (("tree", "-s", "hydra", "-s", "medusa"), "-s names 2 drafters."),
        (("tree", "-s", "ngram"), "method 'ngram' has no ranked candidates. Expected a head or a draft model"),
        (("tree", "-s", "hydra", "--nodes", "513"), "--nodes is 513. Expected at most 512."),
        (("tree", "-s", "hydra", "--depth", "5"), "--depth is 5, but drafts are 4 deep at most. Expected no more."),
        (("stop",), "-s names 0 drafters. Expected one head or draft model"),
        (("stop", "-s", "ngram"), "method 'ngram' has no ranked candidates."),
        (("stop", "-s", "draft_model", "--num-prompts", "1"), "there is one prompt. Expected two at least"),
    ],
)
def test_what_it_refuses(arguments: tuple[str, ...], message: str) -> None:
    command, *more = arguments
    assert_refused(message, "tune", command, MODEL, *(QUICK if command == "tree" else ()), *more)


def test_values_in_files(tmp_path: Path) -> None:
    file = tmp_path / "value.json"
    file.write_text("[[0], [1]")
    assert_refused("is not valid JSON", "verify", MODEL, "-s", f"hydra:tree=@{file}")
    assert_refused("there is no file", "verify", MODEL, "-s", f"hydra:tree=@{tmp_path / 'none'}")


@pytest.fixture
def stopping(tmp_path: Path) -> tuple[Path, str]:
    """A draft model without rules of stopping, and its setup."""
    draft = tmp_path / "draft"
    shutil.copytree(f"{MODEL}-draft", draft)
    return draft, f"draft_model:model={draft}"


def test_rules_that_are_not_trained_are_refused(stopping: tuple[Path, str]) -> None:
    _, setup = stopping
    told = refused("bench", MODEL, "-s", f"{setup}:control=disco", "-s", f"{setup}:control=specdec_pp")
    assert f"Train it: foretoken tune stop {MODEL} -s {setup}" in " ".join(told.split())


@pytest.mark.slow
def test_stop_rules_are_kept_beside_the_weights_and_calibrated(stopping: tuple[Path, str]) -> None:
    """Errors of calibration are those on texts that trained nothing."""
    draft, setup = stopping
    command = ("bench", MODEL, "-s", f"{setup}:control=disco", "-s", f"{setup}:control=specdec_pp", *QUICK[:1], "2")
    texts = ("--num-prompts", "48", "--max-tokens", "64")
    fixed, *rules = report_of("tune", "stop", MODEL, "-s", setup, *texts, "--depth", "8")["rules"]
    assert [fixed["control"], *(rule["control"] for rule in rules)] == ["fixed", "disco", "specdec_pp"]
    for rule in rules:
        assert rule["calibration_error"] < 0.05
        assert 0 < rule["threshold"] < 1
        assert 1 <= rule["max_depth"] <= 8
        assert 1 < rule["tau"] <= 9
        assert (draft / "control" / f"{rule['control']}.safetensors").exists()
    used = report_of(*command, "--max-tokens", "24", "--temperature", "0")
    assert [row["num_identical"] for row in used["measurements"]] == [None, 2, 2]


def test_a_head_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights stay; rates, tau and card are of the prompts given now."""
    monkeypatch.setattr(report, "_MAX_TOKENS", 32)
    head, made = Path(f"{MODEL}-medusa"), tmp_path / "measured"
    tune = ("tune", "acceptance", MODEL, str(head), "--out", str(made), "--num-prompts", "1")
    facts, (old, new) = report_of(*tune), (json.loads((d / "config.json").read_text()) for d in (head, made))
    assert (made / "model.safetensors").read_bytes() == (head / "model.safetensors").read_bytes()
    assert new["config"] == old["config"]
    assert new["notes"]["settings"] == old["notes"]["settings"]
    assert new["acceptance"] != old["acceptance"]
    assert [row[0] for row in new["acceptance"]] == facts["acceptance_of_first_candidate"]
    assert new["notes"]["tau_at_temperature_0"] == facts["tau_at_temperature_0"] > 1
    assert f"| tau at temperature 0 | {facts['tau_at_temperature_0']:.2f} " in (made / "README.md").read_text()
    assert_refused("exists already. Expected a new directory.", *tune)
