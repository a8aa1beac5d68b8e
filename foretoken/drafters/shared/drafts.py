"""Common parts of drafters with weights: how drafts are chosen, passes level by level, and int8 copies of weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeVar

import torch

from foretoken.core.backend import integers_on
from foretoken.core.errors import ConfigError
from foretoken.core.passes import Pass
from foretoken.decoder.base import UnsuitableError
from foretoken.sampling.draft_draws import DraftDraws

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from foretoken.decoder.lean.native_linear import Quantization
    from foretoken.drafters.base import DraftContext
    from foretoken.trees.expansion import Frontier
    from foretoken.trees.pruning import Pruning

QuantizationOption = Literal["auto", "int8", "none"]
_Made = TypeVar("_Made")


def with_quantization(option: QuantizationOption, make: Callable[[Quantization | None], _Made]) -> _Made:
    """Returns the result of `make` for int8 if it is wanted and possible, else for the weights as stored.

    Args:
        option: "int8" requires it, "auto" takes it if possible.
        make: Makes the result; raises `UnsuitableError` if the drafter cannot be quantised.

    Raises:
        ConfigError: For "int8" if it is not possible.
    """
    if option == "none":
        return make(None)
    try:
        return make("int8")
    except UnsuitableError as err:
        if option == "int8":
            raise ConfigError(
                f"quantization 'int8' cannot be had: {err} Leave it out to draft with the weights as they are stored."
            ) from err
        return make(None)


class KeptDraws:
    """The draws of the last proposal."""

    def __init__(self, *, greedy: bool, pruning: Pruning | None = None) -> None:
        """Starts without draws."""
        self._is_greedy, self._pruning = greedy, pruning
        self._draws: DraftDraws | None = None
        self._are_coupled: list[bool] = []

    def of(self, context: DraftContext, rows: Sequence[int], device: torch.device) -> tuple[Tensor, DraftDraws]:
        """Returns roots and draws of some sequences of a batch.

        Args:
            context: Of the whole batch.
            rows: B of its sequences, ascending.
            device: Where trees lie.

        Returns:
            (B,) int64 root tokens, and the draws of these sequences.
        """
        texts = [context.tokens[row] for row in rows]
        last = [[tokens[-1] for tokens in texts], [len(tokens) - 1 for tokens in texts]]
        roots, positions = integers_on(last, device).unbind()
        sampling, are_coupled = context.sampling, [context.is_coupled[row] for row in rows]
        if len(rows) < len(context.slots):
            sampling = sampling.select(torch.tensor(rows, device=device))
        draws = self._draws
        if draws is None or draws.batch is not sampling or self._are_coupled != are_coupled:
            draws = DraftDraws.build(sampling, are_coupled, positions, greedy=self._is_greedy)
            self._draws, self._are_coupled = draws, are_coupled
        return roots, replace(draws, root_positions=positions, pruning=self._pruning)


class LevelPasses:
    """The passes over the levels below the roots, from the first one on; the roots lie in the prefix.

    Attributes:
        tokens: (B, W) int64.
        parents: (B, W) int64, parents among the nodes that were fed, -1 below the roots.
    """

    def __init__(self, slots: Sequence[int], prefix_lens: Sequence[int], device: torch.device) -> None:
        """Starts before the first level."""
        self._slots, self._prefix_lens = slots, prefix_lens
        self.tokens = self.parents = torch.zeros(len(slots), 0, dtype=torch.int64, device=device)
        self._positions = self.tokens  # (B, W)
        self._next_positions = integers_on(prefix_lens, device).unsqueeze(1)
        self._above: range | None = None  # nodes of the level above

    def next(self, frontier: Frontier) -> Pass:
        """Returns the pass over a frontier, without logits. A node of depth d is d - 1 positions after the prefix."""
        tokens, origins = frontier
        (batch, count), earlier = tokens.shape, self.tokens.shape[1]
        if self._above is None:
            parents = torch.full_like(tokens, -1)
        elif origins is None:
            parents = torch.arange(self._above.start, self._above.stop, device=tokens.device).expand(batch, -1)
        else:
            parents = (origins + self._above.start).expand(batch, -1)
        self._above = range(earlier, earlier + count)
        self.tokens = torch.cat([self.tokens, tokens], dim=1)
        self.parents = torch.cat([self.parents, parents], dim=1)
        self._positions = torch.cat([self._positions, self._next_positions.expand(batch, count)], dim=1)
        self._next_positions = self._next_positions + 1
        return Pass(
            tokens=tokens.flatten(),
            positions=self._positions.flatten(),
            parents=self.parents.flatten(),
            slots=self._slots,
            prefix_lens=self._prefix_lens,
            offsets=range(0, batch * count + 1, count),
            num_earlier=[earlier] * batch,
            logit_rows=None,
        )
