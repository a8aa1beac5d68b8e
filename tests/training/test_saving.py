"""What a run ends with, a head and perhaps a new target, appears whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import training_runs
from disks import everything
from limits import full_disk
from tiny_models import tiny_model

from foretoken.core.errors import ConfigError
from foretoken.formats.registry import read_head
from foretoken.models.loading import wrap_model
from foretoken.training.report import save_target, saved_head


class Tokenizer:
    """What is asked of a tokenizer here: to write its files."""

    def save_pretrained(self, directory: Path) -> None:
        (directory / "tokenizer.json").write_text("{}")


def save_head_to(out: Path, work: Path) -> None:
    head = training_runs.trained(work / "run", schedule={"num_steps": 2})
    with full_disk(256) if out.name == "full" else full_disk(1 << 20):
        saved_head(head, out, target=training_runs.target(), tokenizer=None, dtype="auto", workload=None)


def save_target_to(out: Path, work: Path) -> None:
    module: Any = tiny_model("llama", **training_runs.TINY)
    module.save_pretrained(work / "old")
    with full_disk(256) if out.name == "full" else full_disk(1 << 20):
        save_target(wrap_model(module, name="tiny"), out, tokenizer=Tokenizer(), like=str(work / "old"))


@pytest.mark.parametrize("save", [save_head_to, save_target_to])
def test_a_full_disk_after_the_work_is_one_sentence(save: Callable[[Path, Path], None], tmp_path: Path) -> None:
    """The run is still there, so that its last command can be run again."""
    with pytest.raises(
        ConfigError, match=r"/full' cannot be written: .*File too large.*\. Nothing was changed there\. "
    ):
        save(tmp_path / "deep" / "full", tmp_path / "work")
    assert [path.name for path in tmp_path.iterdir()] == ["work"]
    save(tmp_path / "deep" / "fits", tmp_path / "work")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["fits"]
    before = everything(tmp_path / "deep")
    with pytest.raises(ConfigError, match="/fits' cannot be written: Directory not empty"):
        save(tmp_path / "deep" / "fits", tmp_path / "work")
    assert everything(tmp_path / "deep") == before


def test_what_is_saved_can_be_read(tmp_path: Path) -> None:
    save_head_to(tmp_path / "head", tmp_path / "work")
    assert read_head(tmp_path / "head")[1].config.method == "medusa"
    assert (tmp_path / "head" / "README.md").is_file()
