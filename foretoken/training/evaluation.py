"""Simulates drafts on held-out text while a head trains: chains at temperature 0.

The head is fed the text. Step i of the draft from a position is right if its first candidate is the target's choice. A
draft is accepted up to its first wrong step. So all steps from one position are judged together: rates of single steps
would not show how often they are right in a row.

Letters: B windows, S positions, K steps, E hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.core.errors import ConfigError
from foretoken.training.objectives.base import Examples
from foretoken.training.teacher import Teacher

if TYPE_CHECKING:
    from collections.abc import Callable

    from foretoken.heads.base import Head, HeadConfig
    from foretoken.models.loading import LoadedModel
    from foretoken.models.parts import TargetParts
    from foretoken.training.data.packed import PackedTokens

_WINDOWS = 8
_PORTION_VALUES = 1 << 24  # logits made at once


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """The interval and the text of evaluations; changes no weight.

    Attributes:
        every: Optimiser steps from one evaluation to the next.
        tokens: (B, S) int64.
        supervised: (B, S) bool, tokens that count as labels.
    """

    every: int
    tokens: Tensor
    supervised: Tensor

    @classmethod
    def of(cls, held_out: PackedTokens, *, every: int, length: int) -> EvaluationConfig:
        """Takes a few windows of packed tokens, always the same ones; length: most tokens of a window."""
        length = min(length, len(held_out.tokens))
        count = min(_WINDOWS, held_out.num_windows(max(length, 1)))
        tokens, supervised = held_out.batch(0, batch_size=count, length=length, seed=0)
        return cls(every=every, tokens=tokens, supervised=supervised)

    def starts(self, num_steps: int) -> Tensor:
        """Returns (B, S) bool: positions from which all K steps have a label.

        Raises:
            ConfigError: When there is none.
        """
        length = self.tokens.shape[1]
        found = torch.zeros_like(self.supervised)
        if length >= num_steps + 2:
            # Step i of a draft from position t has the label t + 2 + i.
            found[:, : length - 1 - num_steps] = self.supervised[:, 2:].unfold(1, num_steps, 1).all(-1)
        if not bool(found.any()):
            raise ConfigError(
                f"no window of the evaluation data has {num_steps} labels in a row, one for each step of the head. "
                "Expected longer documents, or more of them. Pass other --eval-data, or leave --eval-every out."
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainAcceptance:
    """The result of an evaluation.

    Attributes:
        by_depth: K shares of drafts whose first d steps are all right, from d = 1.
    """

    by_depth: list[float]

    @property
    def tau(self) -> float:
        """Expected tokens of a target pass that verifies a chain of K tokens, the target's own included."""
        return 1.0 + sum(self.by_depth)


class Evaluation:
    """Evaluates a head in training, every few steps."""

    def __init__(self, target: LoadedModel, config: EvaluationConfig, head: HeadConfig, parts: TargetParts) -> None:
        """Prepares evaluations.

        Args:
            target: The frozen target.
            config: Interval and text.
            head: Sizes of the head.
            parts: The modules that the head shares with the target.

        Raises:
            ConfigError: When the windows are too short for the head.
        """
        self._every, self._parts = config.every, parts
        self._teacher = Teacher(target, head.taps)
        self._tokens, self._supervised = (part.to(target.device) for part in (config.tokens, config.supervised))
        self._starts = config.starts(head.steps).to(target.device)

    def is_due(self, step: int) -> bool:
        """Returns whether an evaluation follows this step."""
        return step % self._every == 0

    @torch.no_grad()
    def acceptance(self, head: Head, *, precision: torch.dtype) -> ChainAcceptance:
        """Evaluates a head, which stays in evaluation mode; draws no random number.

        Args:
            head: In float32.
            precision: Dtype of GEMMs.
        """
        head.eval()
        device = self._tokens.device
        counts: list[int] = []
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == torch.bfloat16):
            examples = Examples.of(
                self._tokens, self._supervised, self._teacher.read(self._tokens).float(), head.config
            )  # fmt: skip
            row, begin = self._starts.nonzero().unbind(1)
            choices = _first(self._parts.lm_head, examples.final.flatten(0, 1), head.config.vocab_size)
            choices = choices.view(self._tokens.shape)
            is_right = torch.ones_like(row, dtype=torch.bool)
            for index, hidden in enumerate(head.teacher_forced(examples.features, self._tokens, self._parts)):
                read = partial(head.draft_logits, index, parts=self._parts)
                said = _first(read, hidden[row, begin], head.config.vocab_size)
                if head.token_map is not None:
                    said = head.token_map[said]
                is_right &= said == choices[row, begin + 1 + index]
                counts.append(int(is_right.sum()))
        return ChainAcceptance(by_depth=[count / len(row) for count in counts])


def _first(logits: Callable[[Tensor], Tensor], rows: Tensor, vocab_size: int) -> Tensor:
    """Returns (M,) most probable tokens of (M, W), a portion at a time."""
    return torch.cat([logits(part).argmax(-1) for part in rows.split(max(1, _PORTION_VALUES // vocab_size))])
