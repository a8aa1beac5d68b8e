"""The map of files says what the modules say, and is made by one command."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GENERATOR = ROOT / ".ci" / "make_map.py"
COMMAND = "python .ci/make_map.py"


def make_map(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the generator."""
    return subprocess.run([sys.executable, GENERATOR, *arguments], capture_output=True, text=True, check=False)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources of two packages as a repository of their own, with its map."""
    (tmp_path / "docs").mkdir()
    for package in ("core", "attention"):
        shutil.copytree(ROOT / "foretoken" / package, tmp_path / "foretoken" / package)
    contract = '[[tool.importlinter.contracts]]\ntype = "layers"\nlayers = ["attention", "core"]\n'
    (tmp_path / "pyproject.toml").write_text(contract, encoding="utf-8")
    (tmp_path / "foretoken" / "__init__.py").write_text('"""A package."""\n', encoding="utf-8")
    made = make_map("--root", str(tmp_path))
    assert made.returncode == 0, made.stdout
    return tmp_path


def test_map_is_up_to_date() -> None:
    result = make_map("--check")
    assert result.returncode == 0, f"docs/map.md is stale. Run `{COMMAND}` and commit the result. {result.stdout}"


def test_map_names_every_source_file() -> None:
    text = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
    sources = [path for path in (ROOT / "foretoken").rglob("*.*") if path.suffix in (".py", ".cpp", ".cu")]
    names = {path.relative_to(ROOT).as_posix() for path in sources if path.name != "__init__.py"}
    assert len(names) > 150
    assert not [name for name in names if f"- `{name}`: " not in text]
    assert max(map(len, text.splitlines())) <= 100


def test_layers_stand_in_the_order_of_imports(copy: Path) -> None:
    text = (copy / "docs" / "map.md").read_text(encoding="utf-8")
    assert "core → attention" in text
    assert text.index("## core") < text.index("`foretoken/core/passes.py`") < text.index("## attention")
    assert "- `foretoken/attention/tree_attention.cu`: Attention of tree nodes" in text


def test_picture_shows_the_layers() -> None:
    """docs/iteration.svg is drawn by hand: each package once, those of lower layers before those of higher ones."""
    drawn = re.findall(r">([a-z]+)</text>", (ROOT / "docs" / "iteration.svg").read_text(encoding="utf-8"))
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = [re.findall(r"\w+", layer) for layer in reversed(settings["contracts"][0]["layers"])]
    places = [[drawn.index(name) for name in layer] for layer in layers]
    assert all(max(lower) < min(higher) for lower, higher in pairwise(places))


def test_a_changed_sentence_makes_the_map_stale(copy: Path) -> None:
    assert make_map("--check", "--root", str(copy)).returncode == 0
    module = copy / "foretoken" / "core" / "taps.py"
    module.write_text('"""Something else."""\n', encoding="utf-8")
    stale = make_map("--check", "--root", str(copy))
    assert stale.returncode == 1
    assert COMMAND in stale.stdout
    assert make_map("--root", str(copy)).returncode == 0
    assert "- `foretoken/core/taps.py`: Something else.\n" in (copy / "docs" / "map.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("file", ["core/silent.py", "attention/silent.cu", "other/__init__.py"])
def test_what_cannot_be_described_is_named(copy: Path, file: str) -> None:
    place = copy / "foretoken" / file
    place.parent.mkdir(exist_ok=True)
    place.write_text("\n", encoding="utf-8")
    result = make_map("--root", str(copy))
    assert result.returncode == 1
    assert place.parent.name in result.stdout
    assert "Traceback" not in result.stderr
