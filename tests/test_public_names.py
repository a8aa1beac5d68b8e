"""What users see of the package: its names, in `dir` as for type checkers, and nothing of how it is made."""

import ast
import copy
import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from end_to_end.tiny_llms import llm
from tiny_models import tiny_model

import foretoken
import foretoken.hf
from foretoken import LLM, AsyncLLM
from foretoken.core.errors import ConfigError
from foretoken.hf import accelerate

ROOT = Path(__file__).parents[1]
NOT_LISTED = {"__version__", "hf"}  # of `dir(foretoken)`: no names to be imported with a star


def test_dir_shows_what_users_call_and_nothing_else() -> None:
    """Also after parts of the package were imported, which binds them as attributes."""
    assert LLM.__module__ == "foretoken.entrypoints.llm"
    assert set(dir(foretoken)) == {*foretoken.__all__, *NOT_LISTED}
    assert dir(foretoken.hf) == ["accelerate", "release"] == foretoken.hf.__all__
    for module in (foretoken, foretoken.hf):
        for name in dir(module):
            assert getattr(module, name) is not None
        with pytest.raises(AttributeError, match="has no attribute 'LMM'"):
            _ = module.LMM


def test_importing_the_package_and_looking_at_it_imports_no_torch() -> None:
    script = "import sys, foretoken, foretoken.hf; dir(foretoken), dir(foretoken.hf); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "False"


@pytest.mark.parametrize("module", [foretoken, foretoken.hf])
def test_type_checkers_are_told_every_name(module: Any) -> None:
    """Names that a module's `__getattr__` gives have no types: they are imported for type checkers alone."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    told = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(module.__all__) <= told
    assert (ROOT / "foretoken" / "py.typed").is_file()


@pytest.fixture(scope="module")
def engine() -> LLM:
    return llm({})


@pytest.mark.parametrize(
    "copied", [pickle.dumps, copy.copy, copy.deepcopy, lambda each: pickle.dumps({"engine": each})]
)
def test_engines_are_neither_copied_nor_pickled(copied: Callable[[Any], Any], engine: LLM) -> None:
    handle = accelerate(tiny_model("llama"))
    served = AsyncLLM(engine)
    for each, name in ((engine, "LLM"), (served, "AsyncLLM"), (handle, "Acceleration")):
        with pytest.raises(ConfigError, match=rf"^an object of type {name} cannot be copied or pickled: .* build it"):
            copied(each)
    served.close()


def test_an_engine_cannot_be_handed_to_another_process(engine: LLM) -> None:
    process = multiprocessing.get_context("spawn").Process(target=print, args=(engine,))
    with pytest.raises(ConfigError, match="cannot be copied or pickled"):
        process.start()
