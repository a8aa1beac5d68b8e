"""`foretoken twin`: what it writes and says, that it looks before it believes, and tables that name a twin."""

import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from command_line import MODEL, ROOT, assert_refused, done, output_of, report_of
from tiny_models import tiny_model

from foretoken.bench.padding import Padding
from foretoken.formats import native
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint
from foretoken.formats.conversion import head_shapes
from foretoken.heads.medusa import MedusaConfig
from foretoken.models.loading import load_model

LABEL = "3 x 128 of small"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A tiny target with the bundled tokenizer, and a head of it."""
    model = tmp_path / "small"
    tiny_model("llama", vocab_size=6144, num_hidden_layers=2, max_position_embeddings=1024).save_pretrained(model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(ROOT / MODEL / name, model / name)
    config = MedusaConfig(hidden_size=32, vocab_size=6144, num_heads=2, num_layers=1)
    generator = torch.Generator().manual_seed(0)
    weights = {key: torch.randn(shape, generator=generator) for key, shape in head_shapes(config).items()}
    target = TargetFingerprint.of(load_model(model, device="cpu"))
    native.write_checkpoint(HeadCheckpoint(config=config, weights=weights, target=target), tmp_path / "small-medusa")
    return model


def words(model: Path, *more: str) -> list[str]:
    return ["twin", str(model), str(model.with_name("twin")), "--layers", "3", "--hidden-size", "128", *more]


def test_a_twin_is_made_compared_and_measured(small: Path) -> None:
    assert "s to write" in output_of(*words(small))
    twin = small.with_name("twin")
    report = report_of(*words(small))  # the twin there is replaced
    assert [(part["role"], part["path"]) for part in report["parts"]] == [
        ("target", str(twin)), ("medusa", f"{twin}-medusa"),
    ]  # fmt: skip
    assert [check["what"] for check in report["checks"]][-1] == "drafts of small-medusa"
    assert all(check["is_same"] for check in report["checks"])
    assert (twin / "tokenizer.json").is_file()

    measured = ("bench", str(twin), "-s", "medusa:num_speculative_tokens=2", "--num-prompts", "1", "--max-tokens", "4",
                "--temperature", "0", "--runner", "lean-native")  # fmt: skip
    text = output_of(*measured)
    assert f"cost_twin={LABEL}" in text.splitlines()[0]
    assert text.count(f"cost twin {LABEL}") == 3  # above all tables
    assert report_of(*measured)["cost_twin"] == report_of("inspect", str(twin))["cost_twin"] == LABEL


def test_a_twin_that_computes_something_else_is_told(small: Path) -> None:
    with mock.patch.object(Padding, "root", 1):  # norms are not scaled
        result = done(*words(small), code=1)
    assert "NO" in result.stdout
    assert result.stderr.splitlines()[-1] == (
        f"error: '{small.with_name('twin')}' does not compute the function of '{small}': logits in float32 on "
        "lean-native differ. Expected the same. Measure nothing with it."
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--hidden-size", "100"], "the hidden size 100 is not the 32 of"),
        (["--layers", "1"], "1 layers are asked for"),
        (["--draft-model", "pat"], "--draft-model is 'pat'. Did you mean 'pad'?"),
        (["--fill", "ones"], "--fill is 'ones'. Known: random, zeros."),
        (["--dtype", "float12"], "dtype 'float12' does not exist here. Did you mean 'float32'?"),
        (["--heads", "nowhere"], "there is no head 'nowhere'"),
    ],
)
def test_errors_are_a_sentence(small: Path, more: list[str], message: str) -> None:
    assert_refused(message, *words(small, *more))
    assert not small.with_name("twin").exists()


def test_text_is_needed_to_compare(small: Path) -> None:
    (small / "tokenizer.json").unlink()
    (small / "tokenizer_config.json").unlink()
    assert_refused("has no tokenizer", *words(small))
    assert not small.with_name("twin").exists()
