"""Tree attention over the slot cache: the Triton kernel on GPUs, stock kernels elsewhere.

Each sequence reads exactly its own rows of the cache. The content of uncommitted rows, NaN included, therefore cannot
matter, and a sequence's result does not depend on the lengths of other sequences of the batch.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from foretoken.core.backend import has_cuda_runtime, has_triton
from foretoken.core.checks import require

if TYPE_CHECKING:
    from foretoken.attention.layout import AttentionLayout


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes softmax attention of one sequence with grouped KV heads.

    Args:
        query: (H, T, Dk).
        key: (Hk, S, Dk), H a multiple of Hk; query head h reads KV head h // (H / Hk).
        value: (Hk, S, Dv).
        mask: (T, S) bool, true where a query sees a key; None for everywhere.
        scale: Factor of the dot products.
        softcap: c in c tanh(score / c), applied before the mask (Gemma 2), or None.
        sinks: (H,) logits that take part in the softmax and have no value (GPT-OSS), or None.

    Returns:
        (H, T, Dv) in the query's dtype; the softmax runs in at least float32.
    """
    heads, queries, _ = query.shape
    probs = _probabilities(query, key, mask, scale=scale, softcap=softcap, sinks=sinks).to(value.dtype)
    return (probs @ value).view(heads, queries, -1)


def _probabilities(
    query: Tensor, key: Tensor, mask: Tensor | None, *, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Returns (Hk, H / Hk * T, S), the softmax of `reference_attention` in at least float32."""
    (heads, queries, width), num = query.shape, key.shape[0]
    grouped = query.reshape(num, heads // num * queries, width)
    scores = (grouped @ key.transpose(1, 2)).view(heads, queries, -1) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(heads, 1, 1).expand(-1, queries, 1)], dim=2)
    return scores.softmax(-1)[:, :, : key.shape[1]].reshape(num, heads // num * queries, -1)


_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_WIDEST_HEAD = 256
_log = logging.getLogger(__name__)


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: AttentionLayout,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns (M, H, Dv), the attention of every token of a pass; further arguments as in `reference_attention`.

    Args:
        query: (M, H, Dk).
        keys: (slots, Hk, capacity, Dk), one layer of the cache, this pass's rows already written.
        values: (slots, Hk, capacity, Dv).
    """
    if layout.has_weights:
        layout.keep_weights(_summed_weights(query, keys, layout, window, scale=scale, softcap=softcap, sinks=sinks))
    if layout.is_captured or has_cuda_runtime(query.device):
        kernel = _triton_kernel(query.dtype, max(query.shape[-1], values.shape[-1]))
        if kernel is not None:
            output: Tensor = kernel(
                query, keys, values, layout.tables(), scale=scale, window=window, softcap=softcap, sinks=sinks
            )
            return output
        require(not layout.is_captured, "passes are captured only where the kernel runs, see `has_kernel`")
    outputs = []
    for row, slot in enumerate(layout.slots):
        own, end = query[layout.tokens_of(row)].transpose(0, 1), layout.num_keys(row)
        key, value = keys[slot, :, :end], values[slot, :, :end]
        mask = layout.mask(row, window)
        if softcap is None and sinks is None:
            output = scaled_dot_product_attention(
                own[None], key[None], value[None], mask, scale=scale, enable_gqa=own.shape[0] != key.shape[0]
            )[0]
        else:
            output = reference_attention(own, key, value, mask, scale=scale, softcap=softcap, sinks=sinks)
        outputs.append(output.transpose(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _summed_weights(query: Tensor, keys: Tensor, layout: AttentionLayout, window: int | None, **terms: Any) -> Tensor:
    """Returns (S, Hk, C), the weights of one layer, see `PassOutput.attention`; reads the keys once more."""
    is_plain = window is None and terms["softcap"] is None and terms["sinks"] is None
    if is_plain and has_cuda_runtime(query.device) and has_kernel(query.dtype, query.shape[-1]):
        from foretoken.attention.triton_weights import attention_weights_triton, fits

        weighed = layout.weighed_tensors()
        if fits(query, keys, weighed):
            found: Tensor = attention_weights_triton(query, keys, layout.tables(), weighed, scale=terms["scale"])
            return found
    count = range(len(layout.slots))
    weights = torch.zeros(len(count), keys.shape[1], max(map(layout.num_keys, count)), device=keys.device)
    for row, slot in enumerate(layout.slots):
        tokens, end = layout.weighed_tokens(row), layout.num_keys(row)
        if tokens:
            mask, first = layout.mask(row, window), layout.tokens_of(row).start
            seen = None if mask is None else mask[[token - first for token in tokens]]
            probs = _probabilities(query[tokens].transpose(0, 1), keys[slot, :, :end], seen, **terms)
            weights[row, :, :end] = probs.sum(1)
    return weights


def has_kernel(dtype: torch.dtype, head_width: int) -> bool:
    """Returns whether the Triton kernel supports a dtype and head size, so that attention can be captured."""
    return _triton_kernel(dtype, head_width) is not None


@cache
def _triton_kernel(dtype: torch.dtype, head_width: int) -> Any:
    """Returns the kernel, or None; logs the reason once."""
    if dtype not in _KERNEL_DTYPES or head_width > _WIDEST_HEAD:
        reason = (
            f"it takes heads of at most {_WIDEST_HEAD} in float32, float16 and bfloat16, not {head_width} in {dtype}"
        )
    elif not has_triton():
        reason = "triton is not installed. Run in foretoken's repository: pip install '.[kernels]'"
    else:
        from foretoken.attention.triton_tree import tree_attention_triton

        return tree_attention_triton
    _log.warning("attention runs on stock kernels, sequence by sequence, instead of the Triton kernel: %s.", reason)
    return None
