"""Triton kernels for the distances of `foretoken.training.losses`, one program a row.

A program reads its row of logits three or four times, all but once from a cache, and writes the gradient. PyTorch's
operations would write and read some ten (M, V) tensors for each head. Sums are in float32.

Letters: M positions, V vocabulary, R most probable tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_V = 2048  # a choice: 16 values a thread
_LARGEST_INT32 = tl.constexpr((1 << 31) - 1)
_LEAST_LOG_PROB = tl.constexpr(-1e4)  # in place of -inf, which times a probability of 0 would be NaN


def distributions(logits: Tensor, *, has_probs: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns best (M,) int64, probs (M, V) float32 and entropy (M,) float32 of (M, V) logits, each row contiguous."""
    count, vocab_size = logits.shape
    best = torch.empty(count, dtype=torch.int64, device=logits.device)
    probs = torch.empty(count, vocab_size, device=logits.device) if has_probs else None
    entropy = torch.empty(count, device=logits.device) if has_probs else None
    _distribution_kernel[(count,)](
        logits, best, best if probs is None else probs, best if entropy is None else entropy, vocab_size,
        logits.stride(0), HAS_PROBS=has_probs, BLOCK_V=_BLOCK_V, num_warps=4,
    )  # fmt: skip
    return best, probs, entropy


