"""What is measured of a head at the end of its training, and what its card says; it appears whole or not at all."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import training_runs
from disks import everything
from limits import full_disk
from tiny_models import tiny_model
from trained_heads import PROMPTS, target, tokenizer, trained

from foretoken.bench.workload import Workload
from foretoken.core.errors import ConfigError
from foretoken.formats.registry import read_head
from foretoken.models.loading import wrap_model
from foretoken.training.report import held_out_seconds, save_target, saved_head

NOTES = {
    "steps": 5, "tokens": 100, "seconds": 1.0, "command": "$ foretoken train",
    "curve": [{"step": 5, "loss": 1.25, "head_matches": [0.5, 0.25]}],
    "settings": {
        "head": {"num_steps": 3}, "objective": {"passes": 2, "ce_weight": 1.0},
        "train": {
            "schedule": {"peak": 1e-2, "warmup_steps": 1, "floor": 0.1}, "batch_size": 1, "length": 8, "seed": 0,
            "weight_decay": 0.0, "clip_norm": 1.0, "precision": "float32",
        },
    },
}  # fmt: skip


ROWS = {
    "eagle3": (
        "| taps | 1, 2 |",
        "| drafts | 67 of 67 tokens |",
        "| steps trained | 2; acceptance is measured for 3 |",
    ),
    "eagle": ("| taps | final |", "first candidate right, by step"),
    "medusa": ("first candidate right, by head",),
}


@pytest.mark.parametrize("method", ROWS)
def test_static_and_dynamic_trees(tmp_path: Path, method: str) -> None:
    work = Workload(prompts=PROMPTS[:3], temperatures=(0.0, 0.8), max_tokens=12)
    facts = saved_head(
        replace(trained(method, steps=40), notes=NOTES), tmp_path / "head", target=target(), tokenizer=tokenizer(),
        dtype="float32", workload=work,
    )  # fmt: skip
    assert facts is not None
    head = read_head(tmp_path / "head")[1]
    assert head.acceptance is not None
    assert len(head.acceptance) == head.config.steps == 3
    assert facts["dynamic_tree_nodes"] <= facts["tree_nodes"]
    for name in ("", "dynamic_"):
        for temperature in ("0", "0.8"):
            tau, shares = (
                facts[f"{name}{what}_at_temperature_{temperature}"] for what in ("tau", "acceptance_by_depth")
            )
            assert 1.0 <= tau <= 1 + len(shares)
            assert len(shares) <= (3 if name else 4)  # the static tree is 4 deep
            assert head.notes[f"{name}tau_at_temperature_{temperature}"] == tau
    card = (tmp_path / "head" / "README.md").read_text()
    assert f"| tau at temperature 0, dynamic trees | {facts['dynamic_tau_at_temperature_0']:.2f} " in card
    for row in (*ROWS[method], "| 5 | 1.250 | 0.500 0.250 |", "$ foretoken train"):
        assert row in card
    assert not {"curve", "command", "settings"} & facts.keys()


def test_the_time_that_measuring_takes_is_expected() -> None:
    def expected(num_prompts: int, tau: float = 1.0, max_tokens: int = 12) -> float:
        work = Workload(prompts=PROMPTS[:num_prompts], temperatures=(0.0, 0.8), max_tokens=max_tokens)
        return held_out_seconds(target(), tokenizer(), work)(tau)

    assert held_out_seconds(target(), tokenizer(), None)(1.0) == 0.0
    assert 0.0 < expected(1) < expected(4) < expected(8)  # four are decoded at once
    assert expected(8) == pytest.approx(2 * expected(4)) == pytest.approx(expected(4, max_tokens=24))
    assert expected(4) / 2 < expected(4, tau=2.0) < expected(4)  # the target's own texts take what they take


def save_head_to(out: Path, work: Path) -> None:
    head = training_runs.trained(work / "run", schedule={"num_steps": 2})
    with full_disk(256) if out.name == "full" else full_disk(1 << 20):
        saved_head(head, out, target=training_runs.target(), tokenizer=None, dtype="auto", workload=None)


def save_target_to(out: Path, work: Path) -> None:
    module: Any = tiny_model("llama", **training_runs.TINY)
    module.save_pretrained(work / "old")
    with full_disk(256) if out.name == "full" else full_disk(1 << 20):
        save_target(wrap_model(module, name="tiny"), out, tokenizer=tokenizer(), like=str(work / "old"))


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
