"""`foretoken tune tree`: what it prints and writes, on the bundled heads, and where the file is taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import MODEL, run

from foretoken.drafters.registry import drafter_options
from foretoken.entrypoints.config import parse_setup
from foretoken.trees.choices import TreeShape, best_nodes

QUICK = ("--num-prompts", "1", "--max-tokens", "12", "--temperature", "0")


def test_the_tree_it_writes_is_taken_by_every_command(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    result = run(
        "tune", "tree", MODEL, "-s", "hydra", "--nodes", "9", "--depth", "3", "--out", str(file), *QUICK, "--json"
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    choices = json.loads(file.read_text())
    assert choices == report["tree"]
    bought = best_nodes(report["acceptance"][:3], 64)
    shape = TreeShape.from_choices(choice for choice, value in bought[:8] if value > 0)
    assert TreeShape.parse(choices) == shape
    assert report["tokens_by_nodes"].keys() == {"8", "9", "16", "32", "64"}
    assert report["tokens_by_nodes"]["9"] == pytest.approx(1 + sum(value for _, value in bought[:8]))
    setup = parse_setup(f"hydra:tree=@{file}")
    assert setup.config is not None
    assert drafter_options(setup.config).tree == shape
    again = run("tune", "tree", MODEL, "-s", "hydra", "--out", str(file), *QUICK)
    assert (again.returncode, again.stdout) == (2, "")
    assert "exists already. Expected a new file." in again.stderr


def test_a_draft_model_has_one_row_for_all_depths() -> None:
    result = run("tune", "tree", MODEL, "-s", "draft_model", "--nodes", "6", "--depth", "5", *QUICK)
    assert result.returncode == 0, result.stderr
    assert "acceptance by rank, the same at every depth" in result.stdout
    choices = json.loads(result.stdout.splitlines()[-1])
    assert 1 <= len(choices) <= 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "-s names 0 drafters. Expected one head or draft model, as -s hydra."),
        (("-s", "hydra", "-s", "medusa"), "-s names 2 drafters."),
        (("-s", "ngram"), "method 'ngram' has no ranked candidates. Expected a head or a draft model"),
        (("-s", "hydra", "--nodes", "513"), "--nodes is 513. Expected at most 512."),
        (("-s", "hydra", "--depth", "5"), "--depth is 5, but drafts are 4 deep at most. Expected no more."),
    ],
)
def test_what_it_refuses(arguments: tuple[str, ...], message: str) -> None:
    result = run("tune", "tree", MODEL, *arguments, *QUICK)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr


def test_values_in_files(tmp_path: Path) -> None:
    file = tmp_path / "value.json"
    file.write_text("[[0], [1]")
    assert "is not valid JSON" in run("verify", MODEL, "-s", f"hydra:tree=@{file}").stderr
    assert "there is no file" in run("verify", MODEL, "-s", f"hydra:tree=@{tmp_path / 'none'}").stderr
