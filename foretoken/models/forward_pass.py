"""The pass of a transformers model that is in progress, as a context variable: some models drop unknown arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from foretoken.attention.layout import AttentionLayout
    from foretoken.models.level_states import LevelStates

ATTENTION_NAME = "foretoken_tree"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPass:
    """One pass of the model in progress.

    Attributes:
        layout: Visible rows of the slot cache; None if the model runs by itself and only features are read.
        num_layers: Number of blocks after which the pass ends; None for all.
        features: Filled by taps during the pass: tap name to (1, M, D).
        windows: Filled by attention during the pass: layer index to sliding window.
        states: Of recurrent layers; None if the model has none, or runs by itself.
    """

    layout: AttentionLayout | None
    num_layers: int | None = None
    features: dict[int | str, Tensor] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    states: LevelStates | None = None


_current: ContextVar[ForwardPass | None] = ContextVar("foretoken_forward_pass", default=None)


@contextmanager
def running(forward_pass: ForwardPass) -> Iterator[ForwardPass]:
    """Makes a pass the current one for cache, attention and taps."""
    token = _current.set(forward_pass)
    try:
        yield forward_pass
    finally:
        _current.reset(token)


def current_pass() -> ForwardPass | None:
    """Returns the pass in progress, or None."""
    return _current.get()


def current_layout() -> AttentionLayout | None:
    """Returns the layout of the pass in progress, or None outside a pass over the slot cache."""
    forward_pass = current_pass()
    return None if forward_pass is None else forward_pass.layout
