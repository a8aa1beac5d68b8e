"""Heads of a target that is stored in integers learn from the features that the target verifies with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import training_runs
from models.gguf_files import tiny_file
from safetensors.torch import load_file

from foretoken.core.passes import Pass, Tap
from foretoken.models.loading import load_model
from foretoken.models.smaller import unpacked_model
from foretoken.runner.runner import Runner
from foretoken.training.doctor.checks import check_logits, check_serving, check_taps
from foretoken.training.run import _features
from foretoken.training.teacher import Teacher

pytestmark = pytest.mark.native


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("taps", [("final",), (0, 1), (1, "final")])
def test_features_are_those_of_the_runner_that_verifies(taps: tuple[Tap, ...], dtype: str, tmp_path: Path) -> None:
    """To the bit, after batches of other sizes too; those of the unpacked weights differ by rounding."""
    stored = load_model(tiny_file(tmp_path / "tiny.gguf"), dtype=dtype)
    assert stored.quantization is not None
    model = unpacked_model(stored)
    teacher = Teacher(model, taps)
    generator = torch.Generator().manual_seed(0)
    for size in ((2, 9), (1, 5), (3, 12), (2, 9)):
        tokens = torch.randint(model.vocab_size, size, generator=generator)
        found = teacher.read_features(tokens)
        all_taps = taps if taps[-1] == "final" else (*taps, "final")
        runner = Runner(stored, num_slots=4, context_len=32, taps=all_taps)
        for row, text in enumerate(tokens.tolist()):
            features = runner.run(Pass.of_chains([text], slots=[3], prefix_lens=[0])).features
            assert features is not None
            assert torch.equal(found[row], features.flatten(1).to(model.dtype))
        assert torch.equal(teacher.features(tokens), found[..., -model.config.hidden_size :])
        unpacked = Teacher(replace(model, stored=None), taps).read_features(tokens)
        assert (found.float() - unpacked).norm() < unpacked.norm() * (1e-5 if dtype == "float32" else 0.02)
        assert not found.is_inference()
        assert found.dtype == model.dtype == torch.float32


def test_kept_features_are_those_of_the_dtype_that_serves(tmp_path: Path) -> None:
    """The unpacked weights are in float32 whatever serves, and one folder holds both."""
    kept = []
    for dtype in ("bfloat16", "float32"):
        model = unpacked_model(load_model(tiny_file(tmp_path / f"{dtype}.gguf"), dtype=dtype))
        settings = replace(training_runs.settings(tmp_path / "run"), cache=tmp_path / "cache")
        _features(model, settings)(0, torch.arange(16).view(1, 16))
        kept.append({load_file(file)["features"].dtype for file in (tmp_path / "cache").rglob("*.safetensors")})
    assert kept == [{torch.bfloat16}, {torch.bfloat16, torch.float32}]


def test_the_doctor_compares_what_is_served_with_the_weights_in_torch(tmp_path: Path) -> None:
    """Within the rounding of the served model; the LM head on a training feature is exact for the unpacked weights."""
    model = unpacked_model(load_model(tiny_file(tmp_path / "tiny.gguf"), dtype="bfloat16"))
    tokens = torch.arange(20).view(1, 20)
    checks = [
        check_logits(model, tokens),
        *check_serving(model, tokens, "auto"),
        check_taps(model, tokens, (0, 1), "auto"),
    ]
    assert [(each.name, each.verdict) for each in checks] == [
        ("target logits", "ok"), ("tree logits", "ok"), ("target served", "ok"), ("taps served", "ok"),
    ]  # fmt: skip
    assert checks[0].value < 1e-5 < checks[2].value < 0.05
