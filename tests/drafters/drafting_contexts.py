"""Contexts as the engine builds them, for drafters that are called by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tiny_models import VOCAB_SIZE

from foretoken import SamplingParams
from foretoken.drafters.base import DraftContext, TargetFacts
from foretoken.sampling.batch import SamplingBatch, SamplingRequest

GREEDY = SamplingParams(temperature=0.0)


def facts(**changes: Any) -> TargetFacts:
    """A target of the tiny models' size with eight slots."""
    values: dict[str, Any] = {
        "name": "target", "vocab_size": VOCAB_SIZE, "context_len": 96, "num_slots": 8, "device": torch.device("cpu"),
        "dtype": torch.float32,
    }  # fmt: skip
    return TargetFacts(**{**values, **changes})


def context(
    tokens: Sequence[Sequence[int]],
    *,
    max_depth: int | Sequence[int] = 8,
    params: Sequence[SamplingParams] | None = None,
    is_coupled: Sequence[bool] | None = None,
    slots: Sequence[int] | None = None,
) -> DraftContext:
    """What the engine would tell a drafter; greedy requests in slots 0, 1, … unless said otherwise."""
    each = [GREEDY] * len(tokens) if params is None else params
    requests = [SamplingRequest(params=p, seed=p.seed or 0) for p in each]
    return DraftContext(
        slots=range(len(tokens)) if slots is None else slots,
        tokens=tokens,
        max_depth=[max_depth] * len(tokens) if isinstance(max_depth, int) else max_depth,
        sampling=SamplingBatch.build(requests, VOCAB_SIZE),
        is_coupled=[False] * len(tokens) if is_coupled is None else is_coupled,
    )
