"""What the README shows works as shown."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

import foretoken.drafters
from foretoken import LLM, SamplingParams
from foretoken.bench.setups import parse_setup
from foretoken.cli.commands import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ["README.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md", "docs/heads.md", "docs/map.md", "docs/runners.md"]
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_quick_start_runs() -> None:
    code = PYTHON_BLOCKS[0]
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, cwd=ROOT, check=True
    )
    assert "tokens per target pass" in result.stdout


def test_quick_start_text_does_not_depend_on_the_drafter() -> None:
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=64)
    texts = []
    for config in (None, {"method": "draft_model", "model": str(ROOT / "models/tinycode-draft")}):
        llm = LLM(str(ROOT / "models/tinycode"), speculative_config=config)
        texts.append(llm.generate("def read_config(path):\n", params)[0].outputs[0].text)
    assert texts[0] == texts[1]


def test_a_new_drafter_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(
        lambda: sys.modules.pop("foretoken.drafters.repeat", None)
    )  # other tests have one of that name
    imports, drafter = PYTHON_BLOCKS[1].split("class RepeatDrafter")
    options, create = PYTHON_BLOCKS[2].split("class Options")
    drafter = drafter.split("llm = LLM")[0]
    (tmp_path / "repeat.py").write_text(f"{imports}{options}class RepeatDrafter{drafter}class Options{create}")
    monkeypatch.setattr(foretoken.drafters, "__path__", [*foretoken.drafters.__path__, str(tmp_path)])
    params = SamplingParams(temperature=0.0, max_tokens=24)
    plain = LLM(str(ROOT / "models/tinycode")).generate("x = [0, 0, 0,", params)[0]
    repeat = LLM(str(ROOT / "models/tinycode"), speculative_config={"method": "repeat"}).generate(
        "x = [0, 0, 0,", params
    )[0]
    assert repeat.outputs[0].token_ids == plain.outputs[0].token_ids
    assert repeat.metrics.num_drafted > 0


def test_a_drafter_of_ones_own_runs() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PYTHON_BLOCKS[1]], capture_output=True, text=True, timeout=240, cwd=ROOT, check=True
    )
    accepted = re.fullmatch(r"(\d+) drafted tokens accepted\n", result.stdout)
    assert accepted is not None
    assert int(accepted[1]) > 0


def commands(text: str) -> list[list[str]]:
    """Arguments of the `foretoken` commands of a page; comments and continuations are taken as a shell does."""
    lines = re.findall(r"^\$ foretoken (.*)$", text.replace("\\\n", " "), flags=re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_understood(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands and options exist and have values of their type; setups name methods and weights that fit."""
    group: Any = typer.main.get_command(app)
    monkeypatch.chdir(ROOT)
    for name, *arguments in commands((ROOT / page).read_text(encoding="utf-8")):
        values = group.commands[name].make_context(name, list(arguments)).params
        for setup in values.get("speculative_config") or ():
            assert parse_setup(setup, target=values["model"]).config is not None


def test_quick_start_commands_run() -> None:
    section = README[README.index("## Quick start") : README.index("## What it brings")]
    small = {
        "generate": ["--max-tokens", "24"],
        "verify": ["--max-tokens", "8", "--num-prompts", "1"],
        "bench": ["--max-tokens", "8", "--num-prompts", "1"],
        "inspect": [],
    }
    found = commands(section)
    assert {arguments[0] for arguments in found} == small.keys()
    for arguments in found:
        command = [sys.executable, "-m", "foretoken", *arguments, *small[arguments[0]]]
        result = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, check=False)
        assert result.returncode == 0, result.stderr
        if any("num_speculative_tokens" in argument for argument in arguments):
            assert "did not draft" not in result.stderr


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Files, and headings of pages by the names that hosts of repositories give them."""
    for place, heading in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", (ROOT / page).read_text(encoding="utf-8")):
        target = (ROOT / page).parent / place if place else ROOT / page
        assert target.exists(), place
        if heading:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


def test_map_names_every_file() -> None:
    package = ROOT / "foretoken"
    files = {path.relative_to(package).as_posix() for path in package.rglob("*.py") if path.name != "__init__.py"}
    named = set(re.findall(r"`([\w/]+\.py)`", (ROOT / "docs/map.md").read_text(encoding="utf-8")))
    assert files <= named, sorted(files - named)
    assert all((package / name).is_file() for name in named)
    pointed = set(re.findall(r"`((?:foretoken|tests|benchmarks)/[\w/]+\.py)`", README))
    assert all((ROOT / name).is_file() for name in pointed)
