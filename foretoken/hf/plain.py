"""Runs the model with transformers' own attention and cache: the reference for all other decoders."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor


@contextmanager
def own_attention(model: Any, kind: str = "eager") -> Iterator[None]:
    """Gives a model its own attention back for a while; kind: "eager", which every model has, or "sdpa"."""
    name = model.config._attn_implementation
    try:
        model.set_attn_implementation(kind)
    except (ValueError, ImportError):  # not every architecture has every kind
        model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(name)


def run_plain(model: Any, input_ids: Tensor, **kwargs: Any) -> Any:
    """One ordinary forward.

    Args:
        model: A transformers causal LM.
        input_ids: (B, T) int64.
        **kwargs: Handed to the model.
    """
    with own_attention(model), torch.inference_mode():
        return model(input_ids.to(next(model.parameters()).device), **kwargs)


def generate_plain(model: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Greedy decoding by `transformers` `generate`, not stopping at the end-of-sequence token.

    Args:
        model: A transformers causal LM.
        prompt: Token ids.
        max_tokens: Output tokens.

    Returns:
        The output tokens.
    """
    ids = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    with own_attention(model), torch.inference_mode():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, eos_token_id=-1,
            pad_token_id=0,
        )  # fmt: skip
    result: list[int] = output[0, len(prompt) :].tolist()
    return result
