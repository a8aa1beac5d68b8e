"""Triton kernels for the target's token at every node: greedy, or a Gumbel-max draw with position-keyed noise.

The noise is `KeyedNoise.gumbel(positions, Purpose.TARGET, V)`, made in the kernel. Its 53-bit integers are the same bit
for bit; its logarithms may differ in the last place. Requests with processors, top-k, top-p or min-p are not supported.

A row's result depends on the row alone: not on other rows, and not on how the vocabulary is split.

Letters: B sequences, N nodes, V vocabulary, S parts of the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.core.checks import require
from foretoken.sampling.noise import _GAMMA as _SIGNED_GAMMA
from foretoken.sampling.noise import _MIX_1 as _SIGNED_MIX_1
from foretoken.sampling.noise import _MIX_2 as _SIGNED_MIX_2
from foretoken.sampling.noise import _WORD, Purpose

_GAMMA = tl.constexpr(_SIGNED_GAMMA & _WORD)
_MIX_1 = tl.constexpr(_SIGNED_MIX_1 & _WORD)
_MIX_2 = tl.constexpr(_SIGNED_MIX_2 & _WORD)
_TARGET_TAG = tl.constexpr((int(Purpose.TARGET) + 1) * _SIGNED_MIX_2 & _WORD)  # `KeyedNoise._keys` at lane 0

_LOWEST_KEY = tl.constexpr(-(1 << 63))
_LARGEST_INT32 = tl.constexpr((1 << 31) - 1)
_FINITE = tl.constexpr(1)  # the class of a row: 0 if all is -inf, 1 if its maximum is finite, 2 with NaN or +inf
_BROKEN = tl.constexpr(2)

_BLOCK_V = 1024
_PROGRAMS = 1056  # eight for each of an H200's 132 multiprocessors


class Choices(NamedTuple):
    """The target's token at every node.

    Attributes:
        tokens: (B, N) int64, lowest id first among equals; the first NaN if there is one.
        is_finite: (B, N) bool, whether the largest logit is finite: no NaN, no +inf, not -inf throughout.
    """

    tokens: Tensor
    is_finite: Tensor

    @classmethod
    def empty(cls, batch: int, nodes: int, *, device: torch.device | str) -> Choices:
        """Allocates buffers to be filled."""
        return cls(
            tokens=torch.empty(batch, nodes, dtype=torch.int64, device=device),
            is_finite=torch.empty(batch, nodes, dtype=torch.bool, device=device),
        )


class ChoiceParts(NamedTuple):
    """Results of the parts of the vocabulary, which the second kernel merges.

    Attributes:
        keys: (B * N, S) int64, score and token of each part's best, ordered by preference.
        kinds: (B * N, S) int32, 0 if all is -inf, 2 with NaN or +inf, else 1.
    """

    keys: Tensor
    kinds: Tensor

    @classmethod
    def empty(cls, rows: int, vocab_size: int, *, device: torch.device | str) -> ChoiceParts:
        """Allocates buffers to be filled."""
        # Enough programs for the whole GPU; beyond that longer parts, which share the work of keying the noise.
        blocks = triton.cdiv(vocab_size, _BLOCK_V)
        parts = triton.cdiv(blocks, triton.cdiv(rows * blocks, _PROGRAMS))
        return cls(
            keys=torch.empty(rows, parts, dtype=torch.int64, device=device),
            kinds=torch.empty(rows, parts, dtype=torch.int32, device=device),
        )


def chosen_tokens(
    logits: Tensor,
    inverse_temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    out: Choices | None = None,
    parts: ChoiceParts | None = None,
) -> Choices:
    """Returns argmax(logits) of greedy sequences, argmax(logits * inverse_temperature + noise) of the others.

    Two launches, no synchronisation with the host.

    Args:
        logits: (B, N, V) float32, bfloat16 or float16, each row contiguous.
        inverse_temperature: (B,) float32, contiguous; 0 marks a greedy sequence.
        seeds: (B,) int64, contiguous; ignored for greedy sequences.
        positions: (B, N) int64, contiguous, absolute position of the chosen token: root + depth + 1.
        out: Contiguous buffers to fill, from `Choices.empty`; None allocates them.
        parts: Scratch buffers, from `ChoiceParts.empty`; None allocates them.

    Returns:
        `out`, or the allocated buffers.
    """
    batch, nodes, vocab_size = logits.shape
    rows = batch * nodes
    require(logits.stride(2) == 1, "a row of logits is read as one piece")
    choices = out or Choices.empty(batch, nodes, device=logits.device)
    parts = parts or ChoiceParts.empty(rows, vocab_size, device=logits.device)
    count = parts.keys.shape[1]
    _part_kernel[(rows, count)](
        logits, inverse_temperature, seeds, positions, parts.keys, parts.kinds,
        nodes, vocab_size, triton.cdiv(triton.cdiv(vocab_size, _BLOCK_V), count), logits.stride(0), logits.stride(1),
        BLOCK_V=_BLOCK_V, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    _merge_kernel[(rows,)](
        parts.keys, parts.kinds, choices.tokens, choices.is_finite, count,
        BLOCK_S=triton.next_power_of_2(count), num_warps=1,
    )  # fmt: skip
    return choices


@triton.jit(do_not_specialize=["nodes", "blocks_per_part"])
def _part_kernel(
    logits: tl.tensor,
    inverse_temperature: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    keys: tl.tensor,
    kinds: tl.tensor,
    nodes: tl.tensor,
    vocab_size: tl.tensor,
    blocks_per_part: tl.tensor,
    stride_b: tl.tensor,
    stride_n: tl.tensor,
    BLOCK_V: tl.constexpr,
) -> None:
    """Returns the best token of one part of one row.

    Compiled without contraction to fused multiply-add, so that score and noise round as in the definition.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    sequence = row // nodes
    # 64-bit: a batch of trees over a large vocabulary has more than 2^31 logits.
    row_logits = logits + sequence.to(tl.int64) * stride_b + (row % nodes).to(tl.int64) * stride_n
    scale = tl.load(inverse_temperature + sequence)
    is_sampled = scale != 0
    noise_key = target_key(tl.load(seeds + sequence), tl.load(positions + row))

    best = tl.full((BLOCK_V,), _LOWEST_KEY, tl.int64)
    kind = tl.zeros((BLOCK_V,), tl.int32)
    first = part * blocks_per_part * BLOCK_V
    end = tl.minimum(first + blocks_per_part * BLOCK_V, vocab_size)
    while first < end:
        token = first + tl.arange(0, BLOCK_V)
        is_token = token < end
        logit = tl.load(row_logits + token, mask=is_token, other=float("-inf")).to(tl.float32)
        kind = tl.maximum(kind, _kind(logit))
        score = logit
        if is_sampled:
            score = logit * scale + gumbel(noise_bits(noise_key, token))
        best = tl.maximum(best, tl.where(is_token, _preference(score, token), _LOWEST_KEY))
        first += BLOCK_V
    at = row.to(tl.int64) * tl.num_programs(1) + part
    tl.store(keys + at, tl.max(best, 0))
    tl.store(kinds + at, tl.max(kind, 0))


