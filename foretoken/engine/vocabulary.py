"""Which of the ids that a model has logits for mean nothing to its tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from foretoken.target.runner import Runner


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
