"""Trains a fresh head for a few steps on one batch, to check its starting point and that it learns.

Letters: B texts, S positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.core.errors import ModelError
from foretoken.models.parts import target_parts
from foretoken.training.config import objective_config, train_config
from foretoken.training.doctor.checks import Check, fresh_head, skipped
from foretoken.training.doctor.readings import IN_PLACE, Texts, predictions, read_features, target_choices
from foretoken.training.teacher import Teacher
from foretoken.training.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Callable

    from foretoken.heads.base import Head, HeadConfig
    from foretoken.models.loading import LoadedModel
    from foretoken.models.parts import TargetParts
    from foretoken.training.trainer import Batches

_STEPS, _WINDOWS, _LENGTH = 100, 2, 16


def examine_training(
    target: LoadedModel,
    config: HeadConfig,
    texts: Texts,
    *,
    data: Batches | None = None,
    token_map: Tensor | None = None,
) -> list[Check]:
    """Checks that a fresh head has the right starting point, and that a few steps on one batch lower its loss.

    Args:
        target: The frozen target.
        config: Sizes of the head.
        texts: Texts for the check, and for training without data.
        data: Training data.
        token_map: (Vd,) int64, the tokens of a draft vocabulary; None for the first ones, if the head needs one.
    """
    parts = target_parts(target, dtype=torch.float32)

    def fresh(seed: int) -> Head:
        return fresh_head(config, parts, seed=seed, token_map=token_map)

    return [_check_start(target, fresh, parts, texts), _check_learning(target, fresh, parts, texts, data)]


def _check_start(target: LoadedModel, fresh: Callable[[int], Head], parts: TargetParts, texts: Texts) -> Check:
    """Checks that a fresh head predicts the target's own next token, for methods that start there."""
    config = fresh(0).config
    features = read_features(target, texts.tokens, config.taps)[IN_PLACE]
    one, other = (predictions(fresh(seed), parts, features, texts) for seed in (0, 1))
    if not torch.equal(one, other):
        return skipped("fresh head", f"A fresh {config.method} head is random.")
    where = texts.judged(last=config.steps)
    choices = target_choices(parts, Teacher(target).features(texts.tokens).float(), texts)
    share = min(float((row == choices)[where].float().mean()) for row in one)
    message = "Every fresh head predicts the target's own next token."
    if share < 0.99:
        message = (
            "A fresh head does not say the target's own next token, though it only hands the feature on to the LM "
            "head: the feature is not what the LM head reads, or the LM head is not the target's. Look at the checks "
            "of the target above; do not train yet."
        )
    return Check(
        name="fresh head", verdict="ok" if share >= 0.99 else "warning" if share >= 0.5 else "fault", value=share,
        expected="at least 0.99 of the positions", message=message,
    )  # fmt: skip


def _check_learning(
    target: LoadedModel, fresh: Callable[[int], Head], parts: TargetParts, texts: Texts, data: Batches | None
) -> Check:
    """Checks that 100 steps on one small batch lower the loss."""
    tokens, supervised = _training_batch(texts, data)
    head = fresh(0)
    features = Teacher(target, head.config.taps).read(tokens).float()
    settings = train_config({
        "schedule": {"num_steps": _STEPS, "warmup_steps": 10}, "batch_size": len(tokens),
        "length": tokens.shape[1],
    })  # fmt: skip
    # Without noise: for short windows EAGLE's noise would exceed the features themselves.
    objective = objective_config(head.config.method, {"noise": 0.0})
    name, expected = "learning", "below 0.9 times the first loss"
    trainer = Trainer(head, parts, objective, settings, _OneBatch(tokens, supervised), lambda *_: features)
    try:
        losses = [report.loss for report in trainer.steps()]
    except ModelError as err:
        return Check(name=name, verdict="fault", value=None, expected=expected, message=str(err))
    has_learnt = losses[-1] < 0.9 * losses[0]
    message = f"The loss goes from {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps on one batch"
    if not has_learnt:
        message += (
            ": the head learns nothing even by heart. Expected it to fall clearly. Features may not be finite, or "
            "the rate may be too low"
        )
    return Check(
        name=name, verdict="ok" if has_learnt else "fault", value=[losses[0], losses[-1]], expected=expected,
        message=f"{message}.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _OneBatch:
    """The same (B, S) tokens and flags at every step; see `Batches`."""

    tokens: Tensor
    supervised: Tensor

    def batch(self, step: int, *, batch_size: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
        del step, batch_size, length, seed
        return self.tokens, self.supervised


def _training_batch(texts: Texts, data: Batches | None) -> tuple[Tensor, Tensor]:
    """Returns (B, S) tokens and flags: of the data, or the ends of the texts."""
    if data is not None:
        return data.batch(0, batch_size=_WINDOWS, length=_LENGTH, seed=0)
    length = min(_LENGTH, *map(len, texts.texts))
    tokens = torch.tensor([list(text[-length:]) for text in texts.texts[:_WINDOWS]])
    return tokens, torch.ones_like(tokens, dtype=torch.bool)
