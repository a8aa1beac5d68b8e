"""Examines a target and a head: runs all checks in order and collects their verdicts.

Checks go from the target to the head's weights, the head's predictions, and the engine's drafts. If an early check
fails, later ones are skipped, since their results would mislead.

Letters: B texts, S positions, E hidden size, K heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from foretoken.core.errors import ForetokenError
from foretoken.formats.checkpoint import TargetFingerprint
from foretoken.formats.registry import read_head
from foretoken.formats.target_info import TargetWeights
from foretoken.models.parts import target_parts
from foretoken.training.config import head_config
from foretoken.training.doctor.checks import (
    Check,
    check_fit,
    check_logits,
    check_serving,
    check_taps,
    check_trained,
    check_values,
    skipped,
)
from foretoken.training.doctor.drafting import draft
from foretoken.training.doctor.readings import (
    IN_PLACE,
    Texts,
    greedy_texts,
    measure,
    predictions,
    read_features,
    target_choices,
)
from foretoken.training.doctor.trial import examine_training
from foretoken.training.doctor.verdicts import check_agreement, check_drafting
from foretoken.training.teacher import Teacher

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from foretoken.formats.checkpoint import HeadCheckpoint
    from foretoken.models.loading import LoadedModel
    from foretoken.training.trainer import Batches

_OF_THE_HEAD = ("head trained", "head values", "feature", "labels", "knowledge", "depth", "drafting")


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """The case to examine.

    Attributes:
        head: Directory of a trained head, or None.
        method: Method of a head to be trained, or None.
        train_check: Whether to try training with the trained head's sizes too.
        prompts: Texts that the target continues; held out from training.
        max_tokens: Tokens of each continuation.
        data: Training data for the trial; None for the texts.
        runner: See `LLM`.
        allow_other_target: Whether to accept a head for another target of the same sizes.
    """

    head: Path | None = None
    method: str | None = None
    train_check: bool = False
    prompts: Sequence[str]
    max_tokens: int = 64
    data: Batches | None = None
    runner: str = "auto"
    allow_other_target: bool = False


def examine(target: LoadedModel, tokenizer: Any, what: Examination) -> list[Check]:
    """Makes all checks that the case allows. Writes nothing.

    Raises:
        RequestError: When the prompts are too short.
        ConfigError: For an unknown method.
    """
    # First, since an unknown method must not cost a run of the target.
    config = None if what.method is None else head_config(what.method, target, {})
    texts = greedy_texts(target, tokenizer, what.prompts, max_tokens=what.max_tokens, runner=what.runner)
    probe = torch.tensor([list(texts.texts[0])], device=target.device)
    checks = [check_logits(target, probe), *check_serving(target, probe, what.runner)]
    token_map = None
    if config is not None and config.taps != ("final",):
        checks.append(check_taps(target, probe, config.taps, what.runner))
        if checks[-1].value is None:
            checks += _skip("The taps cannot be read.", "fresh head", "learning")
            config = None
    if what.head is not None:
        found, checkpoint = _examine_head(target, tokenizer, what.head, texts, what)
        checks += found
        if what.train_check and what.method is None:
            if checkpoint is None:
                checks += _skip("The head's sizes are not known to fit.", "fresh head", "learning")
            else:
                config, token_map = checkpoint.config, checkpoint.weights.get("token_map")
    if config is not None:
        checks += examine_training(target, config, texts, data=what.data, token_map=token_map)
    return checks


def _examine_head(
    target: LoadedModel, tokenizer: Any, head: Path, texts: Texts, what: Examination
) -> tuple[list[Check], HeadCheckpoint | None]:
    """Loads a head strictly and examines it; also returns the head if it loads."""
    fingerprint = TargetFingerprint.of(target)
    try:
        _, checkpoint = read_head(
            head, target=fingerprint, base_config=target.config, weights=lambda: TargetWeights.of(target)
        )
    except ForetokenError as err:
        load = Check(
            name="head loads", verdict="fault", value=None, expected="every tensor of its sizes, and no other",
            message=str(err),
        )  # fmt: skip
        return [load, *_skip("The head cannot be loaded.", "head fits", *_OF_THE_HEAD)], None
    load = Check(
        name="head loads", verdict="ok", value=len(checkpoint.weights),
        expected="every tensor of its sizes, and no other", message="Every tensor is there, and no other.",
    )  # fmt: skip
    fit = check_fit(checkpoint, fingerprint, what=str(head), allow_other_target=what.allow_other_target)
    if fit.verdict == "fault":
        return [load, fit, *_skip("The head belongs to another target.", *_OF_THE_HEAD)], None
    parts = target_parts(target, dtype=torch.float32)
    trained, untrained = check_trained(checkpoint, parts)
    values = check_values(checkpoint, untrained)
    weights = [load, fit, trained, values]
    if "fault" in (trained.verdict, values.verdict):
        return [*weights, *_skip("The weights are not those of a trained head.", *_OF_THE_HEAD[2:])], checkpoint
    taps = checkpoint.config.taps
    if taps != ("final",):
        served = check_taps(target, texts.tokens[:1, : len(texts.texts[0])], taps, what.runner)
        weights.append(served)
        if served.value is None:
            return [*weights, *_skip("Its taps cannot be read.", *_OF_THE_HEAD[2:])], None
    options = {"method": checkpoint.config.method, "model": str(head), "allow_other_target": what.allow_other_target}
    readings = read_features(target, texts.tokens, taps)
    module = checkpoint.module(device=target.device, dtype=torch.float32)
    choices = target_choices(parts, Teacher(target).features(texts.tokens).float(), texts)
    agreement = measure(module, parts, readings, texts, choices=choices)
    said = predictions(module, parts, readings[IN_PLACE], texts)
    try:
        drafting = check_drafting(draft(target, options, texts, said, tokenizer=tokenizer, runner=what.runner))
    except ForetokenError as err:
        drafting = Check(name="drafting", verdict="fault", value=None, expected="a drafter", message=str(err))
    return [*weights, *check_agreement(agreement), drafting], checkpoint


def _skip(reason: str, *names: str) -> list[Check]:
    return [skipped(name, reason) for name in names]
