"""Self-tests are remembered with the files, the machine and the code that they were passed with, and nothing else."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretoken.core.errors import ModelError
from foretoken.models.loaded import LoadedModel
from foretoken.models.loading import load_model, wrap_model
from foretoken.runner import decoders
from foretoken.runner.runner import Runner

MODEL = Path("models/tinycode")


class Checks:
    """Counts self-tests, and lets them fail."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count, self.fails, check = 0, False, decoders.check_tree_attention

        def counted(*args: Any, **kwargs: Any) -> None:
            self.count += 1
            if self.fails:
                raise ModelError("it is wrong")
            check(*args, **kwargs)

        patch.setattr(decoders, "check_tree_attention", counted)

    def needed(self, model: LoadedModel, **options: Any) -> bool:
        before = self.count
        Runner(model, num_slots=2, runner="lean-stock", **{"context_len": 64, **options})
        return self.count > before


@pytest.fixture
def tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checks:
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(decoders, "_SMALL", 0)
    return Checks(monkeypatch)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


def test_the_same_files_are_tested_once(tests: Checks, directory: Path) -> None:
    assert tests.needed(load_model(directory))
    assert not tests.needed(load_model(directory))
    assert tests.needed(load_model(directory), context_len=32), "other positions"
    assert tests.needed(replace(load_model(directory), quantization="another")), "another rounding"
    os.utime(directory / "model.safetensors", (1, 1))
    assert tests.needed(load_model(directory)), "the file was written"
    assert not tests.needed(load_model(directory))
    shutil.copy(MODEL / "config.json", directory / "config.json")
    assert tests.needed(load_model(directory)), "the configuration was written"


def test_other_code_tests_again(tests: Checks, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tests.needed(load_model(directory))
    monkeypatch.setattr(decoders, "code_version", lambda: "another")
    assert tests.needed(load_model(directory))


def test_a_failed_test_is_not_remembered(tests: Checks, directory: Path) -> None:
    tests.fails = True
    with pytest.raises(ModelError, match="it is wrong"):
        tests.needed(load_model(directory))
    tests.fails = False
    assert tests.needed(load_model(directory))


def test_weights_in_memory_and_small_models_are_always_tested(
    tests: Checks, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(directory)
    for _ in range(2):
        assert tests.needed(wrap_model(loaded.module, name="mine"))
    monkeypatch.setattr(decoders, "_SMALL", 1 << 30)
    for _ in range(2):
        assert tests.needed(load_model(directory))
