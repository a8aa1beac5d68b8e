"""The lean decoder on torch's own matrix products: any device, and CPUs whose matrix units oneDNN knows how to use.

On GPUs what stands between the products are kernels of our own (`triton_block`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretoken.attention.dispatch import tree_attention
from foretoken.attention.layout import AttentionLayout
from foretoken.core.backend import has_triton_kernels
from foretoken.decoder.base import PassOutput
from foretoken.decoder.held_memory import check_memory, plain_tensors
from foretoken.decoder.lean.fused_linear import FusedLinear, fuse, is_packable
from foretoken.decoder.lean.weights import Block, LeanWeights, tap_indices

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.core.passes import Pass
    from foretoken.core.taps import Tap
    from foretoken.decoder.slot_cache import SlotCache


class _Layer(NamedTuple):
    """A block: fused projections, norms in the model's dtype."""

    query_key_value: FusedLinear
    output: FusedLinear
    gate_up: FusedLinear
    down: FusedLinear
    attention_norm: Tensor
    mlp_norm: Tensor
    query_key_norms: tuple[Tensor, Tensor] | None
    window: int | None


class Steps(NamedTuple):
    """What stands between the matrix products; see `triton_block` for what each takes and gives."""

    add_and_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
    gated_silu: Callable[[Tensor], Tensor]
    rotate_and_write: Callable[..., Tensor] | None


