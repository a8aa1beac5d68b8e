from pathlib import Path

import pytest
from model_files import saved


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a GGUF file to write."""
    return tmp_path / "model.gguf"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A tiny Llama in Hugging Face layout."""
    return saved(tmp_path / "tiny")
