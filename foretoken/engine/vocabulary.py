"""Which of the ids that a model has logits for mean nothing to its tokenizer."""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError, foreign_errors_as, one_line

if TYPE_CHECKING:
    from foretoken.runner.runner import Runner


def check_vocabulary(tokenizer: Any) -> None:
    """Refuses a tokenizer whose `get_vocab`, where it has one, gives anything but tokens and their ids.

    Raises:
        ConfigError: Naming what it gives.
    """
    if not hasattr(tokenizer, "get_vocab"):
        return
    with foreign_errors_as(
        ConfigError,
        lambda err: (
            f"get_vocab of the tokenizer fails: {type(err).__name__}: {one_line(err)}. Expected a mapping of tokens "
            "to ids."
        ),
    ):
        values = list(tokenizer.get_vocab().values())
    foreign = [value for value in values if not isinstance(value, Integral) or isinstance(value, bool)]
    if foreign:
        raise ConfigError(
            f"a value in get_vocab of the tokenizer is {shown(foreign[0])}. Expected a mapping of tokens to ids."
        )


def ids_without_token(tokenizer: Any, target: Runner) -> Tensor | None:
    """Ids that the tokenizer does not have: many models pad their vocabulary to a round number of rows.

    Args:
        tokenizer: A transformers tokenizer; None, or one without a vocabulary to look at, knows every id.
        target: The runner; its end-of-sequence ids always count as known.

    Returns:
        (U,) int64 on the target's device, or None when there are none.
    """
    if not hasattr(tokenizer, "get_vocab"):
        return None
    is_unknown = torch.ones(target.vocab_size, dtype=torch.bool)
    known = [token for token in tokenizer.get_vocab().values() if 0 <= token < target.vocab_size]
    is_unknown[[*known, *target.model.eos_ids]] = False
    unknown = is_unknown.nonzero()[:, 0]
    return unknown.to(target.device) if len(unknown) else None