class StockDecoder:
    """See `Decoder`. What fused weights take of memory is said in `fused_linear`."""

    name = "lean-stock"
    is_exact = False

    def __init__(
        self, weights: LeanWeights, cache: SlotCache, taps: Sequence[Tap], *, steps: Steps | None = None
    ) -> None:
        """Fuses the projections.

        Args:
            weights: The model.
            cache: Its KV rows.
            taps: Features to read.
            steps: What computes the rest; None for the fastest here.

        Raises:
            UnsuitableError: When a tap does not exist.
        """
        self._weights, self._cache, self._dtype = weights, cache, weights.dtype
        self._moves_weights = not weights.is_borrowed
        self._taps = tap_indices(taps, len(self._weights.blocks))
        self._steps = _steps_for(weights.dtype, weights.device) if steps is None else steps
        self._final_norm = self._weights.final_norm.to(self._dtype)
        self._layers = [self._layer(block) for block in self._weights.blocks]
        self._head: Callable[[Tensor], Tensor] = _head(weights)
        self._shared = plain_tensors(weights.module)

    def run(self, work: Pass) -> PassOutput:
        """See `Decoder`."""
        return self.run_on(work, AttentionLayout(work))

    def run_on(self, work: Pass, layout: AttentionLayout) -> PassOutput:
        """`run` where the layout of the pass exists already."""
        check_memory(self._shared)
        with torch.inference_mode():
            final, features = self._hidden(work, layout)
            if work.logit_rows is None:
                return PassOutput(logits=None, features=features)
            wanted = final if work.has_all_logits else final[work.logit_rows]
            return PassOutput(logits=self._head(wanted).float(), features=features)

    def _layer(self, block: Block) -> _Layer:
        """Fuses one block."""
        norms = None
        if block.query_norm is not None and block.key_norm is not None:
            norms = (block.query_norm.to(self._dtype), block.key_norm.to(self._dtype))
        return _Layer(
            query_key_value=fuse(block.attention, "q_proj", "k_proj", "v_proj", moves_weights=self._moves_weights),
            output=fuse(block.attention, "o_proj"),
            gate_up=fuse(block.mlp, "gate_proj", "up_proj", moves_weights=self._moves_weights),
            down=fuse(block.mlp, "down_proj"),
            attention_norm=block.attention_norm.to(self._dtype),
            mlp_norm=block.mlp_norm.to(self._dtype),
            query_key_norms=norms,
            window=block.window,
        )

    def _hidden(self, work: Pass, layout: AttentionLayout) -> tuple[Tensor, Tensor | None]:
        """(M, D) what the LM head reads, and the (M, F, D) tapped features."""
        weights, steps, positions = self._weights, self._steps, work.token_positions
        x, delta = functional.embedding(work.tokens, weights.embedding), None
        rotation = None
        if steps.rotate_and_write is None:
            cos, sin = (table[positions].to(self._dtype).unsqueeze(1) for table in (weights.cos, weights.sin))
            rotation = (cos, sin)
        boundaries = []
        for index, layer in enumerate(self._layers):
            x, normed = steps.add_and_norm(x, delta, layer.attention_norm, weights.epsilon)
            boundaries.append(x)
            joined = layer.query_key_value(normed)
            if rotation is None:
                query = self._rotated_and_written(index, layer, joined, layout, positions)
            else:
                query = self._rotated_query(index, layer, joined, layout, rotation)
            mixed = tree_attention(
                query, self._cache.keys[index], self._cache.values[index], layout, scale=weights.scale,
                window=layer.window,
            )  # fmt: skip
            x, normed = steps.add_and_norm(x, layer.output(mixed.flatten(1)), layer.mlp_norm, weights.epsilon)
            delta = layer.down(steps.gated_silu(layer.gate_up(normed)))
        x, final = steps.add_and_norm(x, delta, self._final_norm, weights.epsilon)
        boundaries += [x, final]
        return final, torch.stack([boundaries[tap] for tap in self._taps], dim=1) if self._taps else None

    def _rotated_and_written(
        self, index: int, layer: _Layer, joined: Tensor, layout: AttentionLayout, positions: Tensor
    ) -> Tensor:
        """As `_rotated_query`, in one launch."""
        assert self._steps.rotate_and_write is not None, "the caller looks"
        return self._steps.rotate_and_write(
            joined, self._weights.cos, self._weights.sin, positions, self._cache.keys[index],
            self._cache.values[index], layout.tables(), layer.query_key_norms, self._weights.epsilon,
        )  # fmt: skip

    def _rotated_query(
        self, index: int, layer: _Layer, joined: Tensor, layout: AttentionLayout, rotation: tuple[Tensor, Tensor]
    ) -> Tensor:
        """(M, H, E) queries with their positions; writes the layer's keys and values."""
        weights = self._weights
        heads, kv_heads = weights.num_heads, weights.num_kv_heads
        query, key, value = joined.unflatten(1, (-1, weights.head_dim)).split([heads, kv_heads, kv_heads], dim=1)
        if layer.query_key_norms is not None:
            query, key = (
                functional.rms_norm(part, norm.shape, norm, weights.epsilon)
                for part, norm in zip((query, key), layer.query_key_norms, strict=True)
            )
        query, key = _rotated(query, *rotation), _rotated(key, *rotation)
        self._cache.write(index, layout, key, value)
        return query


def _steps_for(dtype: torch.dtype, device: torch.device) -> Steps:
    """The kernels where they run, else torch's operations."""
    if has_triton_kernels(device) and dtype in (torch.float32, torch.float16, torch.bfloat16):
        return fused_steps()
    return Steps(_add_and_norm, _gated_silu, None)


def fused_steps() -> Steps:
    """The kernels of `triton_block`.

    Raises:
        ImportError: When triton is not installed.
    """
    from foretoken.decoder.lean import triton_block

    return Steps(triton_block.add_and_norm, triton_block.gated_silu, triton_block.rotate_and_write)


def _add_and_norm(x: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Residual addition and RMS norm over the last dimension."""
    total = x if delta is None else x + delta
    return total, functional.rms_norm(total, weight.shape, weight, epsilon)


def _gated_silu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of (..., 2 I)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _head(weights: LeanWeights) -> Any:
    """The LM head, packed where it can be; a tied one is the embedding, and as large as all else in a small model."""
    head = weights.head
    if isinstance(head, nn.Linear):
        is_tied = head.weight.data_ptr() == weights.embedding.data_ptr()
        if is_tied or not is_packable(head.weight):
            return head
    return fuse(weights.module, "lm_head")


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (M, heads, E), halves paired."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