@triton.jit(do_not_specialize=["parts"])
def _merge_kernel(
    keys: tl.tensor, kinds: tl.tensor, tokens: tl.tensor, is_finite: tl.tensor, parts: tl.tensor, BLOCK_S: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK_S)
    is_part = part < parts
    best = tl.max(tl.load(keys + row * parts + part, mask=is_part, other=_LOWEST_KEY), 0)
    kind = tl.max(tl.load(kinds + row * parts + part, mask=is_part, other=0), 0)
    tl.store(tokens + row, (best & _LARGEST_INT32) ^ _LARGEST_INT32)
    tl.store(is_finite + row, kind == _FINITE)


@triton.jit
def _kind(logit: tl.tensor) -> tl.tensor:
    """int32 kinds of logits, see `_FINITE`."""
    is_broken = (logit != logit) | (logit == float("inf"))  # noqa: PLR0124 - only NaN differs from itself
    return tl.where(is_broken, _BROKEN, tl.where(logit == float("-inf"), 0, _FINITE))


@triton.jit
def _preference(score: tl.tensor, token: tl.tensor) -> tl.tensor:
    """int64 keys that order tokens by preference: NaN, then the score, then the lowest id.

    The bits of a float order as integers if those of negative numbers are reversed.
    """
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)  # -0 and 0 are equals
    ordered = tl.where(bits < 0, bits ^ _LARGEST_INT32, bits)
    ordered = tl.where(score != score, _LARGEST_INT32, ordered)  # noqa: PLR0124 - only NaN differs from itself
    return (ordered.to(tl.int64) << 32) | (token ^ _LARGEST_INT32).to(tl.int64)


@triton.jit
def mix(z: tl.tensor) -> tl.tensor:
    """SplitMix64's finaliser on uint64, `noise.mix`."""
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


@triton.jit
def target_key(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """The uint64 key of the target's token at an int64 position under an int64 seed, `KeyedNoise._keys`."""
    key = mix(seed.to(tl.uint64) + _GAMMA)
    key = mix(key ^ (position.to(tl.uint64) * _GAMMA))
    return mix(key ^ _TARGET_TAG)


@triton.jit
def noise_bits(key: tl.tensor, token: tl.tensor) -> tl.tensor:
    """The 53 random bits of int32 tokens under a key; uint64."""
    return mix(key + (token + 1).to(tl.uint64) * _GAMMA) >> 11


@triton.jit
def gumbel(bits: tl.tensor) -> tl.tensor:
    """Standard Gumbel noise of 53 random bits, `KeyedNoise.gumbel`; float32, finite.

    Triton has no log1p. This is Goldberg's form: with u = 1 - v as float32 rounds it, log1p(-v) = log(u) * v / (1 - u).
    The factor corrects the rounding of u; 1 - u is exact.
    """
    v = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-53, 1 - 2.0**-24)
    u = 1.0 - v
    lost = 1.0 - u
    is_lost = lost == 0
    exponential = tl.where(is_lost, v, -tl.log(u) * tl.div_rn(v, tl.where(is_lost, 1.0, lost)))
    return -tl.log(exponential)
