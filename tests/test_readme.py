"""What the README shows works as shown."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import foretoken.drafters
from foretoken import LLM, SamplingParams

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
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
    (tmp_path / "repeat.py").write_text(PYTHON_BLOCKS[1])
    monkeypatch.setattr(foretoken.drafters, "__path__", [*foretoken.drafters.__path__, str(tmp_path)])
    params = SamplingParams(temperature=0.0, max_tokens=24)
    plain = LLM(str(ROOT / "models/tinycode")).generate("x = [0, 0, 0,", params)[0]
    repeat = LLM(str(ROOT / "models/tinycode"), speculative_config={"method": "repeat"}).generate(
        "x = [0, 0, 0,", params
    )[0]
    assert repeat.outputs[0].token_ids == plain.outputs[0].token_ids
    assert repeat.metrics.num_drafted > 0


def test_commands_exist() -> None:
    commands = re.findall(r"^\$ foretoken (\w+)", README, flags=re.MULTILINE)
    shown = subprocess.run(
        [sys.executable, "-m", "foretoken", "--help"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert commands
    assert all(command in shown for command in commands)


def test_map_names_every_file() -> None:
    package = ROOT / "foretoken"
    files = {path.relative_to(package).as_posix() for path in package.rglob("*.py") if path.name != "__init__.py"}
    named = set(re.findall(r"`([\w/]+\.py)`", README))
    assert files <= named, sorted(files - named)
    assert all((package / name).is_file() or (ROOT / name).is_file() for name in named)
