"""Element-wise operations of a decoder block, with norms and rotation, in torch's operations.

On GPUs `TritonOps` computes the common ones in one launch each and calls these for the rest.

Letters: M tokens of a pass, E hidden size, H query heads, Hk KV heads, D head size, I width of the feed-forward layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from foretoken.core.backend import has_triton_kernels

if TYPE_CHECKING:
    from foretoken.attention.layout import AttentionLayout
    from foretoken.decoder.blocks import Activation, Block, Norm, Rotary
    from foretoken.decoder.slot_cache import SlotCache


class Turns:
    """Cosines and sines at the positions of a pass, looked up once for all layers; `positions`: (M,) int64."""

    def __init__(self, positions: Tensor, dtype: torch.dtype) -> None:
        self.positions, self._dtype = positions, dtype
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Returns (M, 1, R / 2) cosines and sines."""
        if id(rotary) not in self._known:
            cos, sin = (table[self.positions].to(self._dtype).unsqueeze(1) for table in (rotary.cos, rotary.sin))
            self._known[id(rotary)] = cos, sin
        return self._known[id(rotary)]


class Projected(NamedTuple):
    """The (M, (H + 2 Hk) D) outputs of a layer's projections: queries, keys, values; no queries if `num_heads` is 0."""

    joined: Tensor
    num_heads: int
    layer: int
    turns: Turns
    layout: AttentionLayout


class TorchOps:
    """The operations in torch; `sums_parts`: whether a `delta` of `add_and_norm` may be (P, M, E), summed over P."""

    sums_parts = False

    def add_and_norm(self, x: Tensor, delta: Tensor | None, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """Returns x + delta and its norm, (M, E) each in the dtype of `x`; delta: (M, E) or None, norm: may be None."""
        total = x if delta is None else x + delta
        return total, _normed(total, norm)

    def activate(self, up: Tensor, activation: Activation, *, is_gated: bool) -> Tensor:
        """Computes activation(gate) * up of (M, 2 I), gate first; or activation(up) of (M, I) without a gate."""
        if not is_gated:
            return _activated(up, activation)
        gate, up = up.chunk(2, dim=-1)
        return _activated(gate, activation) * up

    def rotate_and_write(self, projected: Projected, block: Block, cache: SlotCache) -> Tensor:
        """Applies norms and rotation to queries and keys, and writes keys and values; returns (M, H, D) queries."""
        spec, joined = block.spec, projected.joined
        sizes = [projected.num_heads * spec.head_dim, *[spec.num_kv_heads * spec.head_dim] * 2]
        query, key, value = joined.split(sizes, dim=1)
        query, key = (
            part.unflatten(1, (0, spec.head_dim))
            if not part.shape[1]
            else _normed_and_rotated(part, norm, block, projected.turns)
            for part, norm in ((query, block.query_norm), (key, block.key_norm))
        )
        cache.write(projected.layer, projected.layout, key, value.unflatten(1, (-1, spec.head_dim)))
        return query


class TritonOps(TorchOps):
    """The kernels of `triton_kernels` if they know the operation, else torch's, as for layer norms."""

    sums_parts = True

    def __init__(self) -> None:
        """Imports the kernels; raises `ImportError` without triton."""
        from foretoken.decoder import triton_kernels

        self._kernels = triton_kernels

    def add_and_norm(self, x: Tensor, delta: Tensor | None, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """See `TorchOps`."""
        if norm is None or norm.kind != "rms":
            if delta is not None and delta.dim() > x.dim():
                delta = delta.sum(0).to(x.dtype)
            return super().add_and_norm(x, delta, norm)
        return self._kernels.add_and_norm(x, delta, norm.weight, norm.epsilon)

    def activate(self, up: Tensor, activation: Activation, *, is_gated: bool) -> Tensor:
        """See `TorchOps`."""
        if activation != "silu" or not is_gated:
            return super().activate(up, activation, is_gated=is_gated)
        return self._kernels.gated_silu(up)

    def rotate_and_write(self, projected: Projected, block: Block, cache: SlotCache) -> Tensor:
        """See `TorchOps`."""
        norms, rotary = (block.query_norm, block.key_norm), block.rotary
        is_known = rotary is not None and 2 * rotary.cos.shape[1] == block.spec.head_dim and not block.norms_all_heads
        if not is_known or any(norm is not None and norm.kind != "rms" for norm in norms):
            return super().rotate_and_write(projected, block, cache)
        assert rotary is not None, "it is known"
        weights = [norm.weight for norm in norms if norm is not None]
        return self._kernels.rotate_and_write(
            projected.joined, rotary.cos, rotary.sin, projected.turns.positions, cache.keys[projected.layer],
            cache.values[projected.layer], projected.layout.tables(),
            (weights[0], weights[1]) if weights else None,
            0.0 if block.query_norm is None else block.query_norm.epsilon,
        )  # fmt: skip


def elementwise_ops(dtype: torch.dtype, device: torch.device) -> TorchOps:
    """Returns the Triton kernels if they run here, else torch's operations."""
    if has_triton_kernels(device) and dtype in (torch.float32, torch.float16, torch.bfloat16):
        return TritonOps()
    return TorchOps()


def prepared_norm(norm: Norm | None, dtype: torch.dtype) -> Norm | None:
    """Returns the norm with weights in `dtype` if that is exact, else in their own wider dtype."""
    if norm is None:
        return None
    tensors = [tensor.to(dtype) for tensor in norm.tensors()]
    if not all(torch.equal(a.to(b.dtype), b) for a, b in zip(tensors, norm.tensors(), strict=True)):
        return norm
    return replace(norm, weight=tensors[0], bias=tensors[1] if norm.bias is not None else None)


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    """Returns the norm over the last dimension, computed in the dtype of its weights, rounded to that of `x`."""
    if norm is None:
        return x
    wide, shape = x.to(norm.weight.dtype), norm.weight.shape
    if norm.kind == "layer":
        return functional.layer_norm(wide, shape, norm.weight, norm.bias, norm.epsilon).to(x.dtype)
    return functional.rms_norm(wide, shape, norm.weight, norm.epsilon).to(x.dtype)


def _activated(x: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _normed_and_rotated(x: Tensor, norm: Norm | None, block: Block, turns: Turns) -> Tensor:
    """Turns (M, heads D) into (M, heads, D)."""
    size = block.spec.head_dim
    if block.norms_all_heads:
        x = _normed(x, norm).unflatten(1, (x.shape[1] // size, size))
    else:
        x = _normed(x.unflatten(1, (x.shape[1] // size, size)), norm)
    return x if block.rotary is None else _rotated(x, *turns.of(block.rotary))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary embedding to the first R elements of each head of (M, heads, D)."""
    size = 2 * cos.shape[-1]
    turned, rest = (x, None) if size == x.shape[-1] else (x[..., :size], x[..., size:])
    a, b = turned.chunk(2, dim=-1)
    parts = [a * cos - b * sin, b * cos + a * sin]
    return torch.cat(parts if rest is None else [*parts, rest], dim=-1)