def losses_and_gradient(
    logits: Tensor, probs: Tensor | None, entropy: Tensor | None, labels: Tensor,
    weights: tuple[float, float, float, float, int], scale: float,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Returns loss (M,) float32, best (M,) int64 and the gradient (M, V) in the logits' dtype, or None without weights.

    Args:
        logits: (M, V), each row contiguous.
        probs: (M, V) float32, contiguous, the target's; None if no weight but `token` is set.
        entropy: (M,) float32, of `probs`.
        labels: (M,) int64.
        weights: `token`, `kl`, `tv`, `top` and `num_top` of `LossWeights`.
        scale: Factor of the gradient alone.
    """
    count, vocab_size = logits.shape
    best = torch.empty(count, dtype=torch.int64, device=logits.device)
    loss = torch.zeros(count, device=logits.device)
    token, kl, tv, top, num_top = weights
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format) if token or kl or tv or top else None
    top_probs, top_tokens = loss, labels  # are not read
    if top and probs is not None:
        top_probs, top_tokens = probs.topk(min(num_top, vocab_size), dim=1)
    _distance_kernel[(count,)](
        logits, loss if probs is None else probs, loss if entropy is None else entropy, labels, top_probs, top_tokens,
        loss, best, logits if grad is None else grad, vocab_size, logits.stride(0), float(token), float(kl), float(tv),
        float(top), float(scale), HAS_PROBS=probs is not None, HAS_TV=bool(tv), HAS_GRAD=grad is not None,
        NUM_TOP=top_tokens.shape[1] if top else 0, BLOCK_V=_BLOCK_V, num_warps=4,
    )  # fmt: skip
    return loss, best, grad


@triton.jit
def _greatest(row_logits: tl.tensor, vocab_size: tl.tensor, BLOCK_V: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Returns the largest logit of a row and its lowest token."""
    values = tl.full((BLOCK_V,), float("-inf"), tl.float32)
    tokens = tl.zeros((BLOCK_V,), tl.int32)
    for begin in range(0, vocab_size, BLOCK_V):
        token = begin + tl.arange(0, BLOCK_V)
        x = tl.load(row_logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        tokens = tl.where(x > values, token, tokens)
        values = tl.maximum(x, values)
    greatest = tl.max(values, 0)
    place = tl.min(tl.where(values == greatest, tokens, _LARGEST_INT32), 0)
    return greatest, tl.minimum(place, vocab_size - 1)  # a row with NaN may have no place


@triton.jit
def _sum_of_exp(row_logits: tl.tensor, greatest: tl.tensor, vocab_size: tl.tensor, BLOCK_V: tl.constexpr) -> tl.tensor:
    sums = tl.zeros((BLOCK_V,), tl.float32)
    for begin in range(0, vocab_size, BLOCK_V):
        token = begin + tl.arange(0, BLOCK_V)
        x = tl.load(row_logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        sums += tl.exp(x - greatest)
    return tl.sum(sums, 0)


@triton.jit(do_not_specialize=["stride"])
def _distribution_kernel(
    logits: tl.tensor,
    best: tl.tensor,
    probs: tl.tensor,
    entropy: tl.tensor,
    vocab_size: tl.tensor,
    stride: tl.tensor,
    HAS_PROBS: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Computes the distribution of one row."""
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * stride
    greatest, place = _greatest(row_logits, vocab_size, BLOCK_V)
    tl.store(best + row, place.to(tl.int64))
    if HAS_PROBS:
        total = _sum_of_exp(row_logits, greatest, vocab_size, BLOCK_V)
        means = tl.zeros((BLOCK_V,), tl.float32)
        for begin in range(0, vocab_size, BLOCK_V):
            token = begin + tl.arange(0, BLOCK_V)
            inside = token < vocab_size
            x = tl.load(row_logits + token, mask=inside, other=float("-inf")).to(tl.float32) - greatest
            p = tl.exp(x) / total
            tl.store(probs + row * vocab_size + token, p, mask=inside)
            means += p * tl.maximum(x, _LEAST_LOG_PROB)
        tl.store(entropy + row, tl.log(total) - tl.sum(means, 0))


@triton.jit(do_not_specialize=["stride", "scale"])
def _distance_kernel(
    logits: tl.tensor,
    probs: tl.tensor,
    entropy: tl.tensor,
    labels: tl.tensor,
    top_probs: tl.tensor,
    top_tokens: tl.tensor,
    loss: tl.tensor,
    best: tl.tensor,
    grad: tl.tensor,
    vocab_size: tl.tensor,
    stride: tl.tensor,
    token_weight: tl.tensor,
    kl: tl.tensor,
    tv: tl.tensor,
    top: tl.tensor,
    scale: tl.tensor,
    HAS_PROBS: tl.constexpr,
    HAS_TV: tl.constexpr,
    HAS_GRAD: tl.constexpr,
    NUM_TOP: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Computes the loss of one row and its gradient; formulas as in `losses._of_block`."""
    row = tl.program_id(0).to(tl.int64)
    row_logits, row_probs = logits + row * stride, probs + row * vocab_size
    greatest, place = _greatest(row_logits, vocab_size, BLOCK_V)
    tl.store(best + row, place.to(tl.int64))
    if HAS_GRAD:
        normalizer = greatest + tl.log(_sum_of_exp(row_logits, greatest, vocab_size, BLOCK_V))
        label = tl.load(labels + row)
        share = token_weight + kl  # the weight of the head's own probabilities in the gradient
        result = token_weight * (normalizer - tl.load(row_logits + label).to(tl.float32))
        for rank in tl.static_range(NUM_TOP):
            p_top = tl.load(top_probs + row * NUM_TOP + rank)
            x_top = tl.load(row_logits + tl.load(top_tokens + row * NUM_TOP + rank)).to(tl.float32)
            share += top * p_top
            result += top * p_top * (normalizer - x_top)
        mean = 0.0
        if HAS_TV:
            gaps, means = tl.zeros((BLOCK_V,), tl.float32), tl.zeros((BLOCK_V,), tl.float32)
            for begin in range(0, vocab_size, BLOCK_V):
                token = begin + tl.arange(0, BLOCK_V)
                inside = token < vocab_size
                x = tl.load(row_logits + token, mask=inside, other=float("-inf")).to(tl.float32)
                own, p = tl.exp(x - normalizer), tl.load(row_probs + token, mask=inside, other=0.0)
                gaps += tl.abs(own - p)
                means += tl.where(own > p, own, tl.where(own < p, -own, 0.0))
            mean = tl.sum(means, 0)
            result += tv * tl.sum(gaps, 0) / 2
        crosses = tl.zeros((BLOCK_V,), tl.float32)
        for begin in range(0, vocab_size, BLOCK_V):
            token = begin + tl.arange(0, BLOCK_V)
            inside = token < vocab_size
            x = tl.load(row_logits + token, mask=inside, other=0.0).to(tl.float32)
            own = tl.exp(x - normalizer)
            slope = own * share - tl.where(token == label, token_weight, 0.0)
            if HAS_PROBS:
                p = tl.load(row_probs + token, mask=inside, other=0.0)
                crosses += p * x
                slope -= kl * p
                if HAS_TV:
                    sign = tl.where(own > p, 1.0, tl.where(own < p, -1.0, 0.0))
                    slope += own * (sign - mean) * (tv / 2)
            for rank in tl.static_range(NUM_TOP):
                p_top = tl.load(top_probs + row * NUM_TOP + rank)
                is_top = token == tl.load(top_tokens + row * NUM_TOP + rank)
                slope -= tl.where(is_top, top * p_top, 0.0)
            tl.store(grad + row * vocab_size + token, slope * scale, mask=inside)
        if HAS_PROBS:
            result += kl * (normalizer - tl.sum(crosses, 0) - tl.load(entropy + row))
        tl.store(loss + row, result)
