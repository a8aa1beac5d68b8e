"""Anchor-offset positions (LongSpec): where they lie, that runs repeat them, and that heads draft far away."""

from pathlib import Path
from typing import Any

import pytest
import torch
import training_runs
from heads.head_formulas import numbers
from tiny_models import VOCAB_SIZE, tiny_model
from torch import Tensor

from foretoken.heads.base import WindowPositions, build_head
from foretoken.models.loading import wrap_model
from foretoken.models.parts import target_parts
from foretoken.training.objectives import head_config
from foretoken.training.run import train_head
from foretoken.training.teacher import Teacher
from foretoken.training.train import _max_offset
from foretoken.training.trainer import drawn_positions, train_config

ROTATING = ("eagle", "eagle3", "hydra", "falcon")


def test_the_first_tokens_keep_their_positions() -> None:
    positions = WindowPositions(torch.tensor([[0], [2]]), torch.tensor([[100], [7]]))
    assert positions.of(torch.arange(4)).tolist() == [[100, 101, 102, 103], [0, 1, 9, 10]]
    assert WindowPositions().of(torch.arange(3)).tolist() == [[0, 1, 2]]


def test_draws_of_a_step() -> None:
    """Every number of anchors and every offset occur, for each window its own, and a step has one draw."""
    config = train_config({"batch_size": 500, "max_offset": 9, "seed": 3})
    anchor, offset = drawn_positions(config, 11)
    assert sorted(set(anchor.flatten().tolist())) == [0, 1, 2, 3, 4]
    assert sorted(set(offset.flatten().tolist())) == list(range(10))
    for (_, other), is_same in ((drawn_positions(config, 11), True), (drawn_positions(config, 12), False)):
        assert torch.equal(other, offset) == is_same
    reseeded = config.model_copy(update={"seed": 4})
    assert not torch.equal(drawn_positions(reseeded, 11)[1], offset)
    assert not drawn_positions(config.model_copy(update={"max_offset": 0}), 11)[1].any()


@pytest.mark.parametrize(("given", "context", "expected"), [(None, 96, 80), (None, 12, 0), (0, 96, 0), (80, 96, 80)])
def test_offsets_fill_the_target_s_context(given: int | None, context: int, expected: int) -> None:
    assert _max_offset(given, 16, context) == expected


@pytest.mark.parametrize("method", ROTATING)
def test_rotations_are_relative(method: str) -> None:
    """An offset of the whole window changes nothing; anchors that stay behind do, for queries that see them."""
    target = training_runs.target()
    head = build_head(head_config(method, target, {}), dtype=torch.float64)
    with torch.no_grad():
        for seed, parameter in enumerate(head.parameters()):
            parameter.copy_(0.3 * numbers(*parameter.shape, seed=seed))
    tokens, parts = torch.arange(24).view(2, 12) % 67, target_parts(target, dtype=torch.float64)
    features = numbers(2, 12, head.config.hidden_size * len(head.config.taps), seed=1)

    def fed(anchor: int, offset: int) -> Tensor:
        positions = WindowPositions(torch.full((2, 1), anchor), torch.full((2, 1), offset))
        return torch.stack([*head.eval().teacher_forced(features, tokens, parts, positions)])[:, :, 3:9]

    torch.testing.assert_close(fed(0, 500), fed(0, 0), rtol=1e-6, atol=1e-8)
    assert (fed(2, 500) - fed(0, 0)).abs().max() > 1e-3


@pytest.mark.parametrize("method", ["hydra", "eagle"])
def test_a_stopped_run_repeats_its_offsets(method: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"max_offset": 70, "save_every_s": 0.0}
    whole = training_runs.trained(tmp_path / "whole", method, **changes)
    with pytest.raises(training_runs.StopError):
        training_runs.trained(tmp_path / "stopped", method, on_step=training_runs.stop_after(4), **changes)
    again = training_runs.trained(tmp_path / "stopped", method, **changes)
    training_runs.same_weights(again.weights, whole.weights)
    plain = training_runs.trained(tmp_path / "plain", method)
    assert any(not torch.equal(plain.weights[key], value) for key, value in whole.weights.items())


class _Chains:
    """Random texts in which one of three tokens follows each token."""

    def __init__(self) -> None:
        self._next = torch.randint(VOCAB_SIZE, (VOCAB_SIZE, 3), generator=torch.Generator().manual_seed(0))

    def batch(self, step: int, *, batch_size: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        chosen = torch.randint(3, (batch_size, length), generator=generator)
        tokens = [torch.randint(VOCAB_SIZE, (batch_size,), generator=generator)]
        for column in chosen[:, 1:].unbind(1):
            tokens.append(self._next[tokens[-1], column])
        text = torch.stack(tokens, 1)
        return text, torch.ones_like(text, dtype=torch.bool)


def test_drafts_far_behind_the_windows(tmp_path: Path) -> None:
    """A head that saw windows of 16 tokens drafts at positions 300 to 400 as well as at the first ones."""
    target = wrap_model(tiny_model("llama", **training_runs.TINY, max_position_embeddings=416), name="long")
    settings = training_runs.settings(
        tmp_path, "hydra", sizes={"num_heads": 1, "num_layers": 1, "dropout": 0.0}, schedule={"num_steps": 150},
        batch_size=16, max_offset=400,
    )  # fmt: skip
    head = train_head(target, _Chains(), settings)[0].module(dtype=torch.float32).eval()
    tokens, _ = _Chains().batch(0, batch_size=16, length=400, seed=1)
    parts = target_parts(target, dtype=torch.float32)
    with torch.no_grad():
        features = Teacher(target).features(tokens)
        choices = parts.lm_head(features)[:, 1:].argmax(-1)
        hidden = next(iter(head.teacher_forced(features, tokens, parts)))
        is_right = (head.draft_logits(0, hidden, parts)[:, :-1].argmax(-1) == choices).double()
    near, far = float(is_right[:, 2:15].mean()), float(is_right[:, 300:].mean())
    assert far >= near > 0.2
